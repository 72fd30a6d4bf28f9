"""A Gaussian prior with a structured precision matrix, such as the posterior of earlier data."""

import json
import math
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from posterity.errors import shown
from posterity.numerics.brief import brief
from posterity.numerics.layout import Layout
from posterity.numerics.random import Key
from posterity.precisions.block import PerMember
from posterity.precisions.precision import Precision
from posterity.priors.prior import Prior
from posterity.storage import encode

_LOG_TWO_PI = math.log(2.0 * math.pi)


@dataclass(frozen=True, eq=False, repr=False)
class Correlated(Prior):
    """Jointly normal weights with a precision matrix, such as the posterior of earlier data.

    **Math**: w ~ N(mean, Lambda^-1), log p = -(w - mean)^T Lambda (w - mean) / 2 + log det(Lambda) / 2
    - P log(2 pi) / 2. `mean` is (P,), or (M, P) with a `PerMember` precision; `matrix` is Lambda in any structure.

    **Limit**: exact.

    **Cost**: one product with Lambda in float64 for value and gradient: P^2 for a `Dense` one, O + I for each weight
    of an O x I layer with Kronecker factors.

    **References**: Ritter et al. (2018), Online structured Laplace approximations for overcoming catastrophic
    forgetting; Kirkpatrick et al. (2017), for the diagonal.

    **Example**:

    >>> from posterity.precisions import Dense
    >>> prior = Correlated(torch.zeros(2), Dense(torch.tensor([[2.0, 1.0], [1.0, 2.0]])))
    >>> prior.value_and_grad(torch.ones(2))[1]
    tensor([-3., -3.])
    """

    mean: Tensor
    matrix: Precision

    def __post_init__(self) -> None:
        if not isinstance(self.matrix, Precision):
            raise TypeError(
                f"Correlated.matrix must be a Precision, such as precisions.Dense(matrix). Got {shown(self.matrix)}."
            )
        count = len(self.matrix.parts) if isinstance(self.matrix, PerMember) else None
        wanted = (self.matrix.size,) if count is None else (count, self.matrix.size)
        good = isinstance(self.mean, Tensor) and tuple(self.mean.shape) == wanted
        if not good or not bool(torch.isfinite(self.mean).all()):
            raise ValueError(f"Correlated.mean must be finite, of shape {wanted}. Got {shown(self.mean)}.")
        # Compute the cached values now: made under a transform or in inference mode they could not be used again.
        _ = self._log_normaliser, self._variance, self.matrix.matvec(self._mean)

    def _content(self) -> tuple[object, ...]:
        tensors: dict[str, Tensor] = {}
        stored = json.dumps([encode(self.matrix, tensors, "matrix"), encode(self.mean, tensors, "mean")])
        return stored, tuple((name, tuple(t.shape), *t.flatten().tolist()) for name, t in tensors.items())

    def __eq__(self, other: object) -> bool:
        return self._content() == other._content() if isinstance(other, Correlated) else NotImplemented

    def __hash__(self) -> int:
        return hash(self._content())

    def __repr__(self) -> str:
        return brief(self)

    def bound(self, layout: Layout) -> "Correlated":
        if layout.size != self.matrix.size:
            raise ValueError(
                f"Correlated: the prior is for {self.matrix.size} weights. Got tensors of {layout.size}. "
                "Use the network that the earlier posterior is of."
            )
        return self

    @property
    def num_members(self) -> int | None:
        return self.mean.shape[0] if self.mean.dim() > 1 else None

    def member(self, index: int) -> "Correlated":
        return self if self.num_members is None else Correlated(self.mean[index], self.matrix.member(index))

    @cached_property
    def _mean(self) -> Tensor:
        return self.mean.to(torch.float64)

    @cached_property
    def _log_normaliser(self) -> Tensor:
        return 0.5 * (self.matrix.logdet.detach() - self.matrix.size * _LOG_TWO_PI)

    @cached_property
    def _variance(self) -> Tensor:
        return self.matrix.variance()

    def log_prob(self, theta: Tensor) -> Tensor:
        away = self._away(theta)
        return (self._log_normaliser - 0.5 * (away * self._times(away)).sum(-1)).to(theta.dtype)

    def value_and_grad(self, theta: Tensor) -> tuple[Tensor, Tensor]:
        """Return log p(theta) and -Lambda (theta - mean), as new tensors and without a graph."""
        with torch.no_grad():
            away = self._away(theta)
            slope = self._times(away)
            value = self._log_normaliser - 0.5 * (away * slope).sum(-1)
            return value.to(theta.dtype), slope.neg_().to(theta.dtype)

    def sample(self, shape: tuple[int, ...], key: Key, like: Tensor) -> Tensor:
        self._check(shape)
        noise = key.normal(shape, torch.float64, like.device)
        if self.num_members is None:
            drawn = self.matrix.colour(noise.reshape(-1, shape[-1])).reshape(shape)
        else:
            rows = noise.reshape(-1, *shape[-2:]).transpose(0, 1)  # (M, S, P)
            drawn = self.matrix.colour(rows).transpose(0, 1).reshape(shape)
        return (self._mean + drawn).to(like)

    def variance(self, like: Tensor) -> Tensor:
        self._check(like.shape)
        return torch.zeros_like(like) + self._variance.to(like)

    def precision(self, theta: Tensor) -> Tensor:
        self._check(theta.shape)
        return torch.zeros_like(theta) + self.matrix.diagonal().to(theta)

    def cross_entropy(self, mean: Tensor, scale: Tensor) -> Tensor:
        """Return -log p(mean) + sum of Lambda_ii scale_i^2 / 2."""
        spread = 0.5 * (self.matrix.diagonal() * scale.to(torch.float64).square()).sum(-1)
        return spread.to(mean.dtype) - self.log_prob(mean)

    def _away(self, theta: Tensor) -> Tensor:
        self._check(theta.shape)
        return theta.to(torch.float64) - self._mean

    def _times(self, away: Tensor) -> Tensor:
        """Multiply vectors (..., P) by Lambda; (..., M, P) where members differ."""
        if self.num_members is None or away.dim() == 2:
            return self.matrix.matvec(away)
        return torch.stack([self.matrix.matvec(v) for v in away.flatten(0, -3)]).reshape(away.shape)

    def _check(self, shape: tuple[int, ...]) -> None:
        members = self.num_members
        if members is not None and (len(shape) < 2 or shape[-2] != members):
            raise ValueError(
                f"Correlated: the prior is for {members} members, so theta must be (..., {members}, P). "
                f"Got theta of shape {tuple(shape)}. Use prior.member(i) for one member."
            )
        if shape[-1] != self.matrix.size:
            raise ValueError(
                f"Correlated: the prior is for {self.matrix.size} weights. Got theta of shape {tuple(shape)}."
            )
