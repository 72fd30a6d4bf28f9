"""Optimisers and schedules that methods take, and IVON for training loops of your own.

Losses and loops do not belong here.
"""

from posterity.optim.ivon import IVON
from posterity.optim.optimizer import SGD, Adam, Optimizer
from posterity.optim.scaled_adam import ScaledAdam
from posterity.optim.schedules import Constant, Cosine, Cycles, Cyclic, Schedule, Steps, Warmup

__all__ = [
    "IVON",
    "SGD",
    "Adam",
    "Constant",
    "Cosine",
    "Cycles",
    "Cyclic",
    "Optimizer",
    "ScaledAdam",
    "Schedule",
    "Steps",
    "Warmup",
]
