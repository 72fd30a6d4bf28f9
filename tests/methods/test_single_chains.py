"""A chain that learns alone ends its warm-up near the acceptance that it wants."""

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

import posterity as po
from posterity.kernels import DiagonalMass
from posterity.methods import HMC, MALA, Metropolis
from posterity.methods.parts.sampler import Sampler

SEEDS = 8
SCALES = (1e-3, 1.0, 1e3)


@dataclass(frozen=True)
class Alone(DiagonalMass):
    """A mass for each chain: each is a run of a single chain."""

    def initial(self, groups: int, like: Tensor) -> Tensor:
        return super().initial(len(like), like)


def acceptance(sampler: Sampler, size: int, correlation: float = 0.0) -> Tensor:
    """Acceptance (3, SEEDS) of single chains on normal targets of three scales."""
    scale = torch.tensor(SCALES, dtype=torch.float64).repeat_interleave(SEEDS).unsqueeze(1)  # (C, 1)
    matrix = (1.0 - correlation) * torch.eye(size, dtype=torch.float64) + correlation
    root = torch.linalg.inv(torch.linalg.cholesky(matrix))
    density = po.Density(
        lambda x: -0.5 * ((x / scale) @ root.T).square().sum(-1), {"x": (size,)}, batched=True, dtype=torch.float64
    )
    start = torch.zeros(len(scale), size, dtype=torch.float64)
    q, _ = po.infer(sampler, density, None, start=start, seed=1, accelerate="off")
    return q.statistics["accept"].mean(1).reshape(3, SEEDS)


@pytest.mark.parametrize(("size", "correlation"), [(1, 0.0), (10, 0.9), (50, 0.0)])
def test_metropolis_at_its_default_warm_up(size: int, correlation: float) -> None:
    rate = acceptance(Metropolis(draws=300, thin=1, chains=3 * SEEDS, mass=Alone()), size, correlation)
    assert bool(((rate.mean(1) - 0.234).abs() < 0.05).all())
    assert bool(((rate > 0.1) & (rate < 0.35)).all())


def test_langevin_at_its_default_warm_up() -> None:
    rate = acceptance(MALA(draws=150, thin=1, chains=3 * SEEDS, mass=Alone()), 5)
    assert bool(((rate.mean(1) - 0.574).abs() < 0.05).all())
    assert bool(((rate > 0.42) & (rate < 0.72)).all())


def test_hamiltonian_trajectories() -> None:
    rate = acceptance(HMC(draws=100, warmup=300, steps=4, chains=3 * SEEDS, mass=Alone()), 5)
    assert bool(((rate.mean(1) - 0.8).abs() < 0.05).all())


def test_one_chain() -> None:
    density = po.Density(lambda x: -0.5 * (x / 50.0).square().sum(-1), {"x": (2,)}, batched=True, dtype=torch.float64)
    q, _ = po.infer(Metropolis(draws=300, thin=1, chains=1), density, None, accelerate="off")
    assert 0.15 < float(q.statistics["accept"].mean()) < 0.3
