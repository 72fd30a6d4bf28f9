"""Covariances from second moments: the floor, and the mode under an inverse-Wishart prior, by every kind."""

import pytest
import torch

from posterity.errors import NotPositiveDefinite
from posterity.mixtures import Diagonal, Full, InverseWishart, Spherical, Tied
from posterity.mixtures.rounds import Floor
from posterity.numerics import Key

KINDS = (Full(), Tied(), Diagonal(), Spherical())
COUNTS = torch.tensor([[3.0, 7.0], [4.0, 6.0]], dtype=torch.float64)


def moments_of(kind):
    """Second moments in storage, and the same as matrices (R, K, D, D); tied ones are summed."""
    roots = Key(0).normal((2, 2, 3, 3), torch.float64)
    full = roots @ roots.mT
    return {
        "full": full,
        "tied": full.sum(1),
        "diag": full.diagonal(dim1=-2, dim2=-1),
        "spherical": full.diagonal(dim1=-2, dim2=-1).sum(-1),
    }[kind.name]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_the_floor_is_added_to_variances(kind):
    moments = moments_of(kind)
    plain = kind.dense(Floor(0.0).covariances(kind, moments, COUNTS, 3), 2, 3)
    raised = kind.dense(Floor(0.25).covariances(kind, moments, COUNTS, 3), 2, 3)
    eye = torch.eye(3, dtype=torch.float64)
    torch.testing.assert_close(raised - plain, (0.25 * eye).expand(2, 2, 3, 3))
    full = moments_of(Full())
    if kind.name == "tied":
        torch.testing.assert_close(plain[:, 0], full.sum(1) / 10)
    else:
        traces = full.diagonal(dim1=-2, dim2=-1).sum(-1) / COUNTS
        torch.testing.assert_close(plain.diagonal(dim1=-2, dim2=-1).sum(-1), traces)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_the_mode_of_the_prior_has_gradient_zero(kind):
    prior, moments = InverseWishart(scale=0.7, degrees=4.0), moments_of(kind)
    covariances = prior.covariances(kind, moments, COUNTS, 3).requires_grad_()
    factors = kind.factors(covariances)
    counts = torch.tensor([[10.0]] * 2) if kind.name == "tied" else COUNTS
    half = kind.half_log_det(factors, 2, 3)[:, : counts.shape[1]]
    expected = (counts * half).sum() - 0.5 * kind.quadratic(factors, moments).sum()
    objective = expected - prior.penalty(kind, factors, 3).sum()
    (gradient,) = torch.autograd.grad(objective, covariances)
    assert float(gradient.abs().max()) < 1e-12


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_the_penalty_is_that_of_the_matrices(kind):
    prior = InverseWishart(scale=0.7, degrees=4.0)
    covariances = Floor(0.1).covariances(kind, moments_of(kind), COUNTS, 3)
    dense = kind.dense(covariances, 2, 3)
    if kind.name == "tied":
        dense = dense[:, :1]
    traces = torch.linalg.inv(dense).diagonal(dim1=-2, dim2=-1).sum((-1, -2))
    wanted = 0.5 * (4.0 * torch.logdet(dense).sum(-1) + 0.7 * traces)
    factors = kind.factors(covariances)
    torch.testing.assert_close(prior.penalty(kind, factors, 3), wanted)
    torch.testing.assert_close(kind.log_determinants(factors, 3), torch.logdet(dense).sum(-1))
    inverse = kind.dense(kind.precisions(factors), 2, 3)[:, : dense.shape[1]]
    torch.testing.assert_close(inverse @ dense, torch.eye(3, dtype=torch.float64).expand_as(dense))
    assert kind.identity(3, factors).sum() == (3 if kind.name in ("full", "tied") else 1)


@pytest.mark.parametrize("regularisation", [Floor(1e-6), InverseWishart(1e-6, 1.0)], ids=["floor", "prior"])
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_moments_that_rounding_has_left_below_zero_are_mended(kind, regularisation):
    random = Key(1).normal((2, 2, 3, 3), torch.float64)
    noise = 1e-4 * (random + random.mT)
    noise[0, 0] += 1e12 * torch.ones(3, 3, dtype=torch.float64)  # one direction wide, the others lost
    moments = {
        "full": noise,
        "tied": noise.sum(1),
        "diag": noise.diagonal(dim1=-2, dim2=-1),
        "spherical": noise.diagonal(dim1=-2, dim2=-1).sum(-1),
    }[kind.name]
    found = regularisation.estimated(kind, moments, COUNTS, 3)
    assert bool(torch.isfinite(kind.factors(found)).all())
    good = moments_of(kind)
    torch.testing.assert_close(
        regularisation.estimated(kind, good, COUNTS, 3), regularisation.covariances(kind, good, COUNTS, 3)
    )
    with pytest.raises(NotPositiveDefinite):
        kind.factors(Floor(0.0).estimated(kind, -good, COUNTS, 3))


def test_only_the_prior_is_exact():
    assert InverseWishart(0.1, 2.0).exact
    assert not Floor(0.0).exact
    assert not Floor(1e-6).exact


@pytest.mark.parametrize("bad", [0.0, -1.0, float("nan"), "a", None, True])
@pytest.mark.parametrize("name", ["scale", "degrees"])
def test_bad_numbers_of_the_prior(name, bad):
    with pytest.raises(ValueError, match=f"InverseWishart.{name} must be a positive number"):
        InverseWishart(**{"scale": 1.0, "degrees": 1.0, name: bad})
