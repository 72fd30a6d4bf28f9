"""The prior as fits see it: scales that were left out and chosen, and the density of the random weights alone."""

import glob
import math
from dataclasses import replace

import torch
from torch import Tensor

from posterity.model.joint import Joint
from posterity.model.problem import Problem
from posterity.options import LEFT_OUT
from posterity.priors.correlated import Correlated
from posterity.priors.layerwise import Layerwise, bound_by_tensor
from posterity.priors.normal import Normal


def leaves_out(joint: Joint) -> bool:
    """Whether a scale of prior or noise was left out, for the method to choose."""
    return LEFT_OUT in (joint.bound_prior.chosen, joint.likelihood.chosen)


def random_log_prior(joint: Problem, theta: Tensor) -> Tensor:
    """The untempered log prior at theta (..., T) of the random weights and the likelihood's learnt parameters, (...).

    Weights that are points, or frozen, are given: an evidence is that of the data given them. Only where a prior ties
    weights of a tensor to each other (`GroupLasso`, `Hierarchical`; `Correlated` ties all) do tied points count too.
    """
    if not isinstance(joint, Joint) or joint.random_indices is None or isinstance(joint.bound_prior, Correlated):
        return joint.log_prior(theta)
    weights, raw = joint.split(theta)
    total, index, prior = joint.likelihood.free_log_prior(raw), joint.random_indices, joint.bound_prior
    if isinstance(prior, Normal):
        mean = prior.mean.to(weights) if isinstance(prior.mean, Tensor) else prior.mean
        precision, away = prior.precision(weights)[..., index], (weights - mean)[..., index]
        return total + 0.5 * ((precision / (2.0 * math.pi)).log() - precision * away.square()).sum(-1)
    layout = joint.network.layout
    for part, own in zip(layout, bound_by_tensor(joint.prior.by_tensor(layout), layout), strict=True):
        chosen = index[(index >= part.offset) & (index < part.offset + part.size)]
        if chosen.numel():
            whole = weights[..., part.offset : part.offset + part.size]
            total = total + own.log_prob(weights[..., chosen] if own.factorises else whole)
    return total


def as_chosen(joint: Joint, way: str) -> Joint:
    """The joint whose present scales count as chosen in this way, except for those that were given."""
    return replace(joint, prior=joint.prior.as_chosen(way), likelihood=joint.likelihood.as_chosen(way))


def with_scales_of(joint: Joint, other: Joint) -> Joint:
    """The joint with the scales that a fit of `other` chose, where they were left out here."""
    prior, likelihood, theirs = joint.prior, joint.likelihood, other.likelihood
    if joint.bound_prior.chosen == LEFT_OUT and other.bound_prior.chosen not in ("", LEFT_OUT):
        layout = other.network.layout
        known = dict(zip(layout.names, other.prior.by_tensor(layout), strict=True))
        own = zip(joint.network.layout, joint.prior.by_tensor(joint.network.layout), strict=True)
        each = {p.name: known.get(p.name, mine) if mine.chosen == LEFT_OUT else mine for p, mine in own}
        same = joint.network.layout == layout and prior.chosen == LEFT_OUT
        prior = other.prior if same else Layerwise({glob.escape(name): value for name, value in each.items()})
    if likelihood.chosen == LEFT_OUT and type(theirs) is type(likelihood) and theirs.chosen not in ("", LEFT_OUT):
        likelihood = theirs
    return replace(joint, prior=prior, likelihood=likelihood)


def chosen_scales(joint: Joint) -> dict[str, Tensor]:
    """The scales that a fit chose: "prior_scale" of each tensor, geometric means (..., T), and "noise_scale"."""
    scales: dict[str, Tensor] = {}
    prior = joint.bound_prior
    if prior.chosen not in ("", LEFT_OUT):
        weights = joint.network.initial.to(torch.float64)
        variance = prior.variance(weights if prior.num_members is None else weights.expand(prior.num_members, -1))
        logs = torch.split(variance.log(), [part.size for part in joint.network.layout], dim=-1)
        scales["prior_scale"] = torch.stack([(0.5 * each.mean(-1)).exp() for each in logs], dim=-1)
    if joint.likelihood.chosen not in ("", LEFT_OUT) and not joint.likelihood.num_free:  # else it is in theta
        noise = torch.as_tensor(getattr(joint.likelihood, "scale", None), dtype=torch.float64)
        noise = noise.squeeze(-2) if noise.dim() > 2 else noise  # of members
        scales["noise_scale"] = noise.squeeze(-1) if noise.dim() and noise.shape[-1] == 1 else noise
    return scales
