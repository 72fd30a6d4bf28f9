"""Optimisers and schedules that methods take, and IVON for training loops of your own.

Losses and loops do not belong here.
"""

from posterity.optim.gradient_scale import GradientScale
from posterity.optim.ivon import IVON
from posterity.optim.lbfgs import LBFGS
from posterity.optim.optimizer import SGD, Adam, Optimizer
from posterity.optim.scaled_adam import ScaledAdam
from posterity.optim.schedules import Constant, Cosine, Cycles, Cyclic, Schedule, Steps, Warmup
from posterity.optim.stationary import StationarySGD

__all__ = [
    "IVON",
    "LBFGS",
    "SGD",
    "Adam",
    "Constant",
    "Cosine",
    "Cycles",
    "Cyclic",
    "GradientScale",
    "Optimizer",
    "ScaledAdam",
    "Schedule",
    "StationarySGD",
    "Steps",
    "Warmup",
]
