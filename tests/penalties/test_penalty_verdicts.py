"""Verdicts that must be right or undecided: slow and tiny penalties, and KLs by deconvolution."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from posterity.penalties import Dirac, Divergence, Function, Gaussian, to_prior
from posterity.penalties.expansion import Member
from posterity.penalties.inversion import invert
from posterity.priors import Laplace, Normal, Prior, StudentT, Tabulated


def by_points(r: Callable[[Tensor], Tensor]) -> tuple[bool, bool, float]:
    verdict = to_prior(Function(lambda mu, nu: r(mu)), Dirac())
    return verdict.satisfies_star, verdict.decided, verdict.kappa


@pytest.mark.parametrize("factor", [1e-300, 1e-120, 1e-40, 1e-3, 1e10])
def test_flat_normals_have_their_prior(factor: float) -> None:
    good, decided, kappa = by_points(lambda mu: factor * mu.square())
    assert good
    assert decided
    assert kappa == pytest.approx(math.sqrt(math.pi / factor), rel=1e-6)
    verdict = to_prior(Function(lambda mu, nu: factor * mu.square()), Dirac())
    assert f"variance {0.5 / factor:.6g}" in verdict.explanation


@pytest.mark.parametrize("power", [0.2, 0.1, 0.01, 1e-3, 1e-9, 1e-10, 1e-18])
def test_slow_powers_are_never_said_not_to_integrate(power: float) -> None:
    """exp(-|w|^p) has the integral 2 Gamma(1 + 1/p) for every p > 0."""
    good, decided, _ = by_points(lambda mu: mu.abs() ** power)
    assert good or not decided


@pytest.mark.parametrize(
    "r",
    [
        lambda mu: torch.zeros_like(mu),
        lambda mu: torch.log1p(mu.abs()),
        lambda mu: 0.9 * torch.log1p(mu.abs()),
        lambda mu: mu.square() / (1.0 + mu.square()),
        lambda mu: torch.log(torch.log(3.0 + mu.abs())),
        lambda mu: torch.log1p(mu.abs()).sqrt(),
        torch.atan,
        torch.cos,
        lambda mu: mu.clamp_min(0.0),
    ],
)
def test_what_does_not_integrate(r: Callable[[Tensor], Tensor]) -> None:
    good, decided, kappa = by_points(r)
    assert not good
    assert decided
    assert kappa == math.inf


QUARTIC = Tabulated.of(lambda x: -0.25 * x**4)


@pytest.mark.parametrize("prior", [Normal(0.5), Laplace(0.3), StudentT(3.0), QUARTIC], ids=str)
@pytest.mark.parametrize("scales", [(0.5,), (0.2, 0.5, 1.0)])
@pytest.mark.parametrize("reach", [2.5, 4.0])
def test_deconvolution_never_denies_a_divergence(prior: Prior, scales: tuple[float, ...], reach: float) -> None:
    family = Gaussian(scales if len(scales) > 1 else scales[0])
    mu = torch.linspace(-reach, reach, 161, dtype=torch.float64, device="cpu")
    divergence = Divergence(prior, family)
    values = torch.stack([divergence.each(mu, torch.full_like(mu, scale)) for scale in scales])
    verdict = invert(mu, values, [Member(family, scale) for scale in scales], route="fourier")
    assert verdict.satisfies_star or not verdict.decided


def test_deconvolution_still_refuses_what_no_prior_has() -> None:
    mu = torch.linspace(-4.0, 4.0, 161, dtype=torch.float64, device="cpu")
    verdict = invert(mu, mu.abs().unsqueeze(0), [Member(Gaussian(0.5), 0.5)], route="fourier")
    assert not verdict.satisfies_star
    assert verdict.decided
