"""The two steps and the ELBO of a Bayesian Gaussian mixture, for `ExpectationMaximization` over all restarts."""

from dataclasses import dataclass

import torch
from torch import Tensor

from posterity.methods.coordinate_ascent import Values
from posterity.mixtures.fitting import Run, run
from posterity.mixtures.normal_wishart import Beliefs, Family, Sums, bound, components, divergence, sums_of, updated
from posterity.mixtures.passes import statistics
from posterity.mixtures.rows import Rows
from posterity.model.density import Density


@dataclass(frozen=True, eq=False)
class VariationalRounds:
    """Coordinate ascent in q(Z) q(pi, mu, Lambda) on given rows: the E-step improves q(Z), the M-step the other.

    Values are the fields of `Beliefs`, with means about `rows.centre`; q(Z) is kept as its `Sums` over the rows. Both
    steps maximise the ELBO, so that it never falls.
    """

    rows: Rows
    family: Family
    prior: Beliefs

    def density(self) -> Density:
        """The problem: the ELBO under the best q(Z), by the names of the values."""
        weights = tuple(self.prior.concentration.shape[1:])
        components, dimensions = weights[0], self.rows.points.shape[1]
        counts = self.rows.centre.new_zeros(1, components)
        degrees = self.family.precisions.gained_degrees(counts, dimensions).shape[-1]
        shapes = {
            "concentration": weights,
            "mean_precision": (components,),
            "means": (components, dimensions),
            "inverse_scales": self.family.precisions.covariance.shape(components, dimensions),
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
        made = components(self.family, beliefs)
        found = statistics(self.rows, self.family.precisions.covariance, made).log_likelihood
        return found - divergence(self.family, self.prior, beliefs, made.factors)

    def expectation(self, values: Values, latent: Values) -> dict[str, Tensor]:
        """The sums over the rows under q(z_n = k), proportional to exp E log p(x_n, z_n = k | pi, mu, Lambda)."""
        made = components(self.family, Beliefs(**values))
        found = statistics(self.rows, self.family.precisions.covariance, made)
        return sums_of(self.family, made.means, found)._asdict()

    def maximisation(self, values: Values, latent: Values) -> dict[str, Tensor]:
        """The conjugate update."""
        return updated(self.family, self.prior, Sums(**latent))._asdict()

    def bound(self, values: Values, latent: Values) -> Tensor:
        """The ELBO (R,)."""
        return bound(self.family, self.prior, Beliefs(**values), Sums(**latent))

    def run(self, start: Beliefs, *, max_iter: int, tol: float, progress: bool) -> Run:
        """Rounds from the beliefs of R restarts; a bound that falls is an error where rounding cannot be the cause."""
        return run(
            self,
            self.density(),
            start._asdict(),
            condition=lambda values: self.family.precisions.condition(values["inverse_scales"]),
            name="BayesianGaussianMixture",
            max_iter=max_iter,
            tol=tol,
            exact=True,
            progress=progress,
        )
