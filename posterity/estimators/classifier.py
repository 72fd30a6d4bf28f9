"""Classification on tables with scikit-learn's interface."""

from dataclasses import dataclass
from typing import Any, Literal, final

import numpy as np
import torch
from sklearn.base import ClassifierMixin
from torch import Tensor

from posterity.errors import BadData, shown
from posterity.estimators.encoding import as_labels
from posterity.estimators.estimator import BayesianEstimator
from posterity.likelihoods import Categorical, Likelihood
from posterity.numerics.random import Key
from posterity.options import option
from posterity.predictive import Conformal, ConformalSets, Predictive
from posterity.predictive.conformal import Order


@final
@dataclass(eq=False, repr=False)
class BayesianClassifier(ClassifierMixin, BayesianEstimator):  # type: ignore[misc]  # scikit-learn has no types
    """Bayesian classification with scikit-learn's interface: class probabilities averaged over a posterior.

    `fit(X, y)` takes pandas and polars frames, arrays and tensors. Categories, dates, booleans, numbers in strings and
    missing values are encoded inside, and the encoding is kept with the fit. y has numbers, strings or booleans, of
    which `classes_` are the different ones in order.

    **Math**: p(y = k | x, w) = softmax(f(x; w))_k, with a prior over w, whose posterior the method infers;
    `predict_proba` is the average of these probabilities over it. `class_weight` multiplies the weights of rows, by
    label or, with "balanced", so that all classes count the same: probabilities are then for such a population.

    **Limit**: as the method. One label a row; rows of two classes at least. A set of level 1 - alpha by `conformal`
    covers exchangeable new rows, whatever the model, with probability >= 1 - alpha for "split", >= 1 - 2 alpha for
    "jackknife+", and somewhat less for "cv+"; `guarantee` says what holds.

    **Cost**: as the method; `auto` about `seconds`. `conformal` fits one model for "split", 6 for "cv+" and n + 1 for
    "jackknife+"; sets of these take predictions by 1, 5 and n models.

    **References**: `predictive.ConformalSets`; Barber et al. (2021), Predictive inference with the jackknife+.

    **Example**:

    >>> import numpy as np
    >>> from posterity.priors import Normal
    >>> X = np.linspace(-1, 1, 40)[:, None]
    >>> model = BayesianClassifier("laplace", network=torch.nn.Linear, prior=Normal(5.0))
    >>> model = model.fit(X, np.where(X[:, 0] > 0, "up", "down"))
    >>> model.classes_.tolist(), model.predict([[0.9]]).tolist()
    (['down', 'up'], ['up'])
    >>> bool(model.predict_proba([[0.9]])[0, 1] > 0.9)
    True
    """

    class_weight: dict[Any, float] | str | None = option(
        None, help="Weights of classes by label, or balanced.", usual="1 for each"
    )

    def predict(self, X: Any) -> Any:
        """Return the most probable class of each row, (N,)."""
        return self._labels(self.predict_distribution(X).probs.argmax(1), X)

    def predict_proba(self, X: Any) -> Any:
        """Return the probability of each class for each row, (N, C), in the order of `classes_`."""
        return self._shaped(self.predict_distribution(X).probs, X)

    def predict_log_proba(self, X: Any) -> Any:
        """Return the logarithm of `predict_proba`."""
        return self._shaped(self.predict_distribution(X).probs.double().log(), X)

    def predict_set(self, X: Any, level: float = 0.9) -> Any:
        """Return which classes are in a set that contains the label with this probability, (N, C) of booleans.

        It needs `conformal`, whose promise `guarantee` says.
        """
        return self._given(self._conformal().sets(self._fold_predictives(X), level), X)

    def sample(self, X: Any, n: int = 1) -> Any:
        """Draw n labels for each row, (n, N); `random_state` determines them."""
        return self._labels(self._draws(X, n), X)

    def _labels(self, index: Tensor, X: Any) -> Any:
        labels = self.classes_[index.cpu().numpy()]
        numeric = isinstance(X, Tensor) and labels.dtype.kind in "biuf"
        return torch.from_numpy(labels).to(X.device) if numeric else labels

    def _task(self) -> Literal["regression", "classification"]:
        return "classification"

    def _check_settings(self, groups: Any, times: Any) -> None:
        super()._check_settings(groups, times)
        given: object = self.class_weight
        if not (given is None or given == "balanced" or isinstance(given, dict)):
            raise ValueError(f"BayesianClassifier.class_weight must be None, balanced or a dict. Got {shown(given)}.")

    def _read_targets(self, y: Any) -> Any:
        return as_labels(y)

    def _settle(self, targets: Any, weights: Any) -> tuple[Tensor, Any]:
        kept = weights > 0
        self.classes_ = np.unique(targets[kept])
        if len(self.classes_) < 2:
            only = shown(self.classes_[0].item())
            raise BadData(
                f"BayesianClassifier needs rows of at least 2 classes. Got 1 class, {only}: nothing to learn."
            )
        index = np.searchsorted(self.classes_, np.where(kept, targets, self.classes_[0]))
        if self.class_weight == "balanced":  # by weights: rows of weight 0 do not count
            totals = np.bincount(index, weights, len(self.classes_))
            weights = weights * (totals.sum() / (len(totals) * totals))[index]
        elif self.class_weight is not None:
            by_class = self._by_class(targets)
            if not (np.isfinite(by_class) & (by_class > 0)).all():
                raise ValueError(
                    f"BayesianClassifier.class_weight must have positive numbers. Got {shown(self.class_weight)}. "
                    "Leave the rows of a class out instead of a weight of 0."
                )
            weights = weights * by_class
        return torch.from_numpy(index), weights

    def _by_class(self, targets: Any) -> Any:
        """Return the weight of each row's class, (N,); 1 for classes that `class_weight` does not name."""
        given: Any = self.class_weight
        known = np.unique(targets).tolist()
        others = [label for label in given if label not in known]
        if others and any(label not in given for label in known):  # the training rows may lack a named class
            raise ValueError(
                f"BayesianClassifier.class_weight names {shown(others[0])}, which is no class of y. "
                f"Name some of {shown(known)}."
            )
        try:
            weights = {label: float(weight) for label, weight in given.items()}
        except (TypeError, ValueError):
            raise ValueError(f"BayesianClassifier.class_weight must have numbers. Got {shown(given)}.") from None
        return np.array([weights.get(label, 1.0) for label in targets.tolist()])

    def _likelihood(self) -> Likelihood:
        return Categorical()

    def _outputs(self) -> int:
        return len(self.classes_)

    def _units(self) -> dict[str, Any]:
        return {"classes": len(self.classes_)}

    def _calibrated(self, predictives: list[Predictive], targets: list[Any], order: Order) -> Conformal:
        known = all(np.isin(values, self.classes_).all() for values in targets)
        if not known or any(pred.probs.shape[1] < len(self.classes_) for pred in predictives):
            raise BadData("conformal needs rows of every class outside each fold. Give more rows, or fewer classes.")
        labels = [torch.from_numpy(np.searchsorted(self.classes_, values)) for values in targets]
        return ConformalSets.fit(predictives, labels, key=Key(self.seed_), order=order)

    def _in_units(self, pred: Predictive) -> Predictive:
        return pred
