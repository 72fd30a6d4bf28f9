"""What holds for the weights of any module before one computes with them."""

from collections.abc import Iterable

from torch import Tensor, nn
from torch.nn.parameter import is_lazy


def uncompiled(module: nn.Module) -> nn.Module:
    """What torch.compile has wrapped; any other module as it is."""
    inner = getattr(module, "_orig_mod", None)
    return inner if isinstance(inner, nn.Module) else module


def check_shapes(owner: str, module: nn.Module) -> None:
    """A ValueError where lazy weights have no shape yet."""
    for name, parameter in module.named_parameters():
        if is_lazy(parameter):
            raise ValueError(f"{owner}: '{name}' has no shape yet. Call the lazy model on a batch of inputs first.")


def check_real(owner: str, weights: Iterable[tuple[str, Tensor]]) -> None:
    """A ValueError where one of these is complex."""
    for name, weight in weights:
        if weight.is_complex():
            raise ValueError(
                f"{owner}: all weights must have a floating dtype. Got {weight.dtype} in '{name}'. Write the layer "
                "with real and imaginary parts as weights of their own."
            )
