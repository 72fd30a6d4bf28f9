"""Curvatures of the negative log-likelihood, and the structures in which they are summed over the data.

Precision matrices are in `precisions`, Jacobians of single layers in `jacobians`.
"""

from posterity.curvature.curvature import Curvature
from posterity.curvature.diagonal import Diagonal, Hutchinson
from posterity.curvature.kinds import EmpiricalFisher, GaussNewton, Hessian, MonteCarloFisher
from posterity.curvature.kronecker import CorrectedKronecker, Kronecker
from posterity.curvature.low_rank import LowRank
from posterity.curvature.structure import BlockDiagonal, Full, Structure
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
