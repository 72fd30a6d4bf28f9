"""Densities of targets given network outputs."""

from posterity.likelihoods.bernoulli import Bernoulli
from posterity.likelihoods.categorical import Categorical
from posterity.likelihoods.gaussian import Gaussian
from posterity.likelihoods.likelihood import Likelihood

__all__ = ["Bernoulli", "Categorical", "Gaussian", "Likelihood"]
