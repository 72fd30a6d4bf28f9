"""Disks that are full or read-only: one sentence, an exit code, and nothing half written."""

import errno
import os

import pytest

from posterity.storage import RunFolder, disk

pytestmark = pytest.mark.cpu
FIT = ("fit", "two-moons", "--hidden", "3", "--steps", "6", "--checkpoint-steps", "3", "--prior-scale", "1", "--quiet")


def fails_at(monkeypatch, count, number=errno.ENOSPC):
    """Let the `count`-th file that is written stop half way; returns what is left to count."""
    left, write = [count], disk.write

    def full(path, pieces):
        left[0] -= 1
        if left[0]:
            return write(path, pieces)
        data = b"".join(pieces)
        path.write_bytes(data[: len(data) // 2])
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(disk, "write", full)
    return left


def test_a_fit_on_a_disk_that_fills_at_any_write_ends_in_a_sentence_and_goes_on(run, tmp_path, monkeypatch, content):
    words = (*FIT, "--device", "cpu", "--method", "map", "--out")
    assert run(*words, tmp_path / "whole").code == 0
    truth, failures = content(tmp_path / "whole"), 0
    for count in range(1, 100):
        folder = tmp_path / str(count)
        with monkeypatch.context() as patch:
            left = fails_at(patch, count)
            result = run(*words, folder)
        if left[0] > 0:
            break
        failures += 1
        assert result.code == 4
        assert "Traceback" not in result.err
        assert "No space left on device: it needs " in result.err
        assert " are free. Nothing there is half written. Free space" in result.err
        assert not RunFolder(folder).exists() or content(folder) == truth
        assert run(*words, folder).code == 0
        assert content(folder) == truth
    assert failures >= 8
    assert result.code == 0


def test_a_finished_run_survives_a_full_disk_when_it_is_fitted_anew(run, tmp_path, monkeypatch, content):
    words = (*FIT, "--device", "cpu", "--method", "map", "--out", tmp_path / "run", "--force")
    assert run(*words).code == 0
    before, parts = content(tmp_path / "run"), RunFolder(tmp_path / "run").parts()
    for count in range(1, 100):
        with monkeypatch.context() as patch:
            left = fails_at(patch, count, errno.EDQUOT)
            result = run(*words, "--seed", "1")
        if left[0] > 0:
            break
        assert result.code == 4
        assert RunFolder(tmp_path / "run").parts() == parts
        assert {name: seal for name, seal in content(tmp_path / "run").items() if name in before} == before
    assert result.code == 0
    assert content(tmp_path / "run") != before


@pytest.mark.parametrize("number", [errno.EROFS, errno.EACCES])
def test_a_folder_that_cannot_be_written_is_refused_in_a_sentence(run, tmp_path, monkeypatch, number):
    open_, folder = os.open, tmp_path / "run"
    folder.mkdir()

    def refused(path, flags, *more, **options):
        if str(path).startswith(str(folder)) and flags & os.O_CREAT:
            raise OSError(number, os.strerror(number), str(path))
        return open_(path, flags, *more, **options)

    monkeypatch.setattr(os, "open", refused)
    result = run(*FIT, "--device", "cpu", "--method", "map", "--out", folder)
    assert result.code == 4
    assert f"error: Cannot write run folder '{folder}': {os.strerror(number)}" in result.err.replace("\n", " ")
    assert not list(folder.iterdir())


def test_predictions_that_find_no_space_say_how_much_they_need(run, tmp_path, monkeypatch):
    words = (*FIT, "--device", "cpu", "--method", "map", "--out", tmp_path / "run")
    assert run(*words).code == 0

    def full(handle):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    result = run("predict", tmp_path / "run", "--out", tmp_path / "table.csv")
    assert result.code == 1
    assert "unexpected" not in result.err
    assert "table.csv': No space left on device: it needs " in result.err.replace("\n", " ")
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
