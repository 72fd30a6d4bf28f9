"""Optimisers and schedules that methods take, and IVON for training loops of your own.

Losses and loops do not belong here.
"""

from posterity.optim.ivon import IVON
from posterity.optim.lbfgs import LBFGS
from posterity.optim.optimizer import SGD, Adam, Optimizer
from posterity.optim.schedules import Constant, Cosine, Cycles, Cyclic, Schedule, Steps, Warmup

__all__ = [
    "IVON",
    "LBFGS",
    "SGD",
    "Adam",
    "Constant",
    "Cosine",
    "Cycles",
    "Cyclic",
    "Optimizer",
    "Schedule",
    "Steps",
    "Warmup",
]
