"""A part of a run folder: JSON and tensors; large files are memory-mapped."""

import json
import math
import struct
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any, TypeAlias

import torch
from safetensors import SafetensorError
from safetensors.torch import load, load_file, save
from torch import Tensor

from posterity.errors import BadFolder

PIECE = 1 << 24  # bytes copied at a time


@dataclass(frozen=True, eq=False)
class TensorFile:
    """The bytes of a safetensors file of these tensors; each iteration makes them again.

    Wide dtypes come first, then names in order: equal tensors give equal bytes, and all are aligned.

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
            header[name] = {"dtype": dtype_name(tensor.dtype), "shape": list(tensor.shape), "data_offsets": [low, high]}
            low = high
        text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        yield struct.pack("<Q", len(text)) + text
        for _, tensor in ordered:
            yield from _pieces(tensor.detach())


def _pieces(tensor: Tensor) -> Iterator[bytes]:
    """Yield the entries in row-major order, whatever the strides."""
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
    """Return the name of the dtype in the installed safetensors; None where that does not support it."""
    try:
        data = save({"x": torch.zeros(1, dtype=dtype, device="cpu")})
        entry = json.loads(data[8 : 8 + struct.unpack("<Q", data[:8])[0]])["x"]
        same = load(data)["x"].dtype == dtype and entry["shape"] == [1]
    except Exception:
        return None
    return str(entry["dtype"]) if same else None


JSON: TypeAlias = "bool | int | float | str | list[JSON] | dict[str, JSON] | None"

CONFIG = "config.json"
TENSORS = "tensors.safetensors"
FILES = frozenset({CONFIG, TENSORS})

_RESERVED = "__metadata__"  # a key of the header that safetensors reserves


@dataclass(frozen=True, eq=False)
class Part:
    """One part of a run: a JSON object `config` and named tensors.

    `older` says that it was read from a folder of an older format, whose values may lack fields that came later.

    >>> Part({"draws": 10}, {"theta": torch.zeros(3)}).config["draws"]
    10
    """

    config: Mapping[str, JSON]
    tensors: Mapping[str, Tensor] = field(default_factory=dict)
    older: bool = False


def pack(name: str, part: Part) -> dict[str, Iterable[bytes]]:
    """Return the files of a part by name, each in pieces that can be iterated again: equal parts give equal bytes.

    Raises TypeError or ValueError if it cannot be stored.
    """
    return {CONFIG: [_config_bytes(name, part.config)], TENSORS: _tensor_file(name, part.tensors)}


def unpack(where: str, config_file: bytes, tensor_file: bytes | Path) -> Part:
    """Return the part in these files, with tensors on the CPU; `where` names it in a BadFolder.

    Tensors of a file given by its path are memory-mapped.
    """
    try:
        config = json.loads(config_file, parse_float=_finite, parse_constant=_finite)
        if isinstance(tensor_file, Path):
            stored = load_file(tensor_file)
        else:
            # Cloned into torch's own memory: some CPU kernels round differently on memory aligned differently.
            stored = {name: tensor.clone() for name, tensor in load(tensor_file).items()}
        tensors = {name[:-1] if name.rstrip("/") == _RESERVED else name: t for name, t in stored.items()}
    except (OSError, KeyError, ValueError, RecursionError, SafetensorError) as error:
        raise BadFolder(f"{where} cannot be read ({_line(error)}). Save the run again.") from error
    if not isinstance(config, dict):
        raise BadFolder(f"{where}: {CONFIG} must hold a JSON object. Got {type(config).__name__}. Save the run again.")
    return Part(config, tensors)


def sent(part: Part) -> bytes:
    """Pack a part into bytes for another process."""
    config, tensors = (b"".join(pieces) for pieces in pack("sent", part).values())
    return struct.pack("<?Q", part.older, len(config)) + config + tensors


def received(data: bytes) -> Part:
    """Return the part of which `sent` made these bytes.

    >>> received(sent(Part({"step": 3}, {"x": torch.ones(2)}))).tensors["x"]
    tensor([1., 1.])
    """
    older, length = struct.unpack_from("<?Q", data)
    begin = struct.calcsize("<?Q")
    part = unpack("A part from another process", data[begin : begin + length], data[begin + length :])
    return replace(part, older=older)


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text[:20]} is not a finite number")
    return value


def json_bytes(value: JSON) -> bytes:
    """Return standard JSON with sorted keys, so that equal values give equal bytes."""
    return (json.dumps(value, indent=2, sort_keys=True, allow_nan=False) + "\n").encode("ascii")


def _config_bytes(name: str, config: Mapping[str, JSON]) -> bytes:
    plain, got = dict(config), "a tuple, or a key that is not a str"  # which json converts silently
    try:
        data = json_bytes(plain)
        if json.loads(data) == plain:
            return data
    except (TypeError, ValueError, RecursionError) as error:
        got = _line(error)
    raise TypeError(
        f"Part '{name}': config must be JSON (None, bool, int, finite float, str, list, dict with str keys). "
        f"Got: {got}. Pass its values through posterity.storage.encode."
    )


def _tensor_file(name: str, tensors: Mapping[str, Tensor]) -> TensorFile:
    for key, tensor in tensors.items():
        if dtype_name(tensor.dtype) is None or tensor.layout != torch.strided or tensor.is_meta:
            raise TypeError(
                f"Part '{name}': tensor {key!r} must be a dense tensor of a dtype that safetensors knows. "
                f"Got {tensor.dtype}, {tensor.layout}, on {tensor.device}. Convert it first."
            )
        try:
            key.encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"Part '{name}': tensor names must be valid Unicode. Got {key!r}. Rename it.") from error
    return TensorFile({f"{key}/" if key.rstrip("/") == _RESERVED else key: tensor for key, tensor in tensors.items()})


def _line(error: BaseException) -> str:
    return " ".join(f"{error or type(error).__name__}".split())
