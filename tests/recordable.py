"""What a CUDA graph cannot record, found without a GPU: reads of numbers, and work on another device."""

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

READS = ("_local_scalar_dense", "nonzero", "is_nonzero", "masked_select", "equal", "_unique2", "unique_dim")


class NothingRead(TorchDispatchMode):
    """Raises where work reads a number of a tensor, makes a shape of numbers, or leaves the `device`, if one is named.

    Numbers of Python that are copied to the device begin as tensors on the CPU, and are seen, too. The meta device has
    no memory, and is allowed.
    """

    def __init__(self, device: str | None = None) -> None:
        super().__init__()
        self._allowed = (device, "meta")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        masks = name in ("index", "index_put", "index_put_") and any(
            isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8) for index in args[1]
        )
        if name in READS or masks:
            raise RuntimeError(f"a step reads numbers by {name}")
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves((args, kwargs, result)):
            if self._allowed[0] and isinstance(leaf, Tensor) and leaf.device.type not in self._allowed:
                raise RuntimeError(f"a step has a tensor on the {leaf.device.type} in {name}")
        return result
