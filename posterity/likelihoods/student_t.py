"""Student-t observation noise, for regression that is robust to outliers."""

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from posterity.errors import positive
from posterity.likelihoods.likelihood import diagonal_information
from posterity.likelihoods.scaled import Scaled
from posterity.numerics.random import Key


@dataclass(frozen=True, eq=False)
class StudentT(Scaled):
    """Independent Student-t noise around each network output, for data with outliers.

    **Math**: y = f + scale * t with t of nu = `degrees` degrees of freedom, log p = sum over the event of
    -(nu + 1) / 2 log(1 + z^2 / nu) - log scale + log Gamma((nu + 1) / 2) - log Gamma(nu / 2) - log(nu pi) / 2,
    z = (y - f) / scale. Per entry, with r = y - f: Hessian of -log p in f is
    (nu + 1) (nu scale^2 - r^2) / (nu scale^2 + r^2)^2, negative beyond |r| = scale sqrt(nu); Fisher information is
    (nu + 1) / ((nu + 3) scale^2). Shapes, `learn` and `log_scale_prior` are as in `Gaussian`; `degrees` is fixed.

    **Limit**: `Gaussian` as nu goes to infinity. An outlier at distance d costs (nu + 1) log d nats, not d^2 / 2.
    `scale` is not the standard deviation: Var[y | f] = scale^2 nu / (nu - 2), infinite up to nu = 2. `mean` is f, the
    median, also up to nu = 1 where there is no mean. The posterior may have several modes.

    **Cost**: one pass over the outputs.

    **References**: Lange, Little and Taylor (1989), Robust statistical modeling using the t distribution;
    Bailey (1994), Polar generation of random variates with the t-distribution.

    **Example**:

    >>> likelihood = StudentT(degrees=4.0, scale=1.0)
    >>> likelihood.log_prob(torch.zeros(2, 1), torch.tensor([[0.0], [10.0]]))
    tensor([-0.9808, -9.1261])
    >>> likelihood.output_hessian(torch.zeros(1, 1), torch.tensor([[10.0]])) < 0
    tensor([[[True]]])
    """

    degrees: float = 4.0
    scale: float | tuple[float, ...] | Tensor = 1.0
    learn: bool = False
    log_scale_prior: tuple[float, float] | None = None

    def __post_init__(self) -> None:
        given: Any = self.degrees
        positive("StudentT.degrees", "a tensor" if isinstance(given, Tensor) else given)
        object.__setattr__(self, "degrees", float(self.degrees))
        super().__post_init__()

    @property
    def _unit_fisher(self) -> float:
        return (self.degrees + 1.0) / (self.degrees + 3.0)

    def _entries(self, outputs: Tensor, targets: Tensor) -> Tensor:
        scale, nu = self._aligned(outputs), self.degrees
        log_scale = scale.log() if isinstance(scale, Tensor) else math.log(scale)
        constant = math.lgamma(0.5 * (nu + 1.0)) - math.lgamma(0.5 * nu) - 0.5 * math.log(nu * math.pi)
        kernel = -0.5 * (nu + 1.0) * torch.log1p(((targets - outputs) / scale).square() / nu)
        entries: Tensor = kernel - log_scale + constant
        return entries

    def sample(self, outputs: Tensor, key: Key) -> Tensor:
        shape, nu = outputs.shape, self.degrees
        radius = 1.0 - key.fold("radius").uniform(shape, torch.float64, outputs.device)  # in (0, 1]
        angle = 2.0 * math.pi * key.fold("angle").uniform(shape, torch.float64, outputs.device)
        # Bailey (1994): u^(-2 / nu) - 1 as expm1, which keeps its digits for large nu.
        t = torch.sqrt(nu * torch.expm1(-2.0 / nu * radius.log())) * angle.cos()
        return outputs + self._aligned(outputs) * t.to(outputs.dtype)

    def variance(self, outputs: Tensor) -> Tensor:
        ratio = self.degrees / (self.degrees - 2.0) if self.degrees > 2.0 else math.inf
        return torch.zeros_like(outputs) + ratio * self._aligned(outputs) ** 2

    def _hessian(self, outputs: Tensor, targets: Tensor) -> Tensor:
        scale, nu = self._aligned(outputs), self.degrees
        square = ((targets - outputs) / scale).square()
        entries = (nu + 1.0) * (nu - square) / (nu + square).square() / scale**2
        return diagonal_information("StudentT", entries, targets.dim() - 1)

    def peaks(self, targets: Tensor) -> Tensor:
        return targets

    def cdf(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Interpolate a table of the tail, to about 1e-14."""
        z, root = ((targets - outputs) / self._aligned(outputs)).double(), math.sqrt(self.degrees)
        step, table = _tail_table(self.degrees)
        position = (root / step * torch.asinh(z.abs() / root)).clamp(max=float(len(table)))
        cell = position.floor().nan_to_num(0.0).clamp(max=len(table) - 1.0).long()
        *coefficients, tail = torch.from_numpy(table).to(z.device)[cell].unbind(-1)
        for coefficient in reversed(coefficients):  # Horner's rule
            tail = coefficient + (position - cell) * tail
        return torch.where(z < 0, tail, 1.0 - tail).to(outputs.dtype)


@lru_cache(maxsize=16)
def _tail_table(nu: float) -> tuple[float, NDArray[np.float64]]:
    """Tabulate the tail P(T > t) at t = sqrt(nu) sinh(w / sqrt(nu)) by quintic Hermite polynomials in w.

    Returns the step and the coefficients (cells, 6), lowest first, in the position within a cell, 0 to 1; values,
    slopes and second derivatives are exact at both ends. In w the density is proportional to cosh(w / sqrt(nu))^-nu,
    smooth on the scale min(1, sqrt(nu)) for every nu, and falls at least exponentially, so few cells are needed. The
    table ends where the density is e^-70 of its value at 0.
    """
    root = math.sqrt(nu)
    end = root * (math.acosh(math.exp(70.0 / nu)) if nu > 0.1 else 70.0 / nu + math.log(2.0))
    step = 0.01 * min(1.0, root)
    w = step * np.arange(math.ceil(end / step) + 1, dtype=np.float64)

    def density(w: Any) -> NDArray[np.float64]:
        v = w / root  # log cosh(v) in two forms, for small and large v
        small, large = 0.5 * np.log1p(np.sinh(np.minimum(v, 20.0)) ** 2), v - math.log(2.0)
        return np.asarray(np.exp(-nu * np.where(v < 20.0, small, large)))

    nodes, weights = np.polynomial.legendre.leggauss(6)
    cells = 0.5 * (density(w[:-1, None] + 0.5 * step * (1.0 + nodes)) @ weights)  # integrals, in units of the step
    values = np.append(np.cumsum(cells[::-1])[::-1], 0.0)
    slopes = -density(w)
    bends = -slopes * root * np.tanh(w / root) * step
    rise, v0, v1, b0, b1 = values[1:] - values[:-1], slopes[:-1], slopes[1:], bends[:-1], bends[1:]
    cubic = 10.0 * rise - 6.0 * v0 - 4.0 * v1 - 1.5 * b0 + 0.5 * b1
    quartic = -15.0 * rise + 8.0 * v0 + 7.0 * v1 + 1.5 * b0 - b1
    quintic = 6.0 * rise - 3.0 * (v0 + v1) - 0.5 * (b0 - b1)
    table = np.stack([values[:-1], v0, 0.5 * b0, cubic, quartic, quintic], axis=-1)
    return step, table * (0.5 / values[0])  # the tail from 0 is one half
