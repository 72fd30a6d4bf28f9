"""The problem: a network as a function of a flat vector, its data, and the log density of both.

Scaling of mini-batches and tempering happen here and nowhere else.
"""

from posterity.model.augmentation import Affine, Augmentation, Compose, Crop, Flip
from posterity.model.data import Batch, Data, Feed, as_data
from posterity.model.density import Constraint, Density, Interval, Ordered, Positive, Real, Simplex
from posterity.model.joint import Joint
from posterity.model.network import Buffers, Network
from posterity.model.problem import Problem
from posterity.model.tempering import LITERATURE, Reported, Tempering
from posterity.model.units import neurons, parameters

__all__ = [
    "LITERATURE",
    "Affine",
    "Augmentation",
    "Batch",
    "Buffers",
    "Compose",
    "Constraint",
    "Crop",
    "Data",
    "Density",
    "Feed",
    "Flip",
    "Interval",
    "Joint",
    "Network",
    "Ordered",
    "Positive",
    "Problem",
    "Real",
    "Reported",
    "Simplex",
    "Tempering",
    "as_data",
    "neurons",
    "parameters",
]
