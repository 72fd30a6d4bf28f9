"""The problem: a network, its data, and the log density they make."""

from posterity.model.augmentation import Augmentation, Compose, Crop, Flip
from posterity.model.constraints import Constraint, Interval, Ordered, Positive, Real, Simplex
from posterity.model.data import Batch, Data, Feed, as_data
from posterity.model.density import Density
from posterity.model.joint import Joint
from posterity.model.literature import LITERATURE, Reported
from posterity.model.network import Network
from posterity.model.pruning import Pruned, dead_units, pruned, unused_inputs
from posterity.model.tempering import Tempering
from posterity.model.units import neurons, parameters

__all__ = [
    "LITERATURE",
    "Augmentation",
    "Batch",
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
    "Pruned",
    "Real",
    "Reported",
    "Simplex",
    "Tempering",
    "as_data",
    "dead_units",
    "neurons",
    "parameters",
    "pruned",
    "unused_inputs",
]
