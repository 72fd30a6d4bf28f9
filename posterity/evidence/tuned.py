"""What a search for hyper-parameters found, and the problem with it."""

import dataclasses
import glob
import logging
from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from posterity.evidence.groups import Groups, grouped
from posterity.evidence.marginal import Marginal, parted
from posterity.likelihoods import Gaussian
from posterity.model.joint import Joint
from posterity.priors import Layerwise, Normal, Prior, ScaleRule

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

    The pattern of scales and means inside a group is kept: every scale of a group is multiplied by one factor. One
    group keeps the kind of prior (a `Normal`, or a `Layerwise` with its rules); several make a `Layerwise` with one
    normal prior for each tensor.
    """
    if not tuned.succeeded:
        return joint
    likelihood = joint.likelihood
    if tuned.noise_scale is not None:
        likelihood = Gaussian(scale=tuned.noise_scale)
    return dataclasses.replace(joint, prior=_tuned_prior(joint, tuned), likelihood=likelihood)


def _tuned_prior(joint: Joint, tuned: Tuned) -> Prior:
    if not tuned.names:
        return joint.prior
    prior, factors = joint.prior, _factors(joint, tuned)  # (G,)
    if len(tuned.names) == 1 and joint.random_indices is None:
        if isinstance(prior, Normal) and not isinstance(prior.scale, Tensor):
            return Normal(float(tuned.prior_precision) ** -0.5, prior.mean)
        if isinstance(prior, Normal):
            return _scaled(prior, float(factors))
        if isinstance(prior, Layerwise):
            return Layerwise({pattern: _scaled_rule(rule, float(factors)) for pattern, rule in prior.rules.items()})
    bound, layout = joint.bound_prior, joint.network.layout
    assert isinstance(bound, Normal)
    scale, mean = (
        torch.as_tensor(v, dtype=torch.float64, device=factors.device).expand(1, layout.size)
        for v in (bound.scale, bound.mean)
    )
    each = factors[grouped(joint, tuned.groups)[1]]
    every = torch.arange(layout.size, device=factors.device) if joint.random_indices is None else joint.random_indices
    scale = scale.index_copy(1, every, scale[:, every] * each)
    return Layerwise(
        {
            glob.escape(part.name): Normal(
                _number(scale[:, part.offset : part.offset + part.size]),
                _number(mean[0, part.offset : part.offset + part.size]),
            )
            for part in layout
        }
    )


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


def _scaled(prior: Normal, factor: float) -> Normal:
    return Normal(prior.scale * factor, prior.mean)


def _scaled_rule(rule: Prior | ScaleRule, factor: float) -> Prior | ScaleRule:
    """A rule of a `Layerwise` that binds to normal priors."""
    if isinstance(rule, ScaleRule):
        return dataclasses.replace(rule, gain=rule.gain * factor)
    assert isinstance(rule, Normal)
    return _scaled(rule, factor)


def _number(values: Tensor) -> float | Tensor:
    """The one number where all are equal."""
    first = float(values.reshape(-1)[0])
    return first if bool((values == first).all()) else values.clone()
