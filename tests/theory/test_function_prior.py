"""Priors over functions: covariances against draws and quadrature, distances of Gaussians, matched scales."""

import math

import pytest
import torch

from posterity.numerics import Key
from posterity.theory import FunctionPrior, matched_prior, wasserstein_distance

pytestmark = pytest.mark.cpu
ROWS = torch.tensor([[-1.5, 0.3], [0.0, 0.0], [0.4, 2.0], [0.4, 2.0]], dtype=torch.float64)


def spread(seed: int, size: int = 4) -> torch.Tensor:
    root = Key(seed).normal((size, size), torch.float64, "cpu")
    return root @ root.mT


@pytest.mark.parametrize("activation", ["erf", "relu"])
@pytest.mark.parametrize("width", [1, 30])
def test_the_covariance_is_that_of_networks_of_every_width(activation, width):
    prior, count = FunctionPrior(1.3, 0.8, 0.6, activation), 40_000
    draws = prior.draw(ROWS, width, count, Key(2))
    products = draws.unsqueeze(-1) * draws.unsqueeze(-2)
    error = products.std(0) / math.sqrt(count)
    assert bool(((products.mean(0) - prior.covariance(ROWS)).abs() <= 5.0 * error).all())
    assert bool((draws.mean(0).abs() <= 5.0 * draws.std(0) / math.sqrt(count)).all())


@pytest.mark.parametrize(("activation", "error"), [("erf", 1e-12), ("relu", 2e-5)])
def test_the_covariance_equals_quadrature(activation, error):
    """E sigma(u) sigma(v) on a grid of two independent normals, whose rule has an error of h^2 at a kink."""
    prior = FunctionPrior(1.0, 1.5, 0.7, activation)
    joint = 1.5**2 * ROWS[:3] @ ROWS[:3].mT + 0.7**2
    axis = torch.linspace(-9.0, 9.0, 3001, dtype=torch.float64)
    weights = torch.exp(-0.5 * axis.square()) / math.sqrt(2.0 * math.pi) * (axis[1] - axis[0])
    function = torch.erf if activation == "erf" else torch.relu
    for i, j in ((0, 2), (1, 2), (0, 1)):
        factor = torch.linalg.cholesky(joint[[i, j]][:, [i, j]])
        u = factor[0, 0] * axis
        v = factor[1, 0] * axis.unsqueeze(1) + factor[1, 1] * axis
        expected = (weights * function(u)) @ function(v) @ weights
        assert float(prior.covariance(ROWS[:3])[i, j]) == pytest.approx(float(expected), abs=error)


def test_wide_networks_are_gaussian_and_narrow_ones_are_not():
    prior, row, count = FunctionPrior(activation="relu"), ROWS[:1], 4000

    def kurtosis(width: int) -> float:
        draws = prior.draw(row, width, count, Key(4)).squeeze(1)
        return float((draws / draws.std()).pow(4).mean())

    assert kurtosis(1) > 10.0  # 18, of a relu(u)
    assert kurtosis(1000) == pytest.approx(3.0, abs=5.0 * math.sqrt(24.0 / count))


def test_distances_of_gaussians():
    first, second = spread(5), spread(6)
    values, vectors = torch.linalg.eigh(first)
    root = vectors * values.sqrt() @ vectors.mT
    cross = torch.linalg.eigvalsh(root @ second @ root).clamp_min(0.0).sqrt().sum()
    expected = ((first.trace() + second.trace() - 2.0 * cross) / 4.0).sqrt()
    assert float(wasserstein_distance(first, second)) == pytest.approx(float(expected), abs=1e-6)
    assert float(wasserstein_distance(first, first)) == pytest.approx(0.0, abs=1e-6)
    shared = torch.diag(torch.tensor([1.0, 4.0, 9.0])), torch.diag(torch.tensor([4.0, 4.0, 1.0]))
    assert float(wasserstein_distance(*shared)) == pytest.approx(math.sqrt(5.0 / 3.0))


@pytest.mark.parametrize("activation", ["erf", "relu"])
def test_scales_that_made_a_covariance_are_found_again(activation):
    rows = torch.linspace(-2.0, 2.0, 9).unsqueeze(1)
    made = FunctionPrior(0.5, 2.0, 1.2, activation)
    found = matched_prior(rows, made.covariance(rows), FunctionPrior(activation=activation))
    torch.testing.assert_close(found.covariance(rows), made.covariance(rows), rtol=1e-3, atol=1e-4)


def test_no_scales_nearby_are_better():
    rows = torch.linspace(-3.0, 3.0, 13, dtype=torch.float64).unsqueeze(1)
    target = torch.exp(-0.5 * (rows - rows.mT).square())
    found = matched_prior(rows, target)
    best = float(wasserstein_distance(found.covariance(rows), target))
    for index in range(3):
        for factor in (0.9, 1.1):
            scales = [found.outer_scale, found.inner_scale, found.bias_scale]
            scales[index] *= factor
            assert float(wasserstein_distance(FunctionPrior(*scales).covariance(rows), target)) > best


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: FunctionPrior(outer_scale=0.0), "FunctionPrior.outer_scale must be"),
        (lambda: FunctionPrior(activation="elu"), "activation"),
        (lambda: FunctionPrior().covariance(torch.zeros(3)), "inputs must be"),
        (lambda: matched_prior(torch.zeros(3, 1), torch.eye(2)), r"covariance must be \(3, 3\)"),
    ],
)
def test_says_what_was_wanted(make, message):
    with pytest.raises(ValueError, match=message):
        make()
