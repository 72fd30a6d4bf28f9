"""The Gaussian that an optimiser has found, for the library's predictives and metrics."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from posterity.model.joint import Joint
from posterity.numerics.diagonal import Diagonal
from posterity.posteriors.gaussian import Gaussian


def gaussian(joint: Joint, module: nn.Module, precisions: Mapping[Tensor, Tensor]) -> Gaussian:
    """N(module's weights, 1 / precisions) over the random weights of the joint, by their names in the module.

    `precisions` has a tensor for each parameter of the optimiser. Buffers are the module's.
    """
    named = dict(module.named_parameters())
    layout = joint.network.layout
    for part in layout:
        if part.name not in named or named[part.name].shape != part.shape:
            raise ValueError(
                "IVON.posterior: the module must be that of the joint. "
                f"It has no parameter '{part.name}' of shape {tuple(part.shape)}."
            )
    missing = [part.name for part in joint.random_slices if named[part.name] not in precisions]
    if missing:
        raise ValueError(
            f"IVON.posterior: the optimiser has no parameter '{missing[0]}', which is random in the joint. "
            "Pass the optimiser all of them, or name its own in Joint(..., random=...)."
        )
    mean = layout.flatten({part.name: named[part.name].detach() for part in layout})
    point = mean.new_ones((), dtype=torch.float64)  # stands for weights that are not random, and is left out
    every = [precisions.get(named[part.name], point.expand(part.shape)).reshape(-1) for part in layout]
    places = joint.random_indices
    precision = torch.cat(every) if places is None else torch.cat(every)[places]
    buffers = dict(module.named_buffers())
    kept = {name: buffers[name].detach().clone() for name in joint.network.buffers}
    return Gaussian(joint, mean.clone(), Diagonal(precision), kept)
