"""Priors that give every weight the same density up to a scale, and scales that are one number or one a member."""

import math
from abc import abstractmethod
from dataclasses import fields, is_dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor

from posterity.errors import positive, shown
from posterity.numerics.random import Key
from posterity.priors.prior import Prior
from posterity.special.quadrature import normal_expectation


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


class Parametric(Prior):
    """A frozen dataclass of hyper-parameters, equal to another of its class where their numbers are."""

    def __eq__(self, other: object) -> bool:
        return content(self) == content(other) if type(self) is type(other) else NotImplemented

    def __hash__(self) -> int:
        return hash(content(self))

    def __getstate__(self) -> dict[str, Any]:
        return {field.name: getattr(self, field.name) for field in fields(self)}  # type: ignore[arg-type]  # casts stay with their device


class Independent(Parametric):
    """Independent weights w = mean + scale x, where x has a standard density p0 that the subclass states.

    log p(theta) is the sum over weights of log p0((w - mean) / scale) - log scale. A subclass is a frozen dataclass
    with a field `scale`, a number or (M,) with one for each member; all else follows from p0.
    """

    scale: float | Tensor
    mean: float = 0.0

    quadrature_points = 201
    """Nodes of the cross-entropy's trapezoid rule."""

    @abstractmethod
    def standard_log_prob(self, x: Tensor) -> Tensor:
        """log p0(x), entry by entry."""

    @abstractmethod
    def standard_precision(self, x: Tensor) -> Tensor:
        """Minus the second derivative of log p0 at x, entry by entry."""

    @abstractmethod
    def standard_sample(self, shape: tuple[int, ...], key: Key, device: torch.device) -> Tensor:
        """Draws of x in float64."""

    @property
    @abstractmethod
    def standard_variance(self) -> float:
        """Variance of x; inf or nan where there is none."""

    @property
    @abstractmethod
    def standard_width(self) -> float:
        """The distance from zero over which log p0 varies; 0 for a singularity there."""

    def standard_cross_entropy(self, mean: Tensor, scale: Tensor) -> Tensor:
        """-E log p0(x) for x ~ N(mean, scale^2), entry by entry."""
        return normal_expectation(
            lambda x: -self.standard_log_prob(x), mean, scale, self.quadrature_points, self.standard_width
        )

    def __post_init__(self) -> None:
        check_members(f"{type(self).__name__}.scale", self.scale)

    @property
    def num_members(self) -> int | None:
        return count_members(self.scale)

    def member(self, index: int) -> Self:
        return replace(self, scale=of_member(self.scale, index))  # type: ignore[type-var]

    def rescaled(self, factor: Any) -> Self:
        return replace(self, scale=in_double(self.scale) * factor)  # type: ignore[type-var]

    @property
    def log_scale(self) -> Tensor:
        return torch.as_tensor(self.scale, dtype=torch.float64).log()

    @property
    def description(self) -> str:
        if self.formula is None:
            return super().description
        return f"{type(self).__name__}, scale {float(self.scale):.6g}"

    def log_prob(self, theta: Tensor) -> Tensor:
        scale = column(self, "scale", theta.shape, theta)
        return self.standard_log_prob((theta - self.mean) / scale).sum(-1) - theta.shape[-1] * log(row(scale))

    def sample(self, shape: tuple[int, ...], key: Key, like: Tensor) -> Tensor:
        draws = self.standard_sample(shape, key, like.device).to(like.dtype)
        return draws * column(self, "scale", shape, like) + self.mean

    def variance(self, like: Tensor) -> Tensor:
        return torch.zeros_like(like) + column(self, "scale", like.shape, like) ** 2 * self.standard_variance

    @property
    def factorises(self) -> bool:
        return True

    def cross_entropy(self, mean: Tensor, scale: Tensor) -> Tensor:
        """-E log p(w) for independent w ~ N(mean, scale^2), summed over weights: (..., P) -> (...)."""
        own = column(self, "scale", mean.shape, mean)
        each = self.standard_cross_entropy((mean - self.mean) / own, scale / own)
        return each.sum(-1) + mean.shape[-1] * log(row(own))

    def precision(self, theta: Tensor) -> Tensor:
        """Minus the second derivative of log p for each weight, which may be negative: (..., P) -> (..., P)."""
        scale = column(self, "scale", theta.shape, theta)
        return self.standard_precision((theta - self.mean) / scale) / scale**2
