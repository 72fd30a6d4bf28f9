"""Two pictures of one number: the Laplace approximation of a density, and the probit of a sigmoid."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from posterity.curvature import Hessian
from posterity.inference import infer
from posterity.methods import MAP, Laplace
from posterity.model import Density
from posterity.optim import SGD
from posterity.posteriors import Gaussian

SHAPE, RATE = 7.0, 2.0  # of the Gamma variable whose logarithm is u


@dataclass(frozen=True)
class Curve:
    """A density exp(k u - r e^u) on the line, and its Laplace approximation N(mode, 1 / precision)."""

    mode: float
    precision: float
    laplace_log_normaliser: float
    exact_log_normaliser: float

    def log_density(self, u: Tensor) -> Tensor:
        """The exact log density, normalised."""
        return SHAPE * u - RATE * u.exp() - self.exact_log_normaliser

    def laplace_log_density(self, u: Tensor) -> Tensor:
        """The log density of the Gaussian at the mode."""
        return 0.5 * (math.log(self.precision / (2 * math.pi)) - self.precision * (u - self.mode) ** 2)


def laplace_curve() -> Curve:
    """Fit MAP and Laplace to exp(k u - r e^u), the log of a Gamma variable, whose normaliser is Gamma(k) / r^k."""
    density = Density(lambda u: SHAPE * u - RATE * u.exp(), {"u": ()}, dtype=torch.float64)
    method = MAP(steps=300, batch_size=None, optimizer=SGD(step_size=0.1, momentum=0.2))
    mode, _ = infer(method, density, None, progress=False)
    fitted, _ = infer(Laplace(tuning=None, curvature=Hessian()), density, None, start=mode, progress=False)
    assert isinstance(fitted, Gaussian)
    assert fitted.log_evidence is not None
    return Curve(
        mode=float(fitted.mean),
        precision=1.0 / float(fitted.variance),
        laplace_log_normaliser=float(fitted.log_evidence),
        exact_log_normaliser=math.lgamma(SHAPE) - SHAPE * math.log(RATE),
    )


@dataclass(frozen=True)
class ProbitError:
    """The largest distance of Phi(a sqrt(pi / 8)) from sigmoid(a), and the a > 0 where it is."""

    largest: float
    at: float


def probit_difference(a: Tensor) -> Tensor:
    """Phi(a sqrt(pi / 8)) - sigmoid(a)."""
    normal: Tensor = torch.special.ndtr(a * math.sqrt(math.pi / 8))
    return normal - torch.sigmoid(a)


def probit_error() -> ProbitError:
    """On a grid of step 1e-4, which the flat top makes exact to 1e-9."""
    a = torch.linspace(0.0, 10.0, 100_001, dtype=torch.float64)
    largest, index = probit_difference(a).abs().max(0)
    return ProbitError(float(largest), float(a[index]))
