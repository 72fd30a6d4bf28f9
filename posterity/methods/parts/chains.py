"""What all samplers share: starts of chains, and warnings about bad draws."""

import logging
from collections.abc import Collection, Mapping

import torch
from torch import Tensor

from posterity.diagnostics.chains import rhat
from posterity.errors import positive_whole, whole
from posterity.inference.method import Method, Traits
from posterity.model.problem import Problem
from posterity.numerics.random import Key


class Chains(Method):
    """Markov chains that step together, theta (C, P): `warmup` steps, then every `thin`-th of `draws * thin` kept."""

    draws: int
    warmup: int
    chains: int
    thin: int

    def _check_counts(self) -> None:
        """A one-line error for numbers of draws, chains and steps that cannot be."""
        name = type(self).__name__
        for field in ("draws", "chains", "thin"):
            positive_whole(f"{name}.{field}", getattr(self, field))
        whole(f"{name}.warmup", self.warmup)

    @property
    def kept_steps(self) -> Collection[int]:
        """Numbers of the steps after which the chains are kept: every `thin`-th after the warm-up."""
        return range(self.warmup + self.thin, self.warmup + self.draws * self.thin + 1, self.thin)

    @property
    def traits(self) -> Traits:
        return Traits(takes_members=False, row="chain", kept_steps=self.kept_steps)

    def initial(self, joint: Problem, key: Key) -> Tensor:
        self._refuse_others(joint)
        return torch.stack([joint.fresh(key.fold(index)) for index in range(self.chains)])

    def each_chain(self, joint: Problem, theta: Tensor) -> Tensor:
        """A copy of theta with a row for each chain, (C, P)."""
        self._refuse_others(joint)
        if theta.dim() > 1 and len(theta) != self.chains:
            raise ValueError(
                f"{type(self).__name__}.chains is {self.chains}, so start must be (P,) or ({self.chains}, P), one row "
                f"for each chain. Got {len(theta)} rows. Use chains={len(theta)}."
            )
        return theta.expand(self.chains, -1).clone(memory_format=torch.contiguous_format)

    def _refuse_others(self, joint: Problem) -> None:
        """A one-line error for a problem that such chains cannot be those of."""
        name = type(self).__name__
        if joint.num_members not in (None, self.chains):
            raise ValueError(
                f"{name}.chains is {self.chains}, and the joint has {joint.num_members} members. Run one chain for "
                f"each: chains={joint.num_members}."
            )
        if joint.random_indices is not None:
            raise ValueError(
                f"{name} samples all weights, but the joint has some as points (random=). "
                "Freeze them at known values: joint.with_weights(patterns of those to sample)."
            )


logger = logging.getLogger("posterity")

DRIFT = 1.5  # R-hat of the two halves of a chain's log densities: those that are still on their way exceed it
LEAST = 100  # draws, for that to say something
ALMOST = 0.9  # a chain that accepts more than this and stays takes steps too small for its numbers, others too large


def warn_of_doubtful(name: str, theta: Tensor, told: Mapping[str, Tensor]) -> None:
    """Log warnings for chains of theta (C, D, P) that never moved or still drift, and for transitions that diverged.

    Takes the sampler's name and the statistics (C, D) of the draws. `diagnostics.convergence` tells more.
    """
    chains, draws, _ = theta.shape
    still = [chain for chain in range(chains) if draws > 1 and bool((theta[chain] == theta[chain, :1]).all())]
    if still:
        rate = float(told["accept"][still].float().mean())
        change = "raise" if rate > ALMOST else "lower"
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
