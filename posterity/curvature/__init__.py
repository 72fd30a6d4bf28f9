"""Curvatures of the negative log-likelihood, and the structures that keep them while they are summed over the data.

The matrices that come out are in `precisions`, the derivatives of single layers in `jacobians`.
"""

from posterity.curvature.curvature import Curvature
from posterity.curvature.diagonal import Diagonal, Hutchinson
from posterity.curvature.fisher import EmpiricalFisher, GaussNewton, Hessian, MonteCarloFisher
from posterity.curvature.full import BlockDiagonal, Full
from posterity.curvature.kronecker import CorrectedKronecker, Kronecker
from posterity.curvature.low_rank import LowRank
from posterity.curvature.structure import Structure
from posterity.curvature.survey import Place

__all__ = [
    "BlockDiagonal",
    "CorrectedKronecker",
    "Curvature",
    "Diagonal",
    "EmpiricalFisher",
    "Full",
    "GaussNewton",
    "Hessian",
    "Hutchinson",
    "Kronecker",
    "LowRank",
    "MonteCarloFisher",
    "Place",
    "Structure",
]
