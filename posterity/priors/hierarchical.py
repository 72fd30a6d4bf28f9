"""Hierarchical priors, whose scale has a prior of its own."""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar, NamedTuple, NoReturn

import torch
from torch import Tensor

from posterity.errors import positive, shown
from posterity.numerics.layout import Layout
from posterity.numerics.random import Key
from posterity.priors.layerwise import Layerwise, bound_by_tensor
from posterity.priors.normal import Normal
from posterity.priors.prior import Prior

_HALF_LOG_TWO_PI = 0.5 * math.log(2.0 * math.pi)


class ScalePrior(ABC):
    """A density of a scale s > 0, stated for log s, in which it must be log-concave."""

    @abstractmethod
    def log_density(self, log_scale: Tensor) -> Tensor:
        """Return the log density of log s, entry by entry."""

    @abstractmethod
    def slope(self, log_scale: Tensor) -> Tensor:
        """Return the derivative of `log_density`."""

    @abstractmethod
    def curvature(self, log_scale: Tensor) -> Tensor:
        """Return minus the second derivative of `log_density`, which is not negative."""

    @property
    @abstractmethod
    def peak(self) -> float:
        """The maximiser of `log_density`."""

    @property
    @abstractmethod
    def second_moment(self) -> float:
        """The moment E s^2; nan where E s is infinite."""

    has_inverse_moments: ClassVar[bool]
    """Whether E s^-n is finite for every n."""

    @abstractmethod
    def sample(self, shape: tuple[int, ...], key: Key, device: torch.device) -> Tensor:
        """Draw s in float64."""


@dataclass(frozen=True)
class LogNormal(ScalePrior):
    """A scale known up to a factor.

    **Math**: log s ~ N(log median, spread^2): s lies within a factor e^spread of `median` with probability 0.68.

    **Limit**: the tails are light on both sides of log s, so that weights keep all moments.

    **Cost**: negligible; one number for each tensor.

    **References**: Johnson, Kotz and Balakrishnan (1994), Continuous Univariate Distributions 1, chapter 14.

    **Example**:

    >>> round(LogNormal(median=0.1, spread=0.5).second_moment, 4)
    0.0165
    """

    median: float = 1.0
    spread: float = 1.0

    def __post_init__(self) -> None:
        positive("LogNormal.median", self.median)
        positive("LogNormal.spread", self.spread)

    def log_density(self, log_scale: Tensor) -> Tensor:
        return -0.5 * ((log_scale - self.peak) / self.spread).square() - (math.log(self.spread) + _HALF_LOG_TWO_PI)

    def slope(self, log_scale: Tensor) -> Tensor:
        return (self.peak - log_scale) / self.spread**2

    def curvature(self, log_scale: Tensor) -> Tensor:
        return torch.full_like(log_scale, self.spread**-2)

    @property
    def peak(self) -> float:
        return math.log(self.median)

    @property
    def second_moment(self) -> float:
        return self.median**2 * math.exp(2.0 * self.spread**2)

    has_inverse_moments = True

    def sample(self, shape: tuple[int, ...], key: Key, device: torch.device) -> Tensor:
        return self.median * torch.exp(self.spread * key.normal(shape, torch.float64, device))


@dataclass(frozen=True)
class HalfCauchy(ScalePrior):
    """A scale of any size, from zero to far above `scale`.

    **Math**: p(s) = 2 / (pi scale (1 + (s / scale)^2)), so that log s - log scale has density sech / pi, and `scale` is
    the median.

    **Limit**: s has no mean, so weights have no variance; s may be zero, so the weights' density is infinite at zero.

    **Cost**: negligible; one number for each tensor.

    **References**: Gelman (2006), Prior distributions for variance parameters in hierarchical models; Polson and Scott
    (2012), On the half-Cauchy prior for a global scale parameter.

    **Example**:

    >>> round(HalfCauchy(scale=2.0).log_density(torch.tensor(2.0).log()).exp().item() * math.pi, 4)
    1.0
    """

    scale: float = 1.0

    def __post_init__(self) -> None:
        positive("HalfCauchy.scale", self.scale)

    def log_density(self, log_scale: Tensor) -> Tensor:
        distance = (log_scale - self.peak).abs()
        return math.log(2.0 / math.pi) - distance - torch.log1p(torch.exp(-2.0 * distance))

    def slope(self, log_scale: Tensor) -> Tensor:
        return -torch.tanh(log_scale - self.peak)

    def curvature(self, log_scale: Tensor) -> Tensor:
        return 1.0 - self.slope(log_scale).square()

    @property
    def peak(self) -> float:
        return math.log(self.scale)

    @property
    def second_moment(self) -> float:
        return math.nan

    has_inverse_moments = False

    def sample(self, shape: tuple[int, ...], key: Key, device: torch.device) -> Tensor:
        return self.scale * torch.tan(0.5 * math.pi * key.uniform(shape, torch.float64, device))


_POINTS = 251  # nodes of the trapezoid rule over log s
_SECTIONS, _ROUNDS = 128, 3  # of the search for the peak: each round divides its bracket by 128
_TAIL = 30.0  # reach of the rule beyond both peaks, in log s
_WIDEST = 8.0  # largest width of a flat peak
_LARGEST = 80.0  # exp(-exp(80)) is zero; the clamp keeps infinities out of the gradient


@dataclass(frozen=True)
class Hierarchical(Prior):
    """Weights v of a simpler prior, times one unknown scale for each tensor, which is integrated out.

    **Math**: w = s v for the n weights of a tensor, v ~ `inner` and s ~ `scale`, so that
    p(w) = integral over s of p(s) s^-n p_inner(w / s). `inner` is a `Normal` or `Laplace` of mean zero, a `GroupLasso`,
    or a `Layerwise` of normals (`Layerwise.of(FanIn())`); `scale` is a `HalfCauchy` or `LogNormal`. For these priors
    A(w) = log p_inner(0) - log p_inner(w) is homogeneous, A(w / s) = A(w) / s^k with k = 2 for the normal and 1 for
    the others, so the integral over u = log s needs one number for each tensor:
    log p(w) = log p_inner(0) + log integral of p(u) exp(-n u - A e^(-k u)) du. `layout` is set by `bound`.

    **Limit**: exact up to quadrature, at 1e-9: the trapezoid rule in sinh around the integrand's peak. Under
    `HalfCauchy` a tensor of zeros has infinite density and there is no mode to find; start without zeros, or use
    `LogNormal`. The weights of a tensor are dependent: `precision` is the diagonal of the Hessian, and `cross_entropy`
    has neither a closed form nor a one-dimensional integral, so it is refused: average -log_prob over draws instead.

    **Cost**: a few passes over theta, and 251 numbers for each tensor.

    **References**: Neal (1996), Bayesian Learning for Neural Networks; Gelman (2006), Prior distributions for variance
    parameters in hierarchical models.

    **Example**:

    >>> from posterity.priors import LogNormal
    >>> prior = Hierarchical(Normal(), LogNormal(spread=0.5)).bound(Layout.of({"weight": (2, 2)}))
    >>> prior.log_prob(torch.ones(4))
    tensor(-6.2224)
    >>> prior.variance(torch.zeros(4))
    tensor([1.6487, 1.6487, 1.6487, 1.6487])
    """

    inner: Prior
    scale: ScalePrior
    layout: Layout | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.scale, ScalePrior):
            raise ValueError(
                f"Hierarchical.scale must be a HalfCauchy or a LogNormal. Got {shown(self.scale)}. "
                "Give the inner prior its own scale, and here the density of what multiplies it."
            )
        if not isinstance(self.inner, Layerwise):
            _degree(self.inner)

    def bound(self, layout: Layout) -> "Hierarchical":
        prior = replace(self, layout=layout)
        prior._parts  # noqa: B018  refuse now what does not fit the tensors
        return prior

    def by_tensor(self, layout: Layout) -> tuple[Prior, ...]:
        return tuple(replace(self, inner=own, layout=None) for own in self.inner.by_tensor(layout))

    @property
    def num_members(self) -> int | None:
        return self.inner.num_members

    def member(self, index: int) -> "Hierarchical":
        return replace(self, inner=self.inner.member(index))

    def log_prob(self, theta: Tensor) -> Tensor:
        return self._integrate(theta).log_prob.to(theta.dtype)

    def value_and_grad(self, theta: Tensor) -> tuple[Tensor, Tensor]:
        """Return log p(theta) and its gradient, E[s^-k] times the inner gradient of each tensor, without a graph."""
        with torch.no_grad():
            state = self._integrate(theta.detach())
            means = state.power_moments()[0].unbind(-1)
            grads = [
                prior.value_and_grad(piece)[1] * mean.unsqueeze(-1).to(theta.dtype)
                for (prior, piece), mean in zip(self._pieces(theta.detach()), means, strict=True)
            ]
            return state.log_prob.to(theta.dtype), torch.cat(grads, dim=-1)

    def sample(self, shape: tuple[int, ...], key: Key, like: Tensor) -> Tensor:
        pieces = []
        for part, prior in zip(self._layout, self._parts, strict=True):
            own = key.fold(part.name)
            scale = self.scale.sample((*shape[:-1], 1), own.fold("scale"), like.device).to(like.dtype)
            pieces.append(scale * prior.sample((*shape[:-1], part.size), own.fold("weights"), like))
        return torch.cat(pieces, dim=-1)

    def variance(self, like: Tensor) -> Tensor:
        """Return E s^2 times the inner variance, shaped as theta `like` (..., P); nan where s has no mean."""
        return torch.cat([p.variance(piece) for p, piece in self._pieces(like)], dim=-1) * self.scale.second_moment

    @property
    def has_cross_entropy(self) -> bool:
        return False

    def cross_entropy(self, mean: Tensor, scale: Tensor) -> NoReturn:
        raise TypeError(
            "Hierarchical has no cross-entropy: the weights of a tensor share one scale, so E log p is no sum over "
            "weights. Average -prior.log_prob(mean + scale * noise) over draws instead (a Monte Carlo KL)."
        )

    def precision(self, theta: Tensor) -> Tensor:
        """Return E[s^-k] A_ii - Var[s^-k] A_i^2 over s given the weights of each tensor."""
        with torch.no_grad():
            means, variances = self._integrate(theta.detach()).power_moments()  # (..., T) each
            pieces = []
            for index, (prior, piece) in enumerate(self._pieces(theta.detach())):
                mean, variance = (value[..., index, None].to(theta.dtype) for value in (means, variances))
                pieces.append(mean * prior.precision(piece) - variance * prior.value_and_grad(piece)[1].square())
            return torch.cat(pieces, dim=-1)

    @property
    def _layout(self) -> Layout:
        if self.layout is None:
            raise RuntimeError(
                "Hierarchical must know the names and shapes of the tensors first. Give it to a Joint, or call "
                "bound(layout)."
            )
        return self.layout

    @cached_property
    def _parts(self) -> tuple[Prior, ...]:
        """The inner prior of each tensor."""
        priors = self.inner.by_tensor(self._layout)
        if isinstance(self.inner, Layerwise) and not all(isinstance(prior, Normal) for prior in priors):
            raise ValueError(
                f"Hierarchical.inner may be a Layerwise of normals only. Got {shown(self.inner)}. "
                "Put a Hierarchical for each tensor into a Layerwise instead."
            )
        for prior in priors:
            _degree(prior)
        return bound_by_tensor(priors, self._layout)

    def _pieces(self, theta: Tensor) -> list[tuple[Prior, Tensor]]:
        """Pair the inner prior of each tensor with its slice of theta."""
        pieces = torch.split(theta, [part.size for part in self._layout], dim=-1)
        return list(zip(self._parts, pieces, strict=True))

    def _integrate(self, theta: Tensor) -> "_Integrand":
        """Evaluate the integrand over log s at its nodes, for each tensor."""
        power = _degree(self._parts[0])
        offsets, penalties = zip(*(prior.penalty(piece) for prior, piece in self._pieces(theta)), strict=True)
        offset, total = torch.stack(offsets, dim=-1), torch.stack(penalties, dim=-1)  # (..., T)
        sizes = torch.stack([total.new_full((), part.size) for part in self._layout])
        known = total.detach().clamp_min(1e-300)
        nodes, log_weights = _nodes(self.scale, known.log(), sizes, power)  # (..., T, points)
        relative = torch.exp((known.log().unsqueeze(-1) - power * nodes).clamp_max(_LARGEST))
        exponents = (
            log_weights
            + self.scale.log_density(nodes)
            - sizes.unsqueeze(-1) * nodes
            - (total / known).unsqueeze(-1) * relative
        )
        values = torch.logsumexp(exponents, dim=-1)  # (..., T)
        if not self.scale.has_inverse_moments:
            values = values.masked_fill(total == 0.0, math.inf)
        return _Integrand((offset + values).sum(-1), exponents, relative / known.unsqueeze(-1))


class _Integrand(NamedTuple):
    """The integral over log s by quadrature, for T tensors, in float64."""

    log_prob: Tensor  # log p(theta), (...)
    exponents: Tensor  # log of weight times integrand at the nodes, (..., T, points)
    powers: Tensor  # s^-k at the nodes, (..., T, points)

    def power_moments(self) -> tuple[Tensor, Tensor]:
        """Return mean and variance of s^-k given the weights of each tensor, (..., T) each."""
        shares = torch.softmax(self.exponents, dim=-1)
        mean = (shares * self.powers).sum(-1, keepdim=True)
        return mean.squeeze(-1), (shares * (self.powers - mean).square()).sum(-1)


def _degree(prior: Prior) -> int:
    """Return the degree k of log p(0) - log p(w), or refuse a prior that has none or whose mode is not zero."""
    if prior.degree is not None and not torch.as_tensor(prior.centred()[1]).any():
        return prior.degree
    raise ValueError(
        "Hierarchical.inner must be a Normal or Laplace of mean zero, a GroupLasso, or a Layerwise of normals. "
        f"Got {shown(prior)}. The heavy-tailed priors are mixtures over scales already: use them as they are."
    )


def _nodes(scale: ScalePrior, log_penalty: Tensor, sizes: Tensor, degree: int) -> tuple[Tensor, Tensor]:
    """Return nodes u and log weights of a trapezoid rule for exp(-n u - A e^(-k u)) p(u), (..., T, points) each.

    The exponent is concave, so its slope has one root, which lies between the peaks of its two factors.
    """
    other = (log_penalty + (degree / sizes).log()) / degree  # where -n u - A e^(-k u) peaks
    low, high = other.clamp_max(scale.peak), other.clamp_min(scale.peak)
    reach = (high - low + _TAIL).unsqueeze(-1)
    fractions = torch.linspace(0.0, 1.0, _SECTIONS + 1, dtype=other.dtype, device=other.device)
    for _ in range(_ROUNDS):
        grid = low.unsqueeze(-1) + (high - low).unsqueeze(-1) * fractions
        pull = degree * torch.exp((log_penalty.unsqueeze(-1) - degree * grid).clamp_max(_LARGEST))
        rising = (pull - sizes.unsqueeze(-1) + scale.slope(grid) > 0.0).sum(-1, keepdim=True).clamp(1, _SECTIONS)
        low, high = grid.gather(-1, rising - 1).squeeze(-1), grid.gather(-1, rising).squeeze(-1)
    peak = (0.5 * (low + high)).unsqueeze(-1)
    bend = degree**2 * torch.exp((log_penalty.unsqueeze(-1) - degree * peak).clamp_max(_LARGEST))
    width = (bend + scale.curvature(peak)).rsqrt().clamp_max(_WIDEST)
    end = torch.asinh(reach / width)  # (..., T, 1)
    steps = torch.linspace(-1.0, 1.0, _POINTS, dtype=other.dtype, device=other.device) * end
    return peak + width * steps.sinh(), torch.log(width * steps.cosh() * end * (2.0 / (_POINTS - 1)))
