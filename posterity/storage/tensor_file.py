"""Tensors as the bytes of a safetensors file, a piece at a time: draws that fill the memory have no room for a copy."""

import json
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from safetensors.torch import load, save
from torch import Tensor

PIECE = 1 << 24  # bytes that are copied at a time


@dataclass(frozen=True, eq=False)
class TensorFile:
    """The bytes of a safetensors file of these tensors, made anew each time one iterates.

    Larger numbers come first, then names in order, so that equal tensors give equal bytes and none lies askew.

    >>> data = b"".join(TensorFile({"x": torch.arange(3.0)}))
    >>> load(data)["x"]
    tensor([0., 1., 2.])
    """

    tensors: Mapping[str, Tensor]

    def __iter__(self) -> Iterator[bytes]:
        ordered = sorted(self.tensors.items(), key=lambda item: (-item[1].itemsize, item[0]))
        header: dict[str, dict[str, Any]] = {}
        low = 0
        for name, tensor in ordered:
            high = low + tensor.numel() * tensor.itemsize
            header[name] = {
                "dtype": dtype_name(tensor.dtype),
                "shape": list(tensor.shape),
                "data_offsets": [low, high],
            }
            low = high
        text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        yield struct.pack("<Q", len(text)) + text
        for _, tensor in ordered:
            yield from _pieces(tensor.detach())


def _pieces(tensor: Tensor) -> Iterator[bytes]:
    """The numbers in row-major order, whatever the order in memory."""
    if not tensor.numel():
        return
    if not tensor.dim() or tensor.numel() * tensor.itemsize <= PIECE:
        plain = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu").copy_(tensor)
        yield plain.view(-1).view(torch.uint8).numpy().tobytes()
        return
    rows = PIECE // (tensor[0].numel() * tensor.itemsize)
    for part in torch.split(tensor, rows) if rows else tensor:
        yield from _pieces(part)


@cache
def dtype_name(dtype: torch.dtype) -> str | None:
    """What the installed safetensors calls the dtype; None where it does not know it (releases differ)."""
    try:
        data = save({"x": torch.zeros(1, dtype=dtype, device="cpu")})
        entry = json.loads(data[8 : 8 + struct.unpack("<Q", data[:8])[0]])["x"]
        same = load(data)["x"].dtype == dtype and entry["shape"] == [1]
    except Exception:
        return None
    return str(entry["dtype"]) if same else None
