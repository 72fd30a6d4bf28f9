"""Problems that are alike but for prior and noise, as one with a member axis."""

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from posterity.likelihoods.likelihood import Likelihood
from posterity.likelihoods.scaled import Scaled
from posterity.model.joint import Joint
from posterity.priors.normal import Normal
from posterity.priors.prior import Prior


def joint_of_members(joint: Joint, each: Sequence[Joint]) -> Joint:
    """The joint whose prior and likelihood are those of the members' joints, where these differ in numbers alone.

    Scales of the noise become one for each member, and so do those of a normal prior; what else differs is taken from
    `joint` (the prior) and from the first member (the likelihood).
    """
    layout = joint.network.layout
    plain, likelihood = joint.network.initial.double(), each[0].likelihood
    noises = [one.likelihood for one in each if isinstance(one.likelihood, Scaled)]
    if len(noises) == len(each):
        likelihood = _noise_of_members(noises, plain)
    priors = [one.bound_prior for one in each if isinstance(one.bound_prior, Normal)]
    prior: Prior = joint.prior
    if len(priors) == len(each):
        scale = torch.stack([one.variance(plain).sqrt() for one in priors])
        mean = torch.stack([torch.as_tensor(one.mean).to(plain).expand(layout.size) for one in priors])
        if bool((scale == scale[:, :1]).all()) and bool((mean == mean[0, 0]).all()):
            prior = Normal(scale[:, 0].clone(), float(mean[0, 0]))
        else:
            prior = Normal(scale, mean)
    return dataclasses.replace(joint, prior=prior, likelihood=likelihood)


def _noise_of_members(noises: Sequence[Scaled], like: Tensor) -> Likelihood:
    """The noise with one scale for each member; the first one where they differ in more."""
    if all(noise == noises[0] for noise in noises) or len({type(noise) for noise in noises}) > 1:
        return noises[0]
    learning = [type(noise)(**{**noise.__getstate__(), "learn": True}) for noise in noises]
    raw = [noise.free(like) for noise in learning]
    return learning[0].fixed(torch.stack(raw)) if len({len(each) for each in raw}) == 1 else noises[0]
