"""Gaussian mixtures, by EM and by variational inference, with the interface of scikit-learn.

Each kind of covariance is one file. EM for models of your own is `methods.ExpectationMaximization`.
"""

from posterity.mixtures.bayesian_gaussian_mixture import BayesianGaussianMixture
from posterity.mixtures.covariance import Covariance
from posterity.mixtures.diagonal import Diagonal
from posterity.mixtures.full import Full
from posterity.mixtures.gaussian_mixture import GaussianMixture
from posterity.mixtures.passes import log_densities, responsibilities, score_chunks, scores, statistics
from posterity.mixtures.regularisation import InverseWishart
from posterity.mixtures.rows import Components, Rows, Statistics, rows_of
from posterity.mixtures.spherical import Spherical
from posterity.mixtures.tied import Tied

__all__ = [
    "BayesianGaussianMixture",
    "Components",
    "Covariance",
    "Diagonal",
    "Full",
    "GaussianMixture",
    "InverseWishart",
    "Rows",
    "Spherical",
    "Statistics",
    "Tied",
    "log_densities",
    "responsibilities",
    "rows_of",
    "score_chunks",
    "scores",
    "statistics",
]
