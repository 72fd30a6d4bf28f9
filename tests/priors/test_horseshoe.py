"""The horseshoe prior."""

import itertools
import math

import pytest
import scipy.integrate
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from posterity.numerics.random import Key
from posterity.priors import Horseshoe


def column(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def mixture(weight: float, scale: float) -> float:
    """The density as the integral over the half-Cauchy scale that defines it, in log l."""

    def integrand(log_local: float) -> float:
        deviation = scale * math.exp(log_local)
        normal = math.exp(-0.5 * (weight / deviation) ** 2) / (math.sqrt(2.0 * math.pi) * deviation)
        return normal / (math.pi * math.cosh(log_local))

    middle = math.log(abs(weight) / scale)
    return sum(
        scipy.integrate.quad(integrand, low, high, epsabs=0.0, epsrel=1e-10, limit=200)[0]
        for low, high in ((-40.0 + min(middle, 0.0), middle), (middle, 40.0 + max(middle, 0.0)))
    )


@pytest.mark.parametrize("scale", [0.3, 2.0])
@pytest.mark.parametrize("weight", [1e-6, 1e-2, 0.5, -1.7, 6.0, 1e3])
def test_is_the_mixture_over_local_scales(weight: float, scale: float) -> None:
    value = Horseshoe(scale).log_prob(column(weight))
    assert math.exp(float(value)) == pytest.approx(mixture(weight, scale), rel=1e-8)


@given(st.floats(-10.0, 6.0))
@settings(deadline=None, max_examples=60)
def test_lies_within_the_bounds_of_its_paper(exponent: float) -> None:
    # Carvalho, Polson and Scott (2010), theorem 1: K/2 log(1 + 4/w^2) < p(w) < K log(1 + 2/w^2).
    weight, constant = 10.0**exponent, (2.0 * math.pi**3) ** -0.5
    density = math.exp(float(Horseshoe().log_prob(column(weight))))
    assert 0.5 * constant * math.log1p(4.0 / weight**2) <= density * (1.0 + 1e-9)
    assert density <= constant * math.log1p(2.0 / weight**2) * (1.0 + 1e-9)


@pytest.mark.parametrize(
    ("mean", "scale"), [(0.0, 1.0), (0.0, 0.01), (1e-8, 0.1), (0.3, 0.2), (5.0, 0.6), (-1.0, 50.0)]
)
def test_cross_entropy_in_spite_of_the_singularity(mean: float, scale: float) -> None:
    prior = Horseshoe(0.4)

    def integrand(log_weight: float, sign: float) -> float:
        weight = sign * math.exp(log_weight)
        density = math.exp(-0.5 * ((weight - mean) / scale) ** 2) / (math.sqrt(2.0 * math.pi) * scale)
        return -float(prior.log_prob(column(weight))) * density * math.exp(log_weight)

    top = math.log(abs(mean) + 9.0 * scale)
    points = sorted(
        {top - 30.0, top - 8.0, math.log(abs(mean - 6.0 * scale) + 1e-12), math.log(abs(mean) + scale), top}
    )
    expected = sum(
        scipy.integrate.quad(integrand, low, high, args=(sign,), epsabs=1e-9, epsrel=1e-8)[0]
        for sign in (-1.0, 1.0)
        for low, high in itertools.pairwise(points)
    )
    assert float(prior.cross_entropy(column(mean), column(scale))) == pytest.approx(expected, rel=1e-6, abs=1e-7)


def test_cross_entropy_has_a_gradient_at_a_zero_mean() -> None:
    mean, scale = column(0.0, 0.0).requires_grad_(), column(0.5, 2.0).requires_grad_()
    in_mean, in_scale = torch.autograd.grad(Horseshoe().cross_entropy(mean, scale), (mean, scale))
    torch.testing.assert_close(in_mean, torch.zeros(2).double(), rtol=0.0, atol=1e-9)
    assert (in_scale > 0.0).all()


def test_is_infinite_at_zero_and_steeper_towards_it() -> None:
    prior = Horseshoe(0.5)
    assert prior.log_prob(column(0.0, 1.0)).item() == math.inf
    near = column(1e-12, 1e-6, 1e-3, 0.1, 1.0, 100.0, 1e8)
    assert (prior.value_and_grad(near)[1] < 0.0).all()
    assert (prior.precision(near) < 0.0).all()
    assert float(prior.precision(near)[-1] * near[-1] ** 2) == pytest.approx(-2.0, rel=1e-6)  # p falls as 1 / w^2


def test_draws_have_the_right_tails() -> None:
    draws = Horseshoe(0.7).sample((200_000,), Key(5), torch.zeros(1).double()).abs()
    for log_point in (-6.0, -2.0, 0.0, 3.0):
        grid = torch.linspace(-60.0, log_point, 20_001, dtype=torch.float64)
        density = 2.0 * Horseshoe(0.7).log_prob(grid.exp().unsqueeze(-1)).exp() * grid.exp()
        below = float(torch.trapezoid(density, grid))
        spread = math.sqrt(below * (1.0 - below) / len(draws))
        assert abs(float((draws < math.exp(log_point)).double().mean()) - below) <= 5.0 * spread
