"""What a part of a run folder is made of, and its bytes."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import TypeAlias

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from posterity.errors import BadFolder

JSON: TypeAlias = "bool | int | float | str | list[JSON] | dict[str, JSON] | None"

CONFIG = "config.json"
TENSORS = "tensors.safetensors"
FILES = frozenset({CONFIG, TENSORS})

_RESERVED = "__metadata__"  # safetensors keeps this key of its header for itself


@dataclass(frozen=True, eq=False)
class Part:
    """One part of a run: a JSON object `config` and named tensors.

    >>> Part({"draws": 10}, {"theta": torch.zeros(3)}).config["draws"]
    10
    """

    config: Mapping[str, JSON]
    tensors: Mapping[str, Tensor] = field(default_factory=dict)


def pack(name: str, part: Part) -> dict[str, bytes]:
    """The files of a part by name: equal parts give equal bytes. TypeError or ValueError if it cannot be stored."""
    return {CONFIG: _config_bytes(name, part.config), TENSORS: _tensor_bytes(name, part.tensors)}


def unpack(where: str, files: Mapping[str, bytes]) -> Part:
    """The part in these files, tensors on the CPU; `where` names it in a BadFolder."""
    try:
        config = json.loads(files[CONFIG])
        # Cloned into torch's own memory: some CPU kernels round differently on memory aligned differently.
        tensors = {_own_name(stored): tensor.clone() for stored, tensor in load(files[TENSORS]).items()}
    except (KeyError, ValueError, RecursionError, SafetensorError) as error:
        raise BadFolder(f"{where} cannot be read ({_line(error)}). Save the run again.") from error
    if not isinstance(config, dict):
        raise BadFolder(f"{where}: {CONFIG} must hold a JSON object. Got {type(config).__name__}. Save the run again.")
    return Part(config, tensors)


def json_bytes(value: JSON) -> bytes:
    """Standard JSON with sorted keys, so that equal values give equal bytes."""
    return (json.dumps(value, indent=2, sort_keys=True, allow_nan=False) + "\n").encode("ascii")


def _config_bytes(name: str, config: Mapping[str, JSON]) -> bytes:
    plain = dict(config)
    try:
        data = json_bytes(plain)
        same = json.loads(data) == plain  # json turns tuples into lists and numbers as keys into strings, silently
    except (TypeError, ValueError, RecursionError) as error:
        raise TypeError(_not_json(name, _line(error))) from error
    if not same:
        raise TypeError(_not_json(name, "a tuple, or a key that is not a str"))
    return data


def _not_json(name: str, came: str) -> str:
    return (
        f"Part '{name}': config must be JSON (None, bool, int, finite float, str, list, dict with str keys). "
        f"Got: {came}. Pass its values through posterity.storage.encode."
    )


def _tensor_bytes(name: str, tensors: Mapping[str, Tensor]) -> bytes:
    ready = {}
    for key in sorted(tensors):
        tensor = tensors[key]
        if not _storable(tensor.dtype) or tensor.layout != torch.strided or tensor.is_meta:
            raise TypeError(
                f"Part '{name}': tensor {key!r} must be a dense tensor of a dtype that safetensors knows. "
                f"Got {tensor.dtype}, {tensor.layout}, on {tensor.device}. Convert it first."
            )
        if not _encodable(key):
            raise ValueError(f"Part '{name}': tensor names must be valid Unicode. Got {key!r}. Rename it.")
        # A copy of its own, because safetensors refuses tensors that share memory.
        copy = tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
        ready[_stored_name(key)] = copy
    return save(ready)


@cache
def _storable(dtype: torch.dtype) -> bool:
    """Whether the installed safetensors knows the dtype; releases differ, and in how they refuse one."""
    try:
        return load(save({"x": torch.zeros(1, dtype=dtype)}))["x"].dtype == dtype
    except Exception:
        return False


def _encodable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _stored_name(name: str) -> str:
    return f"{name}/" if name.rstrip("/") == _RESERVED else name


def _own_name(stored: str) -> str:
    return stored[:-1] if stored.rstrip("/") == _RESERVED else stored


def _line(error: BaseException) -> str:
    return " ".join(f"{error or type(error).__name__}".split())
