"""The base of mixture estimators: scikit-learn's methods and parameters, and the loop of EM rounds."""

import inspect
import logging
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator
from math import fsum
from typing import Any, ClassVar, Self

import numpy as np
import torch
from torch import Tensor

from posterity.datasets.shards import Shards
from posterity.errors import BadData, BoundFell, positive_whole, shown, unknown, whole
from posterity.inference.infer import infer
from posterity.methods.coordinate_ascent import Values
from posterity.methods.expectation_maximization import ExpectationMaximization
from posterity.mixtures.checks import as_key, as_points, not_negative, one_of, stored_points
from posterity.mixtures.covariance import KINDS, Covariance
from posterity.mixtures.seeding import INITS
from posterity.mixtures.sweeps import StoredPoints
from posterity.model.density import Density
from posterity.numerics.random import Key

logger = logging.getLogger("posterity")

COLLINEAR = 1e5  # condition number of correlations from which rounding can be 1e-10 of the bound


class Steps(ABC):
    """The E-step, M-step and bound of a mixture on its rows, for all restarts at once."""

    @property
    def exact(self) -> bool:
        """Whether both steps maximise the bound, so that it never falls."""
        return True

    @abstractmethod
    def expectation(self, values: Values, latent: Values) -> Values:
        """The E-step: the sums over the rows under the responsibilities at these values."""

    @abstractmethod
    def maximisation(self, values: Values, latent: Values) -> Values:
        """The M-step: the values that maximise the bound."""

    @abstractmethod
    def bound(self, values: Values, latent: Values) -> Tensor:
        """The bound (R,), which both steps raise."""

    @abstractmethod
    def condition(self, values: Values) -> float:
        """The condition number of the matrices in values, which magnifies rounding."""


class MixtureEstimator(ABC):
    """A mixture with scikit-learn's methods; a subclass fits, scores rows by component, and has the fitted attributes.

    Rows may be `Shards` of files, which are read block by block in every pass: memory holds a few blocks. Results are
    arrays where rows are arrays or files, and tensors on the rows' device where rows are tensors, in float64.
    """

    n_components: int
    covariance_type: str
    tol: float
    max_iter: int
    n_init: int
    init_params: str
    random_state: Any
    warm_start: bool
    verbose: int  # whether a progress bar is shown
    verbose_interval: int  # for scikit-learn's interface; a bar needs none
    n_features_in_: int
    feature_names_in_: Any
    weights_: Any
    means_: Any
    covariances_: Any
    precisions_: Any
    precisions_cholesky_: Any
    converged_: bool
    n_iter_: int
    lower_bound_: float
    lower_bounds_: list[float]
    _noted: ClassVar[str]  # the column of the trace in lower_bounds_: after E-steps or after M-steps

    @abstractmethod
    def fit(self, X: Any, y: Any = None, *, sample_weight: Any = None, labels: Any = None) -> Self:
        """Fit to rows X (N, D); y is not used."""

    @abstractmethod
    def _scores(self, points: Tensor) -> Tensor:
        """Scores of each row and component (N, K) in float64, whose softmax over components is their probabilities."""

    @abstractmethod
    def _dense_covariances(self) -> Tensor:
        """The covariances (K, D, D) from which `sample` draws, in float64."""

    def _log_joint(self, points: Tensor) -> Tensor:
        """log(weight_k p_k(x_n)) of each row and component, (N, K)."""
        return self._scores(points)

    def _noise(self, components: Tensor, key: Key) -> Tensor:
        """Draw standard noise (n, D) in float64 for `sample`, for rows of these components (n,)."""
        return key.normal((len(components), self.n_features_in_), torch.float64, components.device)

    def log_joint(self, X: Any) -> Any:
        """log p(x_n, z_n = k) of each row and component, (N, K)."""
        return given_as(self._by_block(X, self._log_joint), X)

    def score_samples(self, X: Any) -> Any:
        """log p(x_n) of each row, (N,)."""
        return given_as(self._by_block(X, self._log_densities), X)

    def score(self, X: Any, y: Any = None) -> float:
        """The mean of log p(x_n) over the rows."""
        sums = [(float(logs.mean()), len(logs)) for logs in map(self._log_densities, self._blocks(X))]
        return sums[0][0] if len(sums) == 1 else fsum(mean * count for mean, count in sums) / self._num_rows(X)

    def predict_proba(self, X: Any) -> Any:
        """The probability of each component for each row, (N, K)."""
        return given_as(self._by_block(X, lambda points: torch.softmax(self._scores(points), 1)), X)

    def predict(self, X: Any) -> Any:
        """The most probable component of each row, (N,)."""
        return given_as(self._by_block(X, lambda points: self._scores(points).argmax(1)), X)

    def fit_predict(self, X: Any, y: Any = None, *, sample_weight: Any = None, labels: Any = None) -> Any:
        """Fit, and return the most probable component of each row by the fitted mixture, whatever its label."""
        return self.fit(X, y, sample_weight=sample_weight, labels=labels).predict(X)

    def sample(self, n_samples: int = 1) -> tuple[Any, Any]:
        """Draw rows (n, D) and their components (n,), in the order of components; `random_state` determines them."""
        self._refuse_unfitted()
        positive_whole("n_samples", n_samples)
        key = as_key(self.random_state).fold("sample")
        weights, means = as_parameter(self.weights_), as_parameter(self.means_)
        edges = weights.cumsum(0)
        numbers = key.fold("components").uniform((n_samples,), torch.float64, edges.device) * edges[-1]
        components = torch.searchsorted(edges, numbers, right=True).clamp_max(len(edges) - 1).sort().values
        noise = self._noise(components, key.fold("rows"))
        roots = torch.linalg.cholesky(self._dense_covariances())  # (K, D, D)
        rows = torch.empty_like(noise)
        for component in range(len(edges)):  # a root for each row would be large
            chosen = components == component
            rows[chosen] = means[component] + noise[chosen] @ roots[component].mT
        return given_as(rows, self.means_), given_as(components, self.means_)

    def get_params(self, deep: bool = True) -> dict[str, Any]:
        """The settings by name; none is nested, so that `deep` has no effect."""
        return {name: getattr(self, name) for name in self._defaults()}

    def set_params(self, **params: Any) -> Self:
        """Change settings by name, and return the mixture."""
        known = self._defaults()
        for name in params:
            if name not in known:
                raise ValueError(f"{type(self).__name__}: {unknown('setting', name, known)}")
        for name, value in params.items():
            setattr(self, name, value)
        return self

    def __repr__(self) -> str:
        settings = []
        for name, default in self._defaults().items():
            value = getattr(self, name)
            if value is default or (type(value) is type(default) and not _is_array(value) and value == default):
                continue
            text = f"<{type(value).__name__} of shape {tuple(value.shape)}>" if _is_array(value) else repr(value)
            settings.append(f"{name}={text}")
        return f"{type(self).__name__}({', '.join(settings)})"

    def __sklearn_is_fitted__(self) -> bool:
        """Whether fit was called, for scikit-learn's `check_is_fitted`."""
        return hasattr(self, "n_features_in_")

    def __sklearn_tags__(self) -> Any:
        """The tags that scikit-learn's pipelines read."""
        from sklearn.utils import Tags, TargetTags

        return Tags(
            estimator_type="density_estimator",
            target_tags=TargetTags(required=False),
            transformer_tags=None,
            classifier_tags=None,
            regressor_tags=None,
        )

    def _keep(self, settings: dict[str, Any]) -> None:
        """Store the arguments of the constructor, its `locals()`, under their names, as scikit-learn asks."""
        vars(self).update({name: value for name, value in settings.items() if name != "self"})

    @classmethod
    def _defaults(cls) -> dict[str, Any]:
        parameters = list(inspect.signature(cls.__init__).parameters.values())[1:]
        return {parameter.name: parameter.default for parameter in parameters}

    def _check_settings(self) -> None:
        """Check the settings that all mixtures have."""
        positive_whole("n_components", self.n_components)
        not_negative("tol", self.tol)
        whole("max_iter", self.max_iter)
        positive_whole("n_init", self.n_init)
        one_of("init_params", self.init_params, INITS)
        if not isinstance(self.warm_start, (bool, np.bool_)):
            raise ValueError(f"warm_start must be True or False. Got {shown(self.warm_start)}.")

    def _kind(self) -> Covariance:
        one_of("covariance_type", self.covariance_type, KINDS)
        return KINDS[self.covariance_type]

    def _run(self, steps: Steps, density: Density, start: Values) -> dict[str, Tensor]:
        """Run rounds from `start` (R, ...) until the bound of each restart changes by at most `tol`, or `max_iter`.

        Returns the values of the best restart (1, ...), and sets the attributes that describe the run. Where matrices
        are far from singular, a fall of the bound in exact rounds is an error; otherwise rounding explains it, and the
        rounds are run again without that check, with a warning in the log.
        """
        name, last = type(self).__name__, deque[Values](maxlen=2)  # values at which the last two bounds were taken

        def bound(values: Values, latent: Values) -> Tensor:
            last.append(values)
            return steps.bound(values, latent)

        try:
            values = self._rounds(steps, bound, density, start, steps.exact)
        except BoundFell:
            worst = max(map(steps.condition, last))
            if worst < COLLINEAR:
                raise
            logger.warning(
                "%s: covariances are so close to singular (condition number %.0e of the correlations) that rounding "
                "lowers the bound. Raise reg_covar or the prior's scale, or leave out columns that follow from others.",
                name,
                worst,
            )
            values = self._rounds(steps, steps.bound, density, start, False)
        if not self.converged_:
            advice = "Raise max_iter or tol, or try n_init."
            logger.warning("%s has not converged after max_iter = %d rounds. %s", name, self.max_iter, advice)
        return values

    def _rounds(
        self, steps: Steps, bound: Callable[[Values, Values], Tensor], density: Density, start: Values, exact: bool
    ) -> dict[str, Tensor]:
        em = ExpectationMaximization(
            steps.expectation,
            steps.maximisation,
            bound,
            rounds=int(self.max_iter),
            tolerance=0.0,
            absolute=float(self.tol),
            exact=exact,
            batched=True,
            restarts=len(next(iter(start.values()))),
        )
        q, trace = infer(em, density, None, start=density.unconstrained(start), progress=bool(self.verbose))
        best = int(trace["bound_after_m"][-1].argmax())
        bounds = trace["bound"][:, best].tolist()  # after each E-step
        still = [index for index in range(1, len(bounds)) if abs(bounds[index] - bounds[index - 1]) <= self.tol]
        self.n_iter_ = still[0] + 1 if still else len(bounds)
        self.converged_, self.lower_bounds_ = bool(still), trace[self._noted][: self.n_iter_, best].tolist()
        self.lower_bound_ = self.lower_bounds_[-1]
        return {name: value[None] for name, value in density.constrained(q.start().point()).items()}

    def _note_mixture(
        self, X: Any, kind: Covariance, centre: Tensor, weights: Tensor, means: Tensor, covariances: Tensor
    ) -> None:
        """Set the fitted attributes that all mixtures have, from values (1, ...) with means about the centre."""
        factors = kind.factors(covariances)
        self.n_features_in_ = len(centre)
        vars(self).pop("feature_names_in_", None)
        if (names := _names(X)) is not None:
            self.feature_names_in_ = names
        self.weights_ = given_as(weights[0], X)
        self.means_ = given_as(means[0] + centre, X)
        self.covariances_ = given_as(covariances[0], X)
        self.precisions_cholesky_ = given_as(factors[0], X)
        self.precisions_ = given_as(kind.precisions(factors)[0], X)

    def _log_densities(self, points: Tensor) -> Tensor:
        """log p(x_n) of points in memory, (N,)."""
        return torch.logsumexp(self._log_joint(points), 1)

    def _blocks(self, X: Any) -> Iterator[Tensor]:
        """Yield the rows to score: all together, or files block by block."""
        self._refuse_unfitted()
        self._refuse_other_names(X)
        if isinstance(X, Shards):
            yield from (points for _, points in stored_points(X, self._expected))
        else:
            yield as_points(X, expected=self._expected)

    def _by_block(self, X: Any, function: Callable[[Tensor], Tensor]) -> Tensor:
        """Apply `function` to the rows block by block, (N, ...)."""
        parts = [function(points) for points in self._blocks(X)]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _num_rows(self, X: Any) -> int:
        """Number of rows N."""
        self._refuse_unfitted()
        return len(X) if isinstance(X, Shards) else len(as_points(X, expected=self._expected))

    @property
    def _expected(self) -> tuple[str, int]:
        """The class and the number of columns, for `as_points`."""
        return type(self).__name__, self.n_features_in_

    def _refuse_other_names(self, X: Any) -> None:
        """Raise unless the columns of a data frame are the columns of fit, in their order."""
        wanted, names = getattr(self, "feature_names_in_", None), _names(X)
        if wanted is not None and names is not None and names.tolist() != wanted.tolist():
            raise BadData(
                f"X must have the columns of fit in their order, {', '.join(wanted[:5])}{', ...' * (len(wanted) > 5)}. "
                f"Got {', '.join(names[:5])}{', ...' * (len(names) > 5)}. Use X[list(mixture.feature_names_in_)]."
            )

    def _refuse_unfitted(self) -> None:
        if not self.__sklearn_is_fitted__():
            message = f"This {type(self).__name__} is not fitted yet. Call fit(X) first."
            try:
                from sklearn.exceptions import NotFittedError
            except ImportError:
                raise ValueError(message) from None
            raise NotFittedError(message)


def given_as(tensor: Tensor, like: Any) -> Any:
    """Return the tensor where `like` is a tensor, otherwise an array."""
    return tensor if isinstance(like, Tensor) else tensor.cpu().numpy()


def as_parameter(value: Any, like: Tensor | StoredPoints | None = None) -> Tensor:
    """Convert a fitted attribute to a float64 tensor, on the device of `like` if given."""
    tensor = value if isinstance(value, Tensor) else torch.from_numpy(np.array(value))
    return tensor.to(torch.float64) if like is None else tensor.to(like.device, torch.float64)


def _names(X: Any) -> Any:
    """The names of the columns of a data frame, if all are strings, as an array; else None."""
    names = list(getattr(X, "columns", ()))
    return np.array(names, dtype=object) if names and all(isinstance(name, str) for name in names) else None


def _is_array(value: object) -> bool:
    return isinstance(value, (np.ndarray, Tensor))
