"""Chains that gave draws which must not be taken for those of the target without a word."""

import logging
from collections.abc import Mapping

import torch
from torch import Tensor

from posterity.diagnostics.rhat import rhat

logger = logging.getLogger("posterity")

DRIFT = 1.5  # R-hat of the two halves of a chain's log densities: those that are still on their way exceed it
LEAST = 100  # draws, for that to say something
HARDLY = 0.1  # a rate of acceptance below this says that steps are too large rather than too small


def warn_of_doubtful(name: str, theta: Tensor, told: Mapping[str, Tensor]) -> None:
    """Log warnings for chains of theta (C, D, P) that never moved or still drift, and for transitions that diverged.

    Takes the sampler's name and the statistics (C, D) of the draws. `diagnostics.convergence` tells more.
    """
    chains, draws, _ = theta.shape
    still = [chain for chain in range(chains) if draws > 1 and bool((theta[chain] == theta[chain, :1]).all())]
    if still:
        rate = float(told["accept"][still].float().mean())
        change = "lower" if rate < HARDLY else "raise"
        which = f"all {chains} chains" if len(still) == chains else f"chains {', '.join(map(str, still[:6]))}"
        logger.warning(
            "%s: %s never moved, so that the draws are those of the start (acceptance %.2g): %s step_size, or leave it "
            "out and let a warm-up find it.",
            name,
            which,
            rate,
            change,
        )
    drifting = _drift(told["log_density"]) > DRIFT if draws >= LEAST else torch.zeros(chains)
    if bool(drifting.any()):
        logger.warning(
            "%s: the log density of %d of %d chains has not come to rest: raise warmup, begin at a mode (start=), or "
            "look whether the density is proper. See diagnostics.convergence.",
            name,
            int(drifting.sum()),
            chains,
        )
    count = int(told["divergent"].sum())
    if count and bool((told["leapfrogs"] > 1).any()):  # a single proposal that is rejected loses no trajectory
        logger.warning(
            "%s: %d of %d transitions diverged, so that part of the target may be missing: raise target_accept, lower "
            "step_size, or reparametrise. See diagnostics.convergence.",
            name,
            count,
            chains * draws,
        )


def _drift(log_density: Tensor) -> Tensor:
    """R-hat between the halves of each chain of (C, D), (C,); NaN where a chain has one value only."""
    half = log_density.shape[1] // 2
    halves = log_density[:, : 2 * half].reshape(-1, 2, half)  # (C, 2, D / 2)
    return rhat(halves.permute(1, 2, 0))
