"""Distributions of targets, and the integrators that make them from Gaussian or drawn network outputs.

Scores of predictives are in `metrics`.
"""

from posterity.predictive.classes import ClassPredictive
from posterity.predictive.default import default_integrator
from posterity.predictive.draws import DrawsPredictive
from posterity.predictive.exact import Exact, joint_gaussian, sigmoid_gaussian, softmax_gaussian
from posterity.predictive.gaussian import GaussianPredictive, moment_matched
from posterity.predictive.integrator import Integrator
from posterity.predictive.laplace_bridge import LaplaceBridge, laplace_bridge
from posterity.predictive.mixture import MixturePredictive, mixed
from posterity.predictive.monte_carlo import MonteCarlo
from posterity.predictive.outputs import from_outputs
from posterity.predictive.predictive import Predictive
from posterity.predictive.probit import Probit, ProbitPhi, probit_kappa, probit_phi
from posterity.predictive.temperature_scaling import TemperatureScaling

__all__ = [
    "ClassPredictive",
    "DrawsPredictive",
    "Exact",
    "GaussianPredictive",
    "Integrator",
    "LaplaceBridge",
    "MixturePredictive",
    "MonteCarlo",
    "Predictive",
    "Probit",
    "ProbitPhi",
    "TemperatureScaling",
    "default_integrator",
    "from_outputs",
    "joint_gaussian",
    "laplace_bridge",
    "mixed",
    "moment_matched",
    "probit_kappa",
    "probit_phi",
    "sigmoid_gaussian",
    "softmax_gaussian",
]
