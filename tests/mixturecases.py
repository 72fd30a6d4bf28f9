"""Mixtures for tests, and the naive dense formulas that passes over rows are compared with."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from posterity.mixtures import Components, Covariance, Diagonal, Full, Rows, Spherical, Statistics, Tied

KINDS = [Full(), Tied(), Diagonal(), Spherical()]


class Mixture(NamedTuple):
    """R mixtures in the points' own coordinates."""

    weights: Tensor  # (R, K)
    means: Tensor  # (R, K, D)
    covariances: Tensor  # (R, *shape)


def mixture(kind: Covariance, restarts: int, components: int, dimensions: int, seed: int = 0) -> Mixture:
    generator = torch.Generator("cpu").manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64, device="cpu")

    roots = normal(restarts, components, dimensions, dimensions)
    matrices = roots @ roots.mT / dimensions + 0.3 * torch.eye(dimensions, dtype=torch.float64, device="cpu")
    covariances = {
        "full": matrices,
        "tied": matrices[:, 0],
        "diag": matrices.diagonal(dim1=-2, dim2=-1),
        "spherical": matrices[..., 0, 0],
    }[kind.name]
    weights = torch.softmax(normal(restarts, components), -1)
    found = Mixture(weights, 2 * normal(restarts, components, dimensions), covariances.contiguous())
    return Mixture(*(each.to(torch.get_default_device()) for each in found))


def points_near(means: Tensor, number: int, seed: int = 1) -> Tensor:
    """Points (N, D) around the means (K, D), far enough from them to have several responsible components."""
    generator = torch.Generator("cpu").manual_seed(seed)
    which = torch.randint(len(means), (number,), generator=generator, device="cpu").to(means.device)
    noise = torch.randn(number, means.shape[1], generator=generator, dtype=torch.float64, device="cpu")
    return means[which] + 1.3 * noise.to(means.device)


def components_of(kind: Covariance, given: Mixture, rows: Rows) -> Components:
    count, dimensions = given.means.shape[1:]
    factors = kind.factors(given.covariances)
    normaliser = kind.half_log_det(factors, count, dimensions) - dimensions / 2 * math.log(2 * math.pi)
    return Components(given.weights.log() + normaliser, given.means - rows.centre, factors)


def naive_scores(kind: Covariance, given: Mixture, points: Tensor) -> Tensor:
    """(R, N, K) by the density of a multivariate normal, matrix by matrix."""
    dense = kind.dense(given.covariances, *given.means.shape[1:])
    away = points.double()[:, None] - given.means[:, None]  # (R, N, K, D)
    solved = torch.linalg.solve(dense[:, None], away[..., None])[..., 0]
    distances = (away * solved).sum(-1)
    constants = torch.logdet(dense) + points.shape[1] * math.log(2 * math.pi)
    return given.weights.log()[:, None] - 0.5 * (constants[:, None] + distances)


def naive_statistics(
    kind: Covariance, given: Mixture, points: Tensor, weights: Tensor | None = None, labels: Tensor | None = None
) -> Statistics:
    scores = naive_scores(kind, given, points)
    weights = torch.ones(len(points), dtype=torch.float64) if weights is None else weights
    shares, logs = torch.softmax(scores, -1), torch.logsumexp(scores, -1)
    if labels is not None:
        known = labels >= 0
        hot = torch.nn.functional.one_hot(labels.clamp_min(0), scores.shape[-1]).double()
        shares = torch.where(known[:, None], hot, shares)
        logs = torch.where(known, (hot * scores).sum(-1), logs)
    entropy = -(weights[:, None] * torch.xlogy(shares, shares)).sum((1, 2))
    shares = shares * weights[:, None]
    away = points.double()[:, None] - given.means[:, None]  # (R, N, K, D)
    counts = shares.sum(1)
    scatters = torch.einsum("rnk,rnki,rnkj->rkij", shares, away, away)
    stored = {
        "full": scatters,
        "tied": scatters.sum(1),
        "diag": scatters.diagonal(dim1=-2, dim2=-1),
        "spherical": scatters.diagonal(dim1=-2, dim2=-1).sum(-1),
    }[kind.name]
    shifts = torch.einsum("rnk,rnkd->rkd", shares, away) / counts[..., None]
    return Statistics(counts, shifts, stored, (logs * weights).sum(-1), entropy)


def assert_statistics(got: Statistics, wanted: Statistics, relative: float) -> None:
    """Each within `relative` of the largest number of its kind."""
    for name, one, other in zip(Statistics._fields, got, wanted, strict=True):
        assert one.dtype == torch.float64
        assert one.shape == other.shape, name
        error = (one - other).abs().max() / other.abs().max().clamp_min(1.0)
        assert error <= relative, f"{name} is off by {float(error):.3g} of its largest number"
