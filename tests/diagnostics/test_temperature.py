"""Temperatures: exact on Gaussians at any temperature, with errors and intervals that hold."""

import math

import pytest
import torch
from scipy import stats

from posterity.diagnostics import configurational_temperature, kinetic_temperature
from posterity.numerics import Key, Layout

FLOAT64 = torch.float64
LAYOUT = Layout.of({"weight": (3, 4), "bias": (3,)})


def gaussian(temperature, shape=(4, 2000), seed=0):
    """Draws and gradients of a correlated Gaussian of 15 weights, at a temperature."""
    root = torch.eye(15, dtype=FLOAT64) + 0.3 * Key(seed).normal((15, 15), FLOAT64)  # covariance root root^T
    mean = 5.0 * Key(seed).fold("mean").normal((15,), FLOAT64)
    noise = Key(seed).fold("noise").normal((*shape, 15), FLOAT64)
    theta = mean + math.sqrt(temperature) * noise @ root.T
    grad = -torch.linalg.solve(root @ root.T, (theta - mean).reshape(-1, 15).T).T.reshape(theta.shape)
    return theta, grad, mean, noise


@pytest.mark.parametrize("temperature", [0.1, 1.0, 3.0])
def test_kinetic_temperature_is_the_mean_of_chi_square(temperature):
    mass = torch.linspace(0.5, 4.0, 15, dtype=FLOAT64)
    noise = Key(1).normal((4, 2000, 15), FLOAT64)
    found = kinetic_temperature((temperature * mass).sqrt() * noise, mass)
    torch.testing.assert_close(found.draws[..., 0], temperature * noise.square().mean(-1))
    assert abs(found.mean - temperature) < 5 * found.standard_error
    exact = temperature * math.sqrt(2.0 / 15 / 8000)
    assert found.standard_error == pytest.approx(exact, rel=0.2)
    assert found.expected_scales.tolist() == pytest.approx([math.sqrt(2.0 / 15)])


@pytest.mark.parametrize("temperature", [0.1, 1.0, 3.0])
def test_configurational_temperature_of_a_gaussian(temperature):
    theta, grad, mean, noise = gaussian(temperature)
    about_mean = configurational_temperature(theta, grad, mean)
    torch.testing.assert_close(about_mean.draws[..., 0], temperature * noise.square().mean(-1))  # draw by draw
    for reference in (None, torch.zeros(15)):
        found = configurational_temperature(theta, grad, reference)
        assert abs(found.mean - temperature) < 5 * found.standard_error
    assert configurational_temperature(theta, grad).standard_error < found.standard_error  # zero is far from the mean


def test_the_mean_as_reference_biases_by_one_draw():
    theta, grad, mean, _ = gaussian(1.0, (1, 20))
    own, exact = configurational_temperature(theta, grad), configurational_temperature(theta, grad, mean)
    gap = theta.mean(1)[0] - mean
    assert exact.mean - own.mean == pytest.approx(float(-gap @ grad.mean(1)[0] / 15))
    assert exact.mean - own.mean > 0


def test_by_tensor():
    theta, grad, mean, _ = gaussian(2.0)
    whole, parts = configurational_temperature(theta, grad), configurational_temperature(theta, grad, None, LAYOUT)
    assert parts.names == ("weight", "bias")
    assert parts.sizes == (12, 3)
    assert parts.mean == pytest.approx(whole.mean)
    assert parts.standard_error == pytest.approx(whole.standard_error)
    assert ((parts.means - 2.0).abs() < 5 * parts.standard_errors).all()  # each tensor alone, though they correlate
    kinetic = kinetic_temperature(theta - mean, 1.0, LAYOUT)
    torch.testing.assert_close(kinetic.draws[..., 1], (theta - mean)[..., 12:].square().mean(-1))
    assert [line.split()[0] for line in str(parts).splitlines()] == ["weights", "weight", "bias", "all"]


def test_another_target_than_a_gaussian():
    """Integration by parts holds for a logistic density, whose gradient is -tanh(x / 2)."""
    theta = Key(2).uniform((4, 4000, 20)).double().clamp(1e-12, 1 - 1e-12).logit()
    found = configurational_temperature(theta, -(0.5 * theta).tanh(), torch.zeros(20))
    assert abs(found.mean - 1.0) < 5 * found.standard_error
    assert found.standard_error < 0.005


def test_errors_allow_for_correlation():
    noise = Key(0).normal((4, 500, 10), FLOAT64)
    slow = noise.repeat_interleave(4, dim=1)  # each draw four times
    quick, slow = kinetic_temperature(noise), kinetic_temperature(slow)
    assert slow.mean == pytest.approx(quick.mean)
    assert slow.standard_error == pytest.approx(quick.standard_error, rel=0.3)


def test_interval_is_that_of_chi_square():
    sizes = [1, 7, 300, 100_000]
    layout = Layout.of({str(size): (size,) for size in sizes})
    found = kinetic_temperature(torch.ones(1, layout.size), 1.0, layout).interval(0.9)
    wanted = [[stats.chi2.ppf(p, size) / size for p in (0.05, 0.95)] for size in sizes]
    torch.testing.assert_close(found.cpu(), torch.tensor(wanted, dtype=FLOAT64, device="cpu"), rtol=1e-8, atol=0.0)


def test_single_draws_have_no_error():
    found = kinetic_temperature(torch.tensor([1.0, 2.0, 3.0]), mass=2.0)
    assert found.mean == pytest.approx(14.0 / 6.0)
    assert math.isnan(found.standard_error)


def test_refusals():
    theta = torch.zeros(2, 5, 15)
    with pytest.raises(ValueError, match=r"mass must be a number or \(15,\).*Got \(3,\)"):
        kinetic_temperature(theta, torch.ones(3))
    with pytest.raises(ValueError, match="mass must be a positive number"):
        kinetic_temperature(theta, 0.0)
    with pytest.raises(ValueError, match="momenta must be a tensor"):
        kinetic_temperature([1.0])
    with pytest.raises(ValueError, match=r"grad must have the shape of theta"):
        configurational_temperature(theta, theta[:1])
    with pytest.raises(ValueError, match=r"theta must be a tensor \(chains, draws, weights\)"):
        configurational_temperature(theta[0], theta[0])
    with pytest.raises(ValueError, match=r"reference must be \(15,\)"):
        configurational_temperature(theta, theta, torch.zeros(2))
    with pytest.raises(ValueError, match="The layout has 3 numbers, the draws 15"):
        kinetic_temperature(theta, layout=Layout.of({"a": (3,)}))
    with pytest.raises(ValueError, match="level must be"):
        kinetic_temperature(theta).interval(1.5)
