"""Checks of stored values: against type annotations, of tensors, and with errors that name the folder."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import torch
from torch import Tensor

from posterity.errors import BadFolder, shown

AGAIN = "Restore the folder from a copy, or save the run again to a new folder."


@contextmanager
def reading(where: str) -> Iterator[None]:
    """Turn each error inside the context into a BadFolder that names `where`; a BadFolder gets its name."""
    try:
        yield
    except BadFolder as error:
        if where not in str(error):
            error.args = (f"{where}: {error}",)
        raise
    except Exception as error:
        reason = f"it lacks {error}" if isinstance(error, KeyError) else " ".join(str(error).split())
        raise BadFolder(
            f"{where} is not what posterity stores: {reason or type(error).__name__}. {AGAIN}".replace("..", ".")
        ) from error


@cache
def hints(kind: type[Any]) -> dict[str, Any]:
    """Return the annotations of a dataclass or NamedTuple, resolved."""
    return get_type_hints(kind)


def fits(value: object, hint: Any) -> bool:
    """Return whether a value is of the annotated type; a bool is no number, an int is a float.

    >>> fits((1, 2.5), tuple[float, ...]), fits(None, int | None), fits("1", float), fits(True, int)
    (True, True, False, False)
    """
    if hint is Any:
        return True
    if hint in (None, NoneType):
        return value is None
    if hint is float:
        return type(value) in (int, float)
    if hint is int:
        return type(value) is int
    origin, given = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        return any(fits(value, option) for option in given)
    if origin is Literal:
        return any(type(value) is type(option) and value == option for option in given)
    if origin is tuple:
        if not isinstance(value, tuple) or (given[-1:] != (Ellipsis,) and len(value) != len(given)):
            return False
        return all(fits(item, given[0] if given[-1] is Ellipsis else given[slot]) for slot, item in enumerate(value))
    if origin in (list, Sequence):
        kinds = list if origin is list else (list, tuple)
        return isinstance(value, kinds) and all(fits(item, given[0]) for item in value)
    if origin in (dict, Mapping):
        return isinstance(value, dict) and all(fits(k, given[0]) and fits(v, given[1]) for k, v in value.items())
    return isinstance(value, hint) if isinstance(hint, type) else True


def check_fields(what: str, values: Mapping[str, object], wanted: Mapping[str, Any]) -> None:
    """Raise BadFolder unless each of these values is of the type that is wanted for its name."""
    for name, value in values.items():
        if name in wanted and not fits(value, wanted[name]):
            kind = getattr(wanted[name], "__name__", None) if get_args(wanted[name]) == () else None
            raise BadFolder(f"{what}: {name!r} must be of type {kind or wanted[name]}. Got {shown(value)}. {AGAIN}")


def check_names(what: str, got: Sequence[str], wanted: Sequence[str]) -> None:
    """Raise BadFolder unless the names are the wanted ones, in any order."""
    for name in wanted:
        if name not in got:
            raise BadFolder(f"{what} lacks {name!r}. {AGAIN}")
    for name in got:
        if name not in wanted:
            raise BadFolder(f"{what} has {name!r}, which does not belong there. {AGAIN}")


def check_tensor(
    what: str, tensor: object, shape: Sequence[int] | None, dtype: torch.dtype, like: Tensor | None = None
) -> None:
    """Raise BadFolder unless this is a finite tensor of the shape (None: any) and dtype.

    `like`, of the shape of the last dimensions, says which entries need not be finite: those that are not in it.
    """
    if not isinstance(tensor, Tensor):
        raise BadFolder(f"{what} must be a tensor. Got {shown(tensor)}. {AGAIN}")
    if tensor.dtype != dtype or (shape is not None and tuple(tensor.shape) != tuple(shape)):
        wanted = "" if shape is None else f"{tuple(shape)} "
        raise BadFolder(f"{what} must be {wanted}{dtype}. Got {tuple(tensor.shape)} {tensor.dtype}. {AGAIN}")
    if tensor.is_floating_point():
        bad = ~tensor.isfinite()
        if like is not None:
            bad = bad & like.to(tensor.device).isfinite()
        if bool(bad.any()):
            raise BadFolder(f"{what} has entries that are not finite. {AGAIN}")


def same_form(stored: object, made: object) -> bool:
    """Return whether a constructor left a stored value as it was, up to its numbers.

    What a constructor converts was never stored so: `encode` reads the fields of a value that is made already.
    """
    if isinstance(stored, Tensor):
        return isinstance(made, Tensor) and stored.dtype == made.dtype and stored.shape == made.shape
    if isinstance(stored, (tuple, list)) and type(stored) is type(made):
        assert isinstance(made, (tuple, list))
        return len(stored) == len(made) and all(map(same_form, stored, made))
    return type(stored) is type(made)
