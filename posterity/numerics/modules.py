"""Checks of a module's weights before they are computed with."""

from collections.abc import Iterable

from torch import Tensor, nn
from torch.nn.parameter import is_lazy


def uncompiled(module: nn.Module) -> nn.Module:
    """Return the module that torch.compile wrapped; any other module itself."""
    inner = getattr(module, "_orig_mod", None)
    return inner if isinstance(inner, nn.Module) else module


def check_shapes(owner: str, module: nn.Module) -> None:
    """Raise a ValueError where lazy weights have no shape yet."""
    for name, parameter in module.named_parameters():
        if is_lazy(parameter):
            raise ValueError(f"{owner}: '{name}' has no shape yet. Call the lazy model on a batch of inputs first.")


def check_real(owner: str, weights: Iterable[tuple[str, Tensor]]) -> None:
    """Raise a ValueError where a weight is complex."""
    for name, weight in weights:
        if weight.is_complex():
            raise ValueError(
                f"{owner}: all weights must have a floating dtype. Got {weight.dtype} in '{name}'. Write the layer "
                "with real and imaginary parts as weights of their own."
            )
