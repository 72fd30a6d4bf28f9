"""Images: MNIST, Fashion-MNIST and KMNIST from IDX files, CIFAR-10 from its batches."""

import gzip
import lzma
import struct
import zlib
from math import prod
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from posterity.datasets.dataset import DataSet, LabelledData
from posterity.datasets.files import HOST, check_sum, content, root_folder
from posterity.errors import BadData, unknown

_TYPES = {0x08: "uint8", 0x09: "int8", 0x0B: "int16", 0x0C: "int32", 0x0D: "float32", 0x0E: "float64"}

# SHA-256 of the uncompressed data: some packages have gzipped the same values again.
_SUMS = {
    "mnist": {
        "train-images-idx3-ubyte.gz": "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
        "train-labels-idx1-ubyte.gz": "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
        "t10k-images-idx3-ubyte.gz": "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
        "t10k-labels-idx1-ubyte.gz": "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
    },
    "fashion-mnist": {
        "train-images-idx3-ubyte.gz": "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
        "train-labels-idx1-ubyte.gz": "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
        "t10k-images-idx3-ubyte.gz": "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
        "t10k-labels-idx1-ubyte.gz": "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
    },
    "kmnist": {
        "t10k-images-idx3-ubyte.gz": "76fbd229ce87db80dd281af5e6670de4ad0e42fb30a7bd643972994c47c1f42e",
        "t10k-labels-idx1-ubyte.gz": "a11dc742be8e781a40a92f53d6a4957e7b7d36df2faa097659131ebfd8fd60c6",
    },
}

_GARMENTS = ("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot")
_CLASSES = {"mnist": tuple("0123456789"), "fashion-mnist": _GARMENTS}


def read_idx(path: str | Path) -> Tensor:
    """Return the uint8 array in an idx file, gzipped or plain; raises BadData for a damaged or truncated file."""
    return _decode(_unpacked(Path(path)), Path(path))


def mnist(root: str | Path | None = None, name: str = "mnist") -> DataSet:
    """Return MNIST, or with `name="fashion-mnist"` Fashion-MNIST: images (N, 1, 28, 28) in [0, 1] and labels (N,).

    `root` is the folder with the four published gzip files, by default `data_folder(name)`. The uncompressed data are
    checked against the published SHA-256.
    """
    if name in _SUMS and name not in _CLASSES:
        raise ValueError(f"mnist: only the test part of '{name}' is known. Use mnist_test('{name}').")
    if name not in _CLASSES:
        raise ValueError(unknown("data set", name, _CLASSES))
    folder = root_folder(name, root)
    train, test = _idx_part(folder, name, "train"), _idx_part(folder, name, "t10k")
    return DataSet(name, "classification", train, test, _CLASSES[name])


def mnist_test(name: str = "mnist", root: str | Path | None = None) -> LabelledData:
    """Return the 10,000 test images and labels of "mnist", "fashion-mnist" or "kmnist", in the form of `mnist`."""
    if name not in _SUMS:
        raise ValueError(unknown("data set", name, _SUMS))
    return _idx_part(root_folder(name, root), name, "t10k")


def _idx_part(folder: Path, name: str, part: str) -> LabelledData:
    images = _published(folder, name, f"{part}-images-idx3-ubyte.gz")  # (N, 28, 28)
    labels = _published(folder, name, f"{part}-labels-idx1-ubyte.gz")  # (N,)
    return LabelledData(images.float().div_(255).unsqueeze(1), labels.long())


def _published(folder: Path, name: str, file: str) -> Tensor:
    values = _unpacked(folder / file)
    check_sum(values, _SUMS[name][file], folder / file, name, "of the uncompressed data")
    return _decode(values, folder / file)


def _unpacked(path: Path) -> bytes:
    """Return the bytes of a file, decompressed if it is gzipped."""
    data = content(path)
    if data[:2] != b"\x1f\x8b":
        return data
    try:
        return gzip.decompress(data)
    except EOFError as error:
        raise BadData(f"{path}: the gzip data end too early. Fetch the file again.") from error
    except (gzip.BadGzipFile, zlib.error) as error:
        raise BadData(f"{path}: the gzip data are damaged: {error}. Fetch the file again.") from error


def _decode(data: bytes, path: Path) -> Tensor:
    """Return the array of an idx file: 00 00, type, rank, sizes (big-endian), values."""
    if len(data) < 4 or data[:2] != b"\x00\x00" or data[2] not in _TYPES or data[3] == 0:
        raise BadData(
            f"{path}: not an idx file. It must begin with 00 00, a type and a rank. "
            f"Got {data[:4].hex(' ') or 'no bytes'}."
        )
    if data[2] != 0x08:
        raise BadData(f"{path}: its values must be uint8 (type 08). Got {_TYPES[data[2]]} ({data[2]:02x}).")
    rank = data[3]
    header = 4 + 4 * rank
    if len(data) < header:
        raise BadData(f"{path}: its header must have {header} bytes for {rank} sizes. Got {len(data)}.")
    sizes = struct.unpack(f">{rank}I", data[4:header])
    if len(data) - header != prod(sizes):
        raise BadData(
            f"{path}: sizes {' x '.join(map(str, sizes))} need {prod(sizes)} bytes of values. Got {len(data) - header}."
        )
    values = np.frombuffer(data, np.uint8, offset=header).copy()  # a copy, because bytes are read-only
    return torch.from_numpy(values).reshape(sizes)


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

# SHA-256 of the decompressed files, which are the plain files of the published archive.
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
    """Return CIFAR-10: 50,000 training and 10,000 test images (N, 3, 32, 32) in [0, 1], float32, and labels (N,).

    `root` is the folder with the six files, by default `data_folder("cifar-10")`. Each is a `.bin.xz`, decompressed in
    memory in about two seconds, or a plain `.bin`; all are checked against their SHA-256. The images take 700 MB.
    """
    folder = root_folder("cifar-10", root)
    return DataSet("cifar-10", "classification", _cifar_part(folder, _TRAIN), _cifar_part(folder, _TEST), CLASSES)


def cifar10_test(root: str | Path | None = None) -> LabelledData:
    """Return the 10,000 test images and labels alone, in the form of `cifar10`."""
    return _cifar_part(root_folder("cifar-10", root), _TEST)


def _cifar_part(folder: Path, sums: dict[str, str]) -> LabelledData:
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
