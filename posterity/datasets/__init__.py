"""Data sets: toys made on the spot, and readers of published ones."""

from posterity.datasets.dataset import DataSet, LabelledData
from posterity.datasets.idx import mnist, mnist_test, read_idx
from posterity.datasets.location import cache_folder, data_folder
from posterity.datasets.registry import TOYS, load
from posterity.datasets.toys import LINE_BIAS, LINE_WEIGHT, blobs, line, sine, two_moons

__all__ = [
    "LINE_BIAS",
    "LINE_WEIGHT",
    "TOYS",
    "DataSet",
    "LabelledData",
    "blobs",
    "cache_folder",
    "data_folder",
    "line",
    "load",
    "mnist",
    "mnist_test",
    "read_idx",
    "sine",
    "two_moons",
]
