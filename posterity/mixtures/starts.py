"""The values at which the restarts of a Gaussian mixture begin, from what is given and from seeds."""

import torch
from torch import Tensor

from posterity.errors import BadData
from posterity.mixtures.checks import as_mixture_weights, as_start
from posterity.mixtures.covariance import Covariance
from posterity.mixtures.passes import statistics
from posterity.mixtures.rounds import EMPTY, Rounds, Tensors
from posterity.mixtures.rows import Components, Rows
from posterity.mixtures.seeding import nearest, seeds, shared_at_random, spread_of
from posterity.numerics.random import Key

NARROW = 1e-14  # the share of the variance of all rows below which a start is no covariance


def seeded(rounds: Rounds, components: int, restarts: int, init: str, means: Tensor | None, key: Key) -> Tensors:
    """Values of the restarts: an M-step when each row belongs to the nearest seed, or to all at random.

    Given means (K, D) relative to the centre are the seeds. Components without rows, or whose rows have no spread and
    get none by the regularisation, begin with the covariance of all rows.
    """
    rows, kind = rounds.rows, rounds.kind
    if init == "random" and means is None:
        sums = shared_at_random(rows, kind, components, restarts, key)
        centres = torch.zeros_like(sums.shifts)
    else:
        centres = seeds(rows, components, restarts, init, key) if means is None else means.expand(restarts, -1, -1)
        sums = nearest(rows, kind, centres, spread_of(rows))
    counts, dimensions = sums.counts, rows.points.shape[1]
    empty = counts <= EMPTY * counts.sum(-1, keepdim=True)
    found = rounds.regularisation.estimated(kind, kind.second_moments(sums), counts, dimensions)
    whole = rounds.regularisation.estimated(kind, *_of_all(rows, kind), dimensions)
    unusable = _unusable(kind, found, whole)
    lost = kind.marked(empty | unusable) if unusable.dim() > 1 else unusable[:, None, None]
    weights = torch.where(empty, counts.sum(-1, keepdim=True) / len(rows.points), counts)
    return {
        "weights": weights / weights.sum(-1, keepdim=True),
        "means": centres + sums.shifts if means is None else centres.clone(),
        "covariances": torch.where(lost, whole.expand_as(found), found),
    }


def given(values: Tensors, kind: Covariance, rows: Rows, weights: object, precisions: object) -> Tensors:
    """The values with weights and precisions that were given in the place of theirs."""
    restarts, components, dimensions = values["means"].shape
    values = dict(values)
    if weights is not None:
        found = as_mixture_weights(weights, "weights_init", components, rows.points)
        # A weight of 0 would make a row with that label impossible.
        values["weights"] = found.clamp_min(torch.finfo(found.dtype).tiny).expand(restarts, -1)
    if precisions is not None:
        shape = kind.shape(components, dimensions)
        inverse = inverted(kind, as_start(precisions, "precisions_init", shape, rows.points))
        values["covariances"] = inverse.expand(restarts, *shape)
    return values


def inverted(kind: Covariance, precisions: Tensor) -> Tensor:
    """Covariances of precisions that must be symmetric and positive definite, or positive."""
    if not kind.matrices:
        if not bool((precisions > 0).all()):
            raise ValueError("precisions_init must be positive. Got a number that is not. Give 1 / variance.")
        return _finite(precisions.reciprocal())
    scale = precisions.abs().amax()
    roots, failed = torch.linalg.cholesky_ex(precisions)
    if bool((failed > 0).any()) or not bool(((precisions - precisions.mT).abs() <= 1e-8 * scale).all()):
        raise ValueError(
            "precisions_init must be symmetric and positive definite matrices. Got one that is not. "
            "Give the inverses of covariances."
        )
    return _finite(torch.cholesky_inverse(roots))


def refuse_constant_columns(rows: Rows) -> None:
    """A one-line error where columns have no variance, for fits without regularisation."""
    points = rows.points if rows.weights is None else rows.points[rows.weights > 0]
    same = (points.amin(0) == points.amax(0)).nonzero().flatten().tolist()
    if same:
        raise BadData(
            f"X must vary in every column if reg_covar is 0. Got one value in column{'s' if len(same) > 1 else ''} "
            f"{', '.join(map(str, same[:5]))}. Drop it, or give reg_covar a positive number."
        )


def _finite(covariances: Tensor) -> Tensor:
    if not bool(torch.isfinite(covariances).all()):
        raise ValueError("precisions_init must have finite inverses. Got one that is too close to 0.")
    return covariances


def _of_all(rows: Rows, kind: Covariance) -> tuple[Tensor, Tensor]:
    """Second moments (1, *shape) of all rows about their mean, as of one component, and its count (1, 1)."""
    dimensions, one = rows.points.shape[1], torch.ones(1, 1, dtype=torch.float64, device=rows.points.device)
    covariances = torch.ones(1, *kind.shape(1, dimensions), dtype=torch.float64, device=one.device)
    if kind.matrices:
        covariances = torch.eye(dimensions, dtype=torch.float64, device=one.device).expand_as(covariances)
    means = torch.zeros(1, 1, dimensions, dtype=torch.float64, device=one.device)
    sums = statistics(rows._replace(labels=None), kind, Components(one, means, covariances))
    return kind.second_moments(sums), sums.counts


def _unusable(kind: Covariance, covariances: Tensor, whole: Tensor) -> Tensor:
    """Which covariances are not positive beside that of all rows: (R, K), or (R,) of one that is shared."""
    if not kind.matrices:
        good = covariances > NARROW * whole
        return ~good if good.dim() == 2 else ~good.all(-1)
    good = torch.isfinite(covariances).flatten(-2).all(-1)
    eye = torch.eye(covariances.shape[-1], dtype=covariances.dtype, device=covariances.device)
    roots, failed = torch.linalg.cholesky_ex(torch.where(good[..., None, None], covariances, eye))
    variances = roots.diagonal(dim1=-2, dim2=-1).square()
    wide = (variances > NARROW * whole.diagonal(dim1=-2, dim2=-1)).all(-1)
    bad: Tensor = (failed > 0) | ~(good & wide)
    return bad
