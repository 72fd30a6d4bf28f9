"""Estimators of the gradient of an ELBO, one file each."""

from posterity.methods.parts.gradients.estimator import DataTerm, Estimator, Factorised, Gradients
from posterity.methods.parts.gradients.flipout import Flipout
from posterity.methods.parts.gradients.local_reparameterisation import LocalReparameterisation
from posterity.methods.parts.gradients.score_function import ScoreFunction
from posterity.methods.parts.gradients.second_order import SecondOrder
from posterity.methods.parts.gradients.stick_the_landing import StickTheLanding
from posterity.methods.parts.gradients.weight_sampling import WeightSampling

__all__ = [
    "DataTerm",
    "Estimator",
    "Factorised",
    "Flipout",
    "Gradients",
    "LocalReparameterisation",
    "ScoreFunction",
    "SecondOrder",
    "StickTheLanding",
    "WeightSampling",
]
