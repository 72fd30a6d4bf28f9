"""The two steps and the ELBO of a Bayesian Gaussian mixture, for `ExpectationMaximization` over all restarts."""

from dataclasses import dataclass

import torch
from torch import Tensor

from posterity.methods.coordinate_ascent import Values
from posterity.mixtures.normal_wishart import Beliefs, Sums, bound, components, divergence, sums_of, updated
from posterity.mixtures.passes import statistics
from posterity.mixtures.precisions import Precisions
from posterity.mixtures.rows import Rows
from posterity.model.density import Density


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
