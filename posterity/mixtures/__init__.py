"""Mixtures of Gaussians with scikit-learn's interface: by EM, and Bayesian by coordinate ascent.

`covariance` has one class a kind, `sweeps` and `passes` go over the rows, `rounds` and `beliefs` have the steps.
EM itself is in `methods`; mixtures as posteriors over weights are in `posteriors`.
"""

from posterity.mixtures.bayesian_gaussian_mixture import BayesianGaussianMixture
from posterity.mixtures.covariance import Covariance, Diagonal, Full, Spherical, Tied
from posterity.mixtures.gaussian_mixture import GaussianMixture
from posterity.mixtures.passes import log_densities, responsibilities, score_chunks, scores, statistics
from posterity.mixtures.rounds import InverseWishart
from posterity.mixtures.sweeps import Components, Rows, Statistics, rows_of

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
