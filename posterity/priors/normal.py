"""The normal prior over independent weights, the Bayesian reading of weight decay."""

import math
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from posterity.errors import positive, shown
from posterity.numerics.brief import repr_of_set
from posterity.numerics.layout import Layout, Slice
from posterity.numerics.random import Key
from posterity.options import LEFT_OUT
from posterity.priors.independent import Parametric, in_double, is_transient
from posterity.priors.prior import over

_HALF_LOG_TWO_PI = 0.5 * math.log(2.0 * math.pi)


class _Constants(NamedTuple):
    """The hyper-parameters in one dtype and on one device; tensors broadcast against theta (..., P)."""

    mean: float | Tensor  # number, (P,) or (M, P)
    scale: float | Tensor  # number, (M, 1), (P,) or (M, P)
    inverse_scale: float | Tensor
    average_log_scale: float | Tensor  # over the weights: number, () or (M,)


@dataclass(frozen=True, eq=False)
class Normal(Parametric):
    """Independent normal weights.

    **Math**: w ~ N(mean, scale^2), log p = sum over weights of -(w - mean)^2 / (2 scale^2) - log scale - log(2 pi) / 2.
    `scale` is a number, (M,) with one for each member, or (1, P) or (M, P) with one for each weight. `mean` is a
    number, (P,) or (M, P). A scale that is given is known, and no method moves it by itself. `Normal()` leaves it to
    the method to choose one for each layer (docs/scales.md); until then it is 1. `chosen` says how a scale came about:
    "" for given, "left out" for one that a method is to choose, and after a fit how it chose, such as "evidence".

    **Limit**: exact. The mode under it is L2-penalised maximum likelihood with penalty |w|^2 / (2 scale^2).

    **Cost**: one pass over theta for the value, one for the gradient.

    **References**: MacKay (1992), A practical Bayesian framework for backpropagation networks.

    **Example**:

    >>> prior = Normal(scale=2.0)
    >>> prior.log_prob(torch.zeros(1))
    tensor(-1.6121)
    >>> value, grad = prior.value_and_grad(torch.tensor([4.0, 0.0]))
    >>> grad
    tensor([-1., -0.])
    >>> Normal().chosen, Normal(scale=1.0).chosen
    ('left out', '')
    """

    scale: float | Tensor = None  # type: ignore[assignment]  # left out: 1
    mean: float | Tensor = 0.0
    chosen: str = field(default="", metadata={"stored": "if set"})

    degree = 2

    def __post_init__(self) -> None:
        given: object = self.scale
        if given is None:
            object.__setattr__(self, "scale", 1.0)
            object.__setattr__(self, "chosen", LEFT_OUT)
        positive("Normal.scale", self.scale, "or a tensor (M,), (1, P) or (M, P) of such numbers")
        if isinstance(self.scale, Tensor) and self.scale.dim() > 2:
            raise ValueError(f"Normal.scale must be a number, (M,), (1, P) or (M, P). Got {shown(self.scale)}.")
        if isinstance(self.mean, Tensor):
            good = self.mean.dim() <= 2 and self.mean.numel() > 0 and bool(torch.isfinite(self.mean).all())
        else:
            good = isinstance(self.mean, (int, float)) and not isinstance(self.mean, bool) and math.isfinite(self.mean)
        if not good:
            raise ValueError(f"Normal.mean must be a finite number, (P,) or (M, P). Got {shown(self.mean)}.")
        if any(len(sizes) > 1 for sizes in self._sizes):
            raise ValueError(
                "Normal: scale (M,), (1, P) or (M, P) and mean (P,) or (M, P) must agree on M and P. "
                f"Got scale {shown(self.scale)} and mean {shown(self.mean)}."
            )

    def __repr__(self) -> str:
        return repr_of_set(self)

    @cached_property
    def _sizes(self) -> tuple[set[int], set[int]]:
        """The numbers of members and of weights that scale and mean state."""
        scale, mean = (tuple(v.shape) if isinstance(v, Tensor) else () for v in (self.scale, self.mean))
        members = {*(scale if len(scale) == 1 else ()), *(s[0] for s in (scale, mean) if len(s) == 2 and s[0] > 1)}
        return members, {*scale[1:], *mean[-1:]}

    @cached_property
    def _counts(self) -> tuple[int | None, int | None]:
        """M and P, None where the hyper-parameters are for any number."""
        members, weights = self._sizes
        return next(iter(members), None), next(iter(weights), None)

    @property
    def num_members(self) -> int | None:
        return self._counts[0]

    def bound(self, layout: Layout) -> "Normal":
        num_weights = self._counts[1]
        if num_weights not in (None, layout.size):
            raise ValueError(
                f"Normal: the hyper-parameters are for {num_weights} weights. Got tensors of {layout.size}. "
                "Give one value for each weight, or use Layerwise for one prior a tensor."
            )
        return self

    def member(self, index: int) -> "Normal":
        scale, mean = self.scale, self.mean
        if isinstance(scale, Tensor) and scale.dim() == 1:
            scale = float(scale[index])
        elif isinstance(scale, Tensor) and scale.dim() == 2 and len(scale) > 1:
            scale = scale[index].unsqueeze(0)
        if isinstance(mean, Tensor) and mean.dim() == 2:
            mean = mean[index if len(mean) > 1 else 0]
        return Normal(scale, mean, self.chosen)

    def log_prob(self, theta: Tensor) -> Tensor:
        constants = self._constants(theta.shape, theta)
        whitened = _centred(theta, constants) * constants.inverse_scale
        return -0.5 * whitened.square().sum(-1) - _log_normaliser(theta, constants)

    def value_and_grad(self, theta: Tensor) -> tuple[Tensor, Tensor]:
        """Return log p(theta) and -(theta - mean) / scale^2, as new tensors and without a graph."""
        with torch.no_grad():
            constants = self._constants(theta.shape, theta)
            inverse, centred = constants.inverse_scale, _centred(theta, constants)
            if isinstance(inverse, Tensor) and inverse.shape[-1:] == theta.shape[-1:]:  # one scale for each weight
                whitened = centred * inverse if centred is theta else centred.mul_(inverse)
                quadratic = _square_norm(whitened) * -0.5
                grad = whitened.mul_(inverse).neg_()
            else:
                precision = inverse * inverse
                row_precision = precision.squeeze(-1) if isinstance(precision, Tensor) else precision  # (M,)
                quadratic = _square_norm(centred) * (-0.5 * row_precision)
                grad = centred * -precision if centred is theta else centred.mul_(-precision)
            return quadratic - _log_normaliser(theta, constants), grad

    def sample(self, shape: tuple[int, ...], key: Key, like: Tensor) -> Tensor:
        constants = self._constants(shape, like)
        return key.normal(shape, like.dtype, like.device) * constants.scale + constants.mean

    def variance(self, like: Tensor) -> Tensor:
        return torch.zeros_like(like) + self._constants(like.shape, like).scale ** 2

    def precision(self, theta: Tensor) -> Tensor:
        return torch.zeros_like(theta) + self._constants(theta.shape, theta).inverse_scale ** 2

    @property
    def factorises(self) -> bool:
        return True

    def cross_entropy(self, mean: Tensor, scale: Tensor) -> Tensor:
        """Return the sum of ((mean - mean0)^2 + scale^2) / (2 scale0^2) + log scale0 + log(2 pi) / 2."""
        constants = self._constants(mean.shape, mean)
        inverse = constants.inverse_scale
        squares = (_centred(mean, constants) * inverse).square() + (scale * inverse).square()
        return 0.5 * squares.sum(-1) + _log_normaliser(mean, constants)

    def add_cross_entropy_grad(
        self, mean: Tensor, scale: Tensor, grad_mean: Tensor, grad_scale: Tensor, factor: float | Tensor
    ) -> Tensor:
        """See `Prior`; the gradients are (mean - mean0) / scale0^2 and scale / scale0^2."""
        with torch.no_grad():
            constants = self._constants(mean.shape, mean)
            inverse, centred = constants.inverse_scale, _centred(mean, constants)
            precision = inverse * inverse
            pull = factor * precision
            for total, value in ((grad_mean, centred), (grad_scale, scale)):
                total.addcmul_(value, pull) if isinstance(pull, Tensor) else total.add_(value, alpha=pull)
            if isinstance(inverse, Tensor) and inverse.shape[-1:] == mean.shape[-1:]:  # one scale for each weight
                squares = _square_norm(centred * inverse) + _square_norm(scale * inverse)
            else:
                row_precision = precision.squeeze(-1) if isinstance(precision, Tensor) else precision  # (M,)
                squares = (_square_norm(centred) + _square_norm(scale)) * row_precision
            return 0.5 * squares + _log_normaliser(mean, constants)

    def kl(self, mean: Tensor, scale: Tensor) -> Tensor:
        """Return KL(N(mean, scale^2) || this prior), summed over weights: (..., P) -> (...).

        With e = 2 log(scale / scale0) it is the sum of (expm1(e) - e) / 2 + (mean - mean0)^2 / (2 scale0^2), exactly
        zero at the prior and without the cancellation of cross-entropy minus entropy near it.
        """
        constants = self._constants(mean.shape, mean)
        exponent = 2.0 * (scale / constants.scale).log()
        shift = (_centred(mean, constants) * constants.inverse_scale).square()
        return 0.5 * (exponent.expm1() - exponent + shift).sum(-1)

    def by_tensor(self, layout: Layout) -> tuple["Normal", ...]:
        def sliced(value: float | Tensor, part: Slice, least: int) -> float | Tensor:
            if isinstance(value, Tensor) and value.dim() >= least:  # scales (M,) have no axis of weights
                return value[..., part.offset : part.offset + part.size]
            return value

        return tuple(Normal(sliced(self.scale, part, 2), sliced(self.mean, part, 1), self.chosen) for part in layout)

    def rescaled(self, factor: Any) -> "Normal":
        return replace(self, scale=in_double(self.scale) * factor)

    def rescaled_each(self, factors: Tensor) -> "Normal":
        scale = torch.as_tensor(self.scale, dtype=torch.float64, device=factors.device) * factors.unsqueeze(0)  # (1, n)
        mean = _number(self.mean) if isinstance(self.mean, Tensor) else self.mean
        return Normal(_number(scale), mean, self.chosen)

    def as_chosen(self, way: str) -> "Normal":
        return replace(self, chosen=way) if self.chosen else self

    def centred(self) -> tuple["Normal", float | Tensor]:
        return replace(self, mean=0.0), self.mean

    @property
    def log_scale(self) -> Tensor:
        return torch.as_tensor(self.scale, dtype=torch.float64).log()

    @property
    def description(self) -> str:
        return f"normal, mean {float(self.mean):.6g}, scale {float(self.scale):.6g}"

    @property
    def formula(self) -> str:
        scale = float(self.scale)
        return f"exp(-{self._shifted('w')}^2{over(2.0 * scale**2)}){over(scale * math.sqrt(2.0 * math.pi))}"

    @property
    def kl_formula(self) -> str:
        scale = float(self.scale)
        return f"log({scale:.6g} / sigma) + (sigma^2 + {self._shifted('mu')}^2){over(2.0 * scale**2)} - 1/2"

    def _shifted(self, name: str) -> str:
        mean = float(self.mean)
        return name if mean == 0.0 else f"({name} {'-' if mean > 0.0 else '+'} {abs(mean):.6g})"

    def _constants(self, shape: tuple[int, ...], like: Tensor) -> _Constants:
        """Return the hyper-parameters for theta of `shape` with the dtype and device of `like`, made once."""
        members, weights = self._counts
        if members is not None and (len(shape) < 2 or shape[-2] != members):
            raise ValueError(
                f"Normal: the hyper-parameters are for {members} members, so theta must be (..., {members}, P). "
                f"Got theta of shape {tuple(shape)}. Use prior.member(i) for one member."
            )
        if weights not in (None, shape[-1]):
            raise ValueError(
                f"Normal: the hyper-parameters are for {weights} weights. Got theta of shape {tuple(shape)}. "
                "Give one value for each weight, or one number for all."
            )
        cache, key = self._cache, (like.dtype, like.device)
        if key not in cache:
            constants = _cast(self.scale, self.mean, like)
            # A hyper-parameter that is being learnt needs a new graph at every call.
            learnt = any(isinstance(value, Tensor) and value.requires_grad for value in (self.scale, self.mean))
            if learnt or any(isinstance(value, Tensor) and is_transient(value) for value in constants):
                return constants
            cache[key] = constants
        return cache[key]

    @cached_property
    def _cache(self) -> dict[tuple[torch.dtype, torch.device], _Constants]:
        return {}


def _cast(scale: float | Tensor, mean: float | Tensor, like: Tensor) -> _Constants:
    """Compute the constants in float64, then round once."""
    if isinstance(mean, Tensor):
        mean = (mean[0] if mean.dim() == 2 and len(mean) == 1 else mean).to(like)
    if not isinstance(scale, Tensor):
        return _Constants(mean, scale, 1.0 / scale, math.log(scale))
    scale = scale.double()
    if scale.dim() == 1:
        scale = scale.unsqueeze(-1)  # (M, 1)
    elif scale.dim() == 2 and len(scale) == 1:
        scale = scale[0]  # (P,), so that theta (P,) keeps its shape
    return _Constants(mean, scale.to(like), scale.reciprocal().to(like), scale.log().mean(-1).to(like))


def _number(values: Tensor) -> float | Tensor:
    """Return the common value of equal entries as a number, else a copy."""
    first = float(values.reshape(-1)[0])
    return first if bool((values == first).all()) else values.clone()


def _centred(theta: Tensor, constants: _Constants) -> Tensor:
    mean = constants.mean
    return theta if not isinstance(mean, Tensor) and mean == 0.0 else theta - mean


def _square_norm(vectors: Tensor) -> Tensor:
    """Return |v|^2 over the last axis, without a temporary of the size of v."""
    return torch.dot(vectors, vectors) if vectors.dim() == 1 else torch.linalg.vector_norm(vectors, dim=-1).square()


def _log_normaliser(theta: Tensor, constants: _Constants) -> float | Tensor:
    """Return the sum over weights of log(scale) + log(2 pi) / 2: a number, () or (M,)."""
    return theta.shape[-1] * (constants.average_log_scale + _HALF_LOG_TWO_PI)
