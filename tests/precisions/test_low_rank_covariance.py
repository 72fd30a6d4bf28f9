"""Gaussians whose covariance is low rank plus diagonal: extremes, what is never formed, doors."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from matrixcases import FLOAT64, between, low_rank_covariance, normal
from precisions.test_precision_structures import check_all, close

from posterity.errors import NotPositiveDefinite
from posterity.jacobians.jacobian import Explicit, Stacked
from posterity.numerics import Block
from posterity.precisions import Dense, LowRank, LowRankCovariance


@given(st.integers(0, 10**6), st.integers(1, 7), st.integers(0, 8))
@settings(deadline=None, max_examples=25)
def test_of_any_size(seed, size, rank):
    """Without a factor, and with more rows than weights, too."""
    check_all(low_rank_covariance(seed, (), size, rank), seed)


def test_is_the_inverse_of_low_rank():
    factor, own, vector = normal(1, "f", 2, 5), between(1, "d", 5), normal(1, "v", 5)
    matrix, inverse = LowRank(factor, own), LowRankCovariance(own, factor)
    close(inverse.matvec(matrix.matvec(vector)), vector)
    close(inverse.logdet, -matrix.logdet)
    close(inverse.diagonal(), matrix.variance())
    assert torch.equal(inverse.variance(), matrix.diagonal())


@pytest.mark.parametrize("ratio", [1e-6, 1.0, 1e6])
def test_shares_that_differ_by_much(ratio):
    """Own variances far below or above the shared ones lose nothing."""
    factor, own = normal(2, "f", 2, 6), ratio**2 * between(2, "d", 6)
    precision = LowRankCovariance(own, factor)
    vector = normal(2, "v", 6)
    inner = torch.eye(2, dtype=FLOAT64) + (factor / own) @ factor.T
    wanted = vector / own - (factor / own).T @ torch.linalg.solve(inner, factor @ (vector / own))
    torch.testing.assert_close(precision.matvec(vector), wanted, rtol=1e-8, atol=1e-8 * float(wanted.abs().max()))
    torch.testing.assert_close(precision.logdet, -own.log().sum() - torch.logdet(inner), rtol=1e-10, atol=1e-10)
    half = precision.colour(torch.eye(6, dtype=FLOAT64))
    close(half.T @ half, precision.covariance())


def test_a_million_weights_need_no_matrix_of_that_size():
    size = 1_000_000
    precision = LowRankCovariance(torch.full((size,), 0.25), torch.full((2, size), 0.5))
    assert float(precision.logdet) == pytest.approx(size * math.log(4.0) - math.log(1.0 + 2.0 * size), rel=1e-12)
    drawn = precision.colour(torch.zeros(1, size, dtype=FLOAT64))
    assert drawn.shape == (1, size)
    assert float(precision.solve(torch.ones(size))[0]) == pytest.approx(0.25 + 2 * 0.25 * size)


def test_derivatives_in_factors_stay_in_factors(monkeypatch):
    """The dense rows of a whole network are never asked for."""
    first, second = Block(("a",), 2, 1, weight=0), Block(("b",), 3, 1, weight=2)
    parts = Explicit(normal(3, "a", 4, 2, 2)), Explicit(normal(3, "b", 4, 2, 3))
    stacked = Stacked((first, second), parts, 5)
    dense = stacked.rows()
    case = low_rank_covariance(3, (2,), 5, 2)
    covariance = torch.linalg.inv(case.matrix)
    monkeypatch.setattr(Stacked, "rows", None)
    whole = dense @ covariance.unsqueeze(-3) @ dense.mT
    close(case.precision.quadratic(stacked), whole)
    close(case.precision.marginal(stacked), whole.diagonal(dim1=-2, dim2=-1))
    flat = dense.flatten(0, 1)
    close(case.precision.joint_quadratic(stacked), flat @ covariance @ flat.T)


def test_one_factor_for_several_own_variances():
    own, factor = between(4, "d", 3, 5), normal(4, "f", 2, 5)
    together = LowRankCovariance(own, factor)
    for index in range(3):
        alone = LowRankCovariance(own[index], factor)
        close(together.covariance()[index], alone.covariance())
        close(together.logdet[index], alone.logdet)
        close(together.member(index).variance(), alone.variance())
        jacobian = normal(4, "j", 2, 1, 5)
        close(together.marginal(jacobian)[index], alone.marginal(jacobian))


@pytest.mark.parametrize(
    ("own", "factor", "message"),
    [
        ([1.0, 0.0], [[1.0, 1.0]], r"own must be positive \(smallest 0\)"),
        ([1.0, -2.0], [[1.0, 1.0]], r"own must be positive \(smallest -2\)"),
        ([1.0, float("nan")], [[1.0, 1.0]], "own has entries that are not finite"),
        ([1.0, 1.0], [[1.0, float("inf")]], "factor has entries that are not finite"),
    ],
)
def test_what_is_no_covariance_is_refused(own, factor, message):
    with pytest.raises(NotPositiveDefinite, match=message):
        LowRankCovariance(torch.tensor(own), torch.tensor(factor))


@pytest.mark.parametrize("factor", [torch.ones(2), torch.ones(1, 3)])
def test_shapes_that_do_not_fit_are_refused(factor):
    with pytest.raises(ValueError, match=r"factor must be \(\.\.\., K, R\) for own variances \(\.\.\., R\)"):
        LowRankCovariance(torch.ones(2), factor)


def test_no_curvature_can_be_taken_from_it():
    precision = LowRankCovariance(torch.ones(2), torch.ones(1, 2))
    with pytest.raises(TypeError, match=r"neither can be rescaled.*Laplace"):
        precision.rescaled(2.0, torch.ones(2))
    close(precision.base, 0.5 * precision.diagonal())
    with pytest.raises(TypeError, match=r"within one structure\. Got Dense and LowRankCovariance"):
        Dense(torch.eye(2), torch.ones(2)).plus(precision)
