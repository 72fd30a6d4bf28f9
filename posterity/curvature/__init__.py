"""Curvatures of the negative log-likelihood, and the structures in which they are kept."""

from posterity.curvature.block_diagonal import BlockDiagonal
from posterity.curvature.corrected_kronecker import CorrectedKronecker
from posterity.curvature.curvature import Curvature
from posterity.curvature.diagonal import Diagonal
from posterity.curvature.fisher import EmpiricalFisher, MonteCarloFisher
from posterity.curvature.full import Full
from posterity.curvature.gauss_newton import GaussNewton
from posterity.curvature.hessian import Hessian
from posterity.curvature.hutchinson import Hutchinson
from posterity.curvature.kronecker import Kronecker
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
