"""What priors share that give every weight the same density up to a scale."""

from abc import abstractmethod
from dataclasses import fields, replace
from typing import Any, Self

import torch
from torch import Tensor

from posterity.numerics.random import Key
from posterity.priors.members import check_members, column, content, count_members, in_double, log, of_member, row
from posterity.priors.prior import Prior
from posterity.special.quadrature import normal_expectation


class Independent(Prior):
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

    def __eq__(self, other: object) -> bool:
        return content(self) == content(other) if type(self) is type(other) else NotImplemented

    def __hash__(self) -> int:
        return hash(content(self))

    def __getstate__(self) -> dict[str, Any]:
        return {field.name: getattr(self, field.name) for field in fields(self)}  # type: ignore[arg-type]  # no casts

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
