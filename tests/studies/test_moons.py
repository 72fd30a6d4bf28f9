"""The study of two moons: intervals over seeds, numbers as JSON, figures."""

import json
import math
import warnings

import pytest
import torch

from posterity_studies.moons import fits
from posterity_studies.moons.figures import draw
from posterity_studies.moons.study import METRICS, interval, run
from posterity_studies.options import Settings

pytestmark = pytest.mark.cpu
NAMES = ["MAP", "MeanField", "NaturalGradient", "MCDropout", "Ensemble", "SWAG", "Laplace"]

FIGURES = ["entropy.png", "probability.png", "scores.png"]


@pytest.fixture(scope="module")
def study():
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (("STEPS", 40), ("ROWS", 40), ("SIDE", 9), ("HIDDEN", 8), ("DRAWS", 20)):
            patch.setattr(fits, name, value)
        result = run(Settings(seed=2))
        result.document()  # with these settings in it
        yield result


def test_the_interval_is_that_of_student():
    values = [0.1, 0.4, 0.2, 0.8, 0.3]
    result = interval(values)
    mean = sum(values) / 5
    error = math.sqrt(sum((value - mean) ** 2 for value in values) / 4 / 5)
    assert result.mean == pytest.approx(mean)
    assert (result.upper - result.mean, result.mean - result.lower) == pytest.approx((2.776445 * error,) * 2)


def test_every_method_has_every_number_of_every_seed(study):
    assert study.seeds == (2, 3, 4, 5, 6)
    document = study.document()
    assert json.loads(json.dumps(document, allow_nan=False)) == document
    assert [row["method"] for row in document["methods"]] == NAMES
    for row in document["methods"]:
        for metric in METRICS:
            assert len(row[metric]["values"]) == 5
            assert row[metric]["lower"] <= row[metric]["mean"] <= row[metric]["upper"]
    assert document["methods"][0]["nll_minus_map"]["values"] == [0.0] * 5
    mode, swag = (next(row for row in document["methods"] if row["method"] == name) for name in ("MAP", "SWAG"))
    pairs = zip(swag["test_nll"]["values"], mode["test_nll"]["values"], strict=True)
    assert swag["nll_minus_map"]["values"] == pytest.approx([pair - other for pair, other in pairs])


def test_stages_start_where_the_one_before_ended_and_seeds_differ(study):
    first, second = study.found[:2]
    assert not torch.equal(first.data.train.inputs, second.data.train.inputs)
    assert first.fits["MAP"].map_entropy.shape == (81,)
    assert second.fits["MAP"].map_entropy is second.fits["MAP"].map_probability is None
    for fit in first.fits.values():
        p = fit.map_probability.double()
        entropy = torch.special.entr(p) + torch.special.entr(1.0 - p)
        torch.testing.assert_close(fit.map_entropy.double(), entropy, rtol=1e-3, atol=1e-5)
    assert len({fit.test_nll for fit in first.fits.values()}) == len(NAMES)
    assert fits.fits(2).fits["MAP"].test_nll == first.fits["MAP"].test_nll


def test_every_figure_is_drawn(study, tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert draw(study, tmp_path / "new") == FIGURES
    for name in FIGURES:
        assert (tmp_path / "new" / name).read_bytes().startswith(b"\x89PNG")
