"""The law of the outputs of a wide network, and expected losses under it."""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from posterity.errors import positive, positive_whole, shown
from posterity.numerics.random import Key
from posterity.special.functions import complex_expm1, complex_log1p
from posterity.theory.activations import Activation, Moments
from posterity.theory.neurons import Neurons

_LEAST = 1e-30  # keeps scales of pre-activations positive at inputs of zero
_BUDGET = 2**12  # characteristic functions at a time, each of which holds some hundred numbers


@dataclass(frozen=True, eq=False)
class OutputLaw:
    """The law of f(x) = (1/N) sum over j of a_j sigma(<b_j, x>) at rows x, for N = `width` independent neurons of nu.

    `width` (...) broadcasts with the leading axes of the neurons: all widths at once. At infinite width f is E f.
    """

    neurons: Neurons
    activation: Activation
    inputs: Tensor  # (P, D)
    width: Tensor  # (...)

    @cached_property
    def pre_activations(self) -> tuple[Tensor, Tensor]:
        """Mean and scale of <b, x>, (..., J, P) each."""
        variance = self.neurons.inner_scale.square() @ self.inputs.square().mT
        return self.neurons.inner_mean @ self.inputs.mT, variance.clamp_min(_LEAST**2).sqrt()

    @cached_property
    def moments(self) -> Moments:
        """Moments of sigma(<b, x>), (..., J, P) each."""
        return self.activation.moments(*self.pre_activations)

    @cached_property
    def neuron_means(self) -> Tensor:
        """E phi, (..., J, P, C)."""
        return self.activation.mean(*self.pre_activations).unsqueeze(-1) * self.neurons.outer_mean.unsqueeze(-2)

    @cached_property
    def neuron_covariances(self) -> Tensor:
        """Cov phi = diag(outer_scale^2) E r^2 + outer_mean outer_mean^T Var r, (..., J, P, C, C)."""
        outer = self.neurons.outer_mean
        products = (outer.unsqueeze(-1) * outer.unsqueeze(-2)).unsqueeze(-3)  # (..., J, 1, C, C)
        own = torch.diag_embed(self.neurons.outer_scale.square()).unsqueeze(-3)
        return own * self.moments.second[..., None, None] + products * self.moments.variance[..., None, None]

    @cached_property
    def mean(self) -> Tensor:
        """E f, (..., P, C); the same at every width."""
        return self.neurons.average(self.neuron_means, behind=2)

    @cached_property
    def covariance(self) -> Tensor:
        """Cov f = (1/N) times the average of Cov phi, (..., P, C, C)."""
        return self.neurons.average(self.neuron_covariances, behind=3) / self.width[..., None, None, None]

    @cached_property
    def total_variance(self) -> Tensor:
        """tr Cov f, (..., P), without the matrices."""
        own = self.neurons.outer_scale.square().sum(-1, keepdim=True) * self.moments.second
        shared = self.neurons.outer_mean.square().sum(-1, keepdim=True) * self.moments.variance
        return self.neurons.average(own + shared, behind=1) / self.width[..., None]

    def log_characteristic(self, times: Tensor) -> Tensor:
        """log E exp(i t (f - E f)) = N times the average of log E exp(i (t/N) (phi - E phi)), (T,) -> (..., P, T).

        For one output. It vanishes as 1/N, and at infinite width.
        """
        width = self.width[..., None, None, None]  # against (..., J, P, T)
        mean, scale = (value.unsqueeze(-1) for value in self.pre_activations)
        outer_mean, outer_scale = self.neurons.outer_mean.unsqueeze(-1), self.neurons.outer_scale.unsqueeze(-1)
        per_row = (mean[..., :1, :] + width).numel()
        rows = max(1, min(_BUDGET // per_row, len(self.inputs)))
        blocks = []
        for row_mean, row_scale in zip(torch.split(mean, rows, -2), torch.split(scale, rows, -2), strict=True):
            pieces = []
            for part in torch.split(times, max(1, _BUDGET // (rows * per_row))):
                values = self.activation.characteristic(outer_mean, outer_scale, row_mean, row_scale, part / width)
                pieces.append(self.neurons.average(complex_log1p(values), behind=2))
            blocks.append(torch.cat(pieces, -1))
        finite = torch.where(self.width.isinf(), torch.zeros_like(self.width), self.width)
        return torch.cat(blocks, -2) * finite[..., None, None]


class Loss(ABC):
    """A loss l(f, y) = -log p(y | f) - log Z of rows of outputs f (..., P, C), convex and smooth in f."""

    @property
    @abstractmethod
    def smoothness(self) -> float:
        """The largest eigenvalue beta of the curvature over all f."""

    @abstractmethod
    def checked(self, targets: Tensor, outputs: int) -> Tensor:
        """Convert targets to the form that the other functions take; raise a ValueError if that is impossible."""

    @abstractmethod
    def value(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """l, (..., P, C) -> (..., P)."""

    @abstractmethod
    def slope(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Gradient of l in f, (..., P, C)."""

    @abstractmethod
    def curvature(self, outputs: Tensor) -> Tensor:
        """Hessian of l in f, (..., P, C, C), which does not depend on the target for these losses."""

    def excess(self, law: OutputLaw) -> Tensor:
        """E l(f, y) - l(E f, y) >= 0 under the law of f, (..., P), without subtraction; here to second order."""
        return self.second_order(law)

    def log_normaliser(self, outputs: int) -> float:
        """log Z of one row, log p(y | f) = -l(f, y) - log Z; here 0."""
        return 0.0

    def second_order(self, law: OutputLaw) -> Tensor:
        """1/2 tr(curvature at E f times Cov f), (..., P): the excess up to O(1/N^2)."""
        return 0.5 * (self.curvature(law.mean) * law.covariance).sum((-1, -2))


@dataclass(frozen=True)
class Square(Loss):
    """l = precision/2 |y - f|^2: Gaussian noise of variance 1 / precision. The default is |y - f|^2, variance 1/2.

    **Math**: E l = precision/2 (|y - E f|^2 + tr Cov f), exactly.

    >>> Square().value(torch.zeros(1, 1), torch.tensor([[3.0]]))
    tensor([9.])
    """

    precision: float = 2.0

    def __post_init__(self) -> None:
        positive("Square.precision", self.precision)

    @property
    def smoothness(self) -> float:
        return self.precision

    def checked(self, targets: Tensor, outputs: int) -> Tensor:
        rows = targets.unsqueeze(-1) if targets.dim() == 1 else targets
        if rows.dim() != 2 or rows.shape[-1] != outputs:
            raise ValueError(f"Square: targets must be (P, {outputs}). Got {shown(targets)}.")
        return rows.to(torch.float64)

    def value(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return 0.5 * self.precision * (targets - outputs).square().sum(-1)

    def slope(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return self.precision * (outputs - targets)

    def curvature(self, outputs: Tensor) -> Tensor:
        return self.precision * torch.diag_embed(torch.ones_like(outputs))

    def excess(self, law: OutputLaw) -> Tensor:
        return 0.5 * self.precision * law.total_variance

    def log_normaliser(self, outputs: int) -> float:
        return 0.5 * outputs * math.log(2.0 * math.pi / self.precision)


_LAST = 13.0  # 1 / sinh(pi t) is below 1e-17 beyond
_DECAY = 40.0  # the error of the midpoint rule is exp(-_DECAY)


@dataclass(frozen=True)
class Logistic(Loss):
    """l = log(1 + exp(-y f)) for y = 1 or -1 and one output.

    **Math**: log cosh(f/2) is the integral over t > 0 of (1 - cos(t f)) / (t sinh(pi t)), so that with m = E f and
    c(t) = E exp(i t (f - m)) the excess E l - l(m) is that of -Re(e^(i t m) (c(t) - 1)) / (t sinh(pi t)), whatever y
    is. The characteristic function c is a product over the neurons. The midpoint rule has an error of exp(-2 pi / step)
    for a function that is analytic near the real axis.

    **Limit**: a relative error of 1e-10 where the excess is above 1e-6.

    **Cost**: a characteristic function of every neuron and row at a hundred values of t (more where |f| is large).

    **References**: Gradshteyn and Ryzhik, 3.981.1, for the derivative in f: tanh(f/2) / 2 is the sine transform of
    1 / sinh(pi t).

    >>> Logistic().value(torch.zeros(1, 1), torch.ones(1, 1))
    tensor([0.6931])
    """

    @property
    def smoothness(self) -> float:
        return 0.25

    def checked(self, targets: Tensor, outputs: int) -> Tensor:
        rows = (targets.unsqueeze(-1) if targets.dim() == 1 else targets).to(torch.float64)
        if outputs != 1 or rows.dim() != 2 or rows.shape[-1] != 1:
            raise ValueError(f"Logistic takes one output and targets (P,). Got {outputs} outputs, {shown(targets)}.")
        if not bool((rows.abs() == 1.0).all()):
            raise ValueError(
                f"Logistic: targets must be 1 or -1. Got {shown(targets)}. For 0 and 1 use 2 * targets - 1."
            )
        return rows

    def value(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return F.softplus(-targets * outputs).squeeze(-1)

    def slope(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return -targets * torch.sigmoid(-targets * outputs)

    def curvature(self, outputs: Tensor) -> Tensor:
        return (torch.sigmoid(outputs) * torch.sigmoid(-outputs)).unsqueeze(-1)

    def excess(self, law: OutputLaw) -> Tensor:
        mean = law.mean  # (..., P, 1)
        with torch.no_grad():  # the step resolves the oscillation of e^(i t f)
            reach = (mean.squeeze(-1).abs() + 8.0 * law.total_variance.sqrt()).max().item()
        count = math.ceil(_LAST * (_DECAY + reach) / (2.0 * math.pi))
        step = _LAST / count
        times = step * (torch.arange(count, dtype=torch.float64, device=mean.device) + 0.5)
        logarithm = law.log_characteristic(times)  # (..., P, T)
        difference = complex_expm1(logarithm.real, logarithm.imag)
        phase = times * mean
        integrand = phase.sin() * difference.imag - phase.cos() * difference.real
        return (integrand * (step / (times * torch.sinh(math.pi * times)))).sum(-1)


@dataclass(frozen=True)
class Softmax(Loss):
    """l = log sum over c of exp(f_c) - f_y for classes y = 0 .. C - 1.

    **Math**: the excess to second order, 1/2 tr((diag p - p p^T) Cov f) with p = softmax(E f).

    **Limit**: the error is O(1/N^2), beside an excess of O(1/N). `sampled_excess` estimates the rest.

    >>> Softmax().value(torch.zeros(1, 4), torch.tensor([2]))
    tensor([1.3863])
    """

    @property
    def smoothness(self) -> float:
        return 0.5

    def checked(self, targets: Tensor, outputs: int) -> Tensor:
        labels = targets.to(torch.int64)
        if outputs < 2 or targets.dim() != 1 or not bool((labels == targets).all()):
            raise ValueError(
                f"Softmax takes 2 outputs or more and class numbers (P,). Got {outputs} outputs, {shown(targets)}."
            )
        if not bool(((labels >= 0) & (labels < outputs)).all()):
            raise ValueError(f"Softmax: targets must lie in 0..{outputs - 1}. Got {shown(targets)}.")
        return labels

    def value(self, outputs: Tensor, targets: Tensor) -> Tensor:
        chosen = outputs.gather(-1, targets.unsqueeze(-1).expand(*outputs.shape[:-1], 1)).squeeze(-1)
        return outputs.logsumexp(-1) - chosen

    def slope(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return torch.softmax(outputs, -1) - F.one_hot(targets, outputs.shape[-1]).to(outputs.dtype)

    def curvature(self, outputs: Tensor) -> Tensor:
        probabilities = torch.softmax(outputs, -1)
        return torch.diag_embed(probabilities) - probabilities.unsqueeze(-1) * probabilities.unsqueeze(-2)


_DRAWS_BUDGET = 2**21  # numbers of a block of draws


class Sampled(NamedTuple):
    """An estimate and its standard error, (P,) each."""

    value: Tensor
    standard_error: Tensor


def sampled_excess(loss: Loss, law: OutputLaw, targets: Tensor, draws: int, key: Key) -> Sampled:
    """Estimate E l(f, y) - l(E f, y) for each row from `draws` networks of the law's width.

    **Math**: with d = f - E f, g and H the slope and curvature of l at E f, the average of l(f) - l(E f) - <g, d> -
    d^T H d / 2 over draws, plus 1/2 tr(H Cov f). What is averaged is of third order in d: O(N^-3/2), where l itself
    varies as N^-1/2.

    **Limit**: unbiased. For one network: neurons without leading axes, and a width of which every share is a whole
    number.

    **Cost**: draws times width times rows.
    """
    positive_whole("sampled_excess: draws", draws)
    mean, curvature = law.mean, loss.curvature(law.mean)
    targets = loss.checked(targets, law.neurons.num_outputs)
    base, slope = loss.value(mean, targets), loss.slope(mean, targets)
    neurons, (rows, inputs), kinds = law.neurons, law.inputs.shape, _kinds(law.neurons, law.width)
    block = max(1, _DRAWS_BUDGET // (len(kinds) * (rows + inputs + neurons.num_outputs)))

    def drawn(centres: Tensor, scales: Tensor, count: int, key: Key) -> Tensor:
        shape = (count, len(kinds), centres.shape[-1])
        return centres[kinds] + scales[kinds] * key.normal(shape, torch.float64, centres.device)

    residuals = []
    for start in range(0, draws, block):
        count, own = min(block, draws - start), key.fold(start)
        outer = drawn(neurons.outer_mean, neurons.outer_scale, count, own.fold("outer"))
        inner = drawn(neurons.inner_mean, neurons.inner_scale, count, own.fold("inner"))
        outputs = law.activation(inner @ law.inputs.mT).mT @ outer / len(kinds)  # (S, P, C)
        deviation = outputs - mean
        quadratic = (deviation * (curvature @ deviation.unsqueeze(-1)).squeeze(-1)).sum(-1)
        residuals.append(loss.value(outputs, targets) - base - (slope * deviation).sum(-1) - 0.5 * quadratic)
    rest = torch.cat(residuals)  # (draws, P)
    return Sampled(rest.mean(0) + loss.second_order(law), rest.std(0) / draws**0.5)


def _kinds(neurons: Neurons, width: Tensor) -> Tensor:
    """The index of the kind of each of the N neurons, (N,)."""
    shares = neurons.average(torch.eye(neurons.count, dtype=torch.float64, device=neurons.inner_mean.device), behind=1)
    copies = shares * width
    whole = copies.round()
    if neurons.inner_mean.dim() != 2 or width.dim() or not bool((copies - whole).abs().max() < 1e-6):
        raise ValueError(
            "sampled_excess takes one network at a time, with a whole number of neurons of each kind. "
            f"Got a width of {shown(width)} and shares {shown(shares)}."
        )
    return torch.repeat_interleave(torch.arange(neurons.count, device=whole.device), whole.long())
