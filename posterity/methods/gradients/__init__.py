"""Estimators of the gradient of an ELBO, one file each."""

from posterity.methods.gradients.estimator import DataTerm, Estimator, Factorised, Gradients
from posterity.methods.gradients.flipout import Flipout
from posterity.methods.gradients.local_reparameterisation import LocalReparameterisation
from posterity.methods.gradients.score_function import ScoreFunction
from posterity.methods.gradients.second_order import SecondOrder
from posterity.methods.gradients.stick_the_landing import StickTheLanding
from posterity.methods.gradients.weight_sampling import WeightSampling

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
