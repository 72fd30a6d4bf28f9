"""Prior and steps of a Bayesian Gaussian mixture."""

import numbers
from dataclasses import dataclass

import torch
from torch import Tensor

from posterity.errors import NotPositiveDefinite, positive, shown
from posterity.methods.coordinate_ascent import Values
from posterity.mixtures.checks import as_place, as_start, not_negative
from posterity.mixtures.fitting import Run, run
from posterity.mixtures.normal_wishart import (
    Beliefs,
    Family,
    Sums,
    bound,
    components,
    covariances,
    divergence,
    sums_of,
    updated,
)
from posterity.mixtures.passes import statistics
from posterity.mixtures.precisions import Precisions
from posterity.mixtures.rows import Components, Rows
from posterity.model.density import Density


@dataclass(frozen=True, eq=False)
class PriorSettings:
    """What is believed before any row; None is filled in from the rows by `prior_of`."""

    weight_concentration: object = None
    mean_precision: object = None
    mean: object = None
    degrees_of_freedom: object = None
    covariance: object = None
    floor: object = 1e-6


def prior_of(settings: PriorSettings, family: Family, rows: Rows, components: int) -> Beliefs:
    """The prior, with its mean relative to the rows' centre.

    None stands for: weights 1 / K; mean precision 1; the mean of the rows; D degrees of freedom; the covariance of the
    rows (in the kind's storage) with the share `floor` added to its variances (`floor` itself to those that are 0), so
    that it is not singular when columns are constant or depend on each other.
    """
    precisions, dimensions = family.precisions, rows.points.shape[1]
    smallest = precisions.block(dimensions)[0] - 1
    degrees = _number("degrees_of_freedom_prior", settings.degrees_of_freedom, float(dimensions))
    if degrees <= smallest:
        raise ValueError(f"degrees_of_freedom_prior must be greater than {smallest}. Got {shown(degrees)}.")
    concentration = _number("weight_concentration_prior", settings.weight_concentration, 1.0 / components)
    mean_precision = _number("mean_precision_prior", settings.mean_precision, 1.0)
    floor = not_negative("reg_covar", settings.floor)
    if settings.mean is None or settings.covariance is None:
        mean, inverse_scale = moments(precisions, rows)
        inverse_scale = precisions.floored(inverse_scale, floor)
    if settings.mean is not None:
        mean = as_place(settings.mean, "mean_prior", (dimensions,), rows.points) - rows.centre
    if settings.covariance is not None:
        inverse_scale = precisions.stored(_matrix(settings.covariance, precisions, rows))
    number = torch.ones(1, 1, dtype=torch.float64, device=rows.points.device)
    prior = Beliefs(
        family.weights.prior(concentration * number[0, 0], components),
        mean_precision * number,
        mean[None, None],
        inverse_scale,
        degrees * number,
    )
    try:
        precisions.covariance.factors(covariances(family, prior))
    except NotPositiveDefinite as error:
        if settings.covariance is None:
            raise ValueError(
                "The covariance of the rows, of which the prior is made, is singular. Columns may be constant or "
                "depend on each other: drop some, raise reg_covar or give a covariance_prior."
            ) from error
        raise ValueError("covariance_prior must be positive definite. Got one that is not.") from error
    return prior


def moments(precisions: Precisions, rows: Rows) -> tuple[Tensor, Tensor]:
    """The mean (D,) of all rows relative to their centre, and their covariance in the kind's storage, (1, *shape)."""
    dimensions, device = rows.points.shape[1], rows.points.device
    zeros = torch.zeros(1, 1, dimensions, dtype=torch.float64, device=device)
    unit = precisions.stored(torch.eye(dimensions, dtype=torch.float64, device=device)).contiguous()
    whole = Components(zeros[..., 0], zeros, unit)
    found = statistics(rows._replace(labels=None), precisions.covariance, whole)
    total = float(found.counts)
    # Less one, as in scikit-learn, so that a weight of 2 is a row twice; row weights may also sum to less than one.
    divisor = max(total - 1, total / 2) * precisions.multiplicity(dimensions)
    return found.shifts[0, 0], precisions.covariance.second_moments(found) / divisor


def _number(name: str, value: object, default: float) -> float:
    if value is None:
        return default
    positive(name, value, "or None")
    return float(value)  # type: ignore[arg-type]


def _matrix(value: object, precisions: Precisions, rows: Rows) -> Tensor:
    """A covariance_prior as a matrix (D, D), from the shape that the kind asks for."""
    dimensions = rows.points.shape[1]
    shape = precisions.prior_shape(dimensions)
    if not shape and isinstance(value, numbers.Real):
        value = torch.tensor(float(value))
    given = as_start(value, "covariance_prior", shape, rows.points)
    if given.dim() < 2:
        return torch.diag(given.expand(dimensions))
    if not torch.allclose(given, given.mT, rtol=0.0, atol=1e-8 * float(given.abs().max())):
        raise ValueError("covariance_prior must be symmetric. Got a matrix that is not.")
    return (given + given.mT) / 2


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
