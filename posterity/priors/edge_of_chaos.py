"""Weight variances on the edge of chaos, where deep networks pass on signals and gradients."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from posterity.errors import shown
from posterity.priors.fan import ScaleRule
from posterity.special.activations import activation_function, slope_of
from posterity.special.quadrature import normal_expectation

_POINTS = 2000  # an even number: no node lies on a kink at zero, and slopes on either side of it weigh the same
_NOTHING = 1e-20  # a variance so small that an activation is linear over it
_BISECTIONS = 50  # of a factor 1.6 in q, to the last digit


class Edge(NamedTuple):
    """A point of the edge: sigma_w^2, and the variance q* of pre-activations that it keeps (nan where it keeps any)."""

    weight_variance: float
    q_star: float


@dataclass(frozen=True)
class EdgeOfChaos(ScaleRule):
    """Variance sigma_w^2 gain^2 / fan_in, with the sigma_w^2 at which two inputs neither merge nor part with depth.

    **Math**: in wide layers with weights N(0, sigma_w^2 / fan_in) and biases N(0, sigma_b^2), sigma_b^2 =
    `bias_variance`, pre-activations have the variance q = sigma_w^2 E phi(sqrt(q) z)^2 + sigma_b^2 deep down, z
    standard normal. Differences between inputs grow by chi = sigma_w^2 E phi'(sqrt(q) z)^2 from layer to layer. The
    edge is chi = 1. Each q has one: sigma_w^2 = 1 / E phi'^2, sigma_b^2 = q - sigma_w^2 E phi^2; the rule finds the
    smallest stable q whose sigma_b^2 is the one wanted. `activation` is a name ("relu": sigma_w^2 = 2, "tanh": 1
    without biases) or a function of tensors, entry by entry, with its `derivative` or by autograd.

    Against `FanIn` it divides the factor of a squared L2 penalty by sigma_w^2, those of L1 and group lasso by sigma_w.

    **Limit**: wide layers. Expectations by the trapezoid rule, to 1e-10 for functions smooth but at zero; jumps of the
    slope elsewhere leave errors up to 1e-3. Not every activation has an edge at every `bias_variance`: ReLU has it
    at 0 alone, GELU and SiLU not at 0, softplus nowhere; that is a ValueError which says what there is. Biases are
    not the rule's: give them `Normal(sqrt(bias_variance))`. Posteriors are stored with rules of named activations
    only; `FanIn(gain=sqrt(rule.weight_variance))` stands for one of a function.

    **Cost**: some hundred expectations of 2000 nodes once; then one number a tensor.

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
        """sigma_w^2 and q*."""
        if isinstance(self.activation, str) and self.derivative is None:
            return _named_edge(self.activation, self.bias_variance)
        return _edge(_moments_of(self.activation, self.derivative), self.bias_variance, _name(self.activation))

    @property
    def weight_variance(self) -> float:
        """sigma_w^2, for gain 1."""
        return self.edge.weight_variance

    @property
    def q_star(self) -> float:
        """The variance of pre-activations deep down; nan where every variance is kept, as by ReLU."""
        return self.edge.q_star

    @property
    def chi(self) -> float:
        """gain^2 sigma_w^2 E phi'^2 at q*, which is gain^2."""
        q = 1.0 if math.isnan(self.q_star) else max(self.q_star, _NOTHING)
        return (
            self.gain**2 * self.weight_variance * float(_moments_of(self.activation, self.derivative)(_double([q]))[1])
        )

    def variance(self, fan_in: int, fan_out: int) -> float:
        return self.gain**2 * self.weight_variance / fan_in


_Moments = Callable[[Tensor], tuple[Tensor, Tensor]]


def _moments_of(
    activation: str | Callable[[Tensor], Tensor], derivative: Callable[[Tensor], Tensor] | None
) -> _Moments:
    """The function that gives E phi^2 and E phi'^2 under N(0, q), (Q,) -> (Q,) each."""
    function = activation_function(activation)
    slope = derivative or slope_of(function)
    return lambda q: (_second_moment(function, q), _second_moment(slope, q))


def _second_moment(function: Callable[[Tensor], Tensor], q: Tensor) -> Tensor:
    """E f(sqrt(q) z)^2, (Q,) -> (Q,)."""
    zero = torch.zeros_like(q)
    return normal_expectation(lambda x: function(x).square(), zero, q.sqrt(), _POINTS, width=0.0)


@lru_cache(maxsize=256)
def _named_edge(name: str, bias_variance: float) -> Edge:
    """Found once, since a rule is made anew whenever its gain changes; a function of one's own may change itself."""
    return _edge(_moments_of(name, None), bias_variance, name)


def _edge(moments: _Moments, bias_variance: float, name: str) -> Edge:
    grid = torch.logspace(-8.0, 4.0, 61, dtype=torch.float64, device="cpu")
    squares, slopes = moments(grid)
    if not (slopes > 0).any():
        raise ValueError(f"EdgeOfChaos: {name} has slope zero, so that no signal passes. Use another activation.")
    biases = grid - squares / slopes  # sigma_b^2 of the edge at each q
    if bool((biases.abs() <= 1e-9 * grid).all()):
        return _scale_free(float(1.0 / slopes[0]), bias_variance, name)
    if bias_variance == 0.0 and (edge := _at_zero(moments, grid, squares)):
        return edge
    above = biases > bias_variance
    for left in torch.nonzero((above[1:] != above[:-1]) & biases[1:].isfinite() & biases[:-1].isfinite()).flatten():
        q = _root(moments, bias_variance, float(grid[left]), float(grid[left + 1]), rising=not bool(above[left]))
        if _stable(moments, _double([q]))[0]:
            return Edge(float(1.0 / moments(_double([q]))[1]), q)
    raise ValueError(_absence(biases[_stable(moments, grid) & (biases >= 0.0)], bias_variance, name))


def _scale_free(weight_variance: float, bias_variance: float, name: str) -> Edge:
    """The edge of an activation with phi(a x) = a phi(x) for a > 0: every q is kept, if there are no biases."""
    if bias_variance > 0.0:
        raise ValueError(
            f"EdgeOfChaos: {name} has its edge at bias_variance 0 alone. Its slopes do not depend on the scale of "
            f"signals, so that at weight variance {weight_variance:.6g} each layer's biases add to q without end. "
            f"Got {bias_variance}. Use 0.0."
        )
    return Edge(weight_variance, math.nan)


def _at_zero(moments: _Moments, grid: Tensor, squares: Tensor) -> Edge | None:
    """The edge at q* = 0, where phi(0) = 0 and small signals do not grow."""
    square, slope = (float(value) for value in moments(_double([_NOTHING])))
    if not slope > 0.0 or square > 1e3 * slope * _NOTHING:
        return None
    small = grid <= 1e-2
    return Edge(1.0 / slope, 0.0) if bool((squares <= slope * grid * (1.0 + 1e-9))[small].all()) else None


def _root(moments: _Moments, bias_variance: float, low: float, high: float, *, rising: bool) -> float:
    """The q between two at which the edge's bias variance is this one, by bisection in log q."""
    for _ in range(_BISECTIONS):
        middle = math.sqrt(low * high)
        squares, slopes = moments(_double([middle]))
        below = float(middle - squares / slopes) < bias_variance
        low, high = (middle, high) if below == rising else (low, middle)
    return math.sqrt(low * high)


def _stable(moments: _Moments, q: Tensor) -> Tensor:
    """Whether q comes back after a small change: |d/dq sigma_w^2 E phi(sqrt(q) z)^2| <= 1 on the edge, (Q,)."""
    step = 1e-4
    higher, lower = (moments(q * factor)[0] for factor in (1.0 + step, 1.0 - step))
    return ((higher - lower) / (2.0 * step * q) / moments(q)[1]).abs() <= 1.0


def _absence(biases: Tensor, bias_variance: float, name: str) -> str:
    """Why there is no edge, from the bias variances at which there are some."""
    if not len(biases):
        return (
            f"EdgeOfChaos: {name} has no edge: where its slopes would keep differences, the variance of signals grows "
            "from layer to layer. Use FanIn(gain=...) with a gain of your own, or another activation."
        )
    return (
        f"EdgeOfChaos: {name} has no edge with a stable variance of signals at bias_variance {bias_variance}. "
        f"There is one from about {float(biases.min()):.3g} to {float(biases.max()):.3g}. Choose a bias_variance there."
    )


def _name(activation: str | Callable[[Tensor], Tensor]) -> str:
    return activation if isinstance(activation, str) else getattr(activation, "__name__", type(activation).__name__)


def _double(values: list[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64, device="cpu")
