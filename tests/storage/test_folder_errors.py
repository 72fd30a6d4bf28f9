"""Every way a run folder can be bad says so in one line, with what to do, and harms nothing."""

import errno
import hashlib
import json
import os

import pytest
import torch

from posterity.errors import BadFolder
from posterity.storage import Part, RunFolder

pytestmark = pytest.mark.cpu  # files hold tensors of the CPU

OLD = {"posterior": Part({"v": "old"}, {"x": torch.zeros(100)}), "trace": Part({"v": "old"})}
NEW = {"posterior": Part({"v": "new"}, {"x": torch.ones(100)}), "trace": Part({"v": "new"})}


@pytest.fixture
def run(tmp_path):
    folder = RunFolder(tmp_path / "run")
    folder.commit(OLD)
    return folder


def refusal(action, *words):
    """The message of the BadFolder that `action` raises: one line that has these words."""
    with pytest.raises(BadFolder) as caught:
        action()
    text = str(caught.value)
    assert "\n" not in text
    for word in words:
        assert word in text
    assert caught.value.exit_code == 4
    return text


def edit(run, change):
    path = run.path / "manifest.json"
    manifest = json.loads(path.read_text())
    change(manifest)
    path.write_text(json.dumps(manifest))


def stored(run, name="tensors.safetensors"):
    return next(run.path.glob("posterior-*")) / name


def whole(run):
    """Which content the folder has; fails on a mix."""
    parts = [run.read(name) for name in run.parts()]
    values = {part.config["v"] for part in parts}
    assert len(values) == 1
    assert set(run.parts()) == {"posterior", "trace"}
    assert torch.equal(
        run.read("posterior").tensors["x"], (NEW if values == {"new"} else OLD)["posterior"].tensors["x"]
    )
    return values.pop()


def test_missing_folder(tmp_path):
    run = RunFolder(tmp_path / "nowhere")
    refusal(lambda: run.read("posterior"), "no run folder", "nowhere", "Check the path")
    refusal(run.parts, "no run folder")


def test_folder_without_manifest(tmp_path):
    refusal(
        lambda: RunFolder(tmp_path).read("x"), "no manifest.json", "first save was interrupted", "save the run again"
    )


def test_path_is_a_file(tmp_path):
    (tmp_path / "file").write_text("text")
    run = RunFolder(tmp_path / "file")
    assert not run.exists()
    refusal(lambda: run.read("x"), "is a file", "manifest.json")
    refusal(lambda: run.commit(NEW), "is a file")
    refusal(lambda: RunFolder(tmp_path / "file" / "run").commit(NEW), "Cannot write", "Not a directory")
    assert (tmp_path / "file").read_text() == "text"


@pytest.mark.parametrize(
    "data", [b"", b'{"format": 1, "lib', b"\xff\xfe", b"[" * 100_000], ids=["empty", "cut", "binary", "deep"]
)
def test_truncated_manifest(run, data):
    (run.path / "manifest.json").write_bytes(data)
    refusal(lambda: run.read("posterior"), "manifest.json is truncated or not JSON", "Restore")
    refusal(lambda: run.commit(NEW), "manifest.json is truncated or not JSON")
    assert (run.path / "manifest.json").read_bytes() == data  # nothing is thrown away that a person might still repair


def test_newer_format_says_upgrade(run):
    edit(run, lambda manifest: manifest.update(format=3))
    refusal(lambda: run.read("posterior"), "format 3", "Upgrade posterity")
    refusal(lambda: run.commit(NEW), "Upgrade posterity")


@pytest.mark.parametrize("version", [0, None, "1", True, 1.5])
def test_unknown_format(run, version):
    edit(run, lambda manifest: manifest.update(format=version))
    refusal(lambda: run.read("posterior"), "not in the format")


@pytest.mark.parametrize("manifest", [[], 3, {"format": 1, "library": "other", "parts": {}}])
def test_manifest_of_something_else(run, manifest):
    (run.path / "manifest.json").write_text(json.dumps(manifest))
    refusal(lambda: run.read("posterior"), "not written by posterity")


def test_absent_part_names_the_others(run):
    refusal(lambda: run.read("checkpoint"), "'checkpoint'", "posterior, trace")
    empty = RunFolder(run.path.parent / "empty")
    empty.commit({})
    refusal(lambda: empty.read("checkpoint"), "Parts there: none")


def test_missing_file(run):
    stored(run).unlink()
    refusal(lambda: run.read("posterior"), "tensors.safetensors' is missing", "Restore")
    assert run.read("trace").config == {"v": "old"}


@pytest.mark.parametrize("name", ["config.json", "tensors.safetensors"])
def test_truncated_file(run, name):
    data = stored(run, name).read_bytes()
    stored(run, name).write_bytes(data[:-1])
    refusal(lambda: run.read("posterior"), f"{name}' is truncated ({len(data) - 1} of {len(data)} bytes)", "Restore")


@pytest.mark.parametrize(
    "change", [lambda data: data[:-1] + bytes([data[-1] ^ 1]), lambda data: data + b" "], ids=["bit", "longer"]
)
@pytest.mark.parametrize("name", ["config.json", "tensors.safetensors"])
def test_altered_file(run, name, change):
    stored(run, name).write_bytes(change(stored(run, name).read_bytes()))
    refusal(lambda: run.read("posterior"), f"{name}' was altered after it was saved", "sha256", "Restore")


@pytest.mark.parametrize(
    "folder", ["..", "../posterior-0123456789ab", "/etc", "trace-0123456789ab", "posterior-x", "", 3, "."]
)
def test_manifest_must_not_name_folders_outside(run, folder):
    edit(run, lambda manifest: manifest["parts"]["posterior"].update(folder=folder))
    refusal(lambda: run.read("posterior"), "manifest.json was altered", "inside the run folder")


@pytest.mark.parametrize("name", ["../manifest.json", "/etc/passwd", "sub/config.json", "other.json"])
def test_manifest_must_not_name_files_outside(run, name):
    def change(manifest):
        files = manifest["parts"]["posterior"]["files"]
        files[name] = files.pop("config.json")

    edit(run, change)
    refusal(lambda: run.read("posterior"), "manifest.json was altered")


@pytest.mark.parametrize("part", ["..", "../x", "a/b", ".hidden"])
def test_manifest_must_not_name_parts_outside(run, part):
    edit(run, lambda manifest: manifest["parts"].update({part: manifest["parts"].pop("posterior")}))
    refusal(lambda: run.parts(), "manifest.json was altered")


@pytest.mark.parametrize(
    "seal", [None, {"sha256": "00", "bytes": 1}, {"sha256": "0" * 64}, {"sha256": "0" * 64, "bytes": "1"}]
)
def test_manifest_must_have_whole_seals(run, seal):
    edit(run, lambda manifest: manifest["parts"]["posterior"]["files"].update({"config.json": seal}))
    refusal(lambda: run.read("posterior"), "manifest.json was altered")


@pytest.mark.parametrize(
    ("name", "data", "words"),
    [
        ("config.json", b"[]", "must hold a JSON object"),
        ("config.json", b"{", "cannot be read"),
        ("tensors.safetensors", b"junk", "cannot be read"),
    ],
)
def test_sealed_files_with_wrong_content(run, name, data, words):
    stored(run, name).write_bytes(data)
    seal = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    edit(run, lambda manifest: manifest["parts"]["posterior"]["files"].update({name: seal}))
    refusal(lambda: run.read("posterior"), words, "Save the run again")


@pytest.mark.parametrize("name", ["", "../x", "a/b", ".hidden", "a b", "a\n", "-a"])
def test_part_names_are_checked(run, name):
    with pytest.raises(ValueError, match="part's name"):
        run.commit({name: Part({})})
    assert whole(run) == "old"


@pytest.mark.parametrize(
    "value", [float("nan"), float("inf"), (1, 2), {1: 2}, torch.ones(1), object(), [{"deep": (1,)}]], ids=range(7)
)
def test_config_must_be_json(run, value):
    with pytest.raises(TypeError, match=r"Part 'posterior': config must be JSON .*storage\.encode"):
        run.commit({"posterior": Part({"x": value})})
    assert whole(run) == "old"


@pytest.mark.parametrize(
    "tensor", [torch.ones(1, dtype=torch.complex128), torch.eye(2).to_sparse(), torch.ones(1, device="meta")], ids=str
)
def test_tensors_that_safetensors_cannot_hold(run, tensor):
    with pytest.raises(TypeError, match="'posterior': tensor 'x' must be a dense tensor"):
        run.commit({"posterior": Part({}, {"x": tensor})})


def test_tensor_names_must_be_unicode(run):
    with pytest.raises(ValueError, match="valid Unicode"):
        run.commit({"posterior": Part({}, {"\ud800": torch.ones(1)})})


def test_no_permission_to_read(run, monkeypatch):
    def refuse(self):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(self))

    monkeypatch.setattr(type(run.path), "read_bytes", refuse)
    refusal(lambda: run.read("posterior"), "Cannot read run folder", "Permission denied", "Check its permissions")


def test_a_file_that_cannot_be_read(run):
    stored(run).unlink()
    stored(run).mkdir()
    refusal(lambda: run.read("posterior"), "Cannot read run folder", "Is a directory")


def test_no_permission_to_write(run, monkeypatch):
    def refuse(path, *args, **kwargs):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    monkeypatch.setattr(os, "mkdir", refuse)
    refusal(lambda: run.commit(NEW), "Cannot write run folder", "Permission denied", "check permissions")
    assert whole(run) == "old"


def test_full_disk_keeps_the_old_content_and_gives_the_space_back(run, monkeypatch):
    names = sorted(os.listdir(run.path))

    def full(handle):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    refusal(lambda: run.commit(NEW), "No space left on device", "Free space")
    assert whole(run) == "old"
    assert sorted(os.listdir(run.path)) == names


class Killed(BaseException):
    """Stands for the end of the process: nothing after it runs but the release of the lock."""


CALLS = ("fsync", "rename", "replace", "mkdir", "rmdir", "unlink")


def fail_at(monkeypatch, count, error, after):
    """Make the `count`-th of the calls that change the disk fail, before or after its effect."""
    left = [count]

    def failing(call):
        def wrapper(*args, **kwargs):
            left[0] -= 1
            if left[0] == 0 and not after:
                raise error
            result = call(*args, **kwargs)
            if left[0] == 0:
                raise error
            return result

        return wrapper

    for name in CALLS:
        monkeypatch.setattr(os, name, failing(getattr(os, name)))
    return left


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("error", [OSError(errno.EIO, "Input/output error"), Killed()], ids=["error", "killed"])
@pytest.mark.parametrize("first", [False, True], ids=["second save", "first save"])
def test_failure_at_every_call_leaves_old_or_new(tmp_path, monkeypatch, error, after, first):
    outcomes = set()
    for count in range(1, 200):
        run = RunFolder(tmp_path / f"run{count}" / "nested")
        if not first:
            run.commit(OLD)
        with monkeypatch.context() as patch:
            left = fail_at(patch, count, error, after)
            try:
                run.commit(NEW)
            except (BadFolder, Killed):
                outcomes.add("failed")
        content = whole(run) if run.exists() else "nothing"
        assert content in ({"nothing", "new"} if first else {"old", "new"})
        outcomes.add(content)
        run.commit(NEW)
        assert whole(run) == "new"
        assert len(os.listdir(run.path)) == 4  # manifest, lock, two parts: no leftovers
        if left[0] > 0:  # the commit needed fewer calls: every one of them has failed once
            break
    assert left[0] > 0
    assert count > 12
    assert outcomes == {"failed", "new", "nothing" if first else "old"}


def test_the_format_of_the_first_release_is_read_and_written_on(run):
    edit(run, lambda manifest: manifest.update(format=1))
    assert run.read("posterior").config == OLD["posterior"].config
    run.commit(NEW)
    assert run.read("posterior").config == NEW["posterior"].config
