"""`posterity data`: which data sets there are, where they are, and whether their files are the published ones."""

import gzip
import hashlib
import json
import re

import pytest

from posterity.datasets import UCI_CLASSIFICATION, UCI_REGRESSION, uci
from posterity.datasets import images as idx
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
    assert document["built_in"] == ["two-moons", "sine", "line", "blobs", "waves"]
    assert document["places"][0] == str(place)
    names = {"mnist", "fashion-mnist", "kmnist", "cifar-10", "posteriordb-data", "posteriordb-draws"}
    assert set(entries) == {*names, *UCI_REGRESSION, *UCI_CLASSIFICATION}
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


@pytest.fixture
def source(tmp_path, monkeypatch):
    known = uci._CLASSIFICATION["wdbc"]._replace(sum=hashlib.sha256(b"rows").hexdigest())
    monkeypatch.setitem(uci._CLASSIFICATION, "wdbc", known)
    put(tmp_path, "source/wdbc.data", b"rows")
    return tmp_path / "source"


def test_download_puts_the_files_into_the_cache(run, place, source):
    result = run("data", "wdbc", "--download", "--from", source)
    folder = place.parent / "cache" / "posterity" / "uci-classification" / "wdbc"
    assert (result.code, result.out) == (0, f"wdbc: 1 files fetched, 0 already there, in {folder}\n")
    assert f"{source}/wdbc.data (4 bytes)" in result.err
    assert (folder / "wdbc.data").read_bytes() == b"rows"
    again = run("data", "wdbc", "--download", "--from", source, "--json", "--quiet")
    assert json.loads(again.out) == {
        "name": "wdbc", "folder": str(folder), "fetched": [], "kept": ["wdbc.data"], "without_sum": [],
    }  # fmt: skip
    assert again.err == ""
    assert [entry["status"] for entry in listed(run, "wdbc", "--check")[1]["files"]] == ["here"]


def test_download_into_a_folder_where_nothing_is_looked_for_says_so(run, place, source, tmp_path):
    result = run("data", "wdbc", "--download", "--from", source, "--into", tmp_path / "other")
    assert (result.code, "set POSTERITY_DATA" in result.err) == (0, True)
    assert (tmp_path / "other/uci-classification/wdbc/wdbc.data").is_file()


def test_download_of_another_file_is_bad_data(run, place, source):
    (source / "wdbc.data").write_bytes(b"row")
    result = run("data", "wdbc", "--download", "--from", source, "--quiet")
    assert (result.code, result.out) == (3, "")
    assert result.err.startswith(f"error: {source}/wdbc.data: not the published file of 'wdbc'.")
    assert result.err.count("\n") == 1
    (source / "wdbc.data").unlink()
    result = run("data", "wdbc", "--download", "--from", source, "--quiet")
    assert (result.code, result.err.count("\n")) == (1, 1)
    assert "there is no such file" in result.err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--download",), "--download needs the NAME"),
        (("mnits", "--download"), "Did you mean 'mnist'?"),
        (("mnist", "--into", "there"), "--from and --into are for --download."),
        (("wdbc", "--download"), "no address is known"),
        (("mnist", "--download", "--from", ""), "--from must be a folder or an address"),
        (("mnist", "--download", "--from", "gopher://x"), "must begin with http://"),
    ],
)
def test_wrong_use_of_download(run, place, words, message):
    result = run("data", *words)
    assert (result.code, result.out) == (2, "")
    assert message in result.err


@pytest.mark.parametrize(
    ("words", "entry"),
    [
        (("images",), "mnist"),
        (("temperature",), "mnist"),
        (("temperature", "--data", "cifar-10", "--net", "resnet-20"), "cifar-10"),
        (("penalties",), None),
        (("uci", "--jobs", "1"), None),
        (("hyperparameters", "--jobs", "1"), None),
        (("posteriors",), None),
    ],
)
@pytest.mark.parametrize("empty", [False, True], ids=["nowhere", "an empty folder"])
def test_a_study_without_its_data_names_the_command_that_fetches_them(run, tmp_path, monkeypatch, words, entry, empty):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("POSTERITY_DATA", raising=False)
    if empty:
        for published in catalogue():
            (tmp_path / "cache" / "posterity" / published.folder).mkdir(parents=True, exist_ok=True)
    result = run("study", *words, "--out", tmp_path / "study")
    assert result.code == 3
    named = re.findall(r"'posterity data (\S+) --download'", result.err)
    assert len(named) == 1
    assert {published.name for published in catalogue() if published.base} >= set(named)
    assert entry in (None, named[0])
