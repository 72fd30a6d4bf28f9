"""Files in the idx format, and the image data sets that come in them."""

import gzip
import hashlib
import struct
import zlib
from math import prod
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from posterity.datasets.dataset import DataSet, LabelledData
from posterity.datasets.location import data_folder
from posterity.errors import BadData, unknown

_TYPES = {0x08: "uint8", 0x09: "int8", 0x0B: "int16", 0x0C: "int32", 0x0D: "float32", 0x0E: "float64"}

# SHA-256 of the published files, by data set.
_SUMS = {
    "mnist": {
        "train-images-idx3-ubyte.gz": "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
        "train-labels-idx1-ubyte.gz": "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c",
        "t10k-images-idx3-ubyte.gz": "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6",
        "t10k-labels-idx1-ubyte.gz": "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6",
    },
    "fashion-mnist": {
        "train-images-idx3-ubyte.gz": "3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84",
        "train-labels-idx1-ubyte.gz": "a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845",
        "t10k-images-idx3-ubyte.gz": "346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073",
        "t10k-labels-idx1-ubyte.gz": "67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5",
    },
    "kmnist": {
        "t10k-images-idx3-ubyte.gz": "edd7a857845ad6bb1d0ba43fe7e794d164fe2dce499a1694695a792adfac43c5",
        "t10k-labels-idx1-ubyte.gz": "20bb9a0ef54c7db3efc55a92eef5582c109615df22683c380526788f98e42a1c",
    },
}

_CLASSES = {
    "mnist": tuple("0123456789"),
    "fashion-mnist": (
        "T-shirt/top",
        "Trouser",
        "Pullover",
        "Dress",
        "Coat",
        "Sandal",
        "Shirt",
        "Sneaker",
        "Bag",
        "Ankle boot",
    ),
}


def read_idx(path: str | Path) -> Tensor:
    """The uint8 array in an idx file, gzipped or plain; BadData when the file is not a whole and sound one."""
    return _decode(_content(Path(path)), Path(path))


def mnist(root: str | Path | None = None, name: str = "mnist") -> DataSet:
    """MNIST, or Fashion-MNIST under `name="fashion-mnist"`: images (N, 1, 28, 28) in [0, 1] and labels (N,).

    `root` is the folder with the four published gzip files; without it the folder is looked for by
    `data_folder(name)`. Files are checked against the published SHA-256.
    """
    if name in _SUMS and name not in _CLASSES:
        raise ValueError(f"mnist: only the test part of '{name}' is known. Use mnist_test('{name}').")
    if name not in _CLASSES:
        raise ValueError(unknown("data set", name, _CLASSES))
    folder = data_folder(name) if root is None else Path(root)
    return DataSet(name, "classification", _part(folder, name, "train"), _part(folder, name, "t10k"), _CLASSES[name])


def mnist_test(name: str = "mnist", root: str | Path | None = None) -> LabelledData:
    """The 10,000 test images and labels of "mnist", "fashion-mnist" or "kmnist", as `mnist` gives them."""
    if name not in _SUMS:
        raise ValueError(unknown("data set", name, _SUMS))
    return _part(data_folder(name) if root is None else Path(root), name, "t10k")


def _part(folder: Path, name: str, part: str) -> LabelledData:
    images = _published(folder, name, f"{part}-images-idx3-ubyte.gz")  # (N, 28, 28)
    labels = _published(folder, name, f"{part}-labels-idx1-ubyte.gz")  # (N,)
    return LabelledData(images.float().div_(255).unsqueeze(1), labels.long())


def _published(folder: Path, name: str, file: str) -> Tensor:
    content = _content(folder / file)
    found = hashlib.sha256(content).hexdigest()
    if found != _SUMS[name][file]:
        raise BadData(
            f"{folder / file}: not the published file of '{name}'. "
            f"Its SHA-256 must be {_SUMS[name][file]}. Got {found}. Fetch the file again."
        )
    return _decode(content, folder / file)


def _content(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise BadData(f"{path}: cannot be read: {error.strerror or error}.") from error


def _decode(content: bytes, path: Path) -> Tensor:
    """The array that the bytes of an idx file describe: 00 00, type, rank, sizes (big-endian), values."""
    if content[:2] == b"\x1f\x8b":
        try:
            content = gzip.decompress(content)
        except EOFError as error:
            raise BadData(f"{path}: the gzip data end too early. Fetch the file again.") from error
        except (gzip.BadGzipFile, zlib.error) as error:
            raise BadData(f"{path}: the gzip data are damaged: {error}. Fetch the file again.") from error
    if len(content) < 4 or content[:2] != b"\x00\x00" or content[2] not in _TYPES or content[3] == 0:
        raise BadData(
            f"{path}: not an idx file. It must begin with 00 00, a type and a rank. "
            f"Got {content[:4].hex(' ') or 'no bytes'}."
        )
    if content[2] != 0x08:
        raise BadData(f"{path}: its values must be uint8 (type 08). Got {_TYPES[content[2]]} ({content[2]:02x}).")
    rank = content[3]
    header = 4 + 4 * rank
    if len(content) < header:
        raise BadData(f"{path}: its header must have {header} bytes for {rank} sizes. Got {len(content)}.")
    sizes = struct.unpack(f">{rank}I", content[4:header])
    if len(content) - header != prod(sizes):
        raise BadData(
            f"{path}: sizes {' x '.join(map(str, sizes))} need {prod(sizes)} bytes of values. "
            f"Got {len(content) - header}."
        )
    values = np.frombuffer(content, np.uint8, offset=header).copy()  # a copy, because bytes are read-only
    return torch.from_numpy(values).reshape(sizes)
