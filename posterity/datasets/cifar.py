"""CIFAR-10 in its binary version: records of one label byte and 3 x 32 x 32 pixel bytes, in xz files or plain."""

import lzma
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from posterity.datasets.dataset import DataSet, LabelledData
from posterity.datasets.files import HOST, check_sum, content
from posterity.datasets.location import data_folder
from posterity.errors import BadData

CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")

# SHA-256 of the compressed files.
_TRAIN = {
    "data_batch_1.bin.xz": "267fe1438330fd8d8090d701e64ca6ac19d0789a650663cbb346633934af6392",
    "data_batch_2.bin.xz": "9ffa98e777f1b549e99d142cbd2d32d7db62f5f91ab90c3a6d5b7317911763cc",
    "data_batch_3.bin.xz": "cd78832afc84658d31c2f5b92c29e13cb6e201848a5bbfadb77d19711319d8aa",
    "data_batch_4.bin.xz": "ed492f12929c9a476b12e7892705ed3b1a5c729a565f8b807dd86382036eee58",
    "data_batch_5.bin.xz": "54a85c30fcf1d34c07542737830d8fbe832fbc110c33e447ae554969f7227ba8",
}
_TEST = {"test_batch.bin.xz": "47afd35b180ae1d1534ec8278db54aed9f7ea19a82d1191dfd274ce510d97595"}

# SHA-256 of what they hold, which is what the published archive holds as plain files.
_PLAIN = {
    "data_batch_1.bin": "cee916563c9f80d84e3cc88e17fdc0941787f1244f00a67874d45b261883ada5",
    "data_batch_2.bin": "a591ca11fa1708a91ee40f54b3da4784ccd871ecf2137de63f51ada8b3fa57ed",
    "data_batch_3.bin": "bbe8596564c0f86427f876058170b84dac6670ddf06d79402899d93ceea26f67",
    "data_batch_4.bin": "014e562d6e23c72197cc727519169a60359f5eccd8945ad5a09d710285ff4e48",
    "data_batch_5.bin": "755304fc0b379caeae8c14f0dac912fbc7d6cd469eb67a1029a08a39453a9add",
    "test_batch.bin": "8e2eb146ae340b09e24670f29cabc6326dba54da8789dab6768acf480273f65b",
}

_ROWS = 10_000  # in each file
_SHAPE = (3, 32, 32)
_RECORD = 1 + 3 * 32 * 32


def cifar10(root: str | Path | None = None) -> DataSet:
    """CIFAR-10: 50,000 training and 10,000 test images (N, 3, 32, 32) in [0, 1], float32, and labels (N,).

    `root` is the folder with the six files; without it the folder is looked for by `data_folder("cifar-10")`. Each is
    a `.bin.xz`, unpacked in memory in about two seconds, or else a plain `.bin`; all are checked against their SHA-256.
    The images take 700 MB.
    """
    folder = _folder(root)
    return DataSet("cifar-10", "classification", _part(folder, _TRAIN), _part(folder, _TEST), CLASSES)


def cifar10_test(root: str | Path | None = None) -> LabelledData:
    """The 10,000 test images and labels alone, as `cifar10` gives them."""
    return _part(_folder(root), _TEST)


def _folder(root: str | Path | None) -> Path:
    return data_folder("cifar-10") if root is None else Path(root)


def _part(folder: Path, sums: dict[str, str]) -> LabelledData:
    images = torch.empty(len(sums) * _ROWS, *_SHAPE, dtype=torch.float32, device=HOST)
    labels = torch.empty(len(images), dtype=torch.int64, device=HOST)
    for index, (file, wanted) in enumerate(sums.items()):
        records = torch.from_numpy(_records(folder / file, wanted))  # (10000, 3073)
        rows = slice(index * _ROWS, (index + 1) * _ROWS)
        labels[rows] = records[:, 0]
        images[rows] = records[:, 1:].reshape(-1, *_SHAPE)
    if bool((labels >= len(CLASSES)).any()):
        raise BadData(f"{folder}: labels must be below {len(CLASSES)}. Got {int(labels.max())}. Fetch the files again.")
    return LabelledData(images.div_(255), labels)


def _records(path: Path, wanted: str) -> NDArray[np.uint8]:
    plain = path.with_suffix("")
    if not path.exists() and plain.exists():
        path, data = plain, content(plain)
        check_sum(data, _PLAIN[plain.name], plain, "cifar-10")
    else:
        packed = content(path)
        check_sum(packed, wanted, path, "cifar-10")
        try:
            data = lzma.decompress(packed)
        except lzma.LZMAError as error:
            raise BadData(f"{path}: the xz data are damaged: {error}. Fetch the file again.") from error
    if len(data) != _ROWS * _RECORD:
        raise BadData(f"{path}: it must hold {_ROWS} records of {_RECORD} bytes. Got {len(data)} bytes.")
    return np.frombuffer(data, np.uint8).reshape(_ROWS, _RECORD).copy()  # a copy, because bytes are read-only
