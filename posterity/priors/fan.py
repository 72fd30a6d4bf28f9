"""Rules that set a tensor's prior variance by its fans, as initialisations do, up to the edge of chaos."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from posterity.errors import positive, shown
from posterity.numerics.layout import Layout, Slice
from posterity.special.activations import activation_function, slope_of
from posterity.special.quadrature import normal_expectation

_POINTS = 2000  # an even number: no node lies on a kink at zero, and slopes on either side of it weigh the same
_NOTHING = 1e-20  # a variance so small that an activation is linear over it
_BISECTIONS = 50  # of a factor 1.6 in q, to the last digit


@dataclass(frozen=True)
class ScaleRule(ABC):
    """A prior variance as a function of a tensor's fans; `gain` multiplies the standard deviation."""

    gain: float = 1.0

    def __post_init__(self) -> None:
        positive(f"{type(self).__name__}.gain", self.gain)

    @abstractmethod
    def variance(self, fan_in: int, fan_out: int) -> float:
        """Return the variance of each weight of a tensor with these fans."""

    def rescaled(self, factor: float) -> "ScaleRule":
        """Return the rule with every standard deviation multiplied by `factor`."""
        return replace(self, gain=self.gain * factor)


@dataclass(frozen=True)
class FanIn(ScaleRule):
    """Variance gain^2 / fan_in, which keeps the variance of a linear layer's outputs.

    **Math**: Var w = gain^2 / fan_in. With fan_in inputs of unit variance an output has variance gain^2.

    **Limit**: forward signals only; on the edge of chaos `gain` is the activation's sigma_w.

    **Cost**: none; one number for each tensor.

    **References**: LeCun et al. (1998), Efficient BackProp, eq. 16.

    **Example**:

    >>> FanIn().variance(fan_in=100, fan_out=10)
    0.01
    """

    def variance(self, fan_in: int, fan_out: int) -> float:
        return self.gain**2 / fan_in


@dataclass(frozen=True)
class Glorot(ScaleRule):
    """Variance 2 gain^2 / (fan_in + fan_out), a compromise that keeps the variance of outputs and of gradients.

    **Math**: Var w = 2 gain^2 / (fan_in + fan_out).

    **Limit**: derived for activations that are linear near zero.

    **Cost**: none; one number for each tensor.

    **References**: Glorot and Bengio (2010), Understanding the difficulty of training deep feedforward neural networks,
    eq. 12.

    **Example**:

    >>> Glorot().variance(fan_in=30, fan_out=10)
    0.05
    """

    def variance(self, fan_in: int, fan_out: int) -> float:
        return 2.0 * self.gain**2 / (fan_in + fan_out)


@dataclass(frozen=True)
class He(ScaleRule):
    """Variance 2 gain^2 / fan_in, which keeps the second moment of signals through ReLU layers.

    **Math**: Var w = 2 gain^2 / fan_in.

    **Limit**: for ReLU; it is `FanIn(gain=sqrt(2))`.

    **Cost**: none; one number for each tensor.

    **References**: He et al. (2015), Delving deep into rectifiers, eq. 10.

    **Example**:

    >>> He().variance(fan_in=50, fan_out=10)
    0.04
    """

    def variance(self, fan_in: int, fan_out: int) -> float:
        return 2.0 * self.gain**2 / fan_in


def fans(part: Slice, layout: Layout) -> tuple[int, int] | None:
    """Return (fan_in, fan_out) of a weight (out, in, *kernel), or of the weight of a bias; None without fans.

    A transposed convolution stores (in, out, *kernel), so its fans are exchanged, as in torch's own
    initialisations.
    """
    shape = part.shape
    if len(shape) == 1 and part.name.split(".")[-1] == "bias":
        sibling = part.name.removesuffix("bias") + "weight"
        shape = next((other.shape for other in layout if other.name == sibling), shape)
    if len(shape) < 2:
        return None
    return math.prod(shape[1:]), shape[0] * math.prod(shape[2:])


class Edge(NamedTuple):
    """A point of the edge: sigma_w^2, and the variance q* of pre-activations that it keeps (nan where all are kept)."""

    weight_variance: float
    q_star: float


@dataclass(frozen=True)
class EdgeOfChaos(ScaleRule):
    """Variance sigma_w^2 gain^2 / fan_in, with sigma_w^2 where two inputs neither converge nor diverge with depth.

    **Math**: in wide layers with weights N(0, sigma_w^2 / fan_in) and biases N(0, sigma_b^2), sigma_b^2 =
    `bias_variance`, pre-activations have the variance q = sigma_w^2 E phi(sqrt(q) z)^2 + sigma_b^2 in deep layers,
    z standard normal. Differences between inputs grow by chi = sigma_w^2 E phi'(sqrt(q) z)^2 from layer to layer. The
    edge is chi = 1. Each q has one: sigma_w^2 = 1 / E phi'^2, sigma_b^2 = q - sigma_w^2 E phi^2; the rule finds the
    smallest stable q with the given sigma_b^2. `activation` is a name ("relu": sigma_w^2 = 2, "tanh": 1
    without biases) or a function of tensors, entry by entry, with its `derivative` or by autograd.

    Against `FanIn` it divides the factor of a squared L2 penalty by sigma_w^2, those of L1 and group lasso by sigma_w.

    **Limit**: wide layers. Expectations by the trapezoid rule, to 1e-10 for functions smooth but at zero; jumps of the
    slope elsewhere leave errors up to 1e-3. Not every activation has an edge at every `bias_variance`: ReLU has it
    at 0 alone, GELU and SiLU not at 0, softplus nowhere; then a ValueError names the range. The rule does
    not apply to biases: give them `Normal(sqrt(bias_variance))`. Posteriors are stored with rules of named activations
    only; `FanIn(gain=sqrt(rule.weight_variance))` stands for one of a function.

    **Cost**: some hundred expectations of 2000 nodes once; then one number for each tensor.

    **References**: Poole et al. (2016), Exponential expressivity in deep neural networks through transient chaos;
    Schoenholz et al. (2017), Deep information propagation; Hayou et al. (2019), On the impact of the activation
    function on deep neural networks training.

    **Example**:

    >>> round(EdgeOfChaos("relu").variance(fan_in=50, fan_out=10), 6)
    0.04
    >>> rule = EdgeOfChaos("tanh", bias_variance=0.05)
    >>> round(rule.weight_variance, 5), round(rule.q_star, 5), round(rule.chi, 5)
    (1.76095, 0.57005, 1.0)
    """

    gain: float = field(default=1.0, kw_only=True)
    activation: str | Callable[[Tensor], Tensor]
    bias_variance: float = 0.0
    derivative: Callable[[Tensor], Tensor] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        number = isinstance(self.bias_variance, (int, float)) and not isinstance(self.bias_variance, bool)
        if not number or not math.isfinite(self.bias_variance) or self.bias_variance < 0:
            raise ValueError(
                f"EdgeOfChaos.bias_variance must be a number of at least 0. Got {shown(self.bias_variance)}."
            )
        self.edge  # noqa: B018  there must be one

    @cached_property
    def edge(self) -> Edge:
        """The weight variance sigma_w^2 and q*."""
        if isinstance(self.activation, str) and self.derivative is None:
            return _named_edge(self.activation, self.bias_variance)
        name = getattr(self.activation, "__name__", type(self.activation).__name__)
        name = self.activation if isinstance(self.activation, str) else name
        return _edge(_moments_of(self.activation, self.derivative), self.bias_variance, name)

    @property
    def weight_variance(self) -> float:
        """The weight variance sigma_w^2, for gain 1."""
        return self.edge.weight_variance

    @property
    def q_star(self) -> float:
        """Variance of pre-activations in deep layers; nan where every variance is kept, as by ReLU."""
        return self.edge.q_star

    @property
    def chi(self) -> float:
        """Growth gain^2 sigma_w^2 E phi'^2 of differences at q*, which is gain^2."""
        q = 1.0 if math.isnan(self.q_star) else max(self.q_star, _NOTHING)
        slopes = _moments_of(self.activation, self.derivative)(_double(q))[1]
        return self.gain**2 * self.weight_variance * float(slopes)

    def variance(self, fan_in: int, fan_out: int) -> float:
        return self.gain**2 * self.weight_variance / fan_in


_Moments = Callable[[Tensor], tuple[Tensor, Tensor]]


def _moments_of(
    activation: str | Callable[[Tensor], Tensor], derivative: Callable[[Tensor], Tensor] | None
) -> _Moments:
    """Return the function that gives E phi^2 and E phi'^2 under N(0, q), (Q,) -> (Q,) each."""
    function = activation_function(activation)
    slope = derivative or slope_of(function)

    def moments(q: Tensor) -> tuple[Tensor, Tensor]:
        zero, root = torch.zeros_like(q), q.sqrt()
        square = normal_expectation(lambda x: function(x).square(), zero, root, _POINTS, width=0.0)
        return square, normal_expectation(lambda x: slope(x).square(), zero, root, _POINTS, width=0.0)

    return moments


@lru_cache(maxsize=256)
def _named_edge(name: str, bias_variance: float) -> Edge:
    """Return the edge of a named activation, cached because a rule is made anew whenever its gain changes."""
    return _edge(_moments_of(name, None), bias_variance, name)


def _edge(moments: _Moments, bias_variance: float, name: str) -> Edge:
    grid = torch.logspace(-8.0, 4.0, 61, dtype=torch.float64, device="cpu")
    squares, slopes = moments(grid)
    if not (slopes > 0).any():
        raise ValueError(f"EdgeOfChaos: {name} has slope zero, so that no signal passes. Use another activation.")
    biases = grid - squares / slopes  # sigma_b^2 of the edge at each q
    if bool((biases.abs() <= 1e-9 * grid).all()):  # phi(a x) = a phi(x) for a > 0: without biases every q is kept
        weight_variance = float(1.0 / slopes[0])
        if bias_variance > 0.0:
            raise ValueError(
                f"EdgeOfChaos: {name} has its edge at bias_variance 0 alone. Its slopes do not depend on the scale of "
                f"signals, so that at weight variance {weight_variance:.6g} each layer's biases add to q without end. "
                f"Got {bias_variance}. Use 0.0."
            )
        return Edge(weight_variance, math.nan)
    if bias_variance == 0.0:  # the edge is at q* = 0 where phi(0) = 0 and small signals do not grow
        square, slope = (float(value) for value in moments(_double(_NOTHING)))
        shrinking = bool((squares <= slope * grid * (1.0 + 1e-9))[grid <= 1e-2].all())
        if slope > 0.0 and not square > 1e3 * slope * _NOTHING and shrinking:
            return Edge(1.0 / slope, 0.0)
    above = biases > bias_variance
    for left in torch.nonzero((above[1:] != above[:-1]) & biases[1:].isfinite() & biases[:-1].isfinite()).flatten():
        q = _root(moments, bias_variance, float(grid[left]), float(grid[left + 1]), rising=not bool(above[left]))
        if _stable(moments, _double(q))[0]:
            return Edge(float(1.0 / moments(_double(q))[1]), q)
    known = biases[_stable(moments, grid) & (biases >= 0.0)]
    if not len(known):
        raise ValueError(
            f"EdgeOfChaos: {name} has no edge: where its slopes would keep differences, the variance of signals grows "
            "from layer to layer. Use FanIn(gain=...) with a gain of your own, or another activation."
        )
    raise ValueError(
        f"EdgeOfChaos: {name} has no edge with a stable variance of signals at bias_variance {bias_variance}. "
        f"There is one from about {float(known.min()):.3g} to {float(known.max()):.3g}. Choose a bias_variance there."
    )


def _root(moments: _Moments, bias_variance: float, low: float, high: float, *, rising: bool) -> float:
    """Return the q in (low, high) at which the edge has this bias variance, by bisection in log q."""
    for _ in range(_BISECTIONS):
        middle = math.sqrt(low * high)
        squares, slopes = moments(_double(middle))
        below = float(middle - squares / slopes) < bias_variance
        low, high = (middle, high) if below == rising else (low, middle)
    return math.sqrt(low * high)


def _stable(moments: _Moments, q: Tensor) -> Tensor:
    """Return whether q is a stable fixed point: |d/dq sigma_w^2 E phi(sqrt(q) z)^2| <= 1 on the edge, (Q,)."""
    step = 1e-4
    higher, lower = (moments(q * factor)[0] for factor in (1.0 + step, 1.0 - step))
    return ((higher - lower) / (2.0 * step * q) / moments(q)[1]).abs() <= 1.0


def _double(value: float) -> Tensor:
    return torch.tensor([value], dtype=torch.float64, device="cpu")
