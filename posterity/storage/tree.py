"""Nested states of methods as flat tensors, and back."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from posterity.errors import BadFolder
from posterity.storage.part import JSON, Part
from posterity.storage.values import decode, encode, join, pairs, text_key

State = TypeVar("State")


def flatten(state: object) -> Part:
    """A state as a part: tensors (not copied) under dotted paths, all else and the structure in the config.

    Takes NamedTuples, tuples, lists and dicts with str keys, nested, of whatever `encode` takes. Any other
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
    return Part({"state": _flatten(state, tensors, "")}, tensors)


def restore(part: Part, template: State, device: torch.device | str = "cpu") -> State:
    """The state that `flatten` made `part` of, to the bit.

    `template`, a fresh state of the same method, gives the NamedTuple classes and the device of each tensor
    (`device` where it has none); dtypes, shapes and numbers come from the part. A structure that differs is a
    BadFolder that names the path. None and empty containers in the template fit anything of their kind, for
    what a method only makes or collects later.
    """
    if "state" not in part.config:
        raise BadFolder("This part is no stored state. Give a part that was saved as a checkpoint.")
    return cast(State, _restore(part.config["state"], part.tensors, template, "", torch.device(device)))


def clone(state: State) -> State:
    """A copy of a nested state in which every tensor is a detached copy.

    >>> import torch
    >>> first = (torch.zeros(1), [2])
    >>> second = clone(first)
    >>> second[0].add_(1), first
    (tensor([1.]), (tensor([0.]), [2]))
    """
    return mapped(lambda leaf: leaf.detach().clone() if isinstance(leaf, Tensor) else leaf, state)


def mapped(function: Callable[[Any], Any], state: State) -> State:
    """The nested state with `function` of each leaf in its place: tensors, numbers, None and whatever else it holds.

    >>> mapped(lambda leaf: leaf + 1, (1, {"two": [2]}))
    (2, {'two': [3]})
    """
    return cast(State, _mapped(function, state))


def leaves(state: object) -> dict[str, Any]:
    """Each leaf of the nested state under its dotted path, in the order of `mapped`.

    >>> leaves((1, {"two": [2]}))
    {'0': 1, '1.two.0': 2}
    """
    found: dict[str, Any] = {}
    _gather(state, "", found)
    return found


def _gather(value: Any, path: str, found: dict[str, Any]) -> None:
    if type(value) is dict:
        items: Iterable[tuple[str, Any]] = value.items()
    elif _is_named(value):
        items = zip(value._fields, value, strict=True)
    elif type(value) in (tuple, list):
        items = ((str(index), item) for index, item in enumerate(value))
    else:
        found[path] = value
        return
    for name, item in items:
        _gather(item, join(path, name), found)


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
            stored = pairs(items)
            names = tuple(key for key, _ in stored)
            if not _is_named(template) or type(template).__name__ != name or template._fields != names:
                raise _misfit(path, f"{name}({', '.join(names)})", template)
            return type(template)(
                *(
                    _restore(item, tensors, child, join(path, key), device)
                    for (key, item), child in zip(stored, template, strict=True)
                )
            )
        case {"tuple": list(items)}:
            return tuple(_items(items, tensors, template, path, tuple, device))
        case list(items):
            return _items(items, tensors, template, path, list, device)
        case {"dict": list(items)}:
            entries = dict(pairs(items))
            if not _is_kind(template, dict) or (template and template.keys() != entries.keys()):
                raise _misfit(path, f"a dict of {', '.join(entries) or 'nothing'}", template)
            children = template or dict.fromkeys(entries)
            return {
                key: _restore(item, tensors, children[key], join(path, key), device) for key, item in entries.items()
            }
    return _leaf(decode(node, tensors), template, path, device)


def _items(
    items: list[JSON], tensors: Mapping[str, Tensor], template: Any, path: str, kind: type, device: torch.device
) -> list[Any]:
    if not _is_kind(template, kind) or (template and len(template) != len(items)):
        raise _misfit(path, f"a {kind.__name__} of {len(items)}", template)
    children = template or (None,) * len(items)
    return [
        _restore(item, tensors, child, join(path, str(index)), device)
        for index, (item, child) in enumerate(zip(items, children, strict=True))
    ]


def _leaf(value: object, template: object, path: str, device: torch.device) -> object:
    if isinstance(value, Tensor) and (template is None or isinstance(template, Tensor)):
        return value.to(device if template is None else template.device)
    numbers = type(value) in (int, float) and type(template) in (int, float)
    if value is None or template is None or numbers or type(value) is type(template):
        return value
    raise _misfit(path, f"a {type(value).__name__}", template)


def _is_kind(template: object, kind: type) -> bool:
    return template is None or type(template) is kind


def _is_named(value: object) -> bool:
    return isinstance(value, tuple) and hasattr(value, "_fields")


def _misfit(path: str, came: str, template: Any) -> BadFolder:
    if _is_named(template):
        wanted = f"{type(template).__name__}({', '.join(template._fields)})"
    elif type(template) is dict:
        wanted = f"a dict of {', '.join(template) or 'nothing'}"
    elif type(template) in (tuple, list):
        wanted = f"a {type(template).__name__} of {len(template)}"
    else:
        wanted = f"a {type(template).__name__}"
    return BadFolder(
        f"The stored state does not fit at '{path or 'state'}': the method wants {wanted}. Got {came}. "
        "Resume with the method and options that wrote it."
    )
