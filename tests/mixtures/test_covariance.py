import pytest
import torch
from hypothesis import given as drawn
from hypothesis import settings
from hypothesis import strategies as st
from mixturecases import KINDS, assert_statistics, components_of, mixture, naive_scores, naive_statistics, points_near

from posterity.errors import NotPositiveDefinite
from posterity.mixtures import Diagonal, Full, Spherical, Tied, rows_of, statistics
from posterity.mixtures.sweeps import by_shift, shifted, unshifted

by_kind = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)


def as_matrices(kind, factors, dimensions):
    """Factors as matrices A (R, K or 1, D, D)."""
    if kind.name == "full":
        return factors
    if kind.name == "tied":
        return factors[:, None]
    return torch.diag_embed(factors if kind.name == "diag" else factors[..., None].expand(-1, -1, dimensions))


@by_kind
@pytest.mark.parametrize("dimensions", [1, 3])
def test_factors_whiten(kind, dimensions):
    given = mixture(kind, 2, 3, dimensions)
    factors = kind.factors(given.covariances)
    assert factors.shape == (2, *kind.shape(3, dimensions))
    matrices, dense = as_matrices(kind, factors, dimensions), kind.dense(given.covariances, 3, dimensions)
    assert dense.shape == (2, 3, dimensions, dimensions)
    unit = torch.eye(dimensions, dtype=torch.float64).expand_as(dense)
    torch.testing.assert_close(matrices.mT @ dense @ matrices, unit, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(kind.half_log_det(factors, 3, dimensions), -0.5 * torch.logdet(dense))


@by_kind
def test_second_moments_are_about_the_new_means(kind):
    given = mixture(kind, 2, 3, 2)
    points = points_near(given.means[0], 400)
    rows = rows_of(points)
    found = statistics(rows, kind, components_of(kind, given, rows))
    away = points[:, None] - (given.means + found.shifts)[:, None]  # (R, N, K, D)
    shares = torch.softmax(naive_scores(kind, given, points), -1)
    dense = torch.einsum("rnk,rnki,rnkj->rkij", shares, away, away)
    diagonals = dense.diagonal(dim1=-2, dim2=-1)
    wanted = {"full": dense, "tied": dense.sum(1), "diag": diagonals, "spherical": diagonals.sum(-1)}[kind.name]
    torch.testing.assert_close(kind.second_moments(found), wanted, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(
    ("kind", "wanted"),
    [(Full(), 4 * 6), (Tied(), 6), (Diagonal(), 4 * 3), (Spherical(), 4)],
    ids=lambda each: str(each),
)
def test_parameters_are_counted(kind, wanted):
    assert kind.num_parameters(4, 3) == wanted


@by_kind
@pytest.mark.parametrize("bad", [0.0, -1.0, float("nan"), float("inf")])
def test_a_covariance_that_is_none_is_named(kind, bad):
    covariances = mixture(kind, 2, 3, 2).covariances
    place = {"full": (1, 2, 0, 0), "tied": (1, 0, 0), "diag": (1, 2, 1), "spherical": (1, 2)}[kind.name]
    covariances[place] = bad
    who = "that the components share" if kind.name == "tied" else "of component 2"
    with pytest.raises(NotPositiveDefinite, match=f"The covariance {who} in restart 1 is not positive definite"):
        kind.factors(covariances)
    with pytest.raises(NotPositiveDefinite, match=f"The covariance {who} is not positive definite"):
        kind.factors(covariances[1:])


@pytest.mark.parametrize("dimensions", range(1, 8))
def test_a_symmetric_matrix_is_its_entries_by_shift(dimensions):
    generator = torch.Generator(torch.get_default_device()).manual_seed(dimensions)
    roots = torch.randn(2, dimensions, dimensions, generator=generator, dtype=torch.float64)
    matrices = roots + roots.mT
    entries = shifted(matrices)
    assert entries.shape == (2, dimensions // 2 + 1, dimensions)
    assert torch.equal(unshifted(entries), matrices)
    one, other = roots[:, 0], roots[:, -1]
    assert torch.equal(by_shift(one, other, dimensions // 2 + 1), shifted(one[..., None] * other[..., None, :]))


@settings(max_examples=25, deadline=None)
@drawn(
    kind=st.sampled_from(KINDS),
    restarts=st.integers(1, 3),
    components=st.integers(1, 5),
    dimensions=st.integers(1, 7),
    number=st.integers(1, 200),
    seed=st.integers(0, 1000),
)
def test_statistics_of_any_shape(kind, restarts, components, dimensions, number, seed):
    given = mixture(kind, restarts, components, dimensions, seed)
    points = points_near(given.means[-1], number, seed)
    rows = rows_of(points)
    got = statistics(rows, kind, components_of(kind, given, rows))
    wanted = naive_statistics(kind, given, points)
    # A mean of next to no rows is next to nothing: the sum that an M-step uses is compared.
    scaled = [each._replace(shifts=each.shifts * each.counts[..., None]) for each in (got, wanted)]
    assert_statistics(*scaled, 1e-11)
