"""Estimators for tables with scikit-learn's interface, which this package needs.

Methods, networks and likelihoods come from the other packages; what turns frames into tensors is in `datasets`.
"""

from posterity.estimators.classifier import BayesianClassifier
from posterity.estimators.estimator import Decomposition
from posterity.estimators.regressor import BayesianRegressor

__all__ = ["BayesianClassifier", "BayesianRegressor", "Decomposition"]
