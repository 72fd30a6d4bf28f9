"""Moments of a normal density times a factor, against scipy and closed forms."""

import math
from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from scipy.integrate import quad
from torch import Tensor
from torch.nn import functional as F

from posterity.likelihoods import Probit, StudentT
from posterity.special.tilted import tilted_moments

FLOAT64 = torch.float64


def column(*values: float) -> Tensor:
    return torch.tensor(values, dtype=FLOAT64)


def by_scipy(
    log_factor: Callable[[float], float], mean: float, variance: float, splits: list[float]
) -> tuple[float, float, float]:
    """log Z, mean and variance, integrated between the splits."""

    def log_product(a: float) -> float:
        return log_factor(a) - (a - mean) ** 2 / (2.0 * variance)

    def moment(power: int, centre: float) -> float:
        def integrand(a: float) -> float:
            return (a - centre) ** power * math.exp(log_product(a) - top)

        rules = {"epsabs": 0.0, "epsrel": 1e-12, "limit": 200, "full_output": 1}
        return sum(quad(integrand, *ends, **rules)[0] for ends in pairwise(splits))

    top = max(log_product(a) for a in splits)
    mass = moment(0, 0.0)
    centre = moment(1, 0.0) / mass
    log_normaliser = top + math.log(mass / math.sqrt(2.0 * math.pi * variance))
    return log_normaliser, centre, moment(2, centre) / mass


def assert_moments(found: tuple[Tensor, ...], wanted: tuple[float, float, float]) -> None:
    log_normaliser, centre, spread = (float(value) for value in found)
    assert log_normaliser == pytest.approx(wanted[0], abs=1e-11, rel=1e-11)
    assert centre == pytest.approx(wanted[1], abs=1e-11 * math.sqrt(wanted[2]), rel=1e-11)
    assert spread == pytest.approx(wanted[2], rel=1e-10)


@pytest.mark.parametrize(("mean", "variance"), [(0.3, 1.5), (-6.0, 0.1), (0.0, 400.0), (-40.0, 1.0), (3.0, 1e-4)])
def test_a_sigmoid(mean: float, variance: float) -> None:
    found = tilted_moments(lambda a, rows: F.logsigmoid(a), column(mean), column(variance))
    splits = sorted({0.0, *(mean + k * math.sqrt(variance) for k in (-12, -4, -1, 0, 1, 2, 4, 12, 45))})
    assert_moments(found, by_scipy(lambda a: min(a, 0.0) - math.log1p(math.exp(-abs(a))), mean, variance, splits))


@pytest.mark.parametrize(
    ("count", "mean", "variance"), [(0, 0.0, 1.0), (3, 0.0, 25.0), (500, 1.0, 4.0), (0, -3.0, 1e4)]
)
def test_a_poisson_rate(count: int, mean: float, variance: float) -> None:
    found = tilted_moments(lambda a, rows: count * a - a.exp(), column(mean), column(variance))
    scale = math.sqrt(variance)
    splits = sorted(
        {mean - 40 * scale, *(mean + k * scale for k in (-12, -6, -3, -1)), 0.0, 2.0, 5.0, 6.0, 6.5, 7.0, 8.0}
    )
    assert_moments(found, by_scipy(lambda a: count * a - math.exp(a), mean, variance, [s for s in splits if s <= 8]))


@pytest.mark.parametrize("mean", [-1e3, -40.0, 0.0, 5.0, 2000.0])
@pytest.mark.parametrize("variance", [1e-8, 1.0, 400.0, 1e8])
def test_a_step_of_any_steepness(mean: float, variance: float) -> None:
    """Phi(a) beside a standard deviation of 1e4 is a step; its product is known in closed form."""
    likelihood, label = Probit(), column(1.0)
    found = tilted_moments(lambda a, rows: likelihood.log_prob(a, label[rows]), column(mean), column(variance))
    wanted = likelihood.tilted_moments(column(mean), column(variance), label)
    assert_moments(found, tuple(float(value) for value in wanted))


@pytest.mark.parametrize(("target", "scale"), [(0.5, 1.0), (6.0, 0.01), (-30.0, 0.3), (3.0, 1e-4)])
def test_two_peaks(target: float, scale: float) -> None:
    likelihood, targets = StudentT(degrees=2.0, scale=scale), column(target)
    found = tilted_moments(
        lambda a, rows: likelihood.log_prob(a, targets[rows]), column(0.0), column(4.0), likelihood.peaks(targets)
    )
    near = [target + sign * scale * 10.0**k for k in range(5) for sign in (-1, 1)]
    splits = sorted({-40.0, *range(-24, 25, 4), 40.0, target, *(s for s in near if abs(s) < 40)})
    constant = math.log(math.gamma(1.5) / math.sqrt(2.0 * math.pi) / scale)
    log_factor = lambda a: constant - 1.5 * math.log1p(((a - target) / scale) ** 2 / 2.0)  # noqa: E731
    assert_moments(found, by_scipy(log_factor, 0.0, 4.0, splits))


def test_rows_are_independent_of_each_other() -> None:
    mean, variance = torch.linspace(-5.0, 5.0, 7, dtype=FLOAT64), torch.linspace(0.1, 9.0, 7, dtype=FLOAT64)
    slope = torch.linspace(-2.0, 2.0, 7, dtype=FLOAT64)
    together = torch.stack(tilted_moments(lambda a, rows: F.logsigmoid(slope[rows] * a), mean, variance))
    alone = [
        torch.stack(
            tilted_moments(lambda a, rows, i=i: F.logsigmoid(slope[i] * a), mean[i : i + 1], variance[i : i + 1])
        )
        for i in range(7)
    ]
    torch.testing.assert_close(together, torch.cat(alone, 1), rtol=1e-13, atol=1e-13)
    assert tilted_moments(lambda a, rows: a, mean[:0], variance[:0])[0].shape == (0,)


def test_a_product_without_mass_is_nan() -> None:
    assert tilted_moments(lambda a, rows: torch.full_like(a, -math.inf), column(0.0), column(1.0))[1].isnan().all()


def test_a_factor_made_rough_by_rounding_ends() -> None:
    """Rounded to 1e-3 in its log, no polynomial fits it, and all panels would be halved for ever."""
    found = tilted_moments(lambda a, rows: (1e13 + a.cos()) - 1e13, column(0.0), column(1.0))
    wanted = by_scipy(math.cos, 0.0, 1.0, [-9.0, -3.0, 0.0, 3.0, 9.0])
    assert [float(value) for value in found] == pytest.approx(wanted, abs=1e-3)
