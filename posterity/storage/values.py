"""Values (numbers, containers, tensors, posterity's dataclasses) as JSON and tensors, and back."""

import math
import pkgutil
import sys
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from functools import cache
from importlib import import_module
from types import ModuleType

import torch
from torch import Tensor

from posterity.errors import BadFolder, shown, unknown
from posterity.storage.part import JSON

_PACKAGE = "posterity"


def encode(value: object, tensors: dict[str, Tensor], path: str = "") -> JSON:
    """The JSON of a value; its tensors are put into `tensors` under their path, not copied.

    Takes None, bool, int, float, str, list, tuple, dict with str keys, torch.Tensor, torch.dtype, and the
    dataclasses that a subpackage of posterity exports. Anything else is a TypeError.

    >>> tensors = {}
    >>> encode({"scale": (1.0, float("inf")), "mean": torch.zeros(2)}, tensors, "prior")
    {'dict': [['scale', {'tuple': [1.0, {'float': 'inf'}]}], ['mean', {'tensor': 'prior.mean'}]]}
    >>> tensors
    {'prior.mean': tensor([0., 0.])}
    """
    if value is None or type(value) in (bool, int, str):
        return value  # type: ignore[return-value]
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {"float": str(float(value))}
    if isinstance(value, Tensor):
        name = free_name(path, tensors)
        tensors[name] = value.detach()
        return {"tensor": name}
    if isinstance(value, torch.dtype):
        return {"dtype": str(value).removeprefix("torch.")}
    if type(value) is list:
        return [encode(item, tensors, join(path, str(index))) for index, item in enumerate(value)]
    if type(value) is tuple:
        return {"tuple": [encode(item, tensors, join(path, str(index))) for index, item in enumerate(value)]}
    if type(value) is dict:  # pairs, because the order of a mapping may matter and JSON objects are sorted here
        return {"dict": [[text_key(key, path), encode(item, tensors, join(path, key))] for key, item in value.items()]}
    if is_dataclass(value) and not isinstance(value, type):
        return {
            "type": _type_name(type(value), path),
            "fields": {
                f.name: encode(getattr(value, f.name), tensors, join(path, f.name)) for f in fields(value) if f.init
            },
        }
    raise TypeError(
        f"{path or 'The value'} must be None, a bool, int, float, str, list, tuple, dict, tensor, dtype or one of "
        f"posterity's dataclasses to be stored. Got {type(value).__name__} {shown(value)}. Convert it to one of these."
    )


def decode(json: JSON, tensors: Mapping[str, Tensor]) -> object:
    """The value that `encode` turned into `json` and `tensors`; BadFolder when they do not fit posterity.

    Imports nothing but subpackages of posterity. A field that the JSON lacks takes its default.

    >>> tensors = {}
    >>> decode(encode([1, (2.5, torch.float64)], tensors), tensors)
    [1, (2.5, torch.float64)]
    """
    if isinstance(json, list):
        return [decode(item, tensors) for item in json]
    if not isinstance(json, dict):
        return json
    match sorted(json.items()):
        case [("float", "nan" | "inf" | "-inf" as text)]:
            return float(text)
        case [("tensor", str(name))]:
            if name not in tensors:
                raise BadFolder(f"Tensor '{name}' is missing among the stored ones. Save the run again.")
            return tensors[name]
        case [("dtype", str(name))] if isinstance(dtype := vars(torch).get(name), torch.dtype):
            return dtype
        case [("tuple", list(items))]:
            return tuple(decode(item, tensors) for item in items)
        case [("dict", list(items))]:
            return {key: decode(item, tensors) for key, item in pairs(items)}
        case [("fields", dict(stored)), ("type", str(name))]:
            return _build(name, {key: decode(item, tensors) for key, item in stored.items()})
    raise _malformed(json)


def join(path: str, name: str) -> str:
    """The dotted path of the entry `name` under `path`."""
    return f"{path}.{name}" if path else name


def free_name(path: str, tensors: Mapping[str, Tensor]) -> str:
    """`path`, marked where another tensor has that name already (a dict key may hold dots)."""
    name = path or "value"
    while name in tensors:
        name += "~"
    return name


def text_key(key: object, path: str) -> str:
    """The key of a dict at `path`, which must be a str."""
    if type(key) is not str:
        raise TypeError(
            f"{path or 'The value'}: the keys of a stored dict must be str. Got {shown(key)}. Use str keys."
        )
    return key


def pairs(items: list[JSON]) -> list[tuple[str, JSON]]:
    """The (key, value) pairs of a stored dict."""
    found: list[tuple[str, JSON]] = []
    for item in items:
        match item:
            case [str(key), value]:
                found.append((key, value))
            case _:
                raise _malformed(item)
    return found


def _malformed(json: object) -> BadFolder:
    return BadFolder(
        f"A stored value is not in a form that this posterity knows: {shown(json)}. Upgrade posterity, "
        "or save the run again."
    )


def _type_name(kind: type, path: str) -> str:
    package, _, rest = kind.__module__.partition(".")
    subpackage = rest.partition(".")[0]
    if package != _PACKAGE or subpackage not in _subpackages():
        raise TypeError(
            f"{path or 'The value'} must be made of posterity's own classes to be stored. Got {kind.__module__}."
            f"{kind.__qualname__}. Use one of posterity's, or leave it out and pass it again when loading."
        )
    if _exported(import_module(f"{_PACKAGE}.{subpackage}")).get(kind.__name__) is not kind:
        raise TypeError(
            f"{path or 'The value'}: {kind.__qualname__} must be exported by posterity.{subpackage} under its own name "
            "to be stored. Export it there."
        )
    return f"{subpackage}.{kind.__name__}"


def _build(name: str, values: dict[str, object]) -> object:
    kind = _find(name)
    accepted = {f.name for f in fields(kind) if f.init}
    for key in values:
        if key not in accepted:
            raise BadFolder(f"{unknown(f'field of {name}', key, accepted)} Upgrade posterity, or save the run again.")
    try:
        return kind(**values)
    except (TypeError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise BadFolder(f"Stored {name} does not fit this posterity: {reason} Save the run again.") from error


def _find(name: str) -> type:
    subpackage, _, kind = name.partition(".")
    if subpackage in _subpackages():
        known = _exported(import_module(f"{_PACKAGE}.{subpackage}"))
        if kind in known:
            return known[kind]
    raise BadFolder(f"{unknown('type', name, _known_types())} Upgrade posterity, or save the run again.")


def _known_types() -> list[str]:
    """The types of the subpackages imported so far; an error message is no reason to import the rest."""
    return [
        f"{subpackage}.{kind}"
        for subpackage in _subpackages()
        if (module := sys.modules.get(f"{_PACKAGE}.{subpackage}"))
        for kind in _exported(module)
    ]


@cache
def _subpackages() -> frozenset[str]:
    package = sys.modules[_PACKAGE]
    return frozenset(module.name for module in pkgutil.iter_modules(package.__path__) if module.ispkg)


def _exported(module: ModuleType) -> dict[str, type]:
    """The dataclasses that a subpackage defines and exports under their own names."""
    return {
        name: kind
        for name, kind in vars(module).items()
        if isinstance(kind, type)
        and is_dataclass(kind)
        and kind.__name__ == name
        and f"{kind.__module__}.".startswith(f"{module.__name__}.")
    }
