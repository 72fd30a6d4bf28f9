"""The Laplace evidence where the integral is known."""

import math

import pytest
import torch
from contracts.cases import linear_regression, numbers

import posterity as po
from posterity.curvature import Diagonal
from posterity.evidence import laplace_evidence
from posterity.methods import Conjugate, Laplace
from posterity.numerics import Key
from posterity.precisions import Dense
from posterity.precisions import Diagonal as DiagonalPrecision

FLOAT64 = torch.float64


def spd(size, lead=()):
    root = Key(size).normal((*lead, size, size + 2), FLOAT64)
    return root @ root.mT + torch.eye(size, dtype=FLOAT64)


@pytest.mark.parametrize("size", [1, 2, 7])
def test_it_is_the_integral_of_a_gaussian(size):
    """exp(peak - (x - m)^T A (x - m) / 2) integrates to exp(peak) (2 pi)^(n/2) / sqrt(det A)."""
    matrix = spd(size)
    normal = torch.distributions.MultivariateNormal(torch.zeros(size, dtype=FLOAT64), precision_matrix=matrix)
    peak = normal.log_prob(torch.zeros(size, dtype=FLOAT64))
    assert float(laplace_evidence(peak, Dense(matrix))) == pytest.approx(0.0, abs=1e-12)
    assert float(laplace_evidence(peak + 3.5, Dense(matrix))) == pytest.approx(3.5, abs=1e-12)


def test_in_one_dimension_it_is_what_a_sum_gives():
    grid = torch.linspace(-20.0, 20.0, 200_001, dtype=FLOAT64)
    values = -1.7 - 0.5 * 2.3 * (grid - 0.4).square()
    total = math.log(float(values.exp().sum() * (grid[1] - grid[0])))
    got = laplace_evidence(torch.tensor(-1.7, dtype=FLOAT64), Dense(torch.tensor([[2.3]])))
    assert float(got) == pytest.approx(total, abs=1e-6)


def test_diagonal_and_dense_agree():
    entries = torch.tensor([0.5, 2.0, 7.0], dtype=FLOAT64)
    peak = torch.tensor(1.25, dtype=FLOAT64)
    torch.testing.assert_close(
        laplace_evidence(peak, DiagonalPrecision(entries)), laplace_evidence(peak, Dense(torch.diag(entries)))
    )


def test_each_member_has_its_own():
    matrices, peaks = spd(3, (4,)), torch.arange(4.0, dtype=FLOAT64)
    together = laplace_evidence(peaks, Dense(matrices))
    alone = torch.stack([laplace_evidence(peak, Dense(m)) for peak, m in zip(peaks, matrices, strict=True)])
    torch.testing.assert_close(together, alone)


def test_a_linear_model_has_the_evidence_of_its_marginal():
    """Marginally y ~ N(0, s^2 I + s0^2 X X^T), with a column of ones in X for the bias."""
    x, y = numbers(FLOAT64)
    design = torch.cat([x, torch.ones(20, 1, dtype=FLOAT64)], dim=1)
    marginal = torch.distributions.MultivariateNormal(
        torch.zeros(20, dtype=FLOAT64), 0.3**2 * torch.eye(20, dtype=FLOAT64) + 0.7**2 * design @ design.T
    )
    expected = marginal.log_prob(y[:, 0])
    exact, _ = po.infer(Conjugate(), linear_regression(FLOAT64), (x, y))
    torch.testing.assert_close(exact.log_evidence, expected, rtol=1e-11, atol=1e-11)
    laplace, _ = po.infer(Laplace(tuning=None), linear_regression(FLOAT64), (x, y), start=exact)
    torch.testing.assert_close(laplace.log_evidence, expected, rtol=1e-11, atol=1e-11)
    factorised, _ = po.infer(
        Laplace(tuning=None, structure=Diagonal()), linear_regression(FLOAT64), (x, y), start=exact
    )
    assert factorised.log_evidence < expected  # Hadamard: the product of the diagonal is not below the determinant
