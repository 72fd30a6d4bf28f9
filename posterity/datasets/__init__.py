"""Data sets: toys made on the spot, readers of published files, and tables in text files with their preprocessing.

Batches and loaders are in `model`.
"""

from posterity.datasets.dataset import DataSet, LabelledData
from posterity.datasets.files import cache_folder, data_folder
from posterity.datasets.images import cifar10, cifar10_test, mnist, mnist_test, read_idx
from posterity.datasets.posteriordb import (
    POSTERIORS,
    ReferenceMoments,
    german_credit_reference,
    posteriordb_data,
    posteriordb_draws,
)
from posterity.datasets.preprocessing import (
    InputColumn,
    PreparedTable,
    Preprocessing,
    TargetColumn,
    Transformed,
    prepare,
)
from posterity.datasets.table import Table, read_table, split
from posterity.datasets.toys import LINE_BIAS, LINE_WEIGHT, TOYS, blobs, line, load, sine, two_moons
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
    "Table",
    "TargetColumn",
    "Transformed",
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
    "read_table",
    "sine",
    "split",
    "two_moons",
    "uci_classification",
    "uci_regression",
]
