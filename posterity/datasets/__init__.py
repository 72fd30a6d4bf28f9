"""Data sets: toys made on the spot, readers of published ones, and tables in text files.

Files are looked for in POSTERITY_DATA and the user's cache. How rows reach a network is in `model`.
"""

from posterity.datasets.dataset import DataSet, LabelledData
from posterity.datasets.encodings import InputColumn, TargetColumn
from posterity.datasets.files import cache_folder, data_folder
from posterity.datasets.images import cifar10, cifar10_test, mnist, mnist_test, read_idx
from posterity.datasets.posteriordb import (
    POSTERIORS,
    ReferenceMoments,
    german_credit_reference,
    posteriordb_data,
    posteriordb_draws,
)
from posterity.datasets.preprocessing import PreparedTable, Preprocessing, Transformed, prepare
from posterity.datasets.shards import Shards, read_shards
from posterity.datasets.table import Table, as_table, read_table, split
from posterity.datasets.toys import LINE_BIAS, LINE_WEIGHT, TOYS, blobs, line, load, sine, two_moons, waves
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
    "ReferenceMoments",
    "Shards",
    "Table",
    "TargetColumn",
    "Transformed",
    "as_table",
    "blobs",
    "cache_folder",
    "cifar10",
    "cifar10_test",
    "data_folder",
    "german_credit_reference",
    "line",
    "load",
    "mnist",
    "mnist_test",
    "posteriordb_data",
    "posteriordb_draws",
    "prepare",
    "read_idx",
    "read_shards",
    "read_table",
    "sine",
    "split",
    "two_moons",
    "uci_classification",
    "uci_regression",
    "waves",
]
