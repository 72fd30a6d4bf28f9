"""Natural gradients and SWAG on the command line."""

import json

import pytest

import posterity as po

pytestmark = pytest.mark.cpu
TINY = ("--hidden", "6", "--steps", "40", "--device", "cpu")


@pytest.mark.parametrize("method", ["natural-gradient", "swag"])
def test_fit_keeps_a_gaussian(run, tmp_path, method):
    result = run("fit", "sine", "--out", tmp_path / "run", "--method", method, *TINY, "--json")
    assert result.code == 0
    q = po.load(tmp_path / "run", po.networks.MLP((1, 6, 1), activation="tanh"))
    assert isinstance(q, po.posteriors.Gaussian)
    assert run("evaluate", tmp_path / "run", "--json").code == 0


def test_compare_takes_both_beside_map_which_swag_starts_from(run):
    result = run("compare", "two-moons", "--methods", "map,natural-gradient,swag", *TINY, "--json")
    assert result.code == 0
    rows = json.loads(result.out)["methods"]
    assert [row["method"] for row in rows] == ["map", "natural-gradient", "swag"]
    assert len({row["test_nll"] for row in rows}) == 3


def test_few_steps_collect_few_thetas(run):
    result = run("compare", "two-moons", "--methods", "swag", "--hidden", "6", "--steps", "5", "--device", "cpu")
    assert result.code == 0
