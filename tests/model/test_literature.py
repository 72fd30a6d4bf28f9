"""Temperatures from the literature."""

import pytest
import torch

import posterity as po
from posterity.model import LITERATURE


@pytest.mark.parametrize(
    ("name", "lowest", "highest"),
    [("zhang-2018", 1 / 10, 1 / 2), ("osawa-2019", 1 / 10, 1 / 5), ("ashukha-2020", 1e-5, 1e-3)],
)
def test_ranges_weigh_the_kl(name: str, lowest: float, highest: float) -> None:
    reported = LITERATURE[name]
    assert reported.ends == (po.Tempering.tempered(highest), po.Tempering.tempered(lowest))
    grid = reported.grid(5)
    assert grid.num_members == 5
    assert grid.prior_power == 1.0
    logs = grid.eta.log()
    torch.testing.assert_close(logs.diff(), logs.diff()[:1].expand(4))
    assert grid.eta[[0, -1]].tolist() == pytest.approx([lowest, highest], rel=1e-12)
    assert grid.member(2).kl_weight(num_data=10) == pytest.approx((lowest * highest) ** 0.5 / 10)


def test_wenzel_is_cold_and_without_a_number() -> None:
    reported = LITERATURE["wenzel-2020"]
    assert reported.tempering(0.1) == po.Tempering.cold(0.1)
    for ask in (lambda: reported.ends, lambda: reported.grid(3)):
        with pytest.raises(ValueError, match=r"Wenzel et al. .* reported no range: .* validation rows"):
            ask()


def test_every_entry_says_what_it_is() -> None:
    for name, reported in LITERATURE.items():
        author, year = name.split("-")
        assert reported.paper.lower().startswith(author)
        assert f"({year})" in reported.paper
        assert reported.meaning.endswith(".")


def test_refuses_a_grid_of_nothing() -> None:
    with pytest.raises(ValueError, match=r"Reported\.grid: count must be a positive whole number\. Got 0\."):
        LITERATURE["zhang-2018"].grid(0)
