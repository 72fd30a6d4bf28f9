"""Numerical pieces with no knowledge of models: randomness, layouts, matrices, optimisers, schedules."""

from posterity.numerics.adam import Adam
from posterity.numerics.block import Block
from posterity.numerics.block_diagonal import BlockDiagonal
from posterity.numerics.cycles import Cycles
from posterity.numerics.cyclic import Cyclic
from posterity.numerics.dense import Dense
from posterity.numerics.diagonal import Diagonal
from posterity.numerics.factor import Factor
from posterity.numerics.kronecker import Kronecker
from posterity.numerics.layout import Layout
from posterity.numerics.low_rank import LowRank
from posterity.numerics.low_rank_covariance import LowRankCovariance
from posterity.numerics.optimizer import Optimizer
from posterity.numerics.per_member import PerMember
from posterity.numerics.precision import Precision
from posterity.numerics.random import Key
from posterity.numerics.schedules import Constant, Cosine, Schedule, Steps, Warmup
from posterity.numerics.sgd import SGD

__all__ = [
    "SGD",
    "Adam",
    "Block",
    "BlockDiagonal",
    "Constant",
    "Cosine",
    "Cycles",
    "Cyclic",
    "Dense",
    "Diagonal",
    "Factor",
    "Key",
    "Kronecker",
    "Layout",
    "LowRank",
    "LowRankCovariance",
    "Optimizer",
    "PerMember",
    "Precision",
    "Schedule",
    "Steps",
    "Warmup",
]
