"""UCI tables: splits and classes as published, every damage said, and the real files where they are."""

import hashlib
import os
from pathlib import Path

import numpy as np
import pytest
import torch

from posterity.datasets import (
    UCI_CLASSIFICATION,
    UCI_REGRESSION,
    Preprocessing,
    prepare,
    read_table,
    uci,
    uci_classification,
    uci_regression,
)
from posterity.errors import BadData

pytestmark = pytest.mark.cpu  # files are read into the memory of the CPU


def real(name):
    root = os.environ.get("POSTERITY_DATA", "")
    if not root:
        pytest.skip("POSTERITY_DATA is not set: the real UCI files are not here")
    if not (Path(root) / name).is_dir():
        pytest.skip(f"POSTERITY_DATA has no folder '{name}'")
    return Path(root) / name


@pytest.fixture
def energy(tmp_path, monkeypatch):
    """A small table under the name of a real one: five rows, two inputs, target in the middle, two splits."""
    folder = tmp_path / "uci" / "energy" / "data"
    folder.mkdir(parents=True)
    data = "".join(f" {row}.5\t{row * 10}   -{row}e-1\n" for row in range(5)).encode() + b"\n"
    files = {
        "data.txt": data,
        "index_features.txt": b"0.0\n2.0\n",
        "index_target.txt": b"1\n",
        "index_train_0.txt": b"4\n0\n2\n",
        "index_test_0.txt": b"3.000000000000000000e+00\n1.0\n",
        "index_train_1.txt": b"0\n1\n2\n3\n",
        "index_test_1.txt": b"4\n",
    }
    for name, content in files.items():
        (folder / name).write_bytes(content)
    known = uci._Regression(5, 2, 2, hashlib.sha256(data).hexdigest())
    monkeypatch.setitem(uci._REGRESSION, "energy", known)
    monkeypatch.setenv("POSTERITY_DATA", str(tmp_path))
    return folder


def test_a_regression_set_is_split_as_its_files_say(energy):
    data = uci_regression("energy", 0)
    assert (data.name, data.task, data.classes) == ("energy", "regression", None)
    assert data.train.inputs.tolist() == [[4.5, -0.4], [0.5, 0.0], [2.5, -0.2]]
    assert data.train.targets.tolist() == [[40], [0], [20]]
    assert data.test.targets.tolist() == [[30], [10]]
    assert data.train.inputs.dtype == data.test.targets.dtype == torch.float64
    assert uci_regression("energy", 1, root=energy).test.targets.tolist() == [[40]]


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        (
            "data.txt",
            b"1 2 3\n",
            r"data\.txt: not the published file of 'energy'\. Its SHA-256 must be .* Got .* again",
        ),
        ("data.txt", None, r"data\.txt: cannot be read: No such file"),
        ("index_test_0.txt", None, r"index_test_0\.txt: cannot be read: No such file"),
        ("index_test_0.txt", b"3\n", r"index_train_0\.txt and index_test_0\.txt must share out 5 rows"),
        ("index_test_0.txt", b"3\n2\n", r"index_train_0\.txt and index_test_0\.txt must share out 5 rows"),
        ("index_test_0.txt", b"3\n5\n", r"index_test_0\.txt: its numbers must be whole and from 0 to 4\. Got 5\."),
        ("index_test_0.txt", b"3\n1.5\n", r"index_test_0\.txt: its numbers must be whole and from 0 to 4\. Got 1\.5\."),
        ("index_test_0.txt", b"3\nnan\n", r"index_test_0\.txt: its numbers must be whole and from 0 to 4\. Got nan\."),
        ("index_test_0.txt", b"3\nx\n", r"index_test_0\.txt: it must hold whole numbers\. Could not convert .*'x'"),
        ("index_target.txt", b"0\n", r"index_target\.txt must name 2 columns and one other"),
        ("index_features.txt", b"0\n", r"must name 2 columns and one other\. Got 1 and 1\."),
    ],
)
def test_a_damaged_regression_set_is_refused(energy, file, content, message):
    (energy / file).unlink()
    if content is not None:
        (energy / file).write_bytes(content)
    with pytest.raises(BadData, match=message) as caught:
        uci_regression("energy", 0)
    assert "\n" not in str(caught.value)


def test_a_classification_set_is_read_and_split_by_class(tmp_path, monkeypatch):
    rows = b"".join(b"%d,%s,%d.5,-%d\n" % (row, b"MB"[row % 2 :][:1], row, row) for row in range(10))
    known = uci._CLASSIFICATION["wdbc"]._replace(sum=hashlib.sha256(rows).hexdigest())
    monkeypatch.setitem(uci._CLASSIFICATION, "wdbc", known)
    (tmp_path / "wdbc.data").write_bytes(rows)
    data = uci_classification("wdbc", 0.4, seed=2, root=tmp_path)
    assert (data.name, data.task, data.classes) == ("wdbc", "classification", ("benign", "malignant"))
    assert torch.bincount(data.test.targets).tolist() == [2, 2]
    assert (len(data.train), data.train.inputs.shape[1]) == (6, 2)
    for part in (data.train, data.test):
        assert torch.equal(part.inputs[:, 0], 0.5 - part.inputs[:, 1])
        assert torch.equal((-part.inputs[:, 1] + 1) % 2, part.targets.double())  # M, malignant, in even rows
    (tmp_path / "wdbc.data").write_bytes(rows + b"10,M,1,1\n")
    with pytest.raises(BadData, match=r"wdbc\.data: not the published file of 'wdbc'"):
        uci_classification("wdbc", root=tmp_path)


def test_names_and_splits_are_checked(monkeypatch):
    monkeypatch.delenv("POSTERITY_DATA", raising=False)
    with pytest.raises(ValueError, match=r"^Unknown regression set 'energie'\. Did you mean 'energy'\?$"):
        uci_regression("energie")
    with pytest.raises(ValueError, match=r"^Unknown classification set 'german'\. Did you mean 'german-credit'\?$"):
        uci_classification("german")
    for split in (-1, 20, 1.0, True, "0"):
        with pytest.raises(ValueError, match=r"^uci_regression: split of 'energy' must be from 0 to 19\. Got "):
            uci_regression("energy", split)


@pytest.mark.parametrize("name", UCI_REGRESSION)
def test_real_regression_sets_have_their_published_sizes(name):
    real("uci")
    rows, inputs, splits, _ = uci._REGRESSION[name]
    data = uci_regression(name, splits - 1)
    assert len(data.train) + len(data.test) == rows
    assert len(data.test) == -(-rows // 10) or len(data.test) == rows // 10
    assert data.train.inputs.shape[1] == inputs
    everything = torch.cat((data.train.targets, data.test.targets))
    spread = {"bostonHousing": 9.188, "energy": 10.08, "kin8nm": 0.2636, "naval-propulsion-plant": 0.01472}
    spread |= {"power-plant": 17.07, "protein-tertiary-structure": 6.118, "wine-quality-red": 0.8073}
    assert everything.std(correction=0).item() == pytest.approx(spread[name], rel=1e-3)


@pytest.mark.parametrize(("name", "inputs", "counts"), [
    ("australian", 14, [383, 307]),
    ("banknote", 4, [762, 610]),
    ("german-credit", 24, [700, 300]),
    ("ionosphere", 34, [126, 225]),
    ("wdbc", 30, [357, 212]),
])  # fmt: skip
def test_real_classification_sets_have_their_published_sizes(name, inputs, counts):
    real("uci-classification")
    data = uci_classification(name)
    assert data.train.inputs.shape[1] == inputs
    assert torch.bincount(torch.cat((data.train.targets, data.test.targets))).tolist() == counts
    assert len(data.test) == round(0.2 * sum(counts))


def test_every_classification_set_is_known():
    assert set(UCI_CLASSIFICATION) == {"australian", "banknote", "german-credit", "ionosphere", "wdbc"}


def numbers(table):
    """All numbers of the inputs of a table, (N, D)."""
    columns = [column.numbers(".") for column in table.columns if column.name != table.roles.target]
    return torch.tensor(np.array(columns), dtype=torch.float64).T


@pytest.mark.parametrize("name", [name for name in UCI_REGRESSION if not name.startswith("protein")])
def test_the_table_reader_agrees_on_real_regression_files(name):
    folder = real("uci") / name / "data"
    target = int((folder / "index_target.txt").read_text())
    unused = ["x18"] if name.startswith("naval") else []  # its second target
    table = read_table(folder / "data.txt", f"x{target + 1}", task="regression", drop=unused)
    train, test = (
        [int(float(row)) for row in (folder / f"index_{part}_0.txt").read_text().split()] for part in ("train", "test")
    )
    direct = uci_regression(name, 0)
    assert torch.equal(numbers(table)[train], direct.train.inputs)
    assert torch.equal(numbers(table)[test], direct.test.inputs)
    preprocessing = Preprocessing.fit(table, train)
    inputs, targets, notes = preprocessing.transform(table)
    varied = direct.train.inputs.std(dim=0) > 1e-12
    assert len(preprocessing.inputs) == int(varied.sum()) == len(varied) - 2 * name.startswith("naval")
    spread, mean = direct.train.inputs.std(dim=0, correction=0), direct.train.inputs.mean(dim=0)
    torch.testing.assert_close(
        inputs[test].double(), ((direct.test.inputs - mean) / spread)[:, varied], rtol=0, atol=2e-5
    )
    back = targets[test].double() * preprocessing.target.scale + preprocessing.target.mean
    torch.testing.assert_close(back, direct.test.targets, rtol=1e-5, atol=1e-6)
    assert notes == ()


@pytest.mark.parametrize("name", UCI_CLASSIFICATION)
def test_the_table_reader_agrees_on_real_classification_files(name):
    known = uci._CLASSIFICATION[name]
    path = real("uci-classification") / name / known.file
    table = read_table(path, f"x{known.label + 1}", drop=[f"x{place + 1}" for place in known.unused])
    direct = uci_classification(name, 0.2, seed=5)
    prepared = prepare(table, 0.2, seed=5)
    assert prepared.preprocessing.target.classes == tuple(field for field, _ in known.classes)
    assert torch.equal(prepared.data.train.targets, direct.train.targets)
    assert torch.equal(prepared.data.test.targets, direct.test.targets)
    assert torch.equal(numbers(table)[prepared.test], direct.test.inputs)
    assert prepared.data.test.inputs.isfinite().all()
    assert ("Column 'x2' is constant and was dropped." in prepared.notes) == (name == "ionosphere")
