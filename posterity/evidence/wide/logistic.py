"""The logistic loss."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from posterity.errors import shown
from posterity.evidence.wide.loss import Loss
from posterity.evidence.wide.output_law import OutputLaw
from posterity.numerics.complex_logarithm import complex_expm1

_LAST = 13.0  # 1 / sinh(pi t) is below 1e-17 beyond
_DECAY = 40.0  # the error of the midpoint rule is exp(-_DECAY)


@dataclass(frozen=True)
class Logistic(Loss):
    """l = log(1 + exp(-y f)) for y = 1 or -1 and one output.

    **Math**: log cosh(f/2) is the integral over t > 0 of (1 - cos(t f)) / (t sinh(pi t)), so that with m = E f and
    c(t) = E exp(i t (f - m)) the excess E l - l(m) is that of -Re(e^(i t m) (c(t) - 1)) / (t sinh(pi t)), whatever y
    is. The characteristic function c is a product over the neurons. By the midpoint rule, whose error falls as exp(-2
    pi / step) for a function that is analytic near the real axis.

    **Limit**: exact to 1e-10 of its value while m is not so far out that the excess itself is below 1e-6.

    **Cost**: a hundred times (more where |f| is large), at each of which every neuron has a characteristic function of
    every row.

    **References**: Gradshteyn and Ryzhik, 3.981.1, for the derivative in f: tanh(f/2) / 2 is the sine transform of
    1 / sinh(pi t).

    >>> Logistic().value(torch.zeros(1, 1), torch.ones(1, 1))
    tensor([0.6931])
    """

    @property
    def smoothness(self) -> float:
        """1/4."""
        return 0.25

    def checked(self, targets: Tensor, outputs: int) -> Tensor:
        """Targets (P, 1) of signs."""
        rows = (targets.unsqueeze(-1) if targets.dim() == 1 else targets).to(torch.float64)
        if outputs != 1 or rows.dim() != 2 or rows.shape[-1] != 1:
            raise ValueError(f"Logistic takes one output and targets (P,). Got {outputs} outputs, {shown(targets)}.")
        if not bool((rows.abs() == 1.0).all()):
            raise ValueError(
                f"Logistic: targets must be 1 or -1. Got {shown(targets)}. For 0 and 1 use 2 * targets - 1."
            )
        return rows

    def value(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """log(1 + exp(-y f))."""
        return F.softplus(-targets * outputs).squeeze(-1)

    def slope(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """-y / (1 + exp(y f))."""
        return -targets * torch.sigmoid(-targets * outputs)

    def curvature(self, outputs: Tensor) -> Tensor:
        """p (1 - p)."""
        return (torch.sigmoid(outputs) * torch.sigmoid(-outputs)).unsqueeze(-1)

    def excess(self, law: OutputLaw) -> Tensor:
        """By the characteristic function of f."""
        mean = law.mean  # (..., P, 1)
        with torch.no_grad():  # steps that follow the turns of e^(i t f)
            reach = (mean.squeeze(-1).abs() + 8.0 * law.total_variance.sqrt()).max().item()
        count = math.ceil(_LAST * (_DECAY + reach) / (2.0 * math.pi))
        step = _LAST / count
        times = step * (torch.arange(count, dtype=torch.float64, device=mean.device) + 0.5)
        logarithm = law.log_characteristic(times)  # (..., P, T)
        difference = complex_expm1(logarithm.real, logarithm.imag)
        turn = times * mean
        integrand = turn.sin() * difference.imag - turn.cos() * difference.real
        return (integrand * (step / (times * torch.sinh(math.pi * times)))).sum(-1)

    def log_normaliser(self, outputs: int) -> float:
        """0."""
        return 0.0
