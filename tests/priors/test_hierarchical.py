"""An unknown scale for each tensor, integrated out."""

import itertools
import math

import pytest
import scipy.integrate
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from posterity.numerics.layout import Layout
from posterity.numerics.random import Key
from posterity.priors import (
    Cauchy,
    FanIn,
    GroupLasso,
    HalfCauchy,
    Hierarchical,
    Horseshoe,
    Laplace,
    Layerwise,
    LogNormal,
    Normal,
    ScalePrior,
)

SCALES: list[ScalePrior] = [
    LogNormal(1.0, 1.0),
    LogNormal(0.1, 0.02),
    LogNormal(2.0, 3.0),
    HalfCauchy(1.0),
    HalfCauchy(0.01),
]


def vector(size: int, key: int = 0) -> Tensor:
    return Key(key).normal((size,), torch.float64, torch.get_default_device())


def flat(size: int) -> Layout:
    return Layout.of({"weight": (size,)})


def by_quadrature(inner: Normal | Laplace, scale: ScalePrior, theta: Tensor) -> float:
    """log p by adaptive integration over log s, in pieces around where the integrand is largest on a fine grid."""

    def exponent(log_scale: Tensor) -> Tensor:
        factors = log_scale.exp().unsqueeze(-1)
        return scale.log_density(log_scale) - len(theta) * log_scale + inner.log_prob(theta / factors)

    grid = torch.linspace(-30.0, 15.0, 4501, dtype=torch.float64)
    values = exponent(grid)
    peak, top = float(grid[values.argmax()]), float(values.max())
    edges = [peak + step for step in (-25.0, -5.0, -1.0, -0.2, -0.05, 0.0, 0.05, 0.2, 1.0, 5.0, 25.0)]
    total = sum(
        scipy.integrate.quad(
            lambda u: math.exp(float(exponent(torch.tensor([u], dtype=torch.float64))) - top), low, high, epsrel=1e-9
        )[0]
        for low, high in itertools.pairwise(edges)
    )
    return top + math.log(total)


@pytest.mark.parametrize("scale", SCALES, ids=str)
@pytest.mark.parametrize("size", [1, 3, 400])
@pytest.mark.parametrize("inner", [Normal(0.7), Laplace(0.7)], ids=["normal", "laplace"])
def test_equals_integration_over_the_scale(inner: Normal | Laplace, size: int, scale: ScalePrior) -> None:
    theta = 0.3 * vector(size)
    value = float(Hierarchical(inner, scale).bound(flat(size)).log_prob(theta))
    assert value == pytest.approx(by_quadrature(inner, scale, theta), rel=1e-7, abs=1e-7)


@pytest.mark.parametrize("size", [1, 20, 100_000])
@pytest.mark.parametrize("magnitude", [1e-5, 1.0, 300.0])
def test_a_known_scale_is_the_inner_prior(size: int, magnitude: float) -> None:
    theta = magnitude * vector(size)
    prior = Hierarchical(Normal(2.0), LogNormal(0.5 * magnitude, 1e-5)).bound(flat(size))
    expected = Normal(magnitude)
    assert float(prior.log_prob(theta)) == pytest.approx(float(expected.log_prob(theta)), rel=1e-6, abs=1e-6)
    torch.testing.assert_close(prior.variance(theta), expected.variance(theta), rtol=1e-6, atol=0.0)


@given(st.floats(1e-8, 1e8), st.integers(1, 6))
@settings(deadline=None, max_examples=40)
def test_units_go_through(unit: float, size: int) -> None:
    theta = vector(size)
    for make in (lambda c: LogNormal(0.7 * c, 0.8), lambda c: HalfCauchy(0.7 * c)):
        value = Hierarchical(Normal(), make(1.0)).bound(flat(size)).log_prob(theta)
        rescaled = Hierarchical(Normal(), make(unit)).bound(flat(size)).log_prob(unit * theta)
        torch.testing.assert_close(rescaled, value - size * math.log(unit), rtol=1e-8, atol=1e-7)


def test_one_weight_under_a_half_cauchy_scale_is_the_horseshoe() -> None:
    theta = torch.logspace(-8.0, 4.0, 40, dtype=torch.float64).unsqueeze(-1)
    prior = Hierarchical(Normal(0.6), HalfCauchy(0.5)).bound(flat(1))
    torch.testing.assert_close(prior.log_prob(theta), Horseshoe(0.3).log_prob(theta), rtol=1e-7, atol=1e-7)


def test_float32_keeps_its_digits_for_weights_far_below_the_scale() -> None:
    theta = 1e-5 * vector(5000)
    for inner in (Normal(30.0), Laplace(30.0)):
        prior = Hierarchical(inner, HalfCauchy(1.0)).bound(flat(5000))
        exact, grad = prior.value_and_grad(theta)
        value, rounded = prior.value_and_grad(theta.float())
        assert float(value) == pytest.approx(float(exact), rel=1e-5)
        torch.testing.assert_close(rounded.double(), grad, rtol=1e-4, atol=1e-4 * float(grad.abs().max()))


def test_tensors_have_scales_of_their_own() -> None:
    layout = Layout.of({"first": (40,), "second": (40,)})
    prior = Hierarchical(Normal(), LogNormal(1.0, 0.4)).bound(layout)
    squares = prior.sample((20_000, 80), Key(1), torch.zeros(1).double()).square()
    within, across = (torch.corrcoef(torch.stack([squares[:, 0], squares[:, i]]))[0, 1] for i in (1, 40))
    # Var s^2 / (3 E s^4 - (E s^2)^2) with E s^(2j) = exp(2 j^2 spread^2)
    growth = math.exp(4.0 * 0.4**2)
    assert float(within) == pytest.approx((growth - 1.0) / (3.0 * growth - 1.0), abs=0.08)
    assert abs(float(across)) < 0.04
    separate = [Hierarchical(Normal(), LogNormal(1.0, 0.4)).bound(flat(40)).log_prob(vector(40, key)) for key in (2, 3)]
    joint = prior.log_prob(torch.cat([vector(40, 2), vector(40, 3)]))
    torch.testing.assert_close(joint, sum(separate), rtol=1e-12, atol=0.0)


def test_layerwise_gives_each_tensor_its_fan() -> None:
    layout = Layout.of({"a.weight": (3, 4), "a.bias": (3,)})
    prior = Hierarchical(Layerwise.of(FanIn()), LogNormal(1.0, 0.3)).bound(layout)
    expected = sum(
        Hierarchical(Normal(0.5), LogNormal(1.0, 0.3)).bound(flat(part.size)).log_prob(piece)
        for part, piece in zip(layout, vector(15).split([12, 3]), strict=True)
    )
    torch.testing.assert_close(prior.log_prob(vector(15)), expected, rtol=1e-12, atol=0.0)


@pytest.mark.parametrize("size", [1, 3])
def test_a_tensor_of_zeros(size: int) -> None:
    theta = torch.zeros(size, dtype=torch.float64)
    assert float(Hierarchical(Normal(), HalfCauchy(1.0)).bound(flat(size)).log_prob(theta)) == math.inf
    value = Hierarchical(Normal(), LogNormal(0.5, 0.4)).bound(flat(size)).log_prob(theta)
    inverse_moment = -size * math.log(0.5) + 0.5 * (size * 0.4) ** 2  # log E s^-n
    assert float(value) == pytest.approx(float(Normal().log_prob(theta)) + inverse_moment, rel=1e-9)


def test_no_variance_under_a_half_cauchy_scale() -> None:
    assert Hierarchical(Normal(), HalfCauchy(1.0)).bound(flat(2)).variance(torch.zeros(2)).isnan().all()


@pytest.mark.parametrize("scale", SCALES, ids=str)
def test_scale_priors_are_what_they_say(scale: ScalePrior) -> None:
    grid = torch.linspace(-60.0, 60.0, 60_001, dtype=torch.float64)
    density, spacing = scale.log_density(grid), 120.0 / 60_000
    assert float(density.exp().sum()) * spacing == pytest.approx(1.0, abs=1e-9)
    leaf = grid[(grid - scale.peak).abs() > 1e-3].requires_grad_()  # |x| has no derivative at the peak
    (slope,) = torch.autograd.grad(scale.log_density(leaf).sum(), leaf, create_graph=True)
    (bend,) = torch.autograd.grad(slope.sum(), leaf)
    torch.testing.assert_close(slope.detach(), scale.slope(leaf.detach()), rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(-bend, scale.curvature(leaf.detach()), rtol=1e-6, atol=1e-9)
    assert float(grid[density.argmax()]) == pytest.approx(scale.peak, abs=spacing)
    draws = scale.sample((100_000,), Key(6), torch.device("cpu")).log()
    below = (draws < scale.peak).double().mean()  # the peak is the median of log s
    assert abs(float(below) - 0.5) <= 5.0 * 0.5 / len(draws) ** 0.5
    if math.isfinite(scale.second_moment):
        moment = float((density + 2.0 * grid).exp().sum()) * spacing
        assert scale.second_moment == pytest.approx(moment, rel=1e-6)


def test_must_be_bound() -> None:
    with pytest.raises(RuntimeError, match=r"Hierarchical must know the names and shapes.*bound\(layout\)"):
        Hierarchical(Normal(), HalfCauchy()).log_prob(torch.zeros(2))


@pytest.mark.parametrize(
    ("inner", "scale", "message"),
    [
        (Normal(1.0, 0.5), HalfCauchy(), r"Normal or Laplace of mean zero.*Got Normal\(scale=1\.0, mean=0\.5\)"),
        (Laplace(1.0, 0.5), HalfCauchy(), r"Got Laplace\(scale=1\.0, mean=0\.5\)"),
        (Cauchy(), HalfCauchy(), r"Got Cauchy\(scale=1\.0\)\. The heavy-tailed priors are mixtures"),
        (Normal(), 1.0, r"Hierarchical\.scale must be a HalfCauchy or a LogNormal\. Got 1\.0"),
        (Normal(), Cauchy(), r"Hierarchical\.scale must be a HalfCauchy or a LogNormal\. Got Cauchy"),
    ],
)
def test_refuses_bad_arguments(inner: object, scale: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Hierarchical(inner, scale)


def test_refuses_a_layerwise_of_other_kinds() -> None:
    with pytest.raises(ValueError, match=r"a Layerwise of normals only.*Put a Hierarchical for each tensor"):
        Hierarchical(Layerwise.of(GroupLasso()), HalfCauchy()).bound(flat(3))
    with pytest.raises(ValueError, match=r"Normal or Laplace of mean zero"):
        Hierarchical(Layerwise.of(Normal(1.0, 0.3)), HalfCauchy()).bound(flat(3))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: LogNormal(0.0), r"LogNormal\.median must be a positive number\. Got 0\.0"),
        (lambda: LogNormal(1.0, -1.0), r"LogNormal\.spread must be a positive number\. Got -1\.0"),
        (lambda: HalfCauchy(math.nan), r"HalfCauchy\.scale must be a positive number\. Got nan"),
    ],
)
def test_scale_priors_refuse_bad_arguments(make: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()
