"""Small tables of the UCI repository: regression with the standard splits, and binary classification."""

import io
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from posterity.datasets.dataset import DataSet, LabelledData
from posterity.datasets.files import HOST, check_sum, content, root_folder
from posterity.datasets.table import stratified
from posterity.errors import BadData, shown, unknown


class _Regression(NamedTuple):
    rows: int
    inputs: int
    splits: int
    sum: str  # SHA-256 of data.txt


class _Classification(NamedTuple):
    file: str
    separator: str | None  # None: whitespace
    label: int  # column
    classes: tuple[tuple[str, str], tuple[str, str]]  # (field, name) of classes 0 and 1
    unused: tuple[int, ...]  # columns that are neither input nor label
    sum: str


_REGRESSION = {
    "bostonHousing": _Regression(506, 13, 20, "baadf72995725d76efe787b664e1f083388c79ba21ef9a7990d87f774184735a"),
    "energy": _Regression(768, 8, 20, "7f8bf024cea437267d56be99b7af7bb3faebec8a7bccfbb20d06d52d9372a950"),
    "kin8nm": _Regression(8192, 8, 20, "a694ce0c7a21390f2bd2a205c36f2482cd974637a207038696716e22f3bbe810"),
    "naval-propulsion-plant": _Regression(
        11934, 16, 20, "de0ea69da1efaab8b9655ffed828547d10dd68c1fb8c6e0163e6a988def393a6"
    ),
    "power-plant": _Regression(9568, 4, 20, "daebd20c408dfc5c4979604f240e891be162c3a5d00d662380aa669044a1fb31"),
    "protein-tertiary-structure": _Regression(
        45730, 9, 5, "d35f332707e8a73f21e021039250a1e7b26e14f7dd826a0337ffa8e8e48b9727"
    ),
    "wine-quality-red": _Regression(1599, 11, 20, "3ba41eaf4ab562088cf47b5c9dca2b4de2a330c3ee38a7920b4527a09574d5c1"),
}

_CLASSIFICATION = {
    "australian": _Classification(
        "australian.dat", None, 14, (("0", "0"), ("1", "1")), (),
        "3abe5af151afa50b999a9ba21cbc884e80d80a4050b716cf88b34a2e6ecb731c",
    ),
    "banknote": _Classification(
        "data_banknote_authentication.txt", ",", 4, (("0", "0"), ("1", "1")), (),
        "564ac22b61d87388b1662adee2867e5d382aae78afb0bf5d6745c1a843174b8e",
    ),
    "german-credit": _Classification(
        "german.data-numeric", None, 24, (("1", "good"), ("2", "bad")), (),
        "2752b044394958ab6dd193a0b56ca0f0b3a2d8bc7cb8c008e35a5e84bbec02f8",
    ),
    "ionosphere": _Classification(
        "ionosphere.data", ",", 34, (("b", "bad"), ("g", "good")), (),
        "46d52186b84e20be52918adb93e8fb9926b34795ff7504c24350ae0616a04bbd",
    ),
    "wdbc": _Classification(
        "wdbc.data", ",", 1, (("B", "benign"), ("M", "malignant")), (0,),
        "d606af411f3e5be8a317a5a8b652b425aaf0ff38ca683d5327ffff94c3695f4a",
    ),
}  # fmt: skip

UCI_REGRESSION = tuple(_REGRESSION)
"""The names that `uci_regression` knows."""

UCI_CLASSIFICATION = tuple(_CLASSIFICATION)
"""The names that `uci_classification` knows."""


def num_splits(name: str) -> int:
    """Return the number of standard splits of the regression set `name`."""
    if name not in _REGRESSION:
        raise ValueError(unknown("regression set", name, _REGRESSION))
    return _REGRESSION[name].splits


def uci_regression(name: str, split: int = 0, root: str | Path | None = None) -> DataSet:
    """Return a UCI regression set under one of its standard splits (20, protein 5), not standardised, in float64.

    `root` is the folder with `data.txt` and the index files, by default `<name>/data` in `data_folder("uci")`. The
    table is checked against its SHA-256. Hernandez-Lobato and Adams (2015) published the splits. Inputs are (N, D),
    targets (N, 1).
    """
    count = num_splits(name)
    if not isinstance(split, int) or isinstance(split, bool) or not 0 <= split < count:
        raise ValueError(f"uci_regression: split of '{name}' must be from 0 to {count - 1}. Got {shown(split)}.")
    known, folder = _REGRESSION[name], root_folder("uci", root, f"{name}/data", name)
    path = folder / "data.txt"
    data = content(path)
    check_sum(data, known.sum, path, name)
    table = torch.from_numpy(np.loadtxt(io.BytesIO(data)))  # (N, columns)
    features, target = _columns(folder, known, table.shape[1])
    train, test = _split(folder, known, split)
    rows = LabelledData(table[:, features], table[:, target])
    return DataSet(name, "regression", rows.rows(train), rows.rows(test))


def uci_classification(name: str, test_fraction: float = 0.2, seed: int = 0, root: str | Path | None = None) -> DataSet:
    """Return a UCI set with two classes, not standardised, in float64: inputs (N, D) and labels (N,).

    There are no standard splits: the seed draws the test rows, the same fraction of each class. `root` is the folder
    of the file, by default `<name>` in `data_folder("uci-classification")`. The file is checked against its SHA-256.
    In "german-credit" bad is class 1; the id of "wdbc" is no input.
    """
    if name not in _CLASSIFICATION:
        raise ValueError(unknown("classification set", name, _CLASSIFICATION))
    known = _CLASSIFICATION[name]
    path = root_folder("uci-classification", root, name, f"{name} --from FOLDER") / known.file
    data = content(path)
    check_sum(data, known.sum, path, name)
    fields = [line.split(known.separator) for line in data.decode().split("\n") if line.strip()]
    marks = [field for field, _ in known.classes]
    labels = torch.tensor([marks.index(row[known.label].strip()) for row in fields], device=HOST)
    skipped = {known.label, *known.unused}
    inputs = torch.tensor(
        [[float(field) for index, field in enumerate(row) if index not in skipped] for row in fields],
        dtype=torch.float64,
        device=HOST,
    )
    rows = LabelledData(inputs, labels)
    train, test = stratified(labels, test_fraction, seed)
    return DataSet(name, "classification", rows.rows(train), rows.rows(test), tuple(name for _, name in known.classes))


def _columns(folder: Path, known: _Regression, count: int) -> tuple[Tensor, Tensor]:
    """Return the indices of the inputs and of the target among `count` columns."""
    features, target = (_indices(folder / f"index_{part}.txt", count) for part in ("features", "target"))
    if len(features) != known.inputs or len(target) != 1 or target[0] in features:
        raise BadData(
            f"{folder}: index_features.txt and index_target.txt must name {known.inputs} columns and one other. "
            f"Got {len(features)} and {len(target)}. Fetch the files again."
        )
    return features, target


def _split(folder: Path, known: _Regression, split: int) -> tuple[Tensor, Tensor]:
    """Return the training and the test rows of a split, which partition all rows."""
    train, test = (_indices(folder / f"index_{part}_{split}.txt", known.rows) for part in ("train", "test"))
    if not torch.equal(torch.cat((train, test)).sort().values, torch.arange(known.rows, device=HOST)):
        raise BadData(
            f"{folder}: index_train_{split}.txt and index_test_{split}.txt must share out {known.rows} rows. "
            "Fetch the files again."
        )
    return train, test


def _indices(path: Path, count: int) -> Tensor:
    """Return the whole numbers in a file, each below `count`."""
    fields = content(path).split()
    try:
        numbers = [float(field) for field in fields]
    except ValueError as error:
        raise BadData(f"{path}: it must hold whole numbers. {str(error).capitalize()}.") from error
    for number in numbers:
        if not number.is_integer() or not 0 <= number < count:
            raise BadData(f"{path}: its numbers must be whole and from 0 to {count - 1}. Got {number:g}.")
    return torch.tensor(numbers, dtype=torch.int64, device=HOST)
