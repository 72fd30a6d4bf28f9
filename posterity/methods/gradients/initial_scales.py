"""Where the scales of random weights begin."""

import math

import torch
from torch import Tensor

from posterity.inference.method import Target
from posterity.priors.fan import ScaleRule, fans


def num_random(joint: Target) -> int:
    """Number R of weights that have a distribution."""
    return joint.num_weights if joint.random_indices is None else joint.random_indices.numel()


def initial_log_scales(joint: Target, rule: ScaleRule, like: Tensor) -> Tensor:
    """log of the rule's standard deviation for each random weight, (R,); a tensor without fans has fans of one.

    A ValueError where the number type of the weights cannot hold its square.
    """
    layout, limits = joint.layout, torch.finfo(like.dtype)
    each = []
    for part in layout:
        variance = rule.variance(*(fans(part, layout) or (1, 1)))
        if not limits.tiny <= variance <= limits.max:
            raise ValueError(
                f"initial_scales must give variances that {like.dtype} can hold. Got {variance:.3g} for '{part.name}' "
                f"from {rule!r}. Take another gain; a weight without a distribution is left out by Joint(random=...)."
            )
        each.append(like.new_full((part.size,), 0.5 * math.log(variance)))
    scales = torch.cat(each)
    return scales[: joint.num_weights] if joint.random_indices is None else scales[joint.random_indices]
