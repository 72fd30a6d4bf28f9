"""CIFAR-10: the binary records, every damage said, and the real files where they are."""

import hashlib
import lzma
import os
from pathlib import Path

import pytest
import torch

from posterity.datasets import cifar10, cifar10_test
from posterity.datasets import images as cifar
from posterity.errors import BadData

pytestmark = pytest.mark.cpu  # files are read into the memory of the CPU


def record(label, red, green, blue):
    return bytes((label, *([red] * 1024), *([green] * 1024), *([blue] * 1023), 255))


@pytest.fixture
def small(tmp_path, monkeypatch):
    """A folder with an own CIFAR-10 of two records a file, whose checksums the reader knows."""
    monkeypatch.setattr(cifar, "_ROWS", 2)
    for sums in (cifar._TRAIN, cifar._TEST):
        for place, name in enumerate(sorted(sums)):
            write(tmp_path, monkeypatch, name, record(place, 51 * place, 0, 255) + record(9, 0, 102, place))
    return tmp_path


def write(folder, monkeypatch, name, content):
    packed = lzma.compress(content)
    (folder / name).write_bytes(packed)
    for sums in (cifar._TRAIN, cifar._TEST):
        if name in sums:
            monkeypatch.setitem(sums, name, hashlib.sha256(packed).hexdigest())


def test_records_become_images_and_labels_in_order(small):
    data = cifar10(small)
    assert (data.name, data.task, len(data.classes)) == ("cifar-10", "classification", 10)
    assert data.train.inputs.shape == (10, 3, 32, 32)
    assert data.train.inputs.dtype == torch.float32
    assert data.train.targets.tolist() == [0, 9, 1, 9, 2, 9, 3, 9, 4, 9]
    assert data.train.targets.dtype == torch.int64
    torch.testing.assert_close(data.train.inputs[::2, 0, 7, 31], torch.tensor([0.0, 0.2, 0.4, 0.6, 0.8]))
    torch.testing.assert_close(data.train.inputs[1, :, 0, 0], torch.tensor([0.0, 0.4, 0.0]))
    assert data.train.inputs[:, 2, 31, 31].tolist() == [1.0] * 10
    assert torch.equal(cifar10_test(small).inputs, data.test.inputs)
    assert data.test.targets.tolist() == [0, 9]


def test_it_is_found_through_the_environment(small, monkeypatch):
    (small / "data").mkdir()
    (small / "data" / "cifar-10").symlink_to(small)
    monkeypatch.setenv("POSTERITY_DATA", str(small / "data"))
    assert len(cifar10_test()) == 2


def test_damaged_files_are_refused(small, monkeypatch):
    path = small / "test_batch.bin.xz"
    write(small, monkeypatch, path.name, record(1, 2, 3, 4))
    with pytest.raises(BadData, match=r"test_batch\.bin\.xz: it must hold 2 records of 3073 bytes\. Got 3073 bytes\.$"):
        cifar10_test(small)
    write(small, monkeypatch, path.name, record(1, 2, 3, 4) + record(10, 2, 3, 4))
    with pytest.raises(BadData, match=r"labels must be below 10\. Got 10\."):
        cifar10_test(small)
    path.write_bytes(b"nothing")
    with pytest.raises(BadData, match=r"test_batch\.bin\.xz: not the published file of 'cifar-10'\. .*again\.$"):
        cifar10_test(small)
    monkeypatch.setitem(cifar._TEST, path.name, hashlib.sha256(b"nothing").hexdigest())
    with pytest.raises(BadData, match=r"test_batch\.bin\.xz: the xz data are damaged: .* Fetch the file again\.$"):
        cifar10_test(small)
    path.unlink()
    with pytest.raises(BadData, match=r"test_batch\.bin\.xz: cannot be read: No such file or directory\.$"):
        cifar10(small)


def test_the_real_test_part_has_its_known_labels():
    root = os.environ.get("POSTERITY_DATA", "")
    if not root:
        pytest.skip("POSTERITY_DATA is not set: the real image files are not here")
    if not (Path(root) / "cifar-10").is_dir():
        pytest.skip("POSTERITY_DATA has no folder 'cifar-10'")
    data = cifar10_test()
    assert data.inputs.shape == (10_000, 3, 32, 32)
    assert torch.bincount(data.targets).tolist() == [1000] * 10
    assert data.targets[:10].tolist() == [3, 8, 8, 0, 6, 6, 1, 6, 3, 1]
    assert data.inputs.aminmax() == (0, 1)
