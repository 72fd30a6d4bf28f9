"""Approximations of a posterior with two modes, compared with the exact one on a grid."""

from dataclasses import dataclass

import torch
from torch import Tensor

from posterity.curvature import Hessian
from posterity.inference import infer
from posterity.methods import NUTS, FullRank, Laplace, MeanField
from posterity.optim import Cosine
from posterity.optim.optimizer import Adam
from posterity.posteriors import Gaussian, Linearized, Point, Samples
from posterity.precisions import Dense
from posterity_studies.surface.problem import Surface, grid

STEPS = 500
CHAINS, WARMUP, DRAWS = 4, 80, 120


@dataclass(frozen=True, eq=False)
class Approximation:
    """Probabilities of a method at the points of the grid, (SIDE, SIDE), or draws (S, 2) of its chains."""

    masses: Tensor | None
    draws: Tensor | None
    positive: float  # probability of b > 0, the half plane of one mode
    divergence: float | None  # KL(q || p) in nats, None for draws
    crossed: int | None = None  # chains that visit both half planes


def approximations(surface: Surface, seed: int) -> dict[str, Approximation]:
    """Run every method; Gaussians start from the mode with a positive first weight."""
    rows, joint = (surface.inputs, surface.targets), surface.joint
    mode = max(surface.modes, key=lambda place: float(place[0]))
    start = Point(joint, mode)
    laplace, _ = infer(Laplace(tuning=None, curvature=Hessian()), joint, rows, start=start, progress=False)
    factorised, _ = infer(
        MeanField(STEPS, None, Adam(0.03), Cosine()), joint, rows, start=start, seed=seed, progress=False
    )
    full, _ = infer(FullRank(STEPS, None, 4, Adam(0.03), Cosine()), joint, rows, start=start, seed=seed, progress=False)
    assert isinstance(laplace, Linearized)
    assert isinstance(factorised, Gaussian)
    assert isinstance(full, Gaussian)
    near = _masses(laplace.gaussian)
    return {
        "exact": _approximated(surface, surface.masses),
        "Laplace": _approximated(surface, near),
        "MeanField": _approximated(surface, _masses(factorised)),
        "FullRank": _approximated(surface, _masses(full)),
        "two Laplace posteriors": _approximated(surface, 0.5 * (near + near.flip(0, 1))),
        "NUTS": _chains(surface, seed),
    }


def _masses(q: Gaussian) -> Tensor:
    """Return the normalised probabilities of a Gaussian at the points of the grid."""
    covariance = q.precision.covariance() if isinstance(q.precision, Dense) else q.variance.diag()
    away = grid() - q.mean
    side = round(len(away) ** 0.5)
    squares = (away * torch.linalg.solve(covariance, away.mT).mT).sum(-1)
    return torch.softmax(-0.5 * squares, 0).reshape(side, side)


def _approximated(surface: Surface, masses: Tensor) -> Approximation:
    side = len(masses)
    right = masses[side // 2 + 1 :].sum() + 0.5 * masses[side // 2].sum()
    log_exact = torch.log_softmax(-surface.potential.flatten(), 0).view_as(masses)
    divergence = (torch.xlogy(masses, masses) - masses * log_exact).sum()
    return Approximation(masses, None, float(right), float(divergence))


def _chains(surface: Surface, seed: int) -> Approximation:
    """Run chains from the starts of the first descents."""
    method, rows = NUTS(DRAWS, WARMUP, CHAINS, target_accept=0.9), (surface.inputs, surface.targets)
    q, _ = infer(method, surface.joint, rows, start=surface.paths[0, :CHAINS], seed=seed, progress=False)
    assert isinstance(q, Samples)
    right = q.theta[..., 0] > 0.0  # (C, D)
    crossed = int((right.any(1) & ~right.all(1)).sum())
    return Approximation(None, q.theta.reshape(-1, 2), float(right.double().mean()), None, crossed)
