"""What a search for hyper-parameters found, and the problem with it."""

import dataclasses
import logging
from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from posterity.evidence.groups import Groups, grouped
from posterity.evidence.marginal import Marginal, parted
from posterity.evidence.rescaled import rescaled_prior
from posterity.likelihoods import Gaussian
from posterity.model.joint import Joint

logger = logging.getLogger("posterity")


@dataclass(frozen=True, eq=False)
class Tuned:
    """Hyper-parameters after a search: those found, or, if it failed, those from before.

    `before` and `after` are what was made as large as possible: the log evidence in nats, or minus the validation loss.
    `reason` says why a search failed. `noise_scale` is None where there is no noise to tune.
    """

    groups: Groups
    names: tuple[str, ...]
    prior_precision: Tensor  # (G,)
    noise_scale: float | None
    before: float
    after: float
    evaluations: int
    reason: str = ""

    @property
    def succeeded(self) -> bool:
        """Whether the search found an optimum."""
        return not self.reason


class Tuning(ABC):
    """A way to choose hyper-parameters after a fit, from the evidence of the Gaussian at its mode."""

    groups: Groups
    noise: bool

    @abstractmethod
    def tune(self, marginal: Marginal) -> Tuned:
        """Search from the present hyper-parameters; a failed search gives those back and logs a warning."""


def unchanged(groups: Groups, marginal: Marginal, evaluations: int, reason: str, value: float) -> Tuned:
    """What a failed search gives: everything as before; the reason goes to the log."""
    logger.warning("The hyper-parameters stay as they were: %s", reason)
    scale = None if marginal.noise is None else marginal.noise.scale
    return Tuned(groups, marginal.names, marginal.prior_precision, scale, value, value, evaluations, reason)


def tuned_joint(joint: Joint, tuned: Tuned) -> Joint:
    """The joint with the prior and the noise found; the joint itself if the search failed.

    The pattern of scales and means inside a group is kept: see `rescaled_prior`.
    """
    if not tuned.succeeded:
        return joint
    likelihood = joint.likelihood
    if tuned.noise_scale is not None:
        likelihood = Gaussian(scale=tuned.noise_scale)
    prior = rescaled_prior(joint, tuned.groups, _factors(joint, tuned)) if tuned.names else joint.prior
    return dataclasses.replace(joint, prior=prior, likelihood=likelihood)


def present_precision(joint: Joint, groups: Groups) -> Tensor:
    """Prior precision of each group of random weights, (G,) in float64: geometric means under a normal prior."""
    names, index = grouped(joint, groups)
    precision = joint.bound_prior.precision(joint.network.initial.to(torch.float64))
    random = precision if joint.random_indices is None else precision[joint.random_indices]
    return parted(random, index, len(names))[0]


def _factors(joint: Joint, tuned: Tuned) -> Tensor:
    """What the scales of each group are multiplied by, (G,)."""
    present = present_precision(joint, tuned.groups)
    return (present / tuned.prior_precision.to(present)).sqrt()
