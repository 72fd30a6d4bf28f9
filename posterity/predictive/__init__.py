"""Distributions of targets, and the integrals that make them from network outputs."""

from posterity.predictive.classes import ClassPredictive
from posterity.predictive.default import default_integrator
from posterity.predictive.draws import DrawsPredictive
from posterity.predictive.exact import Exact, sigmoid_gaussian
from posterity.predictive.gaussian import GaussianPredictive
from posterity.predictive.integrator import Integrator
from posterity.predictive.monte_carlo import MonteCarlo
from posterity.predictive.outputs import from_outputs
from posterity.predictive.predictive import Predictive
from posterity.predictive.probit import Probit, ProbitPhi, probit_kappa, probit_phi

__all__ = [
    "ClassPredictive",
    "DrawsPredictive",
    "Exact",
    "GaussianPredictive",
    "Integrator",
    "MonteCarlo",
    "Predictive",
    "Probit",
    "ProbitPhi",
    "default_integrator",
    "from_outputs",
    "probit_kappa",
    "probit_phi",
    "sigmoid_gaussian",
]
