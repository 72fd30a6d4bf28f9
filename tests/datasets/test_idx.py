"""The idx reader: round trips, every damage it reports, and the real MNIST files where they are."""

import gzip
import hashlib
import os
import shutil
import struct
from math import prod
from pathlib import Path

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from posterity.datasets import data_folder, mnist, mnist_test, read_idx
from posterity.datasets import images as idx
from posterity.errors import BadData

pytestmark = pytest.mark.cpu  # files hold tensors of the CPU


def header(sizes, code=0x08):
    return bytes((0, 0, code, len(sizes))) + struct.pack(f">{len(sizes)}I", *sizes)


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    return tmp_path_factory.mktemp("idx") / "values"


@settings(deadline=None, max_examples=60)
@given(sizes=st.lists(st.integers(0, 5), min_size=1, max_size=4), zipped=st.booleans(), seed=st.integers(0, 2**32))
def test_reads_back_what_was_written(file, sizes, zipped, seed):
    values = torch.randint(256, sizes, dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    content = header(sizes) + bytes(values.flatten().tolist())
    file.write_bytes(gzip.compress(content) if zipped else content)
    found = read_idx(str(file))
    assert found.dtype == torch.uint8
    assert torch.equal(found, values)


@settings(deadline=None, max_examples=60)
@given(sizes=st.lists(st.integers(1, 4), min_size=1, max_size=3), zipped=st.booleans(), data=st.data())
def test_no_truncated_file_is_read(file, sizes, zipped, data):
    content = header(sizes) + bytes(prod(sizes))
    content = gzip.compress(content) if zipped else content
    file.write_bytes(content[: data.draw(st.integers(0, len(content) - 1))])
    with pytest.raises(BadData, match=str(file)):
        read_idx(file)


@settings(deadline=None, max_examples=100)
@given(content=st.binary(max_size=40))
def test_any_bytes_give_an_array_or_one_line_that_names_the_file(file, content):
    file.write_bytes(content)
    found, message = None, f"{file}: "
    try:
        found = read_idx(file)
    except BadData as error:
        message = str(error)
    assert message.startswith(f"{file}: ")
    assert "\n" not in message
    assert found is None or content.endswith(bytes(found.flatten().tolist()))


def test_the_array_can_be_written_to(file):
    file.write_bytes(header([2]) + b"\x01\x02")
    values = read_idx(file)
    values += 1
    assert values.tolist() == [2, 3]


DAMAGED = {
    "empty": (b"", "not an idx file. It must begin with 00 00, a type and a rank. Got no bytes."),
    "wrong magic": (
        b"PK\x03\x04rest",
        "not an idx file. It must begin with 00 00, a type and a rank. Got 50 4b 03 04.",
    ),
    "unknown type": (header([1], code=0x07) + b"\x00", "Got 00 00 07 01."),
    "no rank": (header([]) + b"\x00", "Got 00 00 08 00."),
    "floats": (header([1], code=0x0D) + bytes(4), "its values must be uint8 (type 08). Got float32 (0d)."),
    "short header": (header([3, 4])[:9], "its header must have 12 bytes for 2 sizes. Got 9."),
    "too few values": (header([2, 3]) + bytes(5), "sizes 2 x 3 need 6 bytes of values. Got 5."),
    "too many values": (header([2, 3]) + bytes(7), "sizes 2 x 3 need 6 bytes of values. Got 7."),
    "huge sizes": (header([2**32 - 1] * 4), f"need {(2**32 - 1) ** 4} bytes of values. Got 0."),
    "truncated gzip": (
        gzip.compress(header([9]) + bytes(9), mtime=0)[:-9],
        "the gzip data end too early. Fetch the file again.",
    ),
    "gzip checksum": (
        gzip.compress(header([1]) + b"\x05", mtime=0)[:-8] + bytes(8),
        "the gzip data are damaged: CRC check failed",
    ),
    "gzip noise": (b"\x1f\x8b\x08\x00" + bytes(6) + b"\xff" * 30, "the gzip data are damaged: "),
}


@pytest.mark.parametrize("damage", DAMAGED)
def test_says_what_is_wrong_with_a_damaged_file(file, damage):
    content, message = DAMAGED[damage]
    file.write_bytes(content)
    with pytest.raises(BadData) as caught:
        read_idx(file)
    assert str(caught.value).startswith(f"{file}: ")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_says_that_a_file_is_missing_or_a_folder(tmp_path):
    with pytest.raises(BadData, match=r"nothing: cannot be read: No such file or directory\.$"):
        read_idx(tmp_path / "nothing")
    with pytest.raises(BadData, match=r"cannot be read: Is a directory\. Name one file in it"):
        read_idx(tmp_path)


@pytest.fixture
def small(tmp_path, monkeypatch):
    """A folder with an own tiny MNIST whose checksums the reader knows."""
    sums = {}
    for part, count in (("train", 4), ("t10k", 3)):
        images = header([count, 28, 28]) + bytes([255, 0, 51, 102] * (count * 196))
        labels = header([count]) + bytes(range(count))
        for kind, content in ((f"{part}-images-idx3-ubyte.gz", images), (f"{part}-labels-idx1-ubyte.gz", labels)):
            (tmp_path / kind).write_bytes(gzip.compress(content))
            sums[kind] = hashlib.sha256(content).hexdigest()
    monkeypatch.setitem(idx._SUMS, "mnist", sums)
    return tmp_path


def test_mnist_scales_pixels_and_names_digits(small):
    data = mnist(small)
    assert (data.name, data.task, data.classes) == ("mnist", "classification", tuple("0123456789"))
    assert data.train.inputs.shape == (4, 1, 28, 28)
    assert data.train.inputs.dtype == torch.float32
    torch.testing.assert_close(data.train.inputs[0, 0, 0, :4], torch.tensor([1.0, 0.0, 0.2, 0.4]))
    assert data.train.targets.dtype == torch.int64
    assert data.train.targets.tolist() == [0, 1, 2, 3]
    assert torch.equal(mnist_test("mnist", small).inputs, data.test.inputs)


def test_mnist_is_found_through_the_environment(small, monkeypatch):
    shutil.copytree(small, small / "elsewhere" / "mnist")
    monkeypatch.setenv("POSTERITY_DATA", str(small / "elsewhere"))
    assert len(mnist().train) == 4


def test_an_altered_file_is_refused(small):
    path = small / "t10k-labels-idx1-ubyte.gz"
    path.write_bytes(gzip.compress(header([3]) + b"\x01\x01\x01"))
    with pytest.raises(BadData, match=r"t10k-labels-idx1-ubyte\.gz: not the published file of 'mnist'\. .*again\.$"):
        mnist_test("mnist", small)


@pytest.mark.parametrize("pack", [lambda data: gzip.compress(data, 1, mtime=7), bytes])
def test_a_file_packed_in_another_way_is_the_same_file(small, pack):
    path = small / "t10k-labels-idx1-ubyte.gz"
    path.write_bytes(pack(gzip.decompress(path.read_bytes())))
    assert mnist_test("mnist", small).targets.tolist() == [0, 1, 2]


def test_a_missing_file_is_named(small):
    (small / "train-images-idx3-ubyte.gz").unlink()
    with pytest.raises(BadData, match=r"train-images-idx3-ubyte\.gz: cannot be read: No such file"):
        mnist(small)


def test_unknown_names_get_the_nearest():
    with pytest.raises(ValueError, match=r"^Unknown data set 'mnits'\. Did you mean 'mnist'\?$"):
        mnist(name="mnits")
    with pytest.raises(ValueError, match=r"^Unknown data set 'fashion'\. Did you mean 'fashion-mnist'\?$"):
        mnist_test("fashion")
    with pytest.raises(
        ValueError, match=r"^mnist: only the test part of 'kmnist' is known\. Use mnist_test\('kmnist'\)"
    ):
        mnist(name="kmnist")


def real(name):
    """The folder of a real data set, or a skip that says what is missing."""
    root = os.environ.get("POSTERITY_DATA", "")
    if not root:
        pytest.skip("POSTERITY_DATA is not set: the real image files are not here")
    if not (Path(root) / name).is_dir():
        pytest.skip(f"POSTERITY_DATA has no folder '{name}'")
    return name


def check_images(images, mean, std):
    assert images.shape[1:] == (1, 28, 28)
    assert images.aminmax() == (0, 1)
    assert images.double().mean().item() == pytest.approx(mean, abs=5e-5)
    assert images.double().std().item() == pytest.approx(std, abs=5e-5)


def test_real_mnist_has_its_known_counts_and_moments():
    data = mnist(name=real("mnist"))
    counts = [torch.bincount(part.targets).tolist() for part in (data.train, data.test)]
    assert counts[0] == [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]
    assert counts[1] == [980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009]
    check_images(data.train.inputs, 0.1307, 0.3081)


def test_real_kmnist_test_part_has_its_known_counts_and_moments():
    data = mnist_test(real("kmnist"))
    assert torch.bincount(data.targets).tolist() == [1000] * 10
    check_images(data.inputs, 0.1846, 0.3416)


def test_real_fashion_mnist_test_part_has_a_thousand_of_each_class():
    data = mnist_test(real("fashion-mnist"))
    assert torch.bincount(data.targets).tolist() == [1000] * 10
    assert data.inputs.shape == (10_000, 1, 28, 28)
    assert data.inputs.aminmax() == (0, 1)


def test_real_fashion_mnist_training_labels_are_the_published_ones():
    labels = idx._published(data_folder(real("fashion-mnist")), "fashion-mnist", "train-labels-idx1-ubyte.gz")
    assert torch.bincount(labels).tolist() == [6000] * 10
