"""Division of Fourier transforms, held back where the family leaves nothing to divide by (theory 002-13)."""

import math

import torch
from torch import Tensor

from posterity.priors.penalty.inversion.expansion import Expansion
from posterity.priors.penalty.inversion.member import Member
from posterity.priors.penalty.inversion.polynomial import invert_polynomial
from posterity.priors.penalty.inversion.recognition import fit_expansion
from posterity.priors.penalty.inversion.spline import Spline, interpolate

_WINDOW = 1.5  # widths of the window's edges over that of the family: below 1 the inverse raises them without end
_LAST_POINTS = 8  # by which the values are continued beyond the grid


def invert_fourier(mu: Tensor, target: Tensor, member: Member, tikhonov: float = 1e-4) -> Spline:
    """g with E g(mu + X) close to target (N,) at mu (N,), equidistant; good away from the ends of the grid only.

    The best quadratic is inverted exactly. What is left is continued beyond the grid by the cubics through its ends,
    faded out there by a window with Gaussian edges, transformed, multiplied by conj(phi) / (|phi|^2 + tikhonov) with
    phi(k) = E exp(i k X), and transformed back. `inner` says where the continuation is not felt.
    """
    spacing = float(mu[1] - mu[0])
    quadratic = fit_expansion(mu, target, 2, ())
    left = target - quadratic(mu)
    width = _WINDOW * member.spread
    extra = math.ceil(10.0 * width / spacing)
    steps = spacing * torch.arange(1, extra + 1, dtype=torch.float64, device="cpu")
    window = torch.special.ndtr(5.0 - steps / width)
    before, after = (window * _continued(values, spacing, steps) for values in (left.flip(0), left))
    padded = torch.cat([before.flip(0), left, after])
    frequency = 2.0 * math.pi * torch.fft.fftfreq(len(padded), d=spacing, dtype=torch.float64, device="cpu")
    phi = member.characteristic(frequency)
    spectrum = torch.fft.fft(padded) * phi.conj() / (phi.abs().square() + tikhonov)
    wavy = torch.fft.ifft(spectrum).real[extra : extra + len(mu)]
    return interpolate(mu, wavy + Expansion(invert_polynomial(quadratic.coefficients, member))(mu))


def inner(mu: Tensor) -> Tensor:
    """Which points of the grid, the middle three fifths, are away from the continuation: (N,) bool."""
    edge = 0.2 * (mu[-1] - mu[0])
    return (mu >= mu[0] + edge) & (mu <= mu[-1] - edge)


def _continued(values: Tensor, spacing: float, steps: Tensor) -> Tensor:
    """The cubic through the last values, at `steps` beyond the last."""
    before = spacing * torch.arange(1 - _LAST_POINTS, 1, dtype=torch.float64, device="cpu")
    return fit_expansion(before, values[-_LAST_POINTS:], 3, ())(steps)
