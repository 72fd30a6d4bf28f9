"""Numerical pieces with no knowledge of models: randomness, layouts, matrices, optimisers, schedules."""

from posterity.numerics.adam import Adam
from posterity.numerics.block import Block
from posterity.numerics.dense import Dense
from posterity.numerics.diagonal import Diagonal
from posterity.numerics.layout import Layout
from posterity.numerics.optimizer import Optimizer
from posterity.numerics.precision import Precision
from posterity.numerics.random import Key
from posterity.numerics.schedules import Constant, Cosine, Schedule, Steps
from posterity.numerics.sgd import SGD

__all__ = [
    "SGD",
    "Adam",
    "Block",
    "Constant",
    "Cosine",
    "Dense",
    "Diagonal",
    "Key",
    "Layout",
    "Optimizer",
    "Precision",
    "Schedule",
    "Steps",
]
