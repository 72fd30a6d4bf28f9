"""Networks to prune, and whether what is left computes the same."""

import torch
from drawn import normal as drawn_by
from torch import Tensor, nn

from posterity.numerics import Key


def normal(seed: int, *shape: int) -> Tensor:
    """Standard normal numbers in float64, the same on every device."""
    return drawn_by(Key(seed), *shape)


def randomised(module: nn.Module, seed: int) -> nn.Module:
    """In float64 and evaluation mode, with weights and statistics that are neither zero nor one."""
    module = module.double().eval()
    with torch.no_grad():
        for index, (name, value) in enumerate(module.state_dict().items()):
            if value.is_floating_point():
                drawn = 0.6 * normal(seed + 17 * index, *value.shape)
                value.copy_(drawn.exp() if name.endswith("running_var") else drawn)
    return module


def agree(full: nn.Module, smaller: nn.Module, x: Tensor, tolerance: float = 1e-10) -> None:
    """Assert that both give the same."""
    with torch.no_grad():
        torch.testing.assert_close(smaller(x), full(x), rtol=tolerance, atol=tolerance)
