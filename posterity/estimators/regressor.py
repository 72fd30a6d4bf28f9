"""Regression on tables with scikit-learn's interface."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, final

import numpy as np
import torch
from sklearn.base import RegressorMixin
from torch import Tensor

from posterity.errors import shown, unknown
from posterity.estimators.encoding import as_targets, moments
from posterity.estimators.estimator import AUTO, BayesianEstimator
from posterity.likelihoods import Gaussian, Heteroscedastic, Likelihood, Poisson, StudentT
from posterity.options import option
from posterity.predictive import AffinePredictive, Conformal, ConformalIntervals, Predictive
from posterity.predictive.conformal import Order

LIKELIHOODS = ("gaussian", "student-t", "poisson", "heteroscedastic")
DEGREES = 4.0  # of freedom of student-t


@final
@dataclass(eq=False, repr=False)
class BayesianRegressor(RegressorMixin, BayesianEstimator):  # type: ignore[misc]  # scikit-learn has no types
    """Bayesian regression with scikit-learn's interface: a distribution for each row of a table.

    `fit(X, y)` takes pandas and polars frames, arrays and tensors. Categories, dates, booleans, numbers in strings and
    missing values are encoded inside, and the encoding is kept with the fit. y is (N,) or (N, T) for several targets.

    **Math**: y = f(x; w) + noise, with a prior over w, whose posterior the method infers; `predict_distribution` is the
    average of p(y | x, w) over it. Inputs and, unless the likelihood is "poisson" or an object, targets are
    standardised: a `Likelihood` that is given is about y as it comes. "student-t" has 4 degrees of freedom,
    "heteroscedastic" makes the noise an output of the network, "poisson" is for counts, with the log rate as output.

    **Limit**: as the method; `auto` chooses its own noise. Columns with one value are left out. Texts with more than 50
    different values are refused. An interval of level 1 - alpha by `conformal` covers exchangeable new rows, whatever
    the model, with probability >= 1 - alpha for "split", >= 1 - 2 alpha for "jackknife+", and somewhat less for "cv+";
    `guarantee` says what holds.

    **Cost**: as the method; `auto` about `seconds`. `conformal` fits one model for "split", 6 for "cv+" and n + 1 for
    "jackknife+"; intervals of these take predictions by 1, 5 and n models.

    **References**: `predictive.ConformalIntervals`; Barber et al. (2021), Predictive inference with the jackknife+.

    **Example**:

    >>> import numpy as np
    >>> X = np.linspace(-1, 1, 40)[:, None]
    >>> y = 10 + 3 * X[:, 0] + 0.1 * np.cos(50 * X[:, 0])
    >>> model = BayesianRegressor("laplace", network=torch.nn.Linear).fit(X, y)
    >>> lower, upper = model.predict_interval([[0.5]], level=0.9)
    >>> bool(lower[0] < 11.5 < upper[0]), model.predict([[0.5]]).round(1)
    (True, array([11.5]))
    """

    likelihood: str | Likelihood = option(
        "gaussian", help="gaussian, student-t, poisson, heteroscedastic, or a Likelihood of posterity."
    )

    def predict(self, X: Any, return_std: bool = False) -> Any:
        """Return the mean of each row's target, (N,) or (N, T), and its standard deviation if wanted."""
        pred = self.predict_distribution(X)
        mean = self._shaped(pred.mean, X)
        return (mean, self._shaped(pred.std, X)) if return_std else mean

    def predict_interval(self, X: Any, level: float = 0.9) -> tuple[Any, Any]:
        """Return lower and upper ends of an interval that contains the target with this probability.

        It is the central one of the posterior, or with `conformal` one with a guarantee, which `guarantee` says.
        """
        if self.conformal is None:
            lower, upper = self.predict_distribution(X).interval(level)
        else:
            lower, upper = self._conformal().interval(self._fold_predictives(X), level)
        return self._shaped(lower, X), self._shaped(upper, X)

    def predict_quantiles(self, X: Any, quantiles: Sequence[float] = (0.05, 0.5, 0.95)) -> Any:
        """Return quantiles of each row's target, (N, Q) or, for several targets, (N, T, Q)."""
        try:
            levels = [float(p) for p in quantiles]
        except (TypeError, ValueError):
            levels = []
        if not levels:
            raise ValueError(
                f"predict_quantiles: quantiles must be a list of numbers, such as [0.05, 0.95]. Got {shown(quantiles)}."
            )
        pred = self.predict_distribution(X)
        values = torch.stack([self._flat(pred.quantile(p)).double() for p in levels], dim=-1)
        return self._given(values, X)

    def sample(self, X: Any, n: int = 1) -> Any:
        """Draw n targets for each row, (n, N) or (n, N, T); `random_state` determines them."""
        drawn = self._draws(X, n)
        return self._given(drawn[..., 0] if self.flat_targets_ else drawn, X)

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.target_tags.multi_output = True
        return tags

    def _task(self) -> Literal["regression", "classification"]:
        return "regression"

    def _check_settings(self, groups: Any, times: Any) -> None:
        super()._check_settings(groups, times)
        given: object = self.likelihood
        if isinstance(given, str):
            if given not in LIKELIHOODS:
                raise ValueError(f"BayesianRegressor: {unknown('likelihood', given, LIKELIHOODS)}")
        elif not isinstance(given, Likelihood):
            raise TypeError(f"BayesianRegressor.likelihood must be a word or a Likelihood. Got {shown(given)}.")
        if self.method == AUTO and given != "gaussian":
            raise ValueError("BayesianRegressor: auto chooses its own noise. Leave likelihood out, or name a method.")

    def _read_targets(self, y: Any) -> Any:
        return as_targets(y)

    def _settle(self, targets: Any, weights: Any) -> tuple[Tensor, Any]:
        self.flat_targets_ = targets.ndim == 1
        columns, kept = targets.reshape(len(targets), -1), weights > 0
        count = columns.shape[1]
        mean, scale = (0.0,) * count, (1.0,) * count
        if isinstance(self.likelihood, str) and self.likelihood != "poisson":
            mean, scale = moments(columns[kept], weights[kept])
        self.target_mean_, self.target_scale_ = mean, scale
        return torch.from_numpy((columns - np.array(mean)) / np.array(scale)), weights

    def _likelihood(self) -> Likelihood:
        if isinstance(self.likelihood, Likelihood):
            return self.likelihood
        count = len(self.target_mean_)
        if self.likelihood == "gaussian":
            return Gaussian() if count == 1 else Gaussian((1.0,) * count, learn=True)
        if self.likelihood == "student-t":
            return StudentT(degrees=DEGREES, scale=(1.0,) * count, learn=True)
        return Poisson() if self.likelihood == "poisson" else Heteroscedastic()

    def _outputs(self) -> int:
        twice = self.likelihood == "heteroscedastic" or isinstance(self.likelihood, Heteroscedastic)
        return len(self.target_mean_) * (2 if twice else 1)

    def _units(self) -> dict[str, Any]:
        return {"mean": self.target_mean_, "scale": self.target_scale_}

    def _in_units(self, pred: Predictive) -> Predictive:
        if not any(self.target_mean_) and set(self.target_scale_) == {1.0}:
            return pred
        mean, scale = (torch.tensor(value, dtype=torch.float64) for value in (self.target_mean_, self.target_scale_))
        return AffinePredictive(pred, mean, scale)

    def _calibrated(self, predictives: list[Predictive], targets: list[Any], order: Order) -> Conformal:
        return ConformalIntervals.fit(predictives, [torch.from_numpy(values) for values in targets], order=order)

    def _flat(self, values: Tensor) -> Tensor:
        return values.flatten(1)[:, 0] if self.flat_targets_ else values

    def _shaped(self, values: Tensor, X: Any) -> Any:
        return super()._shaped(self._flat(values), X)
