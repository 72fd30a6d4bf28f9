"""Data sets: toys made on the spot, readers of published ones, and tables in text files."""

from posterity.datasets.cifar import cifar10, cifar10_test
from posterity.datasets.dataset import DataSet, LabelledData
from posterity.datasets.encoding import InputColumn, TargetColumn
from posterity.datasets.idx import mnist, mnist_test, read_idx
from posterity.datasets.location import cache_folder, data_folder
from posterity.datasets.posteriordb import POSTERIORS, posteriordb_data, posteriordb_draws
from posterity.datasets.preprocessing import PreparedTable, Preprocessing, Transformed, prepare
from posterity.datasets.registry import TOYS, load
from posterity.datasets.table import Table, read_table, split
from posterity.datasets.toys import LINE_BIAS, LINE_WEIGHT, blobs, line, sine, two_moons
from posterity.datasets.uci import UCI_CLASSIFICATION, UCI_REGRESSION, uci_classification, uci_regression

__all__ = [
    "LINE_BIAS",
    "LINE_WEIGHT",
    "POSTERIORS",
    "TOYS",
    "UCI_CLASSIFICATION",
    "UCI_REGRESSION",
    "DataSet",
    "InputColumn",
    "LabelledData",
    "PreparedTable",
    "Preprocessing",
    "Table",
    "TargetColumn",
    "Transformed",
    "blobs",
    "cache_folder",
    "cifar10",
    "cifar10_test",
    "data_folder",
    "line",
    "load",
    "mnist",
    "mnist_test",
    "posteriordb_data",
    "posteriordb_draws",
    "prepare",
    "read_idx",
    "read_table",
    "sine",
    "split",
    "two_moons",
    "uci_classification",
    "uci_regression",
]
