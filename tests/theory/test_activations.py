"""Expectations of activations: against quadrature, against draws, and their derivatives."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from posterity.numerics import Key
from posterity.theory import Activation, Rectified, Smooth

ACTIVATIONS = [Rectified(), *(Smooth(name) for name in ("tanh", "erf", "sigmoid", "gelu", "silu"))]
NODES, WEIGHTS = (torch.from_numpy(value) for value in np.polynomial.legendre.leggauss(40))


def column(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def line(start: float, end: float) -> Tensor:
    return torch.linspace(start, end, 151, dtype=torch.float64, device="cpu")


def panels(mean: float, scale: float) -> tuple[Tensor, Tensor]:
    """Nodes u and their masses under N(mean, scale^2): 300 panels of 40 nodes, split at the kink."""
    kink = min(max(-mean / scale, -12.0), 12.0)
    edges = torch.cat([line(-12.0, kink), line(kink, 12.0)[1:]])
    half = 0.5 * (edges[1:] - edges[:-1]).unsqueeze(-1)
    z = edges[:-1].unsqueeze(-1) + half * (1.0 + NODES)
    masses = half * WEIGHTS * torch.exp(-0.5 * z.square()) / math.sqrt(2.0 * math.pi)
    return (mean + scale * z).flatten(), masses.flatten()


PLACES = [(0.0, 1.0), (0.7, 0.3), (-0.7, 0.3), (5.0, 0.4), (-2.0, 0.4), (0.3, 8.0), (0.0, 1e-3)]


@pytest.mark.parametrize(("mean", "scale"), PLACES)
@pytest.mark.parametrize("activation", ACTIVATIONS, ids=repr)
def test_moments_equal_quadrature(activation: Activation, mean: float, scale: float) -> None:
    nodes, masses = panels(mean, scale)
    values = activation(nodes)
    first = (masses * values).sum()
    expected = [first, (masses * values.square()).sum(), (masses * (values - first).square()).sum()]
    found = activation.moments(column(mean), column(scale))
    for value, wanted in zip(found, expected, strict=True):
        assert float(value) == pytest.approx(float(wanted), rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=repr)
def test_moments_equal_averages_of_draws(activation: Activation) -> None:
    mean, scale, draws = column(-0.4, 0.0, 1.3), column(0.8, 1.5, 0.5), 40_000
    values = activation(mean + scale * Key(0).normal((draws, 3), torch.float64))
    found = activation.moments(mean, scale)
    for value, sample in ((found.mean, values), (found.second, values.square())):
        assert ((sample.mean(0) - value).abs() <= 5.0 * sample.std(0) / draws**0.5).all()
    torch.testing.assert_close(found.variance, found.second - found.mean.square(), rtol=1e-12, atol=1e-14)


def test_variance_of_the_rectifier_has_its_digits_far_from_the_kink() -> None:
    scale = column(1.0, 0.01, 1e-5, 1e-30)
    found = Rectified().moments(column(100.0, 100.0, 100.0, 0.0), scale)
    torch.testing.assert_close(found.variance[:3], scale[:3].square(), rtol=1e-13, atol=0.0)  # nothing is cut off
    assert all(bool(torch.isfinite(value).all()) for value in found)
    far = Rectified().moments(column(-6.0), column(1.0))
    nodes, masses = panels(-6.0, 1.0)
    assert float(far.mean) == pytest.approx(float((masses * nodes.relu()).sum()), rel=1e-9)


NEURONS = [  # outer mean and scale, mean and scale of the pre-activation
    (0.8, 0.3, 0.5, 0.4),
    (-0.5, 0.5, -0.7, 0.6),
    (2.0, 0.01, 0.0, 1.5),
    (0.0, 1.2, 1.0, 3.0),
    (1.5, 0.4, -4.0, 0.5),
]
TIMES = (1e-5, 0.03, 0.7, 4.0, 13.0)


@pytest.mark.parametrize("neuron", NEURONS)
@pytest.mark.parametrize("activation", ACTIVATIONS, ids=repr)
def test_characteristic_function_equals_quadrature(activation: Activation, neuron: tuple[float, ...]) -> None:
    outer_mean, outer_scale, mean, scale = neuron
    nodes, masses = panels(mean, scale)
    values, times = activation(nodes), torch.tensor(TIMES, dtype=torch.float64, device="cpu").unsqueeze(-1)
    turn = times * (outer_mean * values - outer_mean * (masses * values).sum())
    fading = -0.5 * (times * outer_scale * values).square()
    # 1 - Re without cancellation, part by part
    real = (masses * (torch.expm1(fading) * turn.cos() - 2.0 * (0.5 * turn).sin().square())).sum(-1)
    imaginary = (masses * fading.exp() * turn.sin()).sum(-1)
    found = activation.characteristic(*(column(value) for value in neuron), column(*TIMES)).cpu()
    torch.testing.assert_close(found.real, real, rtol=1e-9, atol=1e-18)
    torch.testing.assert_close(found.imag, imaginary, rtol=1e-9, atol=1e-13)


def test_fast_turns_of_the_rectifier_are_in_closed_form() -> None:
    """Thousands of radians, which a rule of 160 nodes could not follow, and slow ones beside them in one call."""
    times = (0.01, 3.0, 100.0, 400.0)
    found = Rectified().characteristic(column(3.0), column(0.002), column(1.0), column(0.5), column(*times)).cpu()
    nodes, masses = panels(1.0, 0.5)
    height, centre = nodes.relu(), 3.0 * (masses * nodes.relu()).sum()
    for time, value in zip(times, found, strict=True):
        exact = (
            masses * torch.exp(1j * time * (3.0 * height - centre) - 0.5 * (0.002 * time * height) ** 2)
        ).sum() - 1.0
        assert abs(complex(value - exact)) < 1e-12


@pytest.mark.parametrize("activation", [Rectified(), Smooth("tanh")], ids=repr)
def test_characteristic_function_equals_averages_of_draws(activation: Activation) -> None:
    draws, time = 40_000, 1.7
    outer = 0.8 + 0.5 * Key(1).normal((draws,), torch.float64)
    values = outer * activation(-0.3 + 0.9 * Key(2).normal((draws,), torch.float64))
    centre = 0.8 * activation.moments(column(-0.3), column(0.9)).mean
    sample = torch.exp(1j * time * (values - centre)) - 1.0
    found = activation.characteristic(column(0.8), column(0.5), column(-0.3), column(0.9), column(time))
    for part, wanted in ((sample.real, found.real), (sample.imag, found.imag)):
        assert abs(float(part.mean() - wanted)) <= 5.0 * float(part.std()) / draws**0.5


@pytest.mark.parametrize("activation", [Rectified(), Smooth("erf"), Smooth("silu")], ids=repr)
def test_gradients(activation: Activation) -> None:
    """At a mean of zero too, where the two forms of the rectifier's moments meet; and where the closed form is used."""
    mean, scale = column(0.0, 0.6, -0.8), column(0.5, 0.7, 1.1)
    outer_mean, outer_scale = column(0.7, -0.4, 3.0), column(0.3, 0.6, 0.8)
    leaves = [value.requires_grad_() for value in (outer_mean, outer_scale, mean, scale)]
    times = column(0.3, 2.0, 13.0)
    assert torch.autograd.gradcheck(lambda m, s: tuple(activation.moments(m, s)), leaves[2:])
    assert torch.autograd.gradgradcheck(lambda m, s: tuple(activation.moments(m, s))[:2], leaves[2:])
    assert torch.autograd.gradcheck(lambda *theta: activation.characteristic(*theta, times), leaves)


def test_names_the_nearest_activation() -> None:
    with pytest.raises(ValueError, match=r"^Unknown activation 'tan'\. Did you mean 'tanh'\?$"):
        Smooth("tan")
