"""The two steps and the ELBO of a Bayesian Gaussian mixture, for `ExpectationMaximization` over all restarts."""

import logging
from dataclasses import dataclass

import torch
from torch import Tensor

from posterity.errors import BoundFell
from posterity.methods.coordinate_ascent import Values
from posterity.mixtures.fitting import Run, run
from posterity.mixtures.normal_wishart import Beliefs, Sums, bound, components, divergence, sums_of, updated
from posterity.mixtures.passes import statistics
from posterity.mixtures.precisions import Precisions
from posterity.mixtures.rows import Rows
from posterity.model.density import Density

COLLINEAR = 1e5  # condition number of correlations from which rounding can be 1e-10 of the bound

logger = logging.getLogger("posterity")


@dataclass(frozen=True, eq=False)
class VariationalRounds:
    """Coordinate ascent in q(Z) q(pi, mu, Lambda) on given rows: the E-step improves q(Z), the M-step the other.

    Values are the fields of `Beliefs`, with means about `rows.centre`; q(Z) is kept as its `Sums` over the rows. Both
    steps maximise the ELBO, so that it never falls.
    """

    rows: Rows
    precisions: Precisions
    prior: Beliefs

    def density(self) -> Density:
        """The problem: the ELBO under the best q(Z), by the names of the values."""
        components, dimensions = self.prior.concentration.shape[-1], self.rows.points.shape[1]
        degrees = self.precisions.gained_degrees(self.prior.concentration, dimensions).shape[-1]
        shapes = {
            "concentration": (components,),
            "mean_precision": (components,),
            "means": (components, dimensions),
            "inverse_scales": self.precisions.covariance.shape(components, dimensions),
            "degrees": (degrees,),
        }
        return Density(
            lambda **values: self.best(Beliefs(**values)),
            shapes,
            batched=True,
            dtype=torch.float64,
            device=self.rows.points.device,
        )

    def best(self, beliefs: Beliefs) -> Tensor:
        """The ELBO (R,) of these beliefs with the q(Z) that is best for them."""
        made = components(self.precisions, beliefs)
        found = statistics(self.rows, self.precisions.covariance, made).log_likelihood
        return found - divergence(self.precisions, self.prior, beliefs, made.factors)

    def expectation(self, values: Values, latent: Values) -> dict[str, Tensor]:
        """The sums over the rows under q(z_n = k), proportional to exp E log p(x_n, z_n = k | pi, mu, Lambda)."""
        made = components(self.precisions, Beliefs(**values))
        found = statistics(self.rows, self.precisions.covariance, made)
        return sums_of(self.precisions, made.means, found)._asdict()

    def maximisation(self, values: Values, latent: Values) -> dict[str, Tensor]:
        """The conjugate update."""
        return updated(self.precisions, self.prior, Sums(**latent))._asdict()

    def bound(self, values: Values, latent: Values) -> Tensor:
        """The ELBO (R,)."""
        return bound(self.precisions, self.prior, Beliefs(**values), Sums(**latent))

    def run(self, start: Beliefs, *, max_iter: int, tol: float, progress: bool) -> Run:
        """Rounds from the beliefs of R restarts; a bound that falls is an error where rounding cannot be the cause."""

        def rounds(exact: bool) -> Run:
            return run(
                self,
                self.density(),
                start._asdict(),
                name="BayesianGaussianMixture",
                max_iter=max_iter,
                tol=tol,
                exact=exact,
                progress=progress,
            )

        try:
            return rounds(exact=True)
        except BoundFell:
            found = rounds(exact=False)
            matrices = (self.prior.inverse_scales, found.values["inverse_scales"])
            worst = max(self.precisions.condition(each) for each in matrices)
            if worst < COLLINEAR:
                raise
            logger.info("the bound fell by rounding: correlations have the condition number %.1e", worst)
            return found
