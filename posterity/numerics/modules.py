"""Checks of a module's weights before they are computed with."""

from collections.abc import Iterable

from torch import Tensor, nn
from torch.nn.parameter import is_lazy


def without_parallel(module: nn.Module) -> nn.Module:
    """Return the module that DistributedDataParallel wraps, any other module itself; raise a TypeError for FSDP's.

    >>> layer = nn.Linear(1, 1)
    >>> without_parallel(layer) is layer
    True
    """
    kinds = {kind.__name__ for part in module.modules() for kind in type(part).__mro__}
    if kinds & {"FullyShardedDataParallel", "FSDPModule"}:
        raise TypeError(
            "Network: the weights must be whole in each process. Got a module of FSDP, which holds a part of them in "
            "each. Pass the module as it was before FSDP wrapped it: scale.processes() shares the rows of its batches."
        )
    if isinstance(module, nn.parallel.DistributedDataParallel):
        inner: nn.Module = module.module
        return inner
    return module


def uncompiled(module: nn.Module) -> nn.Module:
    """Return the module that torch.compile or DistributedDataParallel wrapped; any other module itself."""
    inner = getattr(module, "_orig_mod", None)
    return uncompiled(inner) if isinstance(inner, nn.Module) else without_parallel(module)


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
