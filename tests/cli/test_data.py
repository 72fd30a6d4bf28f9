"""`posterity data`: which data sets there are, where they are, and whether their files are the published ones."""

import gzip
import hashlib
import json

import pytest

from posterity.datasets import UCI_CLASSIFICATION, UCI_REGRESSION, idx, uci
from posterity.datasets.catalogue import catalogue

pytestmark = pytest.mark.cpu


@pytest.fixture
def place(tmp_path, monkeypatch):
    monkeypatch.setenv("POSTERITY_DATA", str(tmp_path / "given"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "given").mkdir()
    return tmp_path / "given"


def listed(run, *options):
    result = run("data", "--json", *options)
    document = json.loads(result.out)
    return result.code, document, {entry["name"]: entry for entry in document["files"]}


def put(place, path, data):
    (place / path).parent.mkdir(parents=True, exist_ok=True)
    (place / path).write_bytes(data)


def test_every_reader_is_listed_and_nothing_is_there(run, place):
    code, document, entries = listed(run)
    assert code == 0
    assert document["built_in"] == ["two-moons", "sine", "line", "blobs"]
    assert document["places"][0] == str(place)
    names = {"mnist", "fashion-mnist", "kmnist", "cifar-10", *UCI_REGRESSION, *UCI_CLASSIFICATION}
    assert set(entries) == names
    assert {entry["status"] for entry in entries.values()} == {"missing"}
    assert all(entry["files"] for entry in entries.values())


def test_the_text_says_what_to_put_where(run, place):
    words = " ".join(run("data").out.split())
    assert "built in: two-moons, sine, line, blobs" in words
    assert "files are looked for in:" in words
    assert "wdbc missing" in words
    assert "POSTERITY_DATA" in words


def test_files_that_are_there_and_files_that_are_lacking(run, place):
    put(place, "uci-classification/wdbc/wdbc.data", b"anything")
    put(place, "kmnist/t10k-images-idx3-ubyte.gz", b"anything")
    _, _, entries = listed(run)
    assert entries["wdbc"]["status"] == "here"
    assert entries["wdbc"]["folder"] == str(place / "uci-classification")
    assert entries["kmnist"]["status"] == "incomplete"
    assert entries["kmnist"]["missing"] == ["t10k-labels-idx1-ubyte.gz"]
    assert entries["banknote"]["status"] == "missing"


def test_check_tells_published_files_from_others(run, place, monkeypatch):
    known = uci._CLASSIFICATION["wdbc"]._replace(sum=hashlib.sha256(b"rows").hexdigest())
    monkeypatch.setitem(uci._CLASSIFICATION, "wdbc", known)
    images = {"t10k-images-idx3-ubyte.gz": hashlib.sha256(b"pixels").hexdigest()}
    monkeypatch.setitem(idx._SUMS, "kmnist", images)
    put(place, "uci-classification/wdbc/wdbc.data", b"rows")
    put(place, "kmnist/t10k-images-idx3-ubyte.gz", gzip.compress(b"pixels"))
    code, document, entries = listed(run, "--check")
    assert (code, document["checked"]) == (0, True)
    assert (entries["wdbc"]["status"], entries["kmnist"]["status"]) == ("here", "here")
    assert "sound" in run("data", "--check").out
    put(place, "kmnist/t10k-images-idx3-ubyte.gz", gzip.compress(b"pixels")[:-3])
    put(place, "uci-classification/wdbc/wdbc.data", b"row")
    code, _, entries = listed(run, "--check")
    assert code == 3
    assert entries["kmnist"]["damaged"] == ["t10k-images-idx3-ubyte.gz"]
    assert entries["wdbc"]["status"] == "damaged"
    assert listed(run)[0] == 0


def test_regression_sets_need_their_splits():
    files = {entry.name: [file for file, _ in entry.files] for entry in catalogue()}
    assert len(files["energy"]) == 3 + 40
    assert len(files["protein-tertiary-structure"]) == 3 + 10
    assert files["energy"][0] == "energy/data/data.txt"
