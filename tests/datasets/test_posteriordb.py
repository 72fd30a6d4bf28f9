"""posteriordb: data and draws by name, every damage said, and the real files where they are."""

import hashlib
import io
import json
import os
import zipfile
from pathlib import Path

import pytest
import torch

from posterity.datasets import POSTERIORS, german_credit_reference, posteriordb_data, posteriordb_draws
from posterity.datasets import posteriordb as german_credit_module
from posterity.datasets import posteriordb as module
from posterity.errors import BadData

pytestmark = pytest.mark.cpu  # files are read into the memory of the CPU


def packed(content: bytes) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("some.json", content)
    return buffer.getvalue()


@pytest.fixture
def root(tmp_path, monkeypatch):
    """Two draws of two chains, and a data set, under the names of real ones."""
    chains = [
        {"beta[1]": [1.0, 2.0], "beta[2]": [3.0, 4.0], "sigma": [5, 6]},
        {"beta[1]": [7, 8], "beta[2]": [9, 10], "sigma": [11, 12]},
    ]
    draws = packed(json.dumps(chains).encode())
    data = packed(json.dumps({"N": 2, "X": [[1, 2], [3, 4.5]]}).encode())
    for file, content in (("reference_draws/sblrc-blr.json.zip", draws), ("data/sblrc.json.zip", data)):
        path = tmp_path / "posteriordb" / file
        path.parent.mkdir(parents=True)
        path.write_bytes(content)
    monkeypatch.setitem(
        module._DRAWS, "sblrc-blr", ("reference_draws/sblrc-blr.json.zip", hashlib.sha256(draws).hexdigest())
    )
    monkeypatch.setitem(module._DATA, "sblrc", hashlib.sha256(data).hexdigest())
    monkeypatch.setenv("POSTERITY_DATA", str(tmp_path))
    return tmp_path / "posteriordb"


def test_entries_of_a_parameter_are_one_tensor(root):
    draws = posteriordb_draws("sblrc-blr")
    assert list(draws) == ["beta", "sigma"]
    assert draws["beta"].tolist() == [[[1.0, 3.0], [2.0, 4.0]], [[7.0, 9.0], [8.0, 10.0]]]
    assert draws["sigma"].tolist() == [[5.0, 6.0], [11.0, 12.0]]
    assert all(value.dtype == torch.float64 for value in draws.values())


@pytest.mark.parametrize("name", ["sblrc", "sblrc-blr"])
def test_data_come_by_their_name_or_by_that_of_a_posterior(root, name):
    data = posteriordb_data(name, root=root)
    assert data["X"].tolist() == [[1.0, 2.0], [3.0, 4.5]]
    assert data["N"] == 2.0


def test_unknown_names_are_said_with_the_nearest(root):
    with pytest.raises(ValueError, match="Did you mean 'sblrc-blr'"):
        posteriordb_draws("sblrc-blrr")
    with pytest.raises(ValueError, match="Did you mean 'sblri'"):
        posteriordb_data("sblrx")


def test_a_file_that_is_not_the_published_one_is_refused(root):
    path = root / "data" / "sblrc.json.zip"
    path.write_bytes(path.read_bytes() + b"x")
    with pytest.raises(BadData, match="not the published file of 'sblrc'"):
        posteriordb_data("sblrc")
    path.unlink()
    with pytest.raises(BadData, match="cannot be read"):
        posteriordb_data("sblrc")


@pytest.mark.parametrize("content", [b"no archive", packed(b"{"), packed(b"")], ids=["no zip", "cut", "empty"])
def test_a_damaged_archive_is_said(root, monkeypatch, content):
    (root / "data" / "sblrc.json.zip").write_bytes(content)
    monkeypatch.setitem(module._DATA, "sblrc", hashlib.sha256(content).hexdigest())
    with pytest.raises(BadData, match="zip archive with one JSON file"):
        posteriordb_data("sblrc")


def test_moments_of_german_credit(tmp_path, monkeypatch):
    content = json.dumps({"logistic": {"mean": [1, 2], "mean_standard_error": [0.1, 0.2], "sd": [3, 4]}}).encode()
    (tmp_path / "reference_posterior.json").write_bytes(content)
    with pytest.raises(BadData, match="not the published file"):
        german_credit_reference(tmp_path)
    monkeypatch.setattr(german_credit_module, "_SUM", hashlib.sha256(content).hexdigest())
    found = german_credit_reference(tmp_path)
    assert found.mean.tolist() == [1.0, 2.0]
    assert found.mean_error.tolist() == [0.1, 0.2]
    assert found.sd.tolist() == [3.0, 4.0]


@pytest.mark.parametrize("name", POSTERIORS)
def test_the_real_files(name):
    given = os.environ.get("POSTERITY_DATA", "")
    if not given or not (Path(given) / "posteriordb").is_dir():
        pytest.skip("POSTERITY_DATA is not set, or has no folder 'posteriordb'")
    draws = posteriordb_draws(name)
    assert all(value.shape[:2] == (10, 1000) and bool(torch.isfinite(value).all()) for value in draws.values())
    assert posteriordb_data(name)
