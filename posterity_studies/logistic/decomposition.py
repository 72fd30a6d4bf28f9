"""log p(y) = ELBO(q) + KL(q || posterior), both sides by quadrature of their own."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from posterity.posteriors import Linearized
from posterity_studies.logistic.exact import Exact, log_density
from posterity_studies.logistic.regression import Regression

_REACH, _POINTS = 9.0, 181  # standard deviations of q, points of an axis


@dataclass(frozen=True)
class Decomposition:
    """The parts for one Gaussian q, in nats: ELBO = E_q log p(y, w) + entropy, and KL(q || p(w | y))."""

    name: str
    expected_log_joint: float
    entropy: float
    divergence: float

    @property
    def elbo(self) -> float:
        """The lower bound of the log evidence."""
        return self.expected_log_joint + self.entropy


def decompositions(regression: Regression, exact: Exact, variational: Mapping[str, Linearized]) -> list[Decomposition]:
    """For the Laplace Gaussian, narrower and wider ones, those that maximise the ELBO, and the exact moments."""
    mode, covariance = regression.mode.theta, regression.covariance
    return [
        _decomposition("Laplace,\ncovariance / 4", regression, exact, mode, covariance / 4),
        _decomposition("Laplace,\ncovariance \N{MULTIPLICATION SIGN} 4", regression, exact, mode, covariance * 4),
        _decomposition("Laplace", regression, exact, mode, covariance),
        *(
            _decomposition(name.replace(", ", ",\n"), regression, exact, q.point(), q.gaussian.precision.covariance())
            for name, q in variational.items()
        ),
        _decomposition("Exact\nmoments", regression, exact, exact.mean, exact.covariance),
    ]


def _decomposition(name: str, regression: Regression, exact: Exact, mean: Tensor, covariance: Tensor) -> Decomposition:
    """E_q log p(y, w) on a grid along the axes of q; the divergence from E_q [log q - log p(w | y)] on a shifted one.

    The entropy is the closed form, and the log evidence inside log p(w | y) comes from the grid of the posterior, so
    that ELBO + KL meets the log evidence only if all of them are right.
    """
    factor = torch.linalg.cholesky(covariance)
    size = len(mean)
    log_scale = float(factor.diagonal().log().sum())
    weights, mass, _ = _grid(mean, factor, _POINTS)
    expected_log_joint = float(mass @ log_density(regression, weights))
    entropy = 0.5 * size * math.log(2 * math.pi * math.e) + log_scale
    weights, mass, noise = _grid(mean, factor, _POINTS + 20)
    log_q = -0.5 * noise.square().sum(1) - 0.5 * size * math.log(2 * math.pi) - log_scale
    log_posterior = log_density(regression, weights) - exact.log_evidence
    return Decomposition(name, expected_log_joint, entropy, float(mass @ (log_q - log_posterior)))


def _grid(mean: Tensor, factor: Tensor, points: int) -> tuple[Tensor, Tensor, Tensor]:
    """Weights (G, 2), their masses under q (G,), and the standardised weights (G, 2)."""
    axis = torch.linspace(-_REACH, _REACH, points, dtype=torch.float64)
    noise = torch.cartesian_prod(axis, axis)
    mass = torch.exp(-0.5 * noise.square().sum(1))
    return mean + noise @ factor.T, mass / mass.sum(), noise
