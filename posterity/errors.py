"""Errors that people may expect, and the checks that raise them: what was wanted, what came, what to do."""

import difflib
import math
import numbers
import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from typing_extensions import TypeIs


class PosterityError(Exception):
    """Base of the expected errors; the command line turns each into one line and an exit code."""

    exit_code = 1


class BadData(PosterityError, ValueError):
    """The data cannot be used as they are."""

    exit_code = 3


class BadFolder(PosterityError, ValueError):
    """A run folder is missing, incomplete, altered, or belongs to something else."""

    exit_code = 4


class Diverged(PosterityError, ArithmeticError):
    """A run produced a number that is not finite; `step` and `tensor` say where.

    `stored` is the step after which the last good state was stored, None where none was. `posterior` is that of the
    states kept until then (the draws of a sampler), None where there are none.
    """

    exit_code = 5

    def __init__(self, message: str, *, step: int, tensor: str) -> None:
        super().__init__(message)
        self.step = step
        self.tensor = tensor
        self.stored: int | None = None
        self.posterior: Any = None


class BoundFell(PosterityError, ArithmeticError):
    """A step that cannot lower a bound has lowered it, so that it is not the step it should be."""

    exit_code = 5


class NotPositiveDefinite(PosterityError, ArithmeticError):
    """A matrix that must be positive definite is not."""


def positive(name: str, value: object, alternative: str = "") -> None:
    """Raise a ValueError unless `value` is a positive, finite number (or a tensor of such numbers)."""
    if _is_tensor(value):
        good = value.numel() > 0 and bool((value.isfinite() & (value > 0)).all())
    elif isinstance(value, bool):
        good = False
    else:
        good = isinstance(value, numbers.Real) and math.isfinite(value) and float(value) > 0
    if not good:
        wanted = f"a positive number{' ' + alternative if alternative else ''}"
        raise ValueError(f"{name} must be {wanted}. Got {shown(value)}.")


def positive_whole(name: str, value: object, alternative: str = "") -> None:
    """Raise a ValueError unless `value` is a positive whole number."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral) or int(value) < 1:
        wanted = f"a positive whole number{' ' + alternative if alternative else ''}"
        raise ValueError(f"{name} must be {wanted}. Got {shown(value)}.")


def whole(name: str, value: object) -> None:
    """Raise a ValueError unless `value` is a whole number of at least 0."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral) or int(value) < 0:
        raise ValueError(f"{name} must be a whole number of at least 0. Got {shown(value)}.")


def fraction(name: str, value: object) -> None:
    """Raise a ValueError unless `value` is a number of at least 0 and below 1."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real) or not 0.0 <= float(value) < 1.0:
        raise ValueError(f"{name} must be at least 0 and below 1. Got {shown(value)}.")


def check_batch_size(name: str, size: int | None) -> None:
    """Refuse a batch size that is not None or a positive whole number."""
    if size is not None and (not isinstance(size, int) or isinstance(size, bool) or size < 1):
        raise ValueError(f"{name} must be a positive whole number of rows, or None for all of them. Got {shown(size)}.")


def of_kinds(owner: object, **kinds: type) -> None:
    """Raise a TypeError unless each of these settings of `owner` is of the kind named for it."""
    for name, kind in kinds.items():
        value = getattr(owner, name)
        if not isinstance(value, kind):
            hint = f" Call it: {value.__name__}()." if isinstance(value, type) else ""
            raise TypeError(f"{type(owner).__name__}.{name} must be of kind {kind.__name__}. Got {shown(value)}.{hint}")


def shown(value: object) -> str:
    """A value as an error message shows it: short, on one line."""
    if _is_tensor(value):
        text = f"tensor{tuple(value.shape)}"
        return text if value.numel() > 6 else f"{text} {value.tolist()}"
    text = " ".join(repr(value).split())
    return text if len(text) <= 80 else text[:77] + "..."


def unknown(kind: str, name: str, known: Iterable[str]) -> str:
    """The message for an unknown name, with the nearest known one."""
    names = sorted(known)
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    hint = f"Did you mean '{near[0]}'?" if near else f"Known: {', '.join(names)}."
    return f"Unknown {kind} '{name}'. {hint}"


def _is_tensor(value: object) -> "TypeIs[torch.Tensor]":
    """Whether it is a tensor; torch is not imported for it, as the command line checks its options without."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)
