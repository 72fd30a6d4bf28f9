"""A mixture of Gaussians with a posterior over its weights, means and precisions."""

from typing import Any, Self

import torch
from torch import Tensor

from posterity.errors import shown
from posterity.mixtures import fitting, student_mixture
from posterity.mixtures.checks import as_key, as_labels, as_points, as_row_weights, check_settings, refuse_few_rows
from posterity.mixtures.diagonal_precisions import DiagonalPrecisions
from posterity.mixtures.estimator import MixtureEstimator, as_parameter, given_as
from posterity.mixtures.full_precisions import FullPrecisions
from posterity.mixtures.mixture_prior import PriorSettings, prior_of
from posterity.mixtures.moments import precisions as inverses
from posterity.mixtures.normal_wishart import Beliefs, Sums, components, covariances, sums_of, updated
from posterity.mixtures.passes import scores
from posterity.mixtures.precisions import Precisions
from posterity.mixtures.rows import Rows
from posterity.mixtures.seeding import INITS, nearest, seeds, shared_at_random, spread_of
from posterity.mixtures.spherical_precisions import SphericalPrecisions
from posterity.mixtures.tied_precisions import TiedPrecisions
from posterity.mixtures.variational_rounds import VariationalRounds
from posterity.numerics.random import Key

KINDS: dict[str, Precisions] = {
    kind.covariance.name: kind
    for kind in (FullPrecisions(), TiedPrecisions(), DiagonalPrecisions(), SphericalPrecisions())
}
POSTERIOR = {
    "weight_concentration_": "concentration",
    "mean_precision_": "mean_precision",
    "means_": "means",
    "degrees_of_freedom_": "degrees",
}


class BayesianGaussianMixture(MixtureEstimator):
    """A variational posterior over Gaussian mixtures, with scikit-learn's settings, verbs and attributes.

    **Math**: weights ~ Dir(a0), mu_k | Lambda_k ~ N(m0, (b0 Lambda_k)^-1), Lambda_k ~ Wishart(W0, nu0), where
    `weight_concentration_prior` = a0 (None: 1 / K), `mean_precision_prior` = b0 (1), `mean_prior` = m0 (the rows' mean),
    `degrees_of_freedom_prior` = nu0 (D), `covariance_prior` = W0^-1 (the rows' covariance, plus `reg_covar` on its
    diagonal). q(Z) q(weights, mu, Lambda) by coordinate ascent, with N_k, xbar_k, S_k of the responsibilities r:
    `weight_concentration_` = a0 + N_k, `mean_precision_` = b0 + N_k, `means_` = (b0 m0 + N_k xbar_k) / (b0 + N_k),
    `degrees_of_freedom_` = nu_k = nu0 + N_k, W_k^-1 = W0^-1 + N_k S_k + b0 N_k / (b0 + N_k) (xbar_k - m0)(xbar_k - m0)^T;
    log r_nk = E log p(x_n, z_n = k) + constant. `weights_` = E weights, `covariances_` = (E Lambda_k)^-1 = W_k^-1 / nu_k.

    "tied" has one Lambda ~ Wishart with nu = nu0 + N; "diag" an independent Gamma(nu_k / 2, rate W_kd^-1 / 2) for each
    dimension, "spherical" one of them for all, with nu_k = nu0 + D N_k. `lower_bound_` is the ELBO in nats, all constants
    kept: below the log evidence of the rows, and comparable between numbers of components. A run ends when it changes by
    at most `tol` nats. `score_samples` is log E_q p(x): a mixture of Student-t with nu_k + 1 - D degrees of freedom, from
    which `sample` draws; `predict_proba` is q(z) of a row as in fit. Rows, weights, labels, `n_init`, `init_params`,
    `random_state` and `warm_start` are as in `GaussianMixture`.

    A small a0 lets components that the rows do not need die out: weights_ near a0 / N.

    **Limit**: q factorises between Z and the parameters, so that it is too narrow, and holds one labelling of the
    components: the evidence of all K! is up to log K! higher. The ELBO never falls; a round that lowers it is an error
    (in float64; float32 rows are rounded). Differences to scikit-learn: the default is a Dirichlet distribution (its
    Dirichlet process is refused); `reg_covar` enters the prior, once, not every S_k; its lower bound lacks constants, and
    its score_samples is no density. Its "diag" takes E log det of D-dimensional matrices, "tied" counts N / K rows and
    "spherical" one square a row instead of D: none of these is the posterior of a model, and answers differ.

    **Cost**: as `GaussianMixture`.

    **References**: Bishop (2006), Pattern recognition and machine learning, section 10.2, with nu_k = nu0 + N_k in place
    of (10.63) as some printings have it; (10.81) for the Student-t; Attias (2000) for the bound.

    **Example**:

    >>> import numpy as np
    >>> rows = np.array([[1.0, 2.0], [1.0, 4.0], [1.0, 0.0], [10.0, 2.0], [10.0, 4.0], [10.0, 0.0]])
    >>> mixture = BayesianGaussianMixture(2, random_state=0).fit(rows)
    >>> sorted(mixture.means_.round(3).tolist())
    [[2.125, 2.0], [8.875, 2.0]]
    >>> mixture.score([[5.5, 2.0]]) < mixture.score([[1.0, 2.0]])
    True
    """

    covariances_: Any
    precisions_: Any
    precisions_cholesky_: Any
    weight_concentration_: Any
    mean_precision_: Any
    degrees_of_freedom_: Any
    weight_concentration_prior_: float
    mean_precision_prior_: float
    mean_prior_: Any
    degrees_of_freedom_prior_: float
    covariance_prior_: Any
    converged_: bool
    n_iter_: int
    lower_bound_: float
    lower_bounds_: list[float]

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
        self.n_components = n_components
        self.covariance_type = covariance_type
        self.tol = tol
        self.reg_covar = reg_covar
        self.max_iter = max_iter
        self.n_init = n_init
        self.init_params = init_params
        self.weight_concentration_prior_type = weight_concentration_prior_type
        self.weight_concentration_prior = weight_concentration_prior
        self.mean_precision_prior = mean_precision_prior
        self.mean_prior = mean_prior
        self.degrees_of_freedom_prior = degrees_of_freedom_prior
        self.covariance_prior = covariance_prior
        self.random_state = random_state
        self.warm_start = warm_start
        self.verbose = verbose  # a bar of progress
        self.verbose_interval = verbose_interval  # scikit-learn's; the bar needs none

    def fit(self, X: Any, y: Any = None, *, sample_weight: Any = None, labels: Any = None) -> Self:
        """Fit to rows X (N, D) or (N,), with weights (N,) and known components (N,), -1 where unknown; y is not used."""
        kind = self._checked_kind()
        rows = self._rows(X, sample_weight, labels)
        refuse_few_rows(rows.points, rows.weights, self.n_components)
        prior = prior_of(self._settings(), kind, rows, self.n_components)
        steps = VariationalRounds(rows, kind, prior)
        beliefs = self._start(steps, as_key(self.random_state).fold("seeds"))
        self._fit(steps, beliefs, X)
        return self

    def elbo(self, X: Any, *, sample_weight: Any = None, labels: Any = None) -> float:
        """The ELBO in nats of rows X under the fitted posterior, with the q(Z) that is best for it.

        On the rows of the fit it is at least `lower_bound_`, and below their log evidence.
        """
        self._refuse_unfitted()
        rows = self._rows(X, sample_weight, labels, self.n_features_in_)
        beliefs, prior = self._beliefs(rows), self._prior(rows)
        return float(VariationalRounds(rows, self._checked_kind(), prior).best(beliefs))

    def log_joint(self, X: Any) -> Any:
        """log E_q p(x_n, z_n = k) of each row and component, (N, K)."""
        return given_as(self._predictive(self._points(X)), X)

    def score_samples(self, X: Any) -> Any:
        """log E_q p(x_n), the density of a mixture of Student-t, of each row, (N,)."""
        return given_as(torch.logsumexp(self._predictive(self._points(X)), 1), X)

    def score(self, X: Any, y: Any = None) -> float:
        """The mean of log E_q p(x_n) over the rows."""
        return float(torch.logsumexp(self._predictive(self._points(X)), 1).mean())
