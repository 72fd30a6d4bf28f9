"""What mixtures share with scikit-learn's estimators: settings as parameters, and questions about rows."""

import inspect
from abc import ABC, abstractmethod
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from posterity.errors import positive_whole, unknown
from posterity.mixtures.checks import as_key, as_points
from posterity.numerics.random import Key


class MixtureEstimator(ABC):
    """A mixture with scikit-learn's verbs; a subclass fits, scores rows by component, and has the fitted attributes.

    The constructor keeps its arguments as they are, under their names. Answers are arrays where rows come as arrays,
    and tensors on the rows' device where they come as tensors.
    """

    n_components: int
    random_state: Any
    n_features_in_: int
    weights_: Any
    means_: Any

    @abstractmethod
    def fit(self, X: Any, y: Any = None, *, sample_weight: Any = None, labels: Any = None) -> Self:
        """Fit to rows X (N, D); y is not used."""

    @abstractmethod
    def _scores(self, points: Tensor) -> Tensor:
        """Of each row and component (N, K): their softmax over components are the probabilities of components."""

    @abstractmethod
    def _dense_covariances(self) -> Tensor:
        """The covariances (K, D, D) from which `sample` draws, in float64."""

    def _log_joint(self, points: Tensor) -> Tensor:
        """log(weight_k p_k(x_n)) of each row and component, (N, K)."""
        return self._scores(points)

    def _noise(self, components: Tensor, key: Key) -> Tensor:
        """What `sample` multiplies by roots of the covariances, for rows of these components: (n, D) in float64."""
        shape = (len(components), self.n_features_in_)
        return key.normal(shape, torch.float64, components.device)

    def log_joint(self, X: Any) -> Any:
        """log p(x_n, z_n = k) of each row and component, (N, K)."""
        return given_as(self._log_joint(self._points(X)), X)

    def score_samples(self, X: Any) -> Any:
        """log p(x_n) of each row, (N,)."""
        return given_as(torch.logsumexp(self._log_joint(self._points(X)), 1), X)

    def score(self, X: Any, y: Any = None) -> float:
        """The mean of log p(x_n) over the rows."""
        return float(torch.logsumexp(self._log_joint(self._points(X)), 1).double().mean())

    def predict_proba(self, X: Any) -> Any:
        """The probability of each component for each row, (N, K)."""
        return given_as(torch.softmax(self._scores(self._points(X)), 1), X)

    def predict(self, X: Any) -> Any:
        """The most probable component of each row, (N,)."""
        return given_as(self._scores(self._points(X)).argmax(1), X)

    def fit_predict(self, X: Any, y: Any = None, *, sample_weight: Any = None, labels: Any = None) -> Any:
        """Fit, and the most probable component of each row by the fitted mixture, whatever its label."""
        return self.fit(X, y, sample_weight=sample_weight, labels=labels).predict(X)

    def sample(self, n_samples: int = 1) -> tuple[Any, Any]:
        """Rows (n, D) drawn from the mixture and their components (n,), in the order of components.

        The same rows come at each call with the same `random_state`.
        """
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
        """The settings by name; there are no nested ones, so `deep` changes nothing."""
        return {name: getattr(self, name) for name in self._defaults()}

    def set_params(self, **params: Any) -> Self:
        """Change settings by name, and give the mixture back."""
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
        """For scikit-learn's `check_is_fitted`."""
        return hasattr(self, "n_features_in_")

    def __sklearn_tags__(self) -> Any:
        """For scikit-learn's pipelines, which alone ask for it."""
        from sklearn.utils import Tags, TargetTags

        return Tags(
            estimator_type="density_estimator",
            target_tags=TargetTags(required=False),
            transformer_tags=None,
            classifier_tags=None,
            regressor_tags=None,
        )

    @classmethod
    def _defaults(cls) -> dict[str, Any]:
        parameters = list(inspect.signature(cls.__init__).parameters.values())[1:]
        return {parameter.name: parameter.default for parameter in parameters}

    def _points(self, X: Any) -> Tensor:
        self._refuse_unfitted()
        return as_points(X, dimensions=self.n_features_in_)

    def _refuse_unfitted(self) -> None:
        if not self.__sklearn_is_fitted__():
            raise ValueError(f"This {type(self).__name__} is not fitted yet. Call fit(X) first.")


def given_as(tensor: Tensor, like: Any) -> Any:
    """The tensor where `like` is one, otherwise an array."""
    return tensor if isinstance(like, Tensor) else tensor.cpu().numpy()


def as_parameter(value: Any, like: Tensor | None = None) -> Tensor:
    """A fitted attribute as a float64 tensor, on the device of `like` where that is given."""
    tensor = value if isinstance(value, Tensor) else torch.from_numpy(np.array(value))
    return tensor.to(torch.float64) if like is None else tensor.to(like.device, torch.float64)


def _is_array(value: object) -> bool:
    return isinstance(value, (np.ndarray, Tensor))
