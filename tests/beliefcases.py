"""Small Bayesian mixtures of every kind, and draws of their parameters by scipy, one matrix after another."""

from typing import NamedTuple

import numpy as np
import torch
from scipy import stats
from torch import Tensor

from posterity.mixtures import Diagonal, Full, Spherical, Tied
from posterity.mixtures.beliefs import Beliefs, Dirichlet, Family, Sticks, Sums, updated
from posterity.mixtures.sweeps import Rows

FAMILIES = {
    "full": Family(Dirichlet(), Full()),
    "tied": Family(Dirichlet(), Tied()),
    "diag": Family(Dirichlet(), Diagonal()),
    "spherical": Family(Dirichlet(), Spherical()),
    "sticks": Family(Sticks(), Full()),
}


class Problem(NamedTuple):
    family: Family
    prior: Beliefs
    rows: Rows
    responsibilities: Tensor  # (1, N, K)
    sums: Sums
    beliefs: Beliefs


def problem(kind: str, components: int = 3, dimensions: int = 2, num_data: int = 12, seed: int = 0) -> Problem:
    """Random rows with weights and random responsibilities, and the beliefs that follow from them."""
    rng = np.random.default_rng(seed)
    family = FAMILIES[kind]
    root = rng.normal(size=(dimensions, dimensions))
    scale = torch.tensor(root @ root.T + np.eye(dimensions))
    number = lambda value: torch.full((1, 1), value, dtype=torch.float64)  # noqa: E731
    prior = Beliefs(
        family.weights.prior(torch.tensor(0.7, dtype=torch.float64), components),
        number(0.6),
        torch.tensor(rng.normal(size=(1, 1, dimensions))),
        family.kind.from_matrix(scale),
        number(dimensions + 1.5),
    )
    points = torch.tensor(2 * rng.normal(size=(num_data, dimensions)))
    weights = torch.tensor(rng.uniform(0.5, 2.0, size=num_data))
    rows = Rows(points, weights, None, torch.zeros(dimensions, dtype=torch.float64))
    responsibilities = torch.tensor(rng.dirichlet(np.full(components, 0.5), size=(1, num_data)))
    sums = naive_sums(kind, points, weights, responsibilities[0])
    return Problem(family, prior, rows, responsibilities, sums, updated(family, prior, sums))


def naive_sums(kind: str, points: Tensor, weights: Tensor, responsibilities: Tensor) -> Sums:
    """Sums of rows under responsibilities (N, K), one row and component after another."""
    weighted = responsibilities * weights[:, None]
    counts = weighted.sum(0)
    averages = torch.stack([(each[:, None] * points).sum(0) / each.sum() for each in weighted.T])
    matrices = torch.zeros(len(counts), points.shape[1], points.shape[1], dtype=torch.float64)
    for n, point in enumerate(points):
        for k, average in enumerate(averages):
            matrices[k] += weighted[n, k] * torch.outer(point - average, point - average)
    variances = matrices.diagonal(dim1=-2, dim2=-1)
    others = {"tied": matrices.sum(0), "diag": variances, "spherical": variances.sum(-1)}
    stored = others.get(kind, matrices)
    entropy = -(weights[:, None] * torch.xlogy(responsibilities, responsibilities)).sum()
    return Sums(counts[None], averages[None], stored[None], entropy[None])


class Drawn(NamedTuple):
    weights: np.ndarray  # (S, K)
    means: np.ndarray  # (S, K, D)
    precisions: np.ndarray  # (S, K, D, D)
    log_density: np.ndarray  # (S,) of these under the distribution they come from
    log_prior: np.ndarray  # (S,) and under the prior


def drawn(kind: str, beliefs: Beliefs, prior: Beliefs, count: int, seed: int) -> Drawn:
    """Draws of (pi, mu, Lambda), with log densities as products of textbook ones in the kind's own parameters."""
    rng = np.random.default_rng(seed)
    concentration, precision, means, inverse, degrees = (tensor[0].cpu().numpy() for tensor in beliefs)
    concentration0, precision0, means0, inverse0, degrees0 = (tensor[0].cpu().numpy() for tensor in prior)
    components, dimensions = means.shape
    if kind == "sticks":
        ends, ends0 = concentration[:-1].T, concentration0[:-1].T
        breaks = rng.beta(*ends, size=(count, components - 1))
        left = np.cumprod(np.c_[np.ones(count), 1 - breaks], 1)
        weights = np.c_[breaks, np.ones(count)] * left
        log_density, log_prior = (stats.beta.logpdf(breaks, *both).sum(1) for both in (ends, ends0))
    else:
        weights = rng.dirichlet(concentration, size=count)
        log_density = stats.dirichlet.logpdf(weights.T, concentration)
        log_prior = stats.dirichlet.logpdf(weights.T, concentration0)
    matrices = np.empty((count, components, dimensions, dimensions))
    if kind == "tied":
        inverse, degrees = inverse[None], degrees
        inverse0 = inverse0[None]
    for k in range(1 if kind == "tied" else components):
        own, nu, nu0, own0 = inverse[k], degrees[k], degrees0[0], inverse0[0]
        if kind in ("full", "tied", "sticks"):
            one = stats.wishart.rvs(nu, np.linalg.inv(own), size=count, random_state=rng)
            one = one.reshape(count, dimensions, dimensions)
            log_density = log_density + stats.wishart.logpdf(np.moveaxis(one, 0, -1), nu, np.linalg.inv(own))
            log_prior = log_prior + stats.wishart.logpdf(np.moveaxis(one, 0, -1), nu0, np.linalg.inv(own0))
        else:
            numbers = rng.gamma(nu / 2, 2 / own, size=(count, *np.shape(own)))  # (S, D) or (S,)
            densities = (
                stats.gamma.logpdf(numbers, nu / 2, scale=2 / own),
                stats.gamma.logpdf(numbers, nu0 / 2, scale=2 / own0),
            )
            log_density = log_density + densities[0].reshape(count, -1).sum(1)
            log_prior = log_prior + densities[1].reshape(count, -1).sum(1)
            one = numbers.reshape(count, -1, 1) * np.eye(dimensions)
        matrices[:, slice(None) if kind == "tied" else slice(k, k + 1)] = one[:, None]
    roots = np.linalg.cholesky(np.linalg.inv(matrices))
    noise = (roots @ rng.normal(size=(count, components, dimensions, 1)))[..., 0]
    centres = means + noise / np.sqrt(precision)[:, None]
    log_density = log_density + log_normals(centres, means, matrices * precision[:, None, None]).sum(1)
    log_prior = log_prior + log_normals(centres, means0, matrices * precision0[:, None, None]).sum(1)
    return Drawn(weights, centres, matrices, log_density, log_prior)


def log_normals(points: np.ndarray, means: np.ndarray, precisions: np.ndarray) -> np.ndarray:
    """log N(x; m, P^-1) over the leading axes."""
    apart = points - means
    squares = np.einsum("...i,...ij,...j->...", apart, precisions, apart)
    return (np.linalg.slogdet(precisions)[1] - apart.shape[-1] * np.log(2 * np.pi) - squares) / 2
