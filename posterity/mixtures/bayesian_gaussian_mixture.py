"""Bayesian Gaussian mixtures: the estimator, its prior and its steps of coordinate ascent."""

import numbers
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from posterity.errors import NotPositiveDefinite, positive, shown
from posterity.methods.coordinate_ascent import Values
from posterity.mixtures.beliefs import (
    Beliefs,
    Dirichlet,
    Family,
    Sticks,
    Sums,
    bound,
    components,
    covariances,
    divergence,
    log_joint,
    noise,
    scale_matrices,
    sums_of,
    updated,
)
from posterity.mixtures.checks import as_key, as_location, as_rows, as_start, not_negative, one_of, refuse_few_rows
from posterity.mixtures.covariance import Covariance
from posterity.mixtures.estimator import MixtureEstimator, Steps, as_parameter, given_as
from posterity.mixtures.passes import scores, statistics
from posterity.mixtures.seeding import nearest, seeds, shared_at_random, spread_of, statistics_of_all
from posterity.mixtures.sweeps import Rows, StoredPoints
from posterity.model.density import Density
from posterity.numerics.random import Key


def prior_of(
    family: Family,
    rows: Rows,
    components: int,
    weight_concentration: object = None,
    mean_precision: object = None,
    mean: object = None,
    degrees_of_freedom: object = None,
    covariance: object = None,
    floor: object = 1e-6,
) -> Beliefs:
    """Make the prior, with its mean relative to the rows' centre.

    Defaults for None: weights 1 / K; mean precision 1; the mean of the rows; D degrees of freedom; the covariance of
    the rows (in the kind's storage) with variances raised by the share `floor` (zero variances to `floor`), so that it
    is not singular when columns are constant or depend on each other.
    """
    kind, dimensions = family.kind, rows.points.shape[1]
    smallest = kind.block(dimensions)[0] - 1
    degrees = _number("degrees_of_freedom_prior", degrees_of_freedom, float(dimensions))
    if degrees <= smallest:
        raise ValueError(f"degrees_of_freedom_prior must be greater than {smallest}. Got {shown(degrees)}.")
    concentration = _number("weight_concentration_prior", weight_concentration, 1.0 / components)
    shrinkage = _number("mean_precision_prior", mean_precision, 1.0)
    share = not_negative("reg_covar", floor)
    sums = statistics_of_all(rows, kind)
    if mean is None:
        centre = sums.shifts[0, 0]
    else:
        centre = as_location(mean, "mean_prior", (dimensions,), rows.points) - rows.centre
    if covariance is None:
        total = float(sums.counts)
        # Less one, as in scikit-learn, so that a weight of 2 is a row twice; row weights may also sum to less than one.
        divisor = max(total - 1, total / 2) * kind.multiplicity(dimensions)
        inverse_scale = kind.floored(kind.second_moments(sums) / divisor, share)
    else:
        inverse_scale = kind.from_matrix(_matrix(covariance, kind, rows))
    number = torch.ones(1, 1, dtype=torch.float64, device=rows.points.device)
    prior = Beliefs(
        family.weights.prior(concentration * number[0, 0], components),
        shrinkage * number,
        centre[None, None],
        inverse_scale,
        degrees * number,
    )
    try:
        kind.factors(covariances(family, prior))
    except NotPositiveDefinite as error:
        if covariance is None:
            raise ValueError(
                "The covariance of the rows, of which the prior is made, is singular. Columns may be constant or "
                "depend on each other: drop some, raise reg_covar or give a covariance_prior."
            ) from error
        raise ValueError("covariance_prior must be positive definite. Got one that is not.") from error
    return prior


def _number(name: str, value: object, default: float) -> float:
    if value is None:
        return default
    positive(name, value, "or None")
    return float(value)  # type: ignore[arg-type]


def _matrix(value: object, kind: Covariance, rows: Rows) -> Tensor:
    """Convert a covariance_prior in the kind's shape to a matrix (D, D)."""
    dimensions = rows.points.shape[1]
    shape = kind.single_shape(dimensions)
    if not shape and isinstance(value, numbers.Real):
        value = torch.tensor(float(value))
    given = as_start(value, "covariance_prior", shape, rows.points)
    if given.dim() < 2:
        return torch.diag(given.expand(dimensions))
    if not torch.allclose(given, given.mT, rtol=0.0, atol=1e-8 * float(given.abs().max())):
        raise ValueError("covariance_prior must be symmetric. Got a matrix that is not.")
    return (given + given.mT) / 2


@dataclass(frozen=True, eq=False)
class VariationalRounds(Steps):
    """Coordinate ascent in q(Z) q(pi, mu, Lambda) on given rows: the E-step updates q(Z), the M-step the other factor.

    Values are the fields of `Beliefs`, with means about `rows.centre`; q(Z) is stored as its `Sums` over the rows. Both
    steps maximise the ELBO, so that it never falls.
    """

    rows: Rows
    family: Family
    prior: Beliefs

    def density(self) -> Density:
        """The density to maximise: the ELBO under the optimal q(Z), by the names of the values."""
        weights = tuple(self.prior.concentration.shape[1:])
        components, dimensions = weights[0], self.rows.points.shape[1]
        counts = self.rows.centre.new_zeros(1, components)
        degrees = self.family.kind.gained_degrees(counts, dimensions).shape[-1]
        shapes = {
            "concentration": weights,
            "mean_precision": (components,),
            "means": (components, dimensions),
            "inverse_scales": self.family.kind.shape(components, dimensions),
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
        """The ELBO (R,) of these beliefs with the optimal q(Z)."""
        made = components(self.family, beliefs)
        log_likelihood = statistics(self.rows, self.family.kind, made).log_likelihood
        return log_likelihood - divergence(self.family, self.prior, beliefs, made.factors)

    def expectation(self, values: Values, latent: Values) -> dict[str, Tensor]:
        # q(z_n = k) is proportional to exp E log p(x_n, z_n = k | pi, mu, Lambda)
        made = components(self.family, Beliefs(**values))
        return sums_of(self.family, made.means, statistics(self.rows, self.family.kind, made))._asdict()

    def maximisation(self, values: Values, latent: Values) -> dict[str, Tensor]:
        return updated(self.family, self.prior, Sums(**latent))._asdict()

    def bound(self, values: Values, latent: Values) -> Tensor:
        return bound(self.family, self.prior, Beliefs(**values), Sums(**latent))

    def condition(self, values: Values) -> float:
        return self.family.kind.condition(values["inverse_scales"])


WEIGHTS: dict[str, Dirichlet | Sticks] = {"dirichlet_distribution": Dirichlet(), "dirichlet_process": Sticks()}


class BayesianGaussianMixture(MixtureEstimator):
    """A variational posterior over Gaussian mixtures, with scikit-learn's settings, methods and attributes.

    **Math**: weights ~ Dir(a0), mu_k | Lambda_k ~ N(m0, (b0 Lambda_k)^-1), Lambda_k ~ Wishart(W0, nu0), where
    `weight_concentration_prior` is a0 (None: 1 / K), `mean_precision_prior` b0 (1), `mean_prior` m0 (the rows' mean),
    `degrees_of_freedom_prior` nu0 (D) and `covariance_prior` W0^-1 (the rows' covariance, its variances raised by the
    share `reg_covar`). q(Z) q(weights, mu, Lambda) comes by coordinate ascent: with N_k, xbar_k, S_k under r = q(Z),
    `weight_concentration_` = a0 + N_k, `mean_precision_` = b0 + N_k, `means_` = (b0 m0 + N_k xbar_k) / (b0 + N_k),
    `degrees_of_freedom_` = nu_k = nu0 + N_k, and with d = xbar_k - m0
    W_k^-1 = W0^-1 + N_k S_k + b0 N_k / (b0 + N_k) d d^T; log r_nk = E log p(x_n, z_n = k) up to a constant.
    `weights_` is E weights, and `covariances_` = (E Lambda_k)^-1 = W_k^-1 / nu_k.

    `weight_concentration_prior_type` "dirichlet_process" has weights v_k prod_{j<k} (1 - v_j), v_k ~ Beta(1, a0) and
    v_K = 1; `weight_concentration_` is then a pair, 1 + N_k and a0 + sum_{j>k} N_j, whose last entries are not used.
    "tied" has one Lambda ~ Wishart, with nu = nu0 + N (`degrees_of_freedom_` of length 1); "diag" an independent
    Gamma(nu_k / 2, rate W_kd^-1 / 2) for each dimension; "spherical" one such for all, with nu_k = nu0 + D N_k.
    `lower_bound_` is the ELBO in nats after the last round, all constants kept: below the log evidence of the rows, and
    comparable between models. A run ends when it changes by at most `tol`. `score_samples` is log E_q p(x), the
    density of a mixture of Student-t with nu_k + 1 - D degrees of freedom, from which `sample` draws. `predict_proba`
    is q(z) of a row, as in fit. Rows, weights, labels, `n_init`, `init_params`, `random_state`, `warm_start` are as in
    `GaussianMixture`. A small a0 lets components that the rows do not need die out, to weights near a0 / N.

    **Limit**: q factorises between Z and the parameters, so that it is too narrow, and it holds one labelling of the
    components, which alone costs up to log K! nats of evidence. The ELBO never falls: a round that lowers it raises
    `BoundFell`, except where rounding can exceed the tolerance, 1e-10 of the ELBO (full or tied covariances whose
    correlations have a condition number above 1e5).

    Differences to scikit-learn: the default is a Dirichlet distribution, and its Dirichlet process does not end with
    v_K = 1; `reg_covar` enters the prior, once, not each S_k; its bound lacks constants and its score_samples is no
    density. Its "diag" takes E log det of D by D Wishart matrices, its "tied" counts N / K rows for nu and its
    "spherical" one square a row where there are D, so that their rounds ascend no bound, and answers differ.

    **Cost**: as `GaussianMixture`.

    **References**: Bishop (2006), Pattern recognition and machine learning, section 10.2: (10.58) to (10.63), where
    some printings have nu_k = nu0 + N_k + 1, and (10.81) for the Student-t.

    **Example**:

    >>> import numpy as np
    >>> noise = np.random.default_rng(0).normal(size=(80, 2))
    >>> rows = noise + np.repeat([[-5.0, 0.0], [5.0, 0.0]], 40, axis=0)
    >>> mixture = BayesianGaussianMixture(6, weight_concentration_prior=0.01, random_state=0).fit(rows)
    >>> int((mixture.weights_ > 0.02).sum())  # of 6
    2
    >>> mixture.score([[0.0, 0.0]]) < mixture.score([[5.0, 0.0]])
    True
    """

    weight_concentration_: Any
    mean_precision_: Any
    degrees_of_freedom_: Any
    weight_concentration_prior_: float
    mean_precision_prior_: float
    mean_prior_: Any
    degrees_of_freedom_prior_: float
    covariance_prior_: Any
    _noted = "bound_after_m"
    reg_covar: float
    weight_concentration_prior_type: str
    weight_concentration_prior: float | None
    mean_precision_prior: float | None
    mean_prior: Any
    degrees_of_freedom_prior: float | None
    covariance_prior: Any
    _fitted_family: Family  # of the last fit, since when the settings may have changed

    def __init__(
        self,
        n_components: int = 1,
        *,
        covariance_type: str = "full",
        tol: float = 1e-3,
        reg_covar: float = 1e-6,
        max_iter: int = 100,
        n_init: int = 1,
        init_params: str = "kmeans",
        weight_concentration_prior_type: str = "dirichlet_distribution",
        weight_concentration_prior: float | None = None,
        mean_precision_prior: float | None = None,
        mean_prior: Any = None,
        degrees_of_freedom_prior: float | None = None,
        covariance_prior: Any = None,
        random_state: Any = None,
        warm_start: bool = False,
        verbose: int = 0,
        verbose_interval: int = 10,
    ) -> None:
        self._keep(locals())

    def fit(self, X: Any, y: Any = None, *, sample_weight: Any = None, labels: Any = None) -> Self:
        """Fit to rows X (N, D), with weights (N,) and known components (N,), -1 if unknown; y is not used."""
        self._check_settings()
        one_of("weight_concentration_prior_type", self.weight_concentration_prior_type, WEIGHTS)
        family, key = Family(WEIGHTS[self.weight_concentration_prior_type], self._kind()), as_key(self.random_state)
        rows = as_rows(X, sample_weight, labels, self.n_components)
        refuse_few_rows(rows.points, rows.weights, self.n_components)
        prior = prior_of(
            family,
            rows,
            self.n_components,
            self.weight_concentration_prior,
            self.mean_precision_prior,
            self.mean_prior,
            self.degrees_of_freedom_prior,
            self.covariance_prior,
            self.reg_covar,
        )
        rounds = VariationalRounds(rows, family, prior)
        beliefs = self._start(rounds, key.fold("seeds"))
        if self.max_iter > 0:
            beliefs = Beliefs(**self._run(rounds, rounds.density(), beliefs._asdict()))
        else:
            bounds = rounds.best(beliefs)
            best = bounds.argmax(0, keepdim=True)
            self.converged_, self.n_iter_, self.lower_bounds_, self.lower_bound_ = False, 0, [], float(bounds[best])
            beliefs = Beliefs(*(tensor[best] for tensor in beliefs))
        self._note(family, prior, beliefs, rows.centre, X)
        return self

    def elbo(self, X: Any, *, sample_weight: Any = None, labels: Any = None) -> float:
        """The ELBO in nats of rows X under the fitted posterior, with the optimal q(Z).

        On the rows of the fit it is at least `lower_bound_`, and below their log evidence.
        """
        self._refuse_unfitted()
        self._refuse_other_names(X)
        rows = as_rows(X, sample_weight, labels, len(self.means_), self._expected)
        prior = prior_of(
            self._fitted_family,
            rows,
            len(self.means_),
            self.weight_concentration_prior_,
            self.mean_precision_prior_,
            self.mean_prior_,
            self.degrees_of_freedom_prior_,
            self.covariance_prior_,
        )
        return float(VariationalRounds(rows, self._fitted_family, prior).best(self._beliefs(rows.points, rows.centre)))

    def _start(self, rounds: VariationalRounds, key: Key) -> Beliefs:
        """The beliefs of the restarts: the result of the last fit, or from seeds."""
        rows, kind = rounds.rows, rounds.family.kind
        if self.warm_start and self.__sklearn_is_fitted__():
            held, wanted = self.weight_concentration_, rounds.density().shapes
            shapes = {
                "means": np.shape(self.means_),
                "inverse_scales": np.shape(self.covariances_),
                "degrees": np.shape(self.degrees_of_freedom_),
                "concentration": (*np.shape(held[0]), 2) if isinstance(held, tuple) else np.shape(held),
            }
            for name, shape in shapes.items():
                if tuple(shape) != tuple(wanted[name]):
                    raise ValueError(
                        f"warm_start: the last fit must have {name.replace('_', ' ')} of shape {wanted[name]}. "
                        f"Got {tuple(shape)}. Fit a new mixture, or set warm_start=False."
                    )
            return self._beliefs(rows.points, rows.centre)
        if self.init_params == "random":
            sums = shared_at_random(rows, kind, self.n_components, self.n_init, key)
            centres = torch.zeros_like(sums.shifts)
        else:
            centres = seeds(rows, self.n_components, self.n_init, self.init_params, key)
            sums = nearest(rows, kind, centres, spread_of(rows))
            if rounds.family.weights.ordered and rows.labels is None:
                order = sums.counts.argsort(-1, descending=True)
                centres = centres.gather(1, order[..., None].expand_as(centres))
                sums = nearest(rows, kind, centres, spread_of(rows))
        return updated(rounds.family, rounds.prior, sums_of(rounds.family, centres, sums))

    def _note(self, family: Family, prior: Beliefs, beliefs: Beliefs, centre: Tensor, X: Any) -> None:
        """Set the fitted attributes, under scikit-learn's names."""
        means = family.weights.means(beliefs.concentration)
        self._note_mixture(X, family.kind, centre, means, beliefs.means, covariances(family, beliefs))
        self._fitted_family = family
        concentration = beliefs.concentration[0]  # (K,), or (K, 2) of sticks
        pair = tuple(given_as(part, X) for part in concentration.unbind(-1)) if concentration.dim() > 1 else None
        self.weight_concentration_ = pair or given_as(concentration, X)
        self.mean_precision_ = given_as(beliefs.mean_precision[0], X)
        self.degrees_of_freedom_ = given_as(beliefs.degrees[0], X)
        self.weight_concentration_prior_ = float(prior.concentration.flatten()[-1])
        self.mean_precision_prior_ = float(prior.mean_precision)
        self.mean_prior_ = given_as(prior.means[0, 0] + centre, X)
        self.degrees_of_freedom_prior_ = float(prior.degrees)
        self.covariance_prior_ = given_as(prior.inverse_scales.reshape(family.kind.single_shape(len(centre))), X)

    def _beliefs(self, like: Tensor | StoredPoints, centre: Tensor) -> Beliefs:
        """The fitted posterior as a single restart, on the device of `like`, with means about the centre."""
        degrees, held = as_parameter(self.degrees_of_freedom_, like)[None], self.weight_concentration_
        pair = torch.stack([as_parameter(part, like) for part in held], -1) if isinstance(held, tuple) else None
        return Beliefs(
            (as_parameter(held, like) if pair is None else pair)[None],
            as_parameter(self.mean_precision_, like)[None],
            as_parameter(self.means_, like)[None] - centre,
            as_parameter(self.covariances_, like)[None] * self._fitted_family.kind.broadcast(degrees),
            degrees,
        )

    def _centred(self, like: Tensor) -> tuple[Tensor, Beliefs]:
        """The mean of the components' means, and the beliefs about it."""
        centre = as_parameter(self.means_, like).mean(0)
        return centre, self._beliefs(like, centre)

    def _scores(self, points: Tensor) -> Tensor:
        centre, beliefs = self._centred(points)
        made = components(self._fitted_family, beliefs)
        return scores(Rows(points, None, None, centre), self._fitted_family.kind, made)[0]

    def _log_joint(self, points: Tensor) -> Tensor:
        centre, beliefs = self._centred(points)
        return log_joint(self._fitted_family, beliefs, points, centre)

    def _dense_covariances(self) -> Tensor:
        return scale_matrices(self._fitted_family, self._centred(as_parameter(self.means_))[1])

    def _noise(self, components: Tensor, key: Key) -> Tensor:
        return noise(self._fitted_family, self._centred(as_parameter(self.means_))[1], components, key)
