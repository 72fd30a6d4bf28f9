"""Gaussian mixtures by EM: the estimator and the starts of its restarts."""

from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from posterity.errors import BadData
from posterity.mixtures.checks import as_key, as_location, as_mixture_weights, as_rows, as_start, refuse_few_rows
from posterity.mixtures.covariance import Covariance
from posterity.mixtures.estimator import MixtureEstimator, as_parameter
from posterity.mixtures.passes import scores
from posterity.mixtures.rounds import EMPTY, Floor, InverseWishart, Rounds, Tensors, log_normalisers
from posterity.mixtures.seeding import nearest, seeds, shared_at_random, spread_of, statistics_of_all
from posterity.mixtures.sweeps import Components, Rows
from posterity.numerics.random import Key

NARROW = 1e-14  # the least variance of a start, as a share of the variance of all rows


def seeded(rounds: Rounds, components: int, restarts: int, init: str, means: Tensor | None, key: Key) -> Tensors:
    """Values of the restarts: an M-step with each row assigned to the nearest seed, or to all at random.

    Given means (K, D) relative to the centre are the seeds. Components without rows, or with a singular covariance even
    after regularisation, begin with the covariance of all rows.
    """
    rows, kind = rounds.rows, rounds.kind
    if init == "random" and means is None:
        sums = shared_at_random(rows, kind, components, restarts, key)
        centres = torch.zeros_like(sums.shifts)
    else:
        centres = seeds(rows, components, restarts, init, key) if means is None else means.expand(restarts, -1, -1)
        sums = nearest(rows, kind, centres, spread_of(rows))
    counts, dimensions = sums.counts, rows.points.shape[1]
    empty = counts <= EMPTY * counts.sum(-1, keepdim=True)
    estimated = rounds.regularisation.estimated(kind, kind.second_moments(sums), counts, dimensions)
    all_rows = statistics_of_all(rows, kind)
    whole = rounds.regularisation.estimated(kind, kind.second_moments(all_rows), all_rows.counts, dimensions)
    unusable = _unusable(kind, estimated, whole)
    lost = kind.marked(empty | unusable) if unusable.dim() > 1 else unusable[:, None, None]
    weights = torch.where(empty, counts.sum(-1, keepdim=True) / len(rows.points), counts)
    return {
        "weights": weights / weights.sum(-1, keepdim=True),
        "means": centres + sums.shifts if means is None else centres.clone(),
        "covariances": torch.where(lost, whole.expand_as(estimated), estimated),
    }


def inverted(kind: Covariance, precisions: Tensor) -> Tensor:
    """Invert precisions, which must be symmetric and positive definite, or positive."""
    if kind.matrices:
        roots, failed = torch.linalg.cholesky_ex(precisions)
        apart = (precisions - precisions.mT).abs()
        if bool((failed > 0).any()) or not bool((apart <= 1e-8 * precisions.abs().amax()).all()):
            raise ValueError(
                "precisions_init must be symmetric and positive definite matrices. Got one that is not. "
                "Give the inverses of covariances."
            )
        covariances = torch.cholesky_inverse(roots)
    else:
        if not bool((precisions > 0).all()):
            raise ValueError("precisions_init must be positive. Got a number that is not. Give 1 / variance.")
        covariances = precisions.reciprocal()
    if not bool(torch.isfinite(covariances).all()):
        raise ValueError("precisions_init must have finite inverses. Got one that is too close to 0.")
    return covariances


def refuse_constant_columns(rows: Rows) -> None:
    """Raise where columns have no variance, for fits without regularisation."""
    pieces = (points if weights is None else points[weights > 0] for _, points, weights, _ in rows.pieces())
    ends = [torch.stack(torch.aminmax(points, dim=0)) for points in pieces if len(points)]
    least, largest = torch.stack(ends)[:, 0].amin(0), torch.stack(ends)[:, 1].amax(0)
    same = (least == largest).nonzero().flatten().tolist()
    if same:
        raise BadData(
            f"X must vary in every column if reg_covar is 0. Got one value in column{'s' if len(same) > 1 else ''} "
            f"{', '.join(map(str, same[:5]))}. Drop it, or give reg_covar a positive number."
        )


def _unusable(kind: Covariance, covariances: Tensor, whole: Tensor) -> Tensor:
    """A mask of the covariances that are singular relative to the covariance of all rows: (R, K), or (R,) if shared."""
    if not kind.matrices:
        good = covariances > NARROW * whole
        return ~good if good.dim() == 2 else ~good.all(-1)
    good = torch.isfinite(covariances).flatten(-2).all(-1)
    eye = torch.eye(covariances.shape[-1], dtype=covariances.dtype, device=covariances.device)
    roots, failed = torch.linalg.cholesky_ex(torch.where(good[..., None, None], covariances, eye))
    variances = roots.diagonal(dim1=-2, dim2=-1).square()
    wide = (variances > NARROW * whole.diagonal(dim1=-2, dim2=-1)).all(-1)
    bad: Tensor = (failed > 0) | ~(good & wide)
    return bad


class GaussianMixture(MixtureEstimator):
    """A mixture of Gaussians with scikit-learn's settings, methods and attributes: change one import.

    **Math**: p(x) = sum_k weights_k N(x; means_k, S_k). EM: r_nk is proportional to weights_k N(x_n; means_k, S_k);
    then weights_k = N_k / N, means_k = sum_n r_nk x_n / N_k and S_k = sum_n r_nk (x_n - means_k)(x_n - means_k)^T / N_k
    with N_k = sum_n r_nk, by `covariance_type` "full", "tied", "diag" or "spherical". `reg_covar` is a number added to
    all variances, or an `InverseWishart(scale, degrees)` prior. A row with `sample_weight` w counts w times; r of a row
    with a label (-1: unknown) is 1 at its label, so that with all labels the fit is the statistics of the classes.
    `lower_bound_` is the mean log-likelihood for each unit of row weight (less the prior's penalty) at the E-step of
    the last round; a run ends when it changes by at most `tol`, or after `max_iter` rounds (0: the start).

    `n_init` restarts run together, in one pass over the rows for each round, and the best is kept. Each begins with
    every row at its nearest seed: by `init_params` "kmeans", "k-means++" or "random_from_data" (or `means_init`), or
    with "random" responsibilities. With more than 32768 rows a random subset provides the seeds. `random_state` is a
    whole number, a numpy generator or a `Key`; None is 0, so that fits repeat.

    Rows are (N, D); arrays give arrays, tensors give tensors on their device. Parameters,
    sums and results are float64, whatever the dtype of the rows.

    **Limit**: a local maximum. With a floor the bound may fall by O(`reg_covar`); with an `InverseWishart` a round that
    lowers it is an error, unless a covariance is so close to singular that rounding explains it. A component with less
    than 1e-8 of the rows is moved to the row explained worst where that raises the objective. If all rows are equal, or
    a column is constant, the regularisation is the variance; with `reg_covar` 0 that is an error, as is a component
    that collapses on one point.

    **Cost**: a pass over the rows a round, O(N K D^2) for matrices and O(N K D) else, in chunks: beside the rows and
    parameters it takes a few MB. Predictions hold (N, K).

    **References**: Dempster, Laird and Rubin (1977); Arthur and Vassilvitskii (2007) for k-means++; Fraley and Raftery
    (2007) for the prior.

    **Example**:

    >>> import numpy as np
    >>> rows = np.array([[1.0, 2.0], [1.0, 4.0], [1.0, 0.0], [10.0, 2.0], [10.0, 4.0], [10.0, 0.0]])
    >>> mixture = GaussianMixture(2, random_state=0).fit(rows)
    >>> sorted(mixture.means_.round(6).tolist())
    [[1.0, 2.0], [10.0, 2.0]]
    >>> bool((mixture.predict(rows)[:3] == mixture.predict([[0.0, 0.0]])).all())
    True
    """

    _noted = "bound"
    reg_covar: float | InverseWishart
    weights_init: Any
    means_init: Any
    precisions_init: Any
    _fitted_kind: Covariance  # of the last fit, since when covariance_type may have changed

    def __init__(
        self,
        n_components: int = 1,
        *,
        covariance_type: str = "full",
        tol: float = 1e-3,
        reg_covar: float | InverseWishart = 1e-6,
        max_iter: int = 100,
        n_init: int = 1,
        init_params: str = "kmeans",
        weights_init: Any = None,
        means_init: Any = None,
        precisions_init: Any = None,
        random_state: Any = None,
        warm_start: bool = False,
        verbose: int = 0,
        verbose_interval: int = 10,
    ) -> None:
        self._keep(locals())

    def fit(self, X: Any, y: Any = None, *, sample_weight: Any = None, labels: Any = None) -> Self:
        """Fit to rows X (N, D), with weights (N,) and labels (N,) that are -1 where unknown; y is not used."""
        self._check_settings()
        kind, key = self._kind(), as_key(self.random_state)
        regularisation = self.reg_covar if isinstance(self.reg_covar, InverseWishart) else Floor(self.reg_covar)
        rows = as_rows(X, sample_weight, labels, self.n_components)
        refuse_few_rows(rows.points, rows.weights, self.n_components)
        if isinstance(regularisation, Floor) and regularisation.variance == 0:
            refuse_constant_columns(rows)
        rounds = Rounds(rows, kind, regularisation)
        values = self._start(rounds, key)
        self.converged_, self.n_iter_, self.lower_bounds_, self.lower_bound_ = False, 0, [], -float("inf")
        if self.max_iter > 0:
            values = self._run(rounds, rounds.density(self.n_components), values)
        self._note_mixture(X, kind, rows.centre, **values)
        self._fitted_kind = kind
        return self

    def bic(self, X: Any) -> float:
        """Bayesian information criterion on rows X; lower is better."""
        count = self._num_rows(X)
        return -2 * self.score(X) * count + self._num_parameters() * float(np.log(count))

    def aic(self, X: Any) -> float:
        """Akaike information criterion on rows X; lower is better."""
        return -2 * self.score(X) * self._num_rows(X) + 2 * self._num_parameters()

    def _start(self, rounds: Rounds, key: Key) -> Tensors:
        """Values of the restarts: the result of the last fit, or the given values, or seeds."""
        rows, kind = rounds.rows, rounds.kind
        if self.warm_start and self.__sklearn_is_fitted__():
            return self._last_values(rows, kind)
        components, dimensions, means = self.n_components, rows.points.shape[1], None
        if self.means_init is not None:
            shape = (components, dimensions)
            means = as_location(self.means_init, "means_init", shape, rows.points) - rows.centre
        restarts = self.n_init if means is None else 1
        if means is None or self.weights_init is None or self.precisions_init is None:
            values = seeded(rounds, components, restarts, self.init_params, means, key.fold("seeds"))
        else:
            values = {"means": means[None]}
        if self.weights_init is not None:
            weights = as_mixture_weights(self.weights_init, "weights_init", components, rows.points)
            # A weight of 0 would make a row with that label impossible.
            values["weights"] = weights.clamp_min(torch.finfo(weights.dtype).tiny).expand(restarts, -1)
        if self.precisions_init is not None:
            stored = kind.shape(components, dimensions)
            covariances = inverted(kind, as_start(self.precisions_init, "precisions_init", stored, rows.points))
            values["covariances"] = covariances.expand(restarts, *stored)
        return values

    def _last_values(self, rows: Rows, kind: Covariance) -> Tensors:
        if kind != self._fitted_kind:
            raise ValueError(
                f"warm_start: covariance_type must be that of the last fit, {self._fitted_kind.name!r}. "
                f"Got {kind.name!r}. Fit a new mixture, or set warm_start=False."
            )
        shapes = {
            "weights": (self.n_components,),
            "means": (self.n_components, rows.points.shape[1]),
            "covariances": kind.shape(self.n_components, rows.points.shape[1]),
        }
        held = {name: as_parameter(getattr(self, f"{name}_"), rows.points) for name in shapes}
        for name, shape in shapes.items():
            if tuple(held[name].shape) != shape:
                raise ValueError(
                    f"warm_start: {name}_ of the last fit must have shape {shape}. Got {tuple(held[name].shape)}. "
                    "Fit a new mixture, or set warm_start=False."
                )
        held["means"] = held["means"] - rows.centre
        return {name: value[None] for name, value in held.items()}

    def _scores(self, points: Tensor) -> Tensor:
        kind = self._fitted_kind
        weights, means, factors = (
            as_parameter(value, points)[None] for value in (self.weights_, self.means_, self.precisions_cholesky_)
        )
        centre = means[0].mean(0)
        offsets = weights.log() + log_normalisers(kind, factors, *means.shape[1:])
        components = Components(offsets, means - centre, factors)
        return scores(Rows(points, None, None, centre), kind, components)[0]

    def _dense_covariances(self) -> Tensor:
        return self._fitted_kind.dense(as_parameter(self.covariances_)[None], *self.means_.shape)[0]

    def _num_parameters(self) -> int:
        components, dimensions = self.means_.shape
        return int(self._fitted_kind.num_parameters(components, dimensions) + components * (dimensions + 1) - 1)
