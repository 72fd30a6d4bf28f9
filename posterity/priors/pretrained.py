"""Normal priors around weights that were trained before."""

import glob
from collections.abc import Mapping

from torch import Tensor

from posterity.errors import shown
from posterity.priors.fan import ScaleRule
from posterity.priors.layerwise import Layerwise
from posterity.priors.normal import Normal
from posterity.priors.prior import Prior


def around(
    weights: Mapping[str, Tensor] | Tensor, scale: float = 1.0, others: Prior | ScaleRule | None = None
) -> Prior:
    """A normal prior with pretrained weights for its mean.

    - `weights`: flat theta (P,), as `q.point()` gives it, or tensors by name, as `dict(module.named_parameters())`.
    - `scale`: standard deviation of how far the weights may go from there.
    - `others`: the prior of tensors that `weights` does not name, such as those of a new head.

    >>> import torch
    >>> pretrained = torch.nn.Linear(2, 1)
    >>> prior = around(dict(pretrained.named_parameters()), scale=0.1)
    >>> from posterity.numerics import Layout
    >>> bound = prior.bound(Layout.of({"weight": (1, 2), "bias": (1,)}))
    >>> theta = torch.cat([pretrained.weight.flatten(), pretrained.bias]).detach()
    >>> bool(bound.log_prob(theta) > bound.log_prob(theta + 0.1))
    True
    """
    if isinstance(weights, Tensor):
        if others is not None:
            raise ValueError("around: a flat theta names no tensors, so there are no others. Give weights by name.")
        return Normal(scale, weights.detach().clone())
    if not isinstance(weights, Mapping) or not weights or not all(isinstance(w, Tensor) for w in weights.values()):
        raise TypeError(
            "around: weights must be a flat theta (P,) or tensors by name, such as dict(module.named_parameters()). "
            f"Got {shown(weights)}."
        )
    rules: dict[str, Prior | ScaleRule] = {
        glob.escape(name): Normal(scale, weight.detach().flatten().clone()) for name, weight in weights.items()
    }
    return Layerwise(rules if others is None else {**rules, "*": others})
