"""Binary labels from normal quantiles."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from posterity.likelihoods.bernoulli import binary_labels, labels_only
from posterity.likelihoods.likelihood import Entrywise, diagonal_information
from posterity.numerics.random import Key

_FAR = 20.0  # beyond, derivatives of erfcx lose digits, and nine terms of the series at infinity are exact
_HALF_LOG_TWO_PI = 0.5 * math.log(2.0 * math.pi)


@dataclass(frozen=True)
class Probit(Entrywise):
    """A label 0 or 1 that says whether a network output with standard normal noise is positive.

    **Math**: p(y = 1 | f) = Phi(f), the normal distribution function; log p = log Phi(z) with z = (2 y - 1) f, summed
    over the event; labels that are missing (NaN, or -100 among integers) are left out. Outputs are (..., N, 1) or
    (..., N) for one label in each row, (..., N, *event) for several. With
    rho(z) = N(z) / Phi(z) the Hessian of -log p in f is rho(z) (z + rho(z)), between 0 and 1, and the Fisher
    information rho(f) rho(-f). Over a Gaussian output of mean m and variance v, E Phi(f) = Phi(m / sqrt(1 + v)).

    **Limit**: exact, in logs: finite at any output. A label that contradicts f costs f^2 / 2 nats, where `Bernoulli`
    takes |f|: mislabelled rows weigh more. Weights are about 0.6 times as large as under `Bernoulli`.

    **Cost**: one pass over the outputs.

    **References**: Rasmussen and Williams (2006), Gaussian processes for machine learning, eq. 3.16, 3.77, 3.82-3.85.

    **Example**:

    >>> likelihood = Probit()
    >>> likelihood.log_prob(torch.tensor([[0.0], [-40.0]]), torch.tensor([[1.0], [1.0]]))
    tensor([-6.9315e-01, -8.0461e+02])
    """

    link = "probit"

    def check(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return targets 0/1 or NaN with the shape and dtype of outputs (N, *event); (N,) and (N, 1) are the same."""
        return binary_labels("Probit", outputs, targets)

    def _entries(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return _log_phi((2.0 * targets - 1.0) * outputs)

    def sample(self, outputs: Tensor, key: Key) -> Tensor:
        return torch.bernoulli(self.mean(outputs), generator=key.generator(outputs.device))

    def mean(self, outputs: Tensor) -> Tensor:
        probability: Tensor = torch.special.ndtr(outputs)
        return probability

    def variance(self, outputs: Tensor) -> Tensor:
        return self.mean(outputs) * self.mean(-outputs)  # 1 - p, without cancelling

    def class_log_probs(self, outputs: Tensor) -> Tensor:
        quantiles = labels_only(outputs.double(), leading=2)
        return torch.stack([_log_phi(-quantiles), _log_phi(quantiles)], dim=2)

    def _hessian(self, outputs: Tensor, targets: Tensor) -> Tensor:
        entries = _curvature((2.0 * targets - 1.0) * outputs)
        return diagonal_information("Probit", entries, targets.dim() - 1)

    def output_fisher(self, outputs: Tensor, event_dims: int | None = None) -> Tensor:
        entries = (_slope(outputs.double()) * _slope(-outputs.double())).to(outputs.dtype)
        return diagonal_information("Probit", entries, 1 if event_dims is None else event_dims)

    def tilted_moments(self, mean: Tensor, variance: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        sign, root = 2.0 * targets.reshape(mean.shape) - 1.0, (1.0 + variance).sqrt()
        z = sign * mean / root
        shrunk = 1.0 - variance / (1.0 + variance) * _curvature(z)
        return _log_phi(z), mean + sign * variance * _slope(z) / root, variance * shrunk


def _far_below(z: Tensor) -> tuple[Tensor, Tensor]:
    """Return z, at most -20, and d = u - 3 u^2 + 15 u^3 - ... at u = 1 / z^2, for which Phi(z) = N(z) (1 - d) / -z."""
    far = z.clamp(max=-_FAR)
    u, missing = far**-2, torch.zeros_like(z)
    for term in range(9, 0, -1):  # Horner's rule
        missing = (2 * term - 1) * u * (1.0 - missing)
    return far, missing


def _log_phi(z: Tensor) -> Tensor:
    """Return log Phi(z), with derivatives of any order that keep their digits at z far below 0.

    torch's own log_ndtr has neither those nor a rule for vmap.
    """
    far, missing = _far_below(z)
    tail = -0.5 * far.square() - (-far).log() - _HALF_LOG_TWO_PI + torch.log1p(-missing)
    below = z.clamp(-_FAR, -1.0)
    side = (0.5 * torch.special.erfcx(-below / math.sqrt(2.0))).log() - 0.5 * below.square()
    centre = torch.log1p(-0.5 * torch.erfc(z.clamp(min=-1.0) / math.sqrt(2.0)))
    return torch.where(z < -_FAR, tail, torch.where(z < -1.0, side, centre))


def _slope(z: Tensor) -> Tensor:
    """Return rho(z) = N(z) / Phi(z), the derivative of log Phi."""
    mills: Tensor = torch.special.erfcx(-z / math.sqrt(2.0))
    return math.sqrt(2.0 / math.pi) / mills


def _curvature(z: Tensor) -> Tensor:
    """Return rho(z) (z + rho(z)), minus the second derivative of log Phi, in float64 inside."""
    wide = z.double()
    far, missing = _far_below(wide)
    near = _slope(wide)
    tail = far.square() * missing / (1.0 - missing).square()  # z + rho without cancelling
    return torch.where(wide < -_FAR, tail, near * (wide + near)).to(z.dtype)
