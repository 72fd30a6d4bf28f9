"""Files that are written at once or not at all."""

import fcntl

import pytest

from posterity.storage.disk import write_file

DRAFT = ".draft-0123456789abcdef"


def test_a_draft_of_a_killed_writer_goes_with_the_next_write(tmp_path):
    for name in (DRAFT, ".draft-mine", "other"):
        (tmp_path / name).write_bytes(b"half")
    write_file(tmp_path / "new", b"whole")
    assert sorted(path.name for path in tmp_path.iterdir()) == [".draft-mine", "new", "other"]
    assert (tmp_path / "new").read_bytes() == b"whole"


def test_a_draft_that_is_being_written_stays(tmp_path):
    with open(tmp_path / DRAFT, "xb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        write_file(tmp_path / "new", b"whole")
        assert (tmp_path / DRAFT).exists()
    write_file(tmp_path / "new", b"again")
    assert [path.name for path in tmp_path.iterdir()] == ["new"]


def test_a_failed_write_leaves_the_old_file_and_no_draft(tmp_path, monkeypatch):
    write_file(tmp_path / "file", b"old")

    def full(handle):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(Exception, match="needs 3 bytes"):
        write_file(tmp_path / "file", b"new")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    assert (tmp_path / "file").read_bytes() == b"old"
