"""Base of all samplers: counts and starts of chains, and warnings about doubtful draws."""

import logging
from collections.abc import Collection, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from posterity.diagnostics.chains import bulk_ess, rhat
from posterity.errors import positive_whole, whole
from posterity.inference.method import Method, Traits
from posterity.likelihoods import Gaussian
from posterity.model import Data, Joint
from posterity.model.problem import Problem
from posterity.numerics.random import Key
from posterity.options import LEFT_OUT
from posterity.priors import Hierarchical, LogNormal

SPREAD = 1.5  # of log scales under their hyper-priors: within a factor of 20 around 1 with probability 0.95


class Chains(Method):
    """Markov chains that step together, theta (C, P): after `warmup` steps every `thin`-th is kept, `draws` times."""

    draws: int
    warmup: int
    chains: int
    thin: int

    def _check_counts(self) -> None:
        """Raise a ValueError for impossible numbers of draws, chains and steps."""
        name = type(self).__name__
        for field in ("draws", "chains", "thin"):
            positive_whole(f"{name}.{field}", getattr(self, field))
        whole(f"{name}.warmup", self.warmup)

    @property
    def kept_steps(self) -> Collection[int]:
        """Steps after which the chains are kept: every `thin`-th after the warm-up."""
        return range(self.warmup + self.thin, self.warmup + self.draws * self.thin + 1, self.thin)

    @property
    def traits(self) -> Traits:
        return Traits(takes_members=False, row="chain", kept_steps=self.kept_steps)

    def with_scales(self, joint: Joint, data: Data, start: Joint | None, key: Key) -> Joint:
        """The problem whose scales that were left out have log-normal hyper-priors around 1.

        The prior scale of each tensor is integrated out; the noise is sampled along with the weights.
        """
        prior, likelihood = joint.prior, joint.likelihood
        if joint.bound_prior.chosen == LEFT_OUT:
            prior = Hierarchical(prior.as_chosen("hyper-prior"), LogNormal(spread=SPREAD))
        if isinstance(likelihood, Gaussian) and likelihood.chosen == LEFT_OUT:
            likelihood = Gaussian(1.0, learn=True, log_scale_prior=(0.0, SPREAD), chosen="hyper-prior")
        return replace(joint, prior=prior, likelihood=likelihood)

    def initial(self, joint: Problem, key: Key) -> Tensor:
        self._refuse_others(joint)
        return torch.stack([joint.fresh(key.fold(index)) for index in range(self.chains)])

    def each_chain(self, joint: Problem, theta: Tensor) -> Tensor:
        """Return a copy of theta with a row for each chain, (C, P)."""
        self._refuse_others(joint)
        if theta.dim() > 1 and len(theta) != self.chains:
            raise ValueError(
                f"{type(self).__name__}.chains is {self.chains}, so start must be (P,) or ({self.chains}, P), one row "
                f"for each chain. Got {len(theta)} rows. Use chains={len(theta)}."
            )
        return theta.expand(self.chains, -1).clone(memory_format=torch.contiguous_format)

    def _refuse_others(self, joint: Problem) -> None:
        """Raise a ValueError for a problem with another number of members, or with weights that are points."""
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

DRIFT = 1.5  # R-hat of the two halves of a chain's log densities, above which the chain still drifts
LEAST = 100  # draws from which that R-hat is telling
APART = 1.2  # R-hat of a weight above which chains have not mixed
FEWEST = 20  # draws from which that R-hat is telling
EFFECTIVE = 10  # effective draws a chain that a weight should have
WEIGHTS, NUMBERS = 1000, 4_000_000  # weights, and numbers in their draws, that mixing is judged by
ALMOST = 0.9  # acceptance above which a chain that never moved takes steps too small for its dtype, else too large


def warn_of_unmixed(name: str, theta: Tensor) -> None:
    """Log a warning where a weight says that chains of theta (C, D, P) have not mixed, by R-hat and effective draws."""
    chains, draws, size = theta.shape
    if chains < 2 or draws < FEWEST:
        return
    few = max(1, min(WEIGHTS, NUMBERS // (chains * draws)))
    judged = theta[..., :: max(1, -(-size // few))].double()
    apart = float(rhat(judged).nan_to_num(0.0).max())
    effective = float(bulk_ess(judged).nan_to_num(torch.inf).min())
    found = []
    if apart > APART:
        found.append(f"the largest R-hat of a weight is {apart:.2f}, above {APART}")
    if effective < EFFECTIVE * chains:
        found.append(f"a weight has {effective:.0f} effective draws, below {EFFECTIVE} a chain")
    if found:
        logger.warning(
            f"{name}: chains have not mixed: {', and '.join(found)}. Take more warmup and a larger thin. In networks "
            "units change places, and outputs may agree all the same: see diagnostics.convergence(q, x)."
        )


def warn_of_doubtful(name: str, theta: Tensor, statistics: Mapping[str, Tensor]) -> None:
    """Log warnings for chains of theta (C, D, P) that never moved or still drift, and for transitions that diverged.

    Takes the sampler's name and the statistics (C, D) of the draws. `diagnostics.convergence` says more.
    """
    chains, draws, _ = theta.shape
    still = [chain for chain in range(chains) if draws > 1 and bool((theta[chain] == theta[chain, :1]).all())]
    if still:
        rate = float(statistics["accept"][still].float().mean())
        change = "raise" if rate > ALMOST else "lower"
        which = f"all {chains} chains" if len(still) == chains else f"chains {', '.join(map(str, still[:6]))}"
        logger.warning(
            f"{name}: {which} never moved, so that the draws are those of the start (acceptance {rate:.2g}): {change} "
            "step_size, or leave it out and let a warm-up find it."
        )
    if draws >= LEAST:
        half = draws // 2
        halves = statistics["log_density"][:, : 2 * half].reshape(-1, 2, half)  # (C, 2, D / 2)
        drifting = int((rhat(halves.permute(1, 2, 0)) > DRIFT).sum())  # NaN where a chain has one value only
        if drifting:
            logger.warning(
                f"{name}: the log density of {drifting} of {chains} chains has not come to rest: raise warmup, begin "
                "at a mode (start=), or look whether the density is proper. See diagnostics.convergence."
            )
    count = int(statistics["divergent"].sum())
    if count and bool((statistics["leapfrogs"] > 1).any()):  # a single proposal that is rejected loses no trajectory
        logger.warning(
            f"{name}: {count} of {chains * draws} transitions diverged, so that part of the target may be missing: "
            "raise target_accept, lower step_size, or reparametrise. See diagnostics.convergence."
        )
