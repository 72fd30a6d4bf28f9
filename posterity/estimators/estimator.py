"""The base class of estimators: parameters, fit, conformal calibration, prediction and storage."""

import logging
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass
from itertools import islice
from typing import Any, Literal, NamedTuple, Self

import numpy as np
import torch
from sklearn.base import BaseEstimator, clone
from sklearn.utils.validation import check_consistent_length, check_is_fitted, validate_data
from torch import Tensor, nn

from posterity.errors import BadData, BadFolder, positive, positive_whole, shown, unknown
from posterity.estimators import folders
from posterity.estimators.automatic import Stacked, fit_automatic
from posterity.estimators.encoding import Encoding, as_array, as_rows, as_weights
from posterity.estimators.stages import HIDDEN, Fit, Rows, make_module
from posterity.inference import Method
from posterity.inference.folds import folds as folds_of
from posterity.likelihoods import Likelihood
from posterity.mixtures.checks import as_key
from posterity.mixtures.estimator import given_as
from posterity.networks import MLP
from posterity.numerics.random import Key
from posterity.options import check, describe, option
from posterity.posteriors import Posterior
from posterity.posteriors.load import load
from posterity.predictive import Conformal, Predictive
from posterity.predictive.conformal import Order
from posterity.priors import Prior
from posterity.recipes.methods import RECIPES
from posterity.recipes.stages import threads
from posterity.storage import RunFolder

logger = logging.getLogger("posterity")

AUTO = "auto"
DEVICES = ("auto", "cpu", "cuda")
CONFORMAL = ("split", "cv+", "jackknife+")
FOLDS = 5  # of cv+; split calibrates on one fold of as many


class Decomposition(NamedTuple):
    """Uncertainty of each prediction given the weights (aleatoric) and due to the weights (epistemic).

    Variances for regression, shaped as the prediction; nats (N,) for classes, which sum to the entropy.
    """

    aleatoric: Any
    epistemic: Any


@dataclass(eq=False, repr=False)
class BayesianEstimator(BaseEstimator, ABC):  # type: ignore[misc]  # scikit-learn has no types
    """Base of `BayesianRegressor` and `BayesianClassifier`."""

    method: str | Method = option(
        AUTO, help="auto, a word of the command line (posterity fit --help lists them), or a Method of posterity."
    )
    _: KW_ONLY
    network: nn.Module | Callable[[int, int], nn.Module] | None = option(
        None,
        help="A module, or a function (inputs, outputs) -> module. It decides the dtype of the fit.",
        usual="a linear model, or one layer of 50 tanh units where that predicts left-out rows better",
    )
    prior: Prior | None = option(
        None, help="The prior of the weights.", usual="normal, with scales that the method chooses"
    )
    category: Sequence[str] = option(
        (), help="Columns whose numbers are names of categories; columns of arrays are called x1, x2, ..."
    )
    drop: Sequence[str] = option((), help="Columns to leave out.")
    conformal: str | None = option(
        None,
        help="How intervals and sets of classes get their guarantee, by models that have not seen some of the rows:",
        choices=CONFORMAL,
        usual="none: intervals of the posterior",
    )
    seconds: float = option(60.0, help="The budget of auto, from which its plan follows.", unit="S", check=positive)
    random_state: Any = option(
        None,
        help="A whole number, a Key or a NumPy generator: fixes first weights, the order of rows, and draws.",
        usual="0, so that fits repeat",
    )
    n_jobs: int | None = option(
        None, help="Threads of a fit, -1 for all cores.", usual="one for small networks, else as torch has them"
    )
    device: str = option("auto", help="auto is CUDA where there is one.", choices=DEVICES)

    @abstractmethod
    def _task(self) -> Literal["regression", "classification"]:
        """Return the task, as data sets name it."""

    @abstractmethod
    def _read_targets(self, y: Any) -> Any:
        """Check the targets, and return them as an array (N, ...)."""

    @abstractmethod
    def _settle(self, targets: Any, weights: Any) -> tuple[Tensor, Any]:
        """Fit the encoding of targets to rows with weights; return the encoded targets and the final weights."""

    @abstractmethod
    def _likelihood(self) -> Likelihood:
        """Return the likelihood of the encoded targets."""

    @abstractmethod
    def _outputs(self) -> int:
        """Return the number of outputs of the network."""

    @abstractmethod
    def _units(self) -> dict[str, Any]:
        """Return the arguments of `fit_automatic` about the targets."""

    @abstractmethod
    def _in_units(self, pred: Predictive) -> Predictive:
        """Return the predictive in the units of the targets."""

    @abstractmethod
    def _calibrated(self, predictives: list[Predictive], targets: list[Any], order: Order) -> Conformal:
        """Return the conformal scores of the calibration rows, from the predictive of each model at its rows."""

    def fit(self, X: Any, y: Any, sample_weight: Any = None, *, groups: Any = None, times: Any = None) -> Self:
        """Fit to the rows of X, a frame, array or tensor, and their targets y.

        A row of weight w counts w times, and not at all for w = 0; `auto` goes by the ratios of weights alone, and for
        `conformal` all other rows count once. `groups` and `times` (N,) are for the folds of `auto` and `conformal`,
        which then hold whole groups, or come in time order.
        """
        self._check_settings(groups, times)
        for name in self._fitted():  # a failed fit must not leave attributes of an earlier one
            delattr(self, name)
        self.seed_ = as_key(self.random_state).seed
        rows, targets = self._read(X, y, reset=True)
        weights = as_weights(sample_weight, len(targets))
        given = {name: as_array(values, name) for name, values in (("groups", groups), ("times", times))}
        for name, values in given.items():
            if values is not None and np.shape(values)[:1] != (len(targets),):
                raise ValueError(f"fit: {name} must have a value for each of {len(targets)} rows. Got {shown(values)}.")
        if self.conformal is None:
            return self._fit(rows, targets, weights, given)
        return self._fit_conformal(X, y, targets, weights, given)

    def _fit(self, rows: Any, targets: Any, weights: Any, given: dict[str, Any]) -> Self:
        encoded, weights = self._settle(targets, weights)
        kept = weights > 0
        if int(kept.sum()) < 2:
            raise BadData(f"{type(self).__name__} needs at least 2 rows of positive weight. Got 1 sample.")
        notes: list[str] = []
        self.encoding_ = Encoding.fit(rows, weights, notes, category=self.category, drop=self.drop)
        inputs = self.encoding_.transform(rows, [], np.flatnonzero(kept))
        chosen = Rows(inputs, encoded[torch.from_numpy(kept)], torch.from_numpy(weights[kept]))
        with threads(len(inputs) * inputs.shape[1] * HIDDEN[0], self._threads()):
            if self.method == AUTO:
                by = {name: None if value is None else np.asarray(value)[kept] for name, value in given.items()}
                self.posterior_: Posterior | Stacked = self._by_auto(chosen, notes, by)
            else:
                fit = Fit(
                    self.method,
                    self.network,
                    self._likelihood(),
                    self.prior,
                    self._outputs(),
                    self.seed_,
                    self._device(),
                )
                self.posterior_ = fit(chosen, notes)
        self.notes_ = tuple(notes)
        for note in notes:
            logger.info("%s: %s", type(self).__name__, note)
        return self

    def _fit_conformal(self, X: Any, y: Any, targets: Any, weights: Any, given: dict[str, Any]) -> Self:
        """Fit to all rows, and to the rows outside each fold (split: outside one fold); score the rows of the folds."""
        used = np.flatnonzero(weights > 0)
        by = {name: None if value is None else np.asarray(value)[used] for name, value in given.items()}
        if self.conformal == "jackknife+" and by["times"] is not None:
            raise ValueError(
                "conformal='jackknife+' leaves out every row, the first in time too. Use 'split' or 'cv+'."
            )
        count = len(used) if self.conformal == "jackknife+" else min(FOLDS, len(used))
        for name, blocks in by.items():
            if blocks is not None:  # folds hold whole groups, and in time order the earliest rows are in no fold
                count = min(count, len(np.unique(blocks)) - (name == "times"))
        # Folds are not stratified: rows of stratified folds are not exchangeable.
        parts = folds_of(len(used), count, seed=self.seed_, **by)[-1 if self.conformal == "split" else 0 :]
        models: list[Self] = []
        for part in parts:
            seen = np.zeros_like(weights)
            seen[used[part.train.numpy()]] = weights[used[part.train.numpy()]]
            model: Any = clone(self)
            model.set_params(conformal=None, random_state=self.seed_)
            models.append(model.fit(X, y, sample_weight=seen, **(given if self.method == AUTO else {})))
        if self.conformal == "split":
            (only,) = models
            for name in only._fitted():
                setattr(self, name, getattr(only, name))
        else:
            self._fit(as_rows(X), targets, weights, given)
            self.fold_models_ = models
        tests = [used[part.test.numpy()] for part in parts]
        predictives = [model._predict(as_rows(X), test) for model, test in zip(models, tests, strict=True)]
        order: Order = "group" if by["groups"] is not None else "time" if by["times"] is not None else "random"
        self.conformal_ = self._calibrated(predictives, [targets[test] for test in tests], order)
        return self

    def guarantee(self, level: float = 0.9) -> str:
        """Return the conformal guarantee for intervals or sets of this level, in a sentence."""
        sentence: str = self._conformal().guarantee(level)
        return sentence

    def _conformal(self) -> Any:
        check_is_fitted(self)
        if not hasattr(self, "conformal_"):
            words = ", ".join(CONFORMAL)
            raise ValueError(f"{type(self).__name__} was fitted without a guarantee. Fit it with conformal= {words}.")
        return self.conformal_

    def _fold_predictives(self, X: Any) -> list[Predictive]:
        """Return the predictives of X by the models that scored the calibration rows."""
        return [model.predict_distribution(X) for model in getattr(self, "fold_models_", (self,))]

    def predict_distribution(self, X: Any) -> Predictive:
        """Return the distribution of the target of each row of X, in its own units."""
        check_is_fitted(self)
        rows, _ = self._read(X, None, reset=False)
        return self._predict(rows)

    def _predict(self, rows: Any, index: Any = None) -> Predictive:
        """Return the predictive of checked rows, or of those at `index`."""
        notes: list[str] = []
        inputs = self.encoding_.transform(rows, notes, index)
        for note in notes:
            logger.warning("%s: %s", type(self).__name__, note)
        if not isinstance(self.posterior_, Stacked):
            inputs = inputs.to(self.posterior_.joint.device, self.posterior_.joint.dtype)
        with threads(len(inputs) * inputs.shape[1] * HIDDEN[0], self._threads()):
            return self._in_units(self.posterior_.predict(inputs))

    def decompose(self, X: Any) -> Decomposition:
        """Split the uncertainty of each prediction into noise, and the part that more rows would remove."""
        pred = self.predict_distribution(X)
        return Decomposition(self._shaped(pred.aleatoric, X), self._shaped(pred.epistemic, X))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the fitted estimator into the run folder `path`, without pickle; `load` reads it back.

        A network of your own is not stored, only its weights: pass it again to `load`.
        """
        check_is_fitted(self)
        RunFolder(path).refuse("task")
        parameters = {**self.get_params(deep=False), "random_state": self.seed_}
        del parameters["network"], parameters["device"]
        fitted = {name: getattr(self, name) for name in self._fitted() if name not in ("posterior_", "fold_models_")}
        for path_of, model in zip(folders.folds(path, new=True), getattr(self, "fold_models_", ()), strict=False):
            model.save(path_of)
        folders.save(path, type(self).__name__, parameters, fitted, self.posterior_)

    @classmethod
    def load(
        cls,
        path: str | os.PathLike[str],
        network: nn.Module | Callable[[int, int], nn.Module] | None = None,
        device: str = "auto",
    ) -> Self:
        """Load the estimator that `save` wrote; pass `network` again if you gave the network of the fit."""
        parameters, fitted = folders.read(path, cls.__name__)
        known = [name for name in describe(cls) if name not in ("network", "device")]
        for name in parameters:
            if name not in known:
                raise BadFolder(f"{os.fspath(path)!r}: {unknown('parameter', name, known)} Upgrade posterity.")
        estimator = cls(network=network, device=device, **parameters)
        for name, value in fitted.items():
            setattr(estimator, name, value)
        estimator.posterior_ = estimator._stored(path)
        count = estimator.conformal_.num_folds if estimator.conformal is not None else 1
        if count > 1:
            paths = islice(folders.folds(path), count)
            estimator.fold_models_ = [cls.load(path_of, network, device) for path_of in paths]
        return estimator

    def _stored(self, path: str | os.PathLike[str]) -> Posterior | Stacked:
        device = self._device()
        if (config := folders.network(path)) is None and self.method == AUTO:
            return Stacked.load(path, device)
        if self.network is not None:
            module = make_module(self.network, len(self.encoding_.features), self._outputs(), self.seed_, device)
        elif config is not None:
            module = MLP(**config).to(device)
        else:
            raise BadFolder(f"{os.fspath(path)!r} was fitted with a network of your own. Pass it: load(path, network).")
        return load(path, module)

    def _draws(self, X: Any, n: int) -> Tensor:
        positive_whole("sample: n", n)
        return self.predict_distribution(X).sample(n, Key(self.seed_).fold("sample"))

    def _given(self, values: Tensor, X: Any) -> Any:
        """Return values as float64 arrays, or as tensors if X is a tensor."""
        return given_as(values.to(X.device) if isinstance(X, Tensor) else values, X)

    def _shaped(self, values: Tensor, X: Any) -> Any:
        """Return values for each prediction, in its shape and in float64, as arrays or tensors."""
        return self._given(values.double(), X)

    def __sklearn_is_fitted__(self) -> bool:
        return hasattr(self, "posterior_")

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.allow_nan = tags.input_tags.string = tags.input_tags.categorical = True
        tags.target_tags.required = True
        return tags

    def _check_settings(self, groups: Any, times: Any) -> None:
        name = type(self).__name__
        check(self, lambda field: f"{name}.{field}")
        method: object = self.method
        network, jobs = self.network, self.n_jobs
        if isinstance(method, str):
            if method not in (AUTO, *RECIPES):
                raise ValueError(f"{name}: {unknown('method', method, (AUTO, *RECIPES))}")
        elif not isinstance(method, Method):
            hint = f" Call it: {method.__name__}()." if isinstance(method, type) else ""
            raise TypeError(f"{name}.method must be auto, a word or a Method. Got {shown(method)}.{hint}")
        if method == AUTO and (network is not None or self.prior is not None):
            given = "network" if network is not None else "prior"
            raise ValueError(f"{name}: auto chooses its own networks and priors. Leave {given} out, or name a method.")
        if method != AUTO and self.conformal is None and (groups is not None or times is not None):
            raise ValueError(f"{name}: groups and times are for folds of auto or conformal. Leave them out.")
        if network is not None and not callable(network):
            raise TypeError(
                f"{name}.network must be a module or a function of (inputs, outputs). Got {shown(network)}."
            )
        if self.prior is not None and not isinstance(self.prior, Prior):
            raise TypeError(f"{name}.prior must be a Prior, such as Normal(1.0). Got {shown(self.prior)}.")
        for field in ("category", "drop"):
            if not _names(columns := getattr(self, field)):
                raise TypeError(f"{name}.{field} must be a list of columns, by name. Got {shown(columns)}.")
        if jobs is not None and (isinstance(jobs, bool) or jobs == 0 or int(jobs) != jobs):
            raise ValueError(f"{name}.n_jobs must be None, a positive whole number or -1. Got {shown(jobs)}.")

    def _read(self, X: Any, y: Any, *, reset: bool) -> tuple[Any, Any]:
        """Return the rows of X with the names and number of columns noted (reset) or compared, and checked targets."""
        if reset and y is None:
            raise BadData(f"This {type(self).__name__} estimator requires y to be passed, but the target y is None.")
        rows = as_rows(X)
        validate_data(self, rows if isinstance(X, Tensor) else X, reset=reset, skip_check_array=True)
        if y is None:
            return rows, None
        targets = self._read_targets(y)
        check_consistent_length(rows, targets)
        return rows, targets

    def _threads(self) -> int | None:
        if self.n_jobs is None:
            return None
        return int(self.n_jobs) if self.n_jobs > 0 else max(1, (os.cpu_count() or 1) + 1 + int(self.n_jobs))

    def _device(self) -> torch.device:
        wanted = "cuda" if self.device == "auto" and torch.cuda.is_available() else self.device
        if wanted == "cuda" and not torch.cuda.is_available():
            raise ValueError(f"{type(self).__name__}: torch sees no CUDA device. Use device='cpu' or 'auto'.")
        return torch.device("cuda" if wanted == "cuda" else "cpu")

    def _fitted(self) -> list[str]:
        """Return the names of the attributes that a fit has set."""
        return [name for name in vars(self) if name.endswith("_") and not name.startswith("_")]

    def _by_auto(self, rows: Rows, notes: list[str], given: dict[str, Any]) -> Stacked:
        fitted = fit_automatic(
            rows.inputs,
            rows.targets,
            self._task(),
            weights=rows.weights,
            seconds=self.seconds,
            seed=self.seed_,
            device=self._device(),
            **self._units(),
            **given,
        )
        notes.append(fitted.sentence)
        return fitted


def _names(given: Any) -> bool:
    """Return whether a value is a collection of strings, not a string."""
    return not isinstance(given, str) and np.iterable(given) and all(isinstance(name, str) for name in given)
