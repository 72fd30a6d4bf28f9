"""Estimators of the gradient of an ELBO."""

from posterity.methods.parts.gradients.drawn_layers import Flipout, LocalReparameterisation
from posterity.methods.parts.gradients.drawn_weights import (
    PairedSampling,
    ScoreFunction,
    StickTheLanding,
    WeightSampling,
)
from posterity.methods.parts.gradients.estimator import DataTerm, Estimator, Factorised, Gradients
from posterity.methods.parts.gradients.second_order import SecondOrder

__all__ = [
    "DataTerm",
    "Estimator",
    "Factorised",
    "Flipout",
    "Gradients",
    "LocalReparameterisation",
    "PairedSampling",
    "ScoreFunction",
    "SecondOrder",
    "StickTheLanding",
    "WeightSampling",
]
