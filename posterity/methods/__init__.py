"""Inference methods, one file each."""

from posterity.methods.conjugate import Conjugate
from posterity.methods.ensemble import Ensemble
from posterity.methods.full_rank import FullRank
from posterity.methods.gradients import (
    Flipout,
    LocalReparameterisation,
    ScoreFunction,
    StickTheLanding,
    WeightSampling,
)
from posterity.methods.laplace import Laplace
from posterity.methods.maximum_a_posteriori import MAP
from posterity.methods.mean_field import MeanField
from posterity.methods.online_laplace import OnlineLaplace
from posterity.methods.subset import AllWeights, LargestVariance, LastLayer, Matching, Subset

__all__ = [
    "MAP",
    "AllWeights",
    "Conjugate",
    "Ensemble",
    "Flipout",
    "FullRank",
    "Laplace",
    "LargestVariance",
    "LastLayer",
    "LocalReparameterisation",
    "Matching",
    "MeanField",
    "OnlineLaplace",
    "ScoreFunction",
    "StickTheLanding",
    "Subset",
    "WeightSampling",
]
