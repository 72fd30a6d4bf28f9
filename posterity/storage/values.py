"""Values and states as JSON and tensors, and back."""

import math
import pkgutil
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from functools import cache
from importlib import import_module
from types import ModuleType, NoneType
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from posterity.errors import BadFolder, shown, unknown
from posterity.storage.part import JSON, Part
from posterity.storage.schema import check_fields, fits, hints, same_form

_PACKAGE = "posterity"

# Types that a release stored under another name. No other module knows old names.
_MOVED = {
    "optim": "Adam Constant Cosine Cycles Cyclic Optimizer SGD Schedule Steps Warmup",
    "precisions": "BlockDiagonal Dense Diagonal Factor Kronecker LowRank LowRankCovariance PerMember Precision",
}
_RENAMED = {f"numerics.{name}": f"{package}.{name}" for package, names in _MOVED.items() for name in names.split()}
_RENAMED["model.Pruned"] = "pruning.Pruned"

# Fields that a release stored under another name, by the present name of the type: {type: {old: new}}.
_RENAMED_FIELDS: dict[str, dict[str, str]] = {}


def encode(value: object, tensors: dict[str, Tensor], path: str = "") -> JSON:
    """Return the JSON of a value; put its tensors into `tensors` under their paths, without copies.

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
        name = path or "value"
        while name in tensors:  # a dict key may hold dots
            name += "~"
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
                f.name: encode(getattr(value, f.name), tensors, join(path, f.name))
                for f in fields(value)
                if f.init and ("stored" not in f.metadata or _is_set(getattr(value, f.name)))
            },
        }
    raise TypeError(
        f"{path or 'The value'} must be None, a bool, int, float, str, list, tuple, dict, tensor, dtype or one of "
        f"posterity's dataclasses to be stored. Got {type(value).__name__} {shown(value)}. Convert it to one of these."
    )


def _is_set(value: object) -> bool:
    return isinstance(value, Tensor) or bool(value)


def decode(json: JSON, tensors: Mapping[str, Tensor]) -> object:
    """Return the value that `encode` turned into `json` and `tensors`; raises BadFolder for anything else.

    Fields must have the types of their annotations, or be their defaults. Imports nothing but subpackages of
    posterity. A field that the JSON lacks takes its default: folders of older formats lack new ones, and
    `check_complete` looks at the others.

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


def present_names(json: JSON) -> JSON:
    """Return the JSON of a value with the names of types stored by older releases replaced by their present ones."""
    if isinstance(json, list):
        return [present_names(item) for item in json]
    if not isinstance(json, dict):
        return json
    return {
        key: _RENAMED.get(item, item) if key == "type" and isinstance(item, str) else present_names(item)
        for key, item in json.items()
    }


def references(json: JSON) -> set[str]:
    """Return the names of the tensors that the JSON of values refers to."""
    if isinstance(json, list):
        return set().union(*map(references, json))
    if not isinstance(json, dict):
        return set()
    name = json.get("tensor")
    return {name} if isinstance(name, str) and len(json) == 1 else set().union(*map(references, json.values()))


def check_complete(json: JSON) -> None:
    """Raise BadFolder where a dataclass in the JSON of values lacks a field."""
    if isinstance(json, list):
        for item in json:
            check_complete(item)
    if not isinstance(json, dict):
        return
    match json:
        case {"type": str(name), "fields": dict(stored)} if "." in name:
            for f in fields(_find(_RENAMED.get(name, name))):
                if f.init and f.name not in stored and "stored" not in f.metadata:
                    raise BadFolder(f"Stored {name} lacks its field {f.name!r}. Save the run again.")
    for item in json.values():
        check_complete(item)


def join(path: str, name: str) -> str:
    """Return the dotted path of the entry `name` under `path`."""
    return f"{path}.{name}" if path else name


def text_key(key: object, path: str) -> str:
    """Return the key of a dict at `path`, which must be a str."""
    if type(key) is not str:
        raise TypeError(
            f"{path or 'The value'}: the keys of a stored dict must be str. Got {shown(key)}. Use str keys."
        )
    return key


def pairs(items: list[JSON]) -> Iterator[tuple[str, JSON]]:
    """Yield the (key, value) pairs of a stored dict."""
    for item in items:
        match item:
            case [str(key), value]:
                yield key, value
            case _:
                raise _malformed(item)


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
            f"{kind.__qualname__}. Use one of posterity's."
        )
    if _exported(import_module(f"{_PACKAGE}.{subpackage}")).get(kind.__name__) is not kind:
        raise TypeError(
            f"{path or 'The value'}: {kind.__qualname__} must be exported by posterity.{subpackage} under its own name "
            "to be stored. Export it there."
        )
    return f"{subpackage}.{kind.__name__}"


def _build(name: str, values: dict[str, object]) -> object:
    name = _RENAMED.get(name, name)
    kind, renamed = _find(name), _RENAMED_FIELDS.get(name, {})
    values = {renamed.get(key, key): value for key, value in values.items()}
    accepted = {f.name for f in fields(kind) if f.init}
    for key in values:
        if key not in accepted:
            raise BadFolder(f"{unknown(f'field of {name}', key, accepted)} Upgrade posterity, or save the run again.")
    # A setting that is left out, as None or a word, may be of another type than those that are given.
    left_out = {f.name for f in fields(kind) if type(f.default) in (NoneType, str) and values.get(f.name) == f.default}
    check_fields(f"Stored {name}", {key: item for key, item in values.items() if key not in left_out}, hints(kind))
    try:
        made = kind(**values)
    except (TypeError, ValueError, ArithmeticError, AttributeError, LookupError, RuntimeError) as error:
        reason = " ".join(str(error).split())
        raise BadFolder(f"Stored {name} does not fit this posterity: {reason} Save the run again.") from error
    for key, value in values.items():
        if not same_form(value, getattr(made, key)):
            raise BadFolder(f"Stored {name}: {key!r} is not stored as {shown(value)}. Save the run again.")
    return made


def _find(name: str) -> type:
    subpackage, _, kind = name.partition(".")
    if subpackage in _subpackages():
        known = _exported(import_module(f"{_PACKAGE}.{subpackage}"))
        if kind in known:
            return known[kind]
    imported = [  # an error message is no reason to import the other subpackages
        f"{subpackage}.{kind}"
        for subpackage in _subpackages()
        if (module := sys.modules.get(f"{_PACKAGE}.{subpackage}"))
        for kind in _exported(module)
    ]
    raise BadFolder(f"{unknown('type', name, imported)} Upgrade posterity, or save the run again.")


@cache
def _subpackages() -> frozenset[str]:
    package = sys.modules[_PACKAGE]
    return frozenset(module.name for module in pkgutil.iter_modules(package.__path__) if module.ispkg)


def _exported(module: ModuleType) -> dict[str, type]:
    """Return the dataclasses that a subpackage defines and exports under their own names."""
    return {
        name: kind
        for name, kind in vars(module).items()
        if isinstance(kind, type)
        and is_dataclass(kind)
        and kind.__name__ == name
        and f"{kind.__module__}.".startswith(f"{module.__name__}.")
    }


State = TypeVar("State")


def flatten(state: object) -> Part:
    """Return a state as a part: tensors (not copied) under dotted paths, the structure and the rest in the config.

    Takes nested NamedTuples, tuples, lists and dicts with str keys of whatever `encode` takes. Any other
    leaf is a TypeError that names its path.

    >>> import torch
    >>> from typing import NamedTuple
    >>> class Moments(NamedTuple):
    ...     count: int
    ...     mean: torch.Tensor
    >>> part = flatten({"moments": Moments(3, torch.ones(2))})
    >>> part.tensors
    {'moments.mean': tensor([1., 1.])}
    >>> restore(part, {"moments": Moments(0, torch.zeros(2))})
    {'moments': Moments(count=3, mean=tensor([1., 1.]))}
    """
    tensors: dict[str, Tensor] = {}
    return Part({"state": _flatten(state, tensors, ""), "tensors": forms(tensors)}, tensors)


def restore(part: Part, template: State, device: torch.device | str = "cpu") -> State:
    """Return the state that `flatten` stored in `part`, bit for bit.

    `template`, a fresh state of the same method, gives the NamedTuple classes and the device of each tensor
    (`device` where it has none); numbers come from the part. A structure, dtype or shape that differs is a BadFolder
    that names the path. None in the template fits what its annotation allows, an empty container or dimension any of
    its kind. Fields with a default that the part lacks are as in the template.
    """
    if "state" not in part.config:
        raise BadFolder("This part is no stored state. Give a part that was saved as a checkpoint.")
    state = _restore(part.config["state"], part.tensors, template, "", torch.device(device))
    if not part.older and part.config.get("tensors") != forms(part.tensors):
        raise BadFolder("The tensors of the state do not have the shapes and dtypes that are stored with it.")
    return cast(State, state)


def forms(tensors: Mapping[str, Tensor]) -> JSON:
    """Return shapes and dtypes of tensors by name, which are stored with a state: a fresh one does not tell all."""
    return {name: [str(tensor.dtype), *tensor.shape] for name, tensor in tensors.items()}


def clone(state: State) -> State:
    """Return a copy of a nested state in which every tensor is a detached copy.

    >>> import torch
    >>> first = (torch.zeros(1), [2])
    >>> second = clone(first)
    >>> second[0].add_(1), first
    (tensor([1.]), (tensor([0.]), [2]))
    """
    return mapped(lambda leaf: leaf.detach().clone() if isinstance(leaf, Tensor) else leaf, state)


def mapped(function: Callable[[Any], Any], state: State) -> State:
    """Apply `function` to each leaf of the nested state: tensors, numbers, None and whatever else it holds.

    >>> mapped(lambda leaf: leaf + 1, (1, {"two": [2]}))
    (2, {'two': [3]})
    """
    return cast(State, _mapped(function, state))


def leaves(state: object) -> dict[str, Any]:
    """Return the leaves of the nested state by their dotted paths, in the order of `mapped`.

    >>> leaves((1, {"two": [2]}))
    {'0': 1, '1.two.0': 2}
    """
    gathered: dict[str, Any] = {}
    _gather(state, "", gathered)
    return gathered


def _gather(value: Any, path: str, gathered: dict[str, Any]) -> None:
    if type(value) is dict:
        items: Iterable[tuple[str, Any]] = value.items()
    elif _is_named(value):
        items = zip(value._fields, value, strict=True)
    elif type(value) in (tuple, list):
        items = ((str(index), item) for index, item in enumerate(value))
    else:
        gathered[path] = value
        return
    for name, item in items:
        _gather(item, join(path, name), gathered)


def _mapped(function: Callable[[Any], Any], value: Any) -> Any:
    if _is_named(value):
        return type(value)(*[_mapped(function, item) for item in value])
    if type(value) in (tuple, list):
        return type(value)(_mapped(function, item) for item in value)
    if type(value) is dict:
        return {key: _mapped(function, item) for key, item in value.items()}
    return function(value)


def _flatten(value: Any, tensors: dict[str, Tensor], path: str) -> JSON:
    if _is_named(value):
        items = zip(value._fields, value, strict=True)
        return {
            "named": type(value).__name__,
            "fields": [[name, _flatten(item, tensors, join(path, name))] for name, item in items],
        }
    if type(value) is list:
        return [_flatten(item, tensors, join(path, str(index))) for index, item in enumerate(value)]
    if type(value) is tuple:
        return {"tuple": [_flatten(item, tensors, join(path, str(index))) for index, item in enumerate(value)]}
    if type(value) is dict:
        return {"dict": [[text_key(k, path), _flatten(item, tensors, join(path, k))] for k, item in value.items()]}
    return encode(value, tensors, path)


def _restore(node: JSON, tensors: Mapping[str, Tensor], template: Any, path: str, device: torch.device) -> Any:
    match node:
        case {"named": str(name), "fields": list(items)}:
            stored = list(pairs(items))
            names = tuple(key for key, _ in stored)
            children = template._asdict() if _is_named(template) else {}
            later = getattr(template, "_field_defaults", {})  # fields that an earlier release did not have
            if type(template).__name__ != name or names != tuple(k for k in children if k in names or k not in later):
                raise _misfit(path, f"{name}({', '.join(names)})", template)
            values = children | {
                key: _restore(item, tensors, children[key], join(path, key), device) for key, item in stored
            }
            for key, wanted in hints(type(template)).items():  # type: ignore[arg-type]
                if type(values[key]) is not type(getattr(template, key)) and not fits(values[key], wanted):
                    raise _misfit(join(path, key), shown(values[key]), getattr(template, key))
            return type(template)(**values)
        case {"tuple": list(items)}:
            return tuple(_items(items, tensors, template, path, tuple, device))
        case list(items):
            return _items(items, tensors, template, path, list, device)
        case {"dict": list(items)}:
            entries = dict(pairs(items))
            if type(template) not in (dict, NoneType) or (template and template.keys() != entries.keys()):
                raise _misfit(path, f"a dict of {', '.join(entries) or 'nothing'}", template)
            children = template or dict.fromkeys(entries)
            return {
                key: _restore(item, tensors, children[key], join(path, key), device) for key, item in entries.items()
            }
    value = decode(node, tensors)
    if isinstance(value, Tensor) and template is None:
        return value.to(device)
    if isinstance(value, Tensor) and isinstance(template, Tensor):
        if value.dtype != template.dtype or not _same_shape(value, template):
            raise _misfit(path, f"a Tensor {tuple(value.shape)} {value.dtype}", template)
        return value.to(template.device)
    numbers = type(value) in (int, float) and type(template) in (int, float)
    if value is None or template is None or numbers or type(value) is type(template):
        return value
    raise _misfit(path, f"a {type(value).__name__}", template)


def _items(
    items: list[JSON], tensors: Mapping[str, Tensor], template: Any, path: str, kind: type, device: torch.device
) -> list[Any]:
    if type(template) not in (kind, NoneType) or (template and len(template) != len(items)):
        raise _misfit(path, f"a {kind.__name__} of {len(items)}", template)
    children = template or (None,) * len(items)
    return [
        _restore(item, tensors, child, join(path, str(index)), device)
        for index, (item, child) in enumerate(zip(items, children, strict=True))
    ]


def _same_shape(value: Tensor, template: Tensor) -> bool:
    sizes = zip(value.shape, template.shape, strict=False)
    return value.dim() == template.dim() and all(own == wanted or not wanted for own, wanted in sizes)


def _is_named(value: object) -> bool:
    return isinstance(value, tuple) and hasattr(value, "_fields")


def _misfit(path: str, got: str, template: Any) -> BadFolder:
    if _is_named(template):
        wanted = f"{type(template).__name__}({', '.join(template._fields)})"
    elif type(template) is dict:
        wanted = f"a dict of {', '.join(template) or 'nothing'}"
    elif type(template) in (tuple, list):
        wanted = f"a {type(template).__name__} of {len(template)}"
    elif isinstance(template, Tensor):
        wanted = f"a Tensor {tuple(template.shape)} {template.dtype}"
    else:
        wanted = f"a {type(template).__name__}"
    return BadFolder(
        f"The stored state does not fit at '{path or 'state'}': the method wants {wanted}. Got {got}. "
        "Resume with the method and options that wrote it."
    )
