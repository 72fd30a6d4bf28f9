"""Structured precision matrices: sums, solves, draws and quadratic forms.

Which structure a curvature is kept in is decided in `curvature`.
"""

from posterity.precisions.block import BlockDiagonal, PerMember
from posterity.precisions.dense import Dense
from posterity.precisions.diagonal import Diagonal
from posterity.precisions.kronecker import Factor, Kronecker
from posterity.precisions.low_rank import LowRank, LowRankCovariance
from posterity.precisions.precision import Precision

__all__ = [
    "BlockDiagonal",
    "Dense",
    "Diagonal",
    "Factor",
    "Kronecker",
    "LowRank",
    "LowRankCovariance",
    "PerMember",
    "Precision",
]
