"""CRPS and interval metrics against numerical integration."""

import math

import pytest
import torch
from counts import Counts
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from posterity.likelihoods import Gaussian, Heteroscedastic, Likelihood, Poisson, StudentT
from posterity.metrics import coverage, crps, interval_width
from posterity.numerics.random import Key
from posterity.predictive import DrawsPredictive, GaussianPredictive, Predictive


def integrated(likelihood: Likelihood, outputs: Tensor, y: float, lower: float, upper: float) -> float:
    """Integral of (F - 1[x >= y])^2 for the mixture at outputs (S, 1, *event), the kink at y a node of the grid."""
    total = 0.0
    for start, end, step in ((lower, y, 0.0), (y, upper, 1.0)):
        x = torch.linspace(start, end, 40_001, dtype=torch.float64)
        below = likelihood.cdf(outputs.expand(-1, len(x), -1), x.unsqueeze(-1)).mean(0).squeeze(-1)
        total += float(torch.trapezoid((below - step).square(), x))
    return total


@settings(max_examples=25, deadline=None)
@given(means=st.lists(st.floats(-3, 3), min_size=1, max_size=4), scale=st.floats(0.1, 2.0), y=st.floats(-6, 6))
def test_normal_mixtures_against_integration(means: list[float], scale: float, y: float) -> None:
    outputs = torch.tensor(means, dtype=torch.float64).reshape(-1, 1, 1)
    value = crps(DrawsPredictive(Gaussian(scale), outputs), torch.tensor([y], dtype=torch.float64))
    assert value == pytest.approx(integrated(Gaussian(scale), outputs, y, -30.0, 30.0), abs=1e-6)


def test_components_of_different_width_against_integration() -> None:
    outputs = torch.tensor([[[0.0, -1.0]], [[1.0, 0.5]], [[-2.0, 0.2]]], dtype=torch.float64)
    value = crps(DrawsPredictive(Heteroscedastic(), outputs), torch.tensor([0.7], dtype=torch.float64))
    assert value == pytest.approx(integrated(Heteroscedastic(), outputs, 0.7, -30.0, 30.0), abs=1e-7)


@pytest.mark.parametrize("likelihood", [StudentT(4.0, 0.8), Poisson()], ids=lambda item: type(item).__name__)
def test_samples_against_integration(likelihood: Likelihood) -> None:
    outputs = torch.tensor([[[0.3]], [[1.2]]], dtype=torch.float64)
    pred = DrawsPredictive(likelihood, outputs)
    y = torch.tensor([2.0], dtype=torch.float64)
    exact = integrated(likelihood, outputs, 2.0, -150.0, 150.0)
    values = torch.tensor([crps(pred, y, draws=100, seed=seed) for seed in range(200)], dtype=torch.float64)
    assert abs(float(values.mean()) - exact) < 5.0 * float(values.std()) / 200**0.5 + 2e-3  # the grid's own error
    few = torch.tensor([crps(pred, y, draws=2, seed=seed) for seed in range(2000)], dtype=torch.float64)
    assert abs(float(few.mean()) - exact) < 5.0 * float(few.std()) / 2000**0.5  # unbiased by as few as two


def test_a_gaussian_in_closed_form() -> None:
    mean, scale, y = torch.tensor([[0.5], [-1.0]]).double(), 1.3, torch.tensor([0.2, 3.0]).double()
    pred = GaussianPredictive(mean, torch.full((2, 1), 0.4).double(), torch.tensor(scale**2 - 0.4).double())
    z = (y - mean.squeeze(1)) / scale
    normal = torch.distributions.Normal(torch.zeros(2).double(), 1.0)
    closed = scale * (z * (2 * normal.cdf(z) - 1) + 2 * normal.log_prob(z).exp() - 1 / math.sqrt(math.pi))
    assert crps(pred, y) == pytest.approx(float(closed.mean()), rel=1e-6)
    torch.testing.assert_close(crps.rows(pred, y), closed, rtol=1e-6, atol=0.0)


def test_sure_predictions_are_scored_by_their_distance() -> None:
    pred = DrawsPredictive(Gaussian(1e-200), torch.tensor([[[1.0]], [[3.0]]]).double())
    assert crps(pred, torch.tensor([7.0]).double()) == pytest.approx(5.0 - 0.5)  # E|X - y| - E|X - X'| / 2
    point = GaussianPredictive(torch.zeros(1, 1), torch.zeros(1, 1), torch.tensor(1e-30))
    assert crps(point, torch.tensor([-2.0])) == pytest.approx(2.0, rel=1e-6)


def test_memory_is_bounded_by_parts_of_rows() -> None:
    outputs = Key(0).normal((60, 2300, 1), torch.float64, torch.get_default_device())
    pred, y = DrawsPredictive(Gaussian(), outputs), torch.zeros(2300).double()
    whole = crps.rows(pred, y)
    torch.testing.assert_close(whole[2200:], crps.rows(pred.rows(slice(2200, 2300)), y[2200:]))


def test_the_truth_scores_best() -> None:
    y = Key(0).normal((4000, 1), torch.float64, torch.get_default_device())

    def gaussian(mean: float, scale: float) -> Predictive:
        return GaussianPredictive(torch.full_like(y, mean), torch.zeros_like(y), torch.tensor(scale**2).double())

    best = crps(gaussian(0.0, 1.0), y)
    for mean, scale in ((0.3, 1.0), (0.0, 0.7), (0.0, 1.4)):
        assert crps(gaussian(mean, scale), y) > best


@pytest.mark.parametrize("draws", [1, 0, 2.5])
def test_two_samples_at_least(draws: int) -> None:
    with pytest.raises(ValueError, match="crps: draws must be an integer from 2 up"):
        crps(DrawsPredictive(Counts(), torch.zeros(1, 1, 1)), torch.zeros(1), draws=draws)


@pytest.mark.parametrize("level", [0.5, 0.9])
@pytest.mark.parametrize(
    "likelihood", [Gaussian(0.7), StudentT(3.0, 0.7), Heteroscedastic()], ids=lambda item: type(item).__name__
)
def test_intervals_against_integration(likelihood: Likelihood, level: float) -> None:
    outputs = Key(2).normal((5, 1, 2), torch.float64, torch.get_default_device())
    pred = DrawsPredictive(likelihood, outputs)
    lower, upper = (end.reshape(-1)[0].item() for end in pred.interval(level))
    edges = torch.linspace(lower, upper, 20_001, dtype=torch.float64)
    one = DrawsPredictive(likelihood, outputs if isinstance(likelihood, Heteroscedastic) else outputs[..., :1])
    density = one.rows(torch.zeros(len(edges), dtype=torch.long)).log_prob(edges).exp()
    assert float(torch.trapezoid(density, edges)) == pytest.approx(level, abs=1e-7)
    assert interval_width(one, torch.zeros(1), level) == pytest.approx(upper - lower)


def test_coverage_counts_both_ends_and_all_outputs() -> None:
    pred = GaussianPredictive(torch.zeros(2, 2).double(), torch.zeros(2, 2).double(), torch.ones(1).double())
    end = float(pred.interval(0.8)[1][0, 0])
    y = torch.tensor([[end, -end], [end + 1e-9, 0.0]], dtype=torch.float64)
    assert coverage(pred, y, level=0.8) == 0.75
    assert coverage.rows(pred, y, 0.8).tolist() == [1.0, 0.5]
    assert coverage(pred, y) == 1.0


def test_counts_lie_on_the_ends_of_their_interval() -> None:
    pred = DrawsPredictive(Poisson(), torch.full((1, 3, 1), math.log(4.0), dtype=torch.float64))
    lower, upper = pred.interval(0.9)
    assert (lower[0].item(), upper[0].item()) == (1.0, 8.0)
    assert coverage(pred, torch.tensor([1.0, 8.0, 9.0]), level=0.9) == pytest.approx(2 / 3)
    assert interval_width(pred, torch.zeros(3), level=0.9) == 7.0


def test_coverage_of_the_truth_is_its_level() -> None:
    size = 20_000
    outputs = Key(0).normal((8, 1, 1), torch.float64, torch.get_default_device()).expand(8, size, 1)
    pred = DrawsPredictive(StudentT(3.0, 0.5), outputs)
    y = pred.sample(1, Key(1))[0]
    for level in (0.5, 0.95):
        one = pred.rows(slice(0, 1)).interval(level)
        inside = ((one[0] <= y) & (y <= one[1])).double().mean()
        assert abs(float(inside) - level) < 5.0 * (level * (1 - level) / size) ** 0.5
