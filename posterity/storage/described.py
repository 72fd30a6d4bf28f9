"""Values of the user's own classes: a description is stored, and compared with the object passed to `load`."""

import logging
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor

from posterity.errors import BadFolder, shown
from posterity.storage.part import JSON
from posterity.storage.values import decode, encode, join

logger = logging.getLogger("posterity")


def described(value: object, tensors: dict[str, Tensor], path: str = "") -> JSON:
    """Return the JSON of a value as `encode` does; a value that it refuses is described.

    The description of an object has the name of its class and its fields, public attributes where it is no dataclass.
    Functions are named, and anything else that has no JSON is noted by its class.

    >>> class Mine:
    ...     def __init__(self):
    ...         self.scale, self.table = 2.0, {3}
    >>> described(Mine(), {})
    {'own': 'Mine', 'values': {'scale': 2.0, 'table': {'other': 'set'}}}
    """
    mine: dict[str, Tensor] = {}
    try:
        json = encode(value, mine, path)
    except TypeError:
        return _description(value, tensors, path)
    tensors.update(mine)
    return json


def _description(value: object, tensors: dict[str, Tensor], path: str) -> JSON:
    if isinstance(value, (list, tuple)):
        return {"items": [described(item, tensors, join(path, str(index))) for index, item in enumerate(value)]}
    if isinstance(value, Mapping):
        pairs = [(str(key), item) for key, item in value.items()]
        return {"entries": [[key, described(item, tensors, join(path, key))] for key, item in pairs]}
    if callable(value) and hasattr(value, "__qualname__"):
        return {"function": value.__qualname__}
    if is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in fields(value) if field.init]
    elif type(value).__module__ != "builtins" and hasattr(value, "__dict__") and not isinstance(value, type):
        names = sorted(name for name in vars(value) if not name.startswith("_"))
    else:
        return {"other": type(value).__name__}
    values = {name: described(getattr(value, name), tensors, join(path, name)) for name in names}
    return {"own": type(value).__name__, "values": values}


def is_described(json: object) -> bool:
    """Return whether this is the description of an object, which must be passed again for loading."""
    return isinstance(json, dict) and "own" in json


def recalled(
    name: str, config: Mapping[str, Any], tensors: Mapping[str, Tensor], given: Mapping[str, object]
) -> object:
    """Return the stored value `name` of a joint, or the object given for it, if that is what was stored.

    Raises BadFolder where an object must be given, or differs. The log names what cannot be compared.
    """
    stored, value = config[name], given.get(name)
    if value is None and not is_described(stored):
        return decode(stored, tensors)
    if value is None:
        raise BadFolder(
            f"Its {name} is a {stored['own']}, of which only the fields are stored. Pass one with the same fields: "
            f"load(path, network, {name}={stored['own']}(...))."
        )
    own: dict[str, Tensor] = {}
    now = described(value, own, f"joint.{name}")
    for path, before, after in _differences(stored, now, name):
        raise BadFolder(
            f"The {name} given is not the stored one: {path} was {_words(before, tensors)} and here is "
            f"{_words(after, own)}. Pass the {name} that the folder was fitted with."
        )
    for key, tensor in own.items():
        if key not in tensors or not torch.equal(tensors[key].cpu(), tensor.cpu()):
            words = "absent" if key not in tensors else shown(tensors[key])
            where = key.removeprefix("joint.")
            raise BadFolder(f"The {name} given is not the stored one: {where} was {words} and here is {shown(tensor)}.")
    unknown = sorted(_not_compared(stored, name))
    if unknown:
        logger.warning("load: %s cannot be compared with what the folder was fitted with.", ", ".join(unknown))
    return value


def _differences(before: JSON, after: JSON, path: str) -> Iterator[tuple[str, JSON, JSON]]:
    """Yield the entries in which two JSON values differ: path, and both values."""
    if isinstance(before, dict) and isinstance(after, dict) and before.keys() == after.keys():
        for key in sorted(before, key=lambda key: key not in ("own", "type")):  # another class comes before its fields
            inner = path if key in ("values", "fields", "dict", "entries", "items", "tuple") else f"{path}.{key}"
            yield from _differences(before[key], after[key], path if key in ("own", "type") else inner)
    elif isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        for index, pair in enumerate(zip(before, after, strict=True)):
            yield from _differences(*pair, f"{path}[{index}]")
    elif before != after:
        yield path, before, after


def _words(json: JSON, tensors: Mapping[str, Tensor]) -> str:
    """Write JSON for an error message: a tensor by its numbers, an object by its class."""
    if isinstance(json, dict) and isinstance(name := json.get("tensor"), str) and name in tensors:
        return shown(tensors[name])
    return str(json["own"]) if isinstance(json, dict) and "own" in json else shown(json)


def _not_compared(json: JSON, path: str) -> Iterator[str]:
    """Yield the paths of functions and of objects without JSON."""
    if isinstance(json, list):
        for index, item in enumerate(json):
            yield from _not_compared(item, f"{path}[{index}]")
    elif isinstance(json, dict):
        if json.keys() in ({"function"}, {"other"}):
            yield path
        for key, item in json.items():
            inner = path if key in ("values", "fields", "dict", "entries", "items", "tuple") else f"{path}.{key}"
            yield from _not_compared(item, inner)
