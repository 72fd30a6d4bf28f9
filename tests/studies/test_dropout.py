"""The dropout study: its claims hold, its numbers are JSON, its figures are drawn."""

import json
import math
import warnings

import pytest
import torch

from posterity.datasets.toys import two_moons
from posterity.likelihoods import Categorical
from posterity.model import Joint
from posterity.networks import MLP
from posterity.numerics import Key
from posterity.priors import Normal
from posterity_studies.dropout import classification, enumeration, regression, training
from posterity_studies.dropout.enumeration import divergence
from posterity_studies.dropout.figures import draw
from posterity_studies.dropout.study import run
from posterity_studies.options import Settings

pytestmark = pytest.mark.cpu
FIGURES = ["regression.png", "moons.png", "enumeration.png", "divergence.png", "training.png"]


@pytest.fixture(scope="module")
def study():
    with pytest.MonkeyPatch.context() as patch:
        for module, steps in ((regression, 400), (classification, 300), (enumeration, 300)):
            patch.setattr(module, "STEPS", steps)
        patch.setattr(classification, "SIDE", 15)
        patch.setattr(enumeration, "REPEATS", 300)
        for name, value in (("DATA_SETS", 4), ("STEPS", 150), ("STEP_SIZE", 0.01), ("HELD_OUT", 200)):
            patch.setattr(training, name, value)
        return run(Settings(seed=1))


def test_the_function_varies_more_where_there_are_no_rows(study):
    rows = {row["method"]: row for row in study.document()["regression"]["methods"]}
    assert rows["MAP"]["scale_outside"] == rows["MAP"]["scale_on_the_data"] == 0.0
    assert rows["MC dropout"]["scale_outside"] > rows["MC dropout"]["scale_on_the_data"] > 0.05
    assert rows["MC dropout"]["rates"] == [0.1, 0.1]
    assert len(rows["MC dropout, learnt"]["rates"]) == 2
    assert rows["MC dropout, learnt"]["rates"] != [0.1, 0.1]
    for name, curve in study.regression.curves.items():
        torch.testing.assert_close(curve.target_scale.square(), curve.function_scale.square() + curve.noise**2)
        assert rows[name]["precision"] == pytest.approx(curve.noise**-2)


def test_the_convention_is_that_of_the_joint(study):
    """A N(0, 1) prior on the weights, with a mean squared error: weight decay 2 / (n tau)."""
    convention = study.document()["regression"]["convention"]
    expected = 2 / (100 * convention["precision"])
    assert convention["weight_decay_of_the_same_model_with_squared_error"] == pytest.approx(expected)


def test_far_from_the_moons_dropout_is_less_sure_than_map(study):
    rows = {row["method"]: row for row in study.document()["classification"]["methods"]}
    assert rows["MC dropout"]["entropy_on_the_ring"] > 1.5 * rows["MAP"]["entropy_on_the_ring"]
    for entropies in study.classification.maps.values():
        assert entropies.probability.shape == (15 * 15,)
        p = entropies.probability
        torch.testing.assert_close(
            entropies.entropy, torch.special.entr(p) + torch.special.entr(1 - p), rtol=1e-4, atol=1e-5
        )
        assert entropies.test_accuracy > 0.9


def test_draws_come_to_the_sum_over_all_masks(study):
    result = study.enumeration
    assert result.masks == 2**enumeration.UNITS
    assert float(torch.trapezoid(result.log_density.exp(), result.y)) == pytest.approx(1.0, abs=1e-6)
    assert result.divergence > 0
    for estimate in result.estimates:
        assert estimate.mean_error_by_theory == pytest.approx(math.sqrt(result.variance / estimate.draws))
        # A mean of 300 squared errors: its relative standard error is some sqrt(2 / 300), half of that for the root.
        assert estimate.mean_error == pytest.approx(estimate.mean_error_by_theory, rel=5 * math.sqrt(1 / 600))
        assert abs(estimate.unbiased_variance - result.variance) <= 5 * estimate.standard_error
        assert estimate.plug_in_variance == pytest.approx((1 - 1 / estimate.draws) * estimate.unbiased_variance)


def test_dropout_trains_more_slowly_and_fits_less_closely(study):
    without, dropout = study.training.values()
    assert float(without.train[0]) == float(dropout.train[0])  # the same first weights and rows
    assert without.steps.tolist() == list(range(0, 151, 5))
    assert float(without.train[-1]) < 0.2 < float(dropout.train[-1])
    assert without.gap > 0.1 + dropout.gap
    assert all(training.claims(study.training).values())
    swapped = {"without dropout": dropout, "with dropout": without}
    assert not any(training.claims(swapped).values())


def test_losses_are_those_of_the_mean_network(study):
    """Before the first step the loss is that of the first weights, row by row."""
    own, key = study.training["with dropout"], Key(1).fold("training")
    joint = Joint(MLP((2, training.HIDDEN, training.HIDDEN, 2), dropout=0.5), Categorical(), Normal(1.0), 100)
    values = []
    for index in range(4):
        theta = joint.fresh(Key(1).fold("first weights").fold(index))
        data = two_moons(training.ROWS, training.NOISE, key.fold(index).seed, 200)
        logits = joint.network.outputs(theta, data.test.inputs)
        values.append(float(torch.nn.functional.cross_entropy(logits, data.test.targets)))
    assert float(own.held_out[0]) == pytest.approx(sum(values) / 4, rel=1e-5)


def test_the_condition_fails_where_theory_says():
    failures = {(failure.rate, failure.width): failure.distance for failure in divergence().failures}
    for width, multiple in ((0.1, 5.0), (0.05, 6.0), (0.01, 7.6), (0.001, 9.7)):
        assert failures[0.5, width] == pytest.approx(multiple, abs=0.15)
        assert failures[0.1, width] < failures[0.5, width]


def test_the_document_is_json(study):
    document = study.document()
    assert json.loads(json.dumps(document, allow_nan=False)) == document
    assert document["seed"] == 1


def test_every_figure_is_drawn(study, tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a glyph that the font lacks, an empty contour
        assert draw(study, tmp_path / "new") == FIGURES
    for name in FIGURES:
        assert (tmp_path / "new" / name).read_bytes().startswith(b"\x89PNG")
