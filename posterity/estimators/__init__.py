"""Estimators for tables: scikit-learn's conventions around the library, and the automatic choice behind them.

Methods, networks and likelihoods come from the other packages; what turns frames into tables is in `datasets`.
"""

from posterity.estimators.automatic import Stacked, fit_automatic
from posterity.estimators.candidates import Warp
from posterity.estimators.classifier import BayesianClassifier
from posterity.estimators.densities import Calibration, Density, Pool, Scale, Shape
from posterity.estimators.encoding import Encoding
from posterity.estimators.estimator import Decomposition
from posterity.estimators.gaussian_process import GaussianProcess
from posterity.estimators.regressor import BayesianRegressor

__all__ = [
    "BayesianClassifier",
    "BayesianRegressor",
    "Calibration",
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
