"""Distributions of targets, the integrators that make them from network outputs, and conformal prediction on them.

Scores of predictives are in `metrics`.
"""

from posterity.predictive.affine import AffinePredictive
from posterity.predictive.classes import ClassPredictive
from posterity.predictive.conformal import (
    Conformal,
    ConformalIntervals,
    ConformalScore,
    ConformalSets,
    Quantiles,
    Residual,
    Studentised,
)
from posterity.predictive.draws import DrawsPredictive, from_blocks, from_outputs
from posterity.predictive.exact import Exact, joint_gaussian
from posterity.predictive.exponential import ExponentialPredictive
from posterity.predictive.gaussian import GaussianPredictive, moment_matched
from posterity.predictive.information import label_information
from posterity.predictive.integrator import Integrator, MonteCarlo
from posterity.predictive.mixture import MixturePredictive, mixed
from posterity.predictive.normals import NormalsPredictive
from posterity.predictive.predictive import Predictive
from posterity.predictive.probit import LaplaceBridge, Probit, ProbitPhi, laplace_bridge, probit_kappa
from posterity.predictive.quadrature import probit_phi, sigmoid_gaussian, softmax_gaussian
from posterity.predictive.scaling import Scaling, TemperatureScaling, VectorScaling

__all__ = [
    "AffinePredictive",
    "ClassPredictive",
    "Conformal",
    "ConformalIntervals",
    "ConformalScore",
    "ConformalSets",
    "DrawsPredictive",
    "Exact",
    "ExponentialPredictive",
    "GaussianPredictive",
    "Integrator",
    "LaplaceBridge",
    "MixturePredictive",
    "MonteCarlo",
    "NormalsPredictive",
    "Predictive",
    "Probit",
    "ProbitPhi",
    "Quantiles",
    "Residual",
    "Scaling",
    "Studentised",
    "TemperatureScaling",
    "VectorScaling",
    "from_blocks",
    "from_outputs",
    "joint_gaussian",
    "label_information",
    "laplace_bridge",
    "mixed",
    "moment_matched",
    "probit_kappa",
    "probit_phi",
    "sigmoid_gaussian",
    "softmax_gaussian",
]
