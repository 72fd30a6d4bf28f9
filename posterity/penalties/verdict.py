"""What is known about a penalty once its prior has been asked for."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from posterity.priors.prior import Prior

Route = Literal["catalogue", "polynomial", "trigonometric", "spline", "fourier"]


@dataclass(frozen=True, eq=False)
class Verdict:
    """Whether a penalty r_nu(mu) is KL(beta_{mu,nu} || alpha) + K for one prior alpha, and for which.

    `satisfies_star`: there is such a prior (by the routes "spline" and "fourier", which fit: to within `residual`).
    `kappa`: the integral of exp(A), inf where it diverges, nan where there is no one A; `K` = -log kappa, which is
    finite also where kappa is beyond the largest number or below the least.
    `residual`: max |KL + K - r| over the grid. `noise_amplification`: by how much a small error of r grows in log
    alpha (0 where nothing was inverted numerically). `log_alpha`: t (...) -> log alpha(t) (...), normalised where
    kappa is finite (else A itself, or the closest that was found). `prior`: alpha as a prior of this library, where it
    is one of them. `explanation`: the finding in plain words. `nearest`: what to use instead, where there is no prior.
    `decided`: False where none was found, but there may be one (or there is, but beyond all numbers).
    """

    satisfies_star: bool
    kappa: float
    K: float
    residual: float
    noise_amplification: float
    log_alpha: Callable[[Tensor], Tensor]
    prior: Prior | None
    explanation: str
    nearest: object | None
    route: Route
    decided: bool = True

    @property
    def fitted(self) -> bool:
        """Whether it comes from a fit, not from an exact inversion."""
        return self.route in ("spline", "fourier")

    def __str__(self) -> str:
        heading = "is no prior" if self.decided else "may be a prior or none"
        if self.satisfies_star:
            heading = f"is a prior, to within {self.residual:.1g}" if self.fitted else "is a prior"
        kappa = "infinite" if math.isinf(self.K) else f"{self.kappa:.6g}"
        if math.isfinite(self.K) and self.kappa in (0.0, math.inf):
            kappa = f"exp({-self.K:.6g})"
        lines = [
            f"penalty: {heading} ({self.route})",
            f"  {self.explanation}",
            f"  kappa = {kappa}, K = {self.K:.6g}, residual = {self.residual:.2g}, "
            f"noise amplification = {self.noise_amplification:.2g}",
        ]
        if self.prior is not None:
            lines.append(f"  prior: {self.prior}")
        if self.nearest is not None:
            lines.append(f"  nearest: {self.nearest}")
        return "\n".join(lines)
