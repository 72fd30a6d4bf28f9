"""Hyper-parameters of a prior that are one positive number, or one for each member."""

import math
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor

from posterity.errors import positive, shown


def check_members(name: str, value: object) -> None:
    """Raise a ValueError unless `value` is a positive number or a tensor (M,) of such numbers."""
    positive(name, value, "or a tensor (M,) with one for each member")
    if isinstance(value, Tensor) and value.dim() > 1:
        raise ValueError(
            f"{name} must be a number or (M,), one for each member. Got {shown(value)}. "
            "Use Layerwise for one prior a tensor."
        )


def count_members(value: float | Tensor) -> int | None:
    """M of a hyper-parameter (M,), else None."""
    return len(value) if isinstance(value, Tensor) and value.dim() else None


def of_member(value: float | Tensor, index: int) -> float | Tensor:
    """A hyper-parameter for one member."""
    return float(value[index]) if isinstance(value, Tensor) and value.dim() else value


def column(prior: Any, name: str, shape: tuple[int, ...], like: Tensor) -> float | Tensor:
    """Hyper-parameter `name` of a prior for theta of `shape` (..., P): a number, () or (M, 1), as `like` needs it."""
    value: float | Tensor = getattr(prior, name)
    if not isinstance(value, Tensor):
        return value
    if value.dim() and (len(shape) < 2 or shape[-2] != len(value)):
        raise ValueError(
            f"{type(prior).__name__}: {name} is for {len(value)} members, so theta must be (..., {len(value)}, P). "
            f"Got theta of shape {tuple(shape)}. Use prior.member(i) for one member."
        )
    cast = _cast(prior, value, like)
    return cast.unsqueeze(-1) if cast.dim() else cast


def row(value: float | Tensor) -> float | Tensor:
    """A `column` without its last axis: a number, () or (M,)."""
    return value.squeeze(-1) if isinstance(value, Tensor) and value.dim() else value


def log(value: float | Tensor) -> float | Tensor:
    """The logarithm of a hyper-parameter."""
    return value.log() if isinstance(value, Tensor) else math.log(value)


def content(value: object) -> object:
    """What equality and hash of a prior go by: its class and hyper-parameters, tensors by their numbers."""
    if is_dataclass(value) and not isinstance(value, type):
        return type(value), *(content(getattr(value, field.name)) for field in fields(value))
    if isinstance(value, (Tensor, int, float)):
        numbers = torch.as_tensor(value, dtype=torch.float64, device="cpu")
        return tuple(numbers.shape), *numbers.reshape(-1).tolist()
    return value


def _cast(prior: Any, value: Tensor, like: Tensor) -> Tensor:
    """The tensor with the dtype and device of `like`, copied there once."""
    if value.requires_grad or (value.dtype, value.device) == (like.dtype, like.device):
        return value.to(like)  # a hyper-parameter that is being learnt needs its graph anew each time
    casts: dict[tuple[torch.dtype, torch.device], Tensor] = prior.__dict__.setdefault("_casts", {})
    key = (like.dtype, like.device)
    if key not in casts:
        cast = value.to(like)
        if is_transient(cast):
            return cast
        casts[key] = cast
    return casts[key]


def is_transient(value: Tensor) -> bool:
    """Whether a tensor must not outlive the torch.func transform, trace or inference mode that it was made under."""
    return type(value) is not Tensor or value.is_inference() or torch._C._functorch.is_functorch_wrapped_tensor(value)


def in_double(value: float | Tensor) -> float | Tensor:
    """In float64, so that many multiplications do not add up their rounding."""
    return value.double() if isinstance(value, Tensor) else value
