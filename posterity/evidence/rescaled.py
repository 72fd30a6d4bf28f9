"""The prior of a problem with the scales of each group of weights multiplied by one factor."""

import glob

import torch
from torch import Tensor

from posterity.evidence.groups import Groups, grouped
from posterity.model.joint import Joint
from posterity.priors import Layerwise, Normal, Prior
from posterity.priors.scale_family import by_tensor, rescaled


def rescaled_prior(joint: Joint, groups: Groups, factors: Tensor) -> Prior:
    """The joint's prior with the scales of each group of random weights times its factor, (G,).

    Patterns of scales and means inside a group stay, and so do the priors of weights that are points. One group of all
    weights keeps the kind of prior (a `Layerwise` with its rules); several make a `Layerwise` with one for each tensor.
    """
    if len(factors) == 1 and joint.random_indices is None:
        return rescaled(joint.prior, float(factors))
    layout = joint.network.layout
    every = torch.arange(layout.size, device=factors.device) if joint.random_indices is None else joint.random_indices
    each = factors.new_ones(layout.size).index_copy(0, every, factors[grouped(joint, groups)[1]])  # (P,)
    alone = zip(by_tensor(joint.prior, layout), layout, strict=True)
    return Layerwise({glob.escape(p.name): _times(own, each[p.offset : p.offset + p.size]) for own, p in alone})


def _times(prior: Prior, each: Tensor) -> Prior:
    """The prior of a tensor with a factor for each of its weights (n,); for a normal they may differ."""
    if isinstance(prior, Normal):
        scale = torch.as_tensor(prior.scale, dtype=torch.float64, device=each.device) * each.unsqueeze(0)  # (1, n)
        return Normal(_number(scale), _number(prior.mean) if isinstance(prior.mean, Tensor) else prior.mean)
    return prior if bool((each == 1.0).all()) else rescaled(prior, float(each[0]))


def _number(values: Tensor) -> float | Tensor:
    """The one number where all are equal."""
    first = float(values.reshape(-1)[0])
    return first if bool((values == first).all()) else values.clone()
