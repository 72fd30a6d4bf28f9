"""What a sampler keeps of a state."""

from typing import NamedTuple

from torch import Tensor


class KeptDraw(NamedTuple):
    """Draws theta (C, P) of all chains, with their log density and what the last transitions were like, (C,).

    `divergent` is whether any transition since the draw kept before, or since the warm-up, was.
    """

    theta: Tensor
    log_density: Tensor
    accept: Tensor
    energy: Tensor
    divergent: Tensor
    leapfrogs: Tensor
    depth: Tensor
    step_size: Tensor
