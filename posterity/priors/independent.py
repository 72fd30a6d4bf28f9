"""Priors of independent weights from one location-scale family, with a scale for all members or for each."""

import math
from abc import abstractmethod
from dataclasses import fields, is_dataclass, replace
from typing import Any, ClassVar, Self

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


def column(prior: Any, shape: tuple[int, ...], like: Tensor) -> float | Tensor:
    """Return the hyper-parameter `prior.per_member` for theta of `shape` (..., P): a number, () or (M, 1).

    A tensor has the dtype and device of `like`, and is copied there once.
    """
    value: float | Tensor = getattr(prior, prior.per_member)
    if not isinstance(value, Tensor):
        return value
    if value.dim() and (len(shape) < 2 or shape[-2] != len(value)):
        raise ValueError(
            f"{type(prior).__name__}: {prior.per_member} is for {len(value)} members, so theta must be "
            f"(..., {len(value)}, P). Got theta of shape {tuple(shape)}. Use prior.member(i) for one member."
        )
    casts: dict[tuple[torch.dtype, torch.device], Tensor] = prior.__dict__.setdefault("_casts", {})
    key = (like.dtype, like.device)
    cast = None if value.requires_grad else casts.get(key)  # one that is being learnt needs a new graph at every call
    if cast is None:
        cast = value.to(like)
        if not value.requires_grad and not is_transient(cast):
            casts[key] = cast
    return cast.unsqueeze(-1) if cast.dim() else cast


def row(value: float | Tensor) -> float | Tensor:
    """Return a `column` without its last axis: a number, () or (M,)."""
    return value.squeeze(-1) if isinstance(value, Tensor) and value.dim() else value


def log(value: float | Tensor) -> float | Tensor:
    """Return the logarithm of a hyper-parameter."""
    return value.log() if isinstance(value, Tensor) else math.log(value)


def content(value: object) -> object:
    """Return the class and hyper-parameters of a prior, tensors as tuples, for equality and hash."""
    if is_dataclass(value) and not isinstance(value, type):
        return type(value), *(content(getattr(value, field.name)) for field in fields(value))
    if isinstance(value, (Tensor, int, float)):
        numbers = torch.as_tensor(value, dtype=torch.float64, device="cpu")
        return tuple(numbers.shape), *numbers.reshape(-1).tolist()
    return value


def is_transient(value: Tensor) -> bool:
    """Return whether a tensor must not outlive the torch.func transform, trace or inference mode that made it."""
    wrapped = torch._C._functorch.is_functorch_wrapped_tensor  # pyright: ignore[reportAttributeAccessIssue]
    return type(value) is not Tensor or value.is_inference() or wrapped(value)


def in_double(value: float | Tensor) -> float | Tensor:
    """Convert a tensor to float64, so that rounding does not accumulate over many multiplications."""
    return value.double() if isinstance(value, Tensor) else value


class Parametric(Prior):
    """A frozen dataclass of hyper-parameters; two of a class are equal where their hyper-parameters are."""

    per_member: ClassVar[str] = "scale"
    """The hyper-parameter that may be (M,), with one value for each member."""

    @property
    def num_members(self) -> int | None:
        value = getattr(self, self.per_member)
        return len(value) if isinstance(value, Tensor) and value.dim() else None

    def member(self, index: int) -> Self:
        if self.num_members is None:
            return self
        return replace(self, **{self.per_member: float(getattr(self, self.per_member)[index])})  # type: ignore[type-var]

    def __eq__(self, other: object) -> bool:
        return content(self) == content(other) if type(self) is type(other) else NotImplemented

    def __hash__(self) -> int:
        return hash(content(self))

    def __getstate__(self) -> dict[str, Any]:
        return {field.name: getattr(self, field.name) for field in fields(self)}  # type: ignore[arg-type]  # not casts


class Independent(Parametric):
    """Independent weights w = mean + scale x, where the subclass states the standard density p0 of x.

    log p(theta) is the sum over weights of log p0((w - mean) / scale) - log scale. A subclass is a frozen dataclass
    with a field `scale`, a number or (M,) with one for each member; the rest follows from p0.
    """

    scale: float | Tensor
    mean: float = 0.0

    quadrature_points = 201
    """Nodes of the cross-entropy's trapezoid rule."""

    @abstractmethod
    def standard_log_prob(self, x: Tensor) -> Tensor:
        """Return log p0(x), entry by entry."""

    @abstractmethod
    def standard_precision(self, x: Tensor) -> Tensor:
        """Return minus the second derivative of log p0 at x, entry by entry."""

    @abstractmethod
    def standard_sample(self, shape: tuple[int, ...], key: Key, device: torch.device) -> Tensor:
        """Draw x in float64."""

    @property
    @abstractmethod
    def standard_variance(self) -> float:
        """Variance of x; inf or nan where there is none."""

    @property
    def standard_width(self) -> float:
        """Distance from zero over which log p0 varies, which the quadrature resolves; 0 for a singularity there."""
        return 1.0

    def standard_cross_entropy(self, mean: Tensor, scale: Tensor) -> Tensor:
        """Return -E log p0(x) for x ~ N(mean, scale^2), entry by entry."""
        return normal_expectation(
            lambda x: -self.standard_log_prob(x), mean, scale, self.quadrature_points, self.standard_width
        )

    def __post_init__(self) -> None:
        name = type(self).__name__
        check_members(f"{name}.scale", self.scale)
        if not isinstance(self.mean, (int, float)) or isinstance(self.mean, bool) or not math.isfinite(self.mean):
            raise ValueError(f"{name}.mean must be a finite number. Got {shown(self.mean)}.")

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
        scale = column(self, theta.shape, theta)
        return self.standard_log_prob((theta - self.mean) / scale).sum(-1) - theta.shape[-1] * log(row(scale))

    def sample(self, shape: tuple[int, ...], key: Key, like: Tensor) -> Tensor:
        draws = self.standard_sample(shape, key, like.device).to(like.dtype)
        return draws * column(self, shape, like) + self.mean

    def variance(self, like: Tensor) -> Tensor:
        return torch.zeros_like(like) + column(self, like.shape, like) ** 2 * self.standard_variance

    @property
    def factorises(self) -> bool:
        return True

    def cross_entropy(self, mean: Tensor, scale: Tensor) -> Tensor:
        own = column(self, mean.shape, mean)
        each = self.standard_cross_entropy((mean - self.mean) / own, scale / own)
        return each.sum(-1) + mean.shape[-1] * log(row(own))

    def precision(self, theta: Tensor) -> Tensor:
        scale = column(self, theta.shape, theta)
        return self.standard_precision((theta - self.mean) / scale) / scale**2
