"""`posterity doctor`: what it finds, and when it fails."""

import json
from importlib import metadata

import pytest
import torch

import posterity

pytest.importorskip("platformdirs")  # without it something required is missing
pytestmark = pytest.mark.cpu


@pytest.fixture(autouse=True)
def places(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("POSTERITY_DATA", str(tmp_path / "data"))
    (tmp_path / "data" / "mnist").mkdir(parents=True)
    return tmp_path


def findings(result):
    return {finding["name"]: finding for finding in json.loads(result.out)["findings"]}


def test_a_good_installation(run):
    result = run("doctor")
    assert (result.code, result.err) == (0, "")
    for word in (posterity.__version__, torch.__version__, "self-check", "Everything required works."):
        assert word in result.out
    assert "FAILED" not in result.out


def test_the_document_says_the_same(run, places):
    result = run("doctor", "--json")
    assert json.loads(result.out)["ok"] is True
    found = findings(result)
    assert found["torch"]["detail"] == torch.__version__
    assert found["matplotlib"]["required"] is False
    assert f"in {places / 'data'}: mnist" in found["data sets"]["detail"]
    assert "two-moons" in found["data sets"]["detail"]
    assert found["cache folder"]["status"] == "ok"
    assert found["self-check"]["required"] is True


def test_the_write_test_leaves_nothing_behind(run, places):
    assert run("doctor").code == 0
    assert not (places / "cache").exists()


def test_a_cache_that_cannot_be_written_is_told_and_is_no_failure(run, places):
    (places / "cache").write_text("a file in the way")
    result = run("doctor", "--json")
    assert result.code == 0
    assert findings(result)["cache folder"]["status"] == "FAILED"


def test_a_package_that_is_missing(run, monkeypatch):
    original = metadata.version

    def version(name):
        if name in missing:
            raise metadata.PackageNotFoundError(name)
        return original(name)

    monkeypatch.setattr(metadata, "version", version)
    missing = {"matplotlib"}
    result = run("doctor", "--json")
    assert result.code == 0
    finding = findings(result)["matplotlib"]
    assert finding["status"] == "missing"
    assert "posterity[report]" in finding["detail"]
    missing = {"safetensors"}
    result = run("doctor", "--json")
    assert result.code == 1
    assert json.loads(result.out)["ok"] is False
    assert findings(result)["safetensors"]["status"] == "FAILED"


def test_a_wrong_posterior_fails_the_self_check(run, monkeypatch):
    original = torch.linalg.solve_triangular
    monkeypatch.setattr(torch.linalg, "solve_triangular", lambda *words, **more: 1.0001 * original(*words, **more))
    result = run("doctor")
    assert result.code == 1
    assert "self-check" in result.out
    assert "is missed by" in result.out
    assert "see FAILED above" in result.out
