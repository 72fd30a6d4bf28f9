"""What a sampler keeps of a state."""

from typing import NamedTuple

from torch import Tensor


class KeptDraw(NamedTuple):
    """Draws theta (C, P) of all chains, with their log density and what the transitions to them were like, (C,)."""

    theta: Tensor
    log_density: Tensor
    accept: Tensor
    energy: Tensor
    divergent: Tensor
    leapfrogs: Tensor
    depth: Tensor
    step_size: Tensor
