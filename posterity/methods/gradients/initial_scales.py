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
    """log of the rule's standard deviation for each random weight, (R,); a tensor without fans has fans of one."""
    layout = joint.layout
    found = [(fans(part, layout) or (1, 1), part.size) for part in layout]
    each = torch.cat([like.new_full((size,), 0.5 * math.log(rule.variance(*pair))) for pair, size in found])
    return each[: joint.num_weights] if joint.random_indices is None else each[joint.random_indices]
