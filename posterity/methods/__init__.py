"""Inference methods, one file each."""

from posterity.methods.conjugate import Conjugate
from posterity.methods.laplace import Laplace
from posterity.methods.maximum_a_posteriori import MAP
from posterity.methods.online_laplace import OnlineLaplace
from posterity.methods.subset import AllWeights, LargestVariance, LastLayer, Matching, Subset

__all__ = [
    "MAP",
    "AllWeights",
    "Conjugate",
    "Laplace",
    "LargestVariance",
    "LastLayer",
    "Matching",
    "OnlineLaplace",
    "Subset",
]
