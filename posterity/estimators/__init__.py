"""Estimators for tables: scikit-learn's conventions around the library, and the automatic choice behind them.

Methods, networks and likelihoods come from the other packages; what turns frames into tables is in `datasets`.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from posterity.estimators.automatic import Stacked, fit_automatic
from posterity.estimators.candidates import Warp
from posterity.estimators.class_process import ClassProcess
from posterity.estimators.densities import Calibration, Density, Pool, Scale, Shape
from posterity.estimators.encoding import Encoding
from posterity.estimators.gaussian_process import GaussianProcess

if TYPE_CHECKING:
    from posterity.estimators.classifier import BayesianClassifier
    from posterity.estimators.estimator import Decomposition
    from posterity.estimators.regressor import BayesianRegressor

# Loaded at first use: importing scikit-learn takes seconds, and the command line does without it.
_MODULES = {"BayesianClassifier": "classifier", "BayesianRegressor": "regressor", "Decomposition": "estimator"}

__all__ = [
    "BayesianClassifier",
    "BayesianRegressor",
    "Calibration",
    "ClassProcess",
    "Decomposition",
    "Density",
    "Encoding",
    "GaussianProcess",
    "Pool",
    "Scale",
    "Shape",
    "Stacked",
    "Warp",
    "fit_automatic",
]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return getattr(import_module(f"posterity.estimators.{_MODULES[name]}"), name)
    raise AttributeError(f"module 'posterity.estimators' has no attribute '{name}'")
