"""Densities of targets given network outputs, with their derivatives and closed-form integrals.

Distributions after integrating over outputs are in `predictive`.
"""

from posterity.likelihoods.bernoulli import Bernoulli
from posterity.likelihoods.categorical import Categorical
from posterity.likelihoods.custom import Custom
from posterity.likelihoods.gaussian import Gaussian, Heteroscedastic
from posterity.likelihoods.likelihood import Likelihood
from posterity.likelihoods.poisson import Poisson
from posterity.likelihoods.probit import Probit
from posterity.likelihoods.student_t import StudentT

__all__ = [
    "Bernoulli",
    "Categorical",
    "Custom",
    "Gaussian",
    "Heteroscedastic",
    "Likelihood",
    "Poisson",
    "Probit",
    "StudentT",
]
