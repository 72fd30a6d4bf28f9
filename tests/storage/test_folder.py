"""What goes into a run folder comes out to the bit, and equal content is equal bytes."""

import hashlib
import json
import logging
import os
import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from posterity.errors import BadFolder
from posterity.storage import Part, RunFolder, disk, folder
from posterity.storage.part import pack, unpack

pytestmark = pytest.mark.cpu  # files hold tensors of the CPU

BYTE_DTYPES = [torch.float8_e4m3fn, torch.float8_e5m2]
EXACT = {
    "bfloat16": torch.linspace(-1.3, 2.9, 6).view(3, 2).bfloat16(),
    "float64": torch.tensor([0.1, -0.0, float("nan"), float("inf"), 5e-324], dtype=torch.float64),
    "float16": torch.tensor([1e-7], dtype=torch.float16),
    "int64": torch.tensor([2**63 - 1, -(2**63)]),
    "uint8": torch.arange(256).to(torch.uint8),
    "bool": torch.tensor([True, False, True]),
    "negated": torch.tensor([1 + 2j]).conj().imag,
    "empty": torch.zeros(0),
    "empty rows": torch.zeros(4, 0, 3, dtype=torch.int32),
    "scalar": torch.tensor(3.5),
}


def bits(tensor):
    return (
        tensor.dtype,
        tuple(tensor.shape),
        tensor.clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8).cpu().numpy().tobytes(),
    )


def content(path):
    return {str(p.relative_to(path)): p.read_bytes() for p in sorted(path.rglob("*")) if p.is_file()}


@pytest.fixture
def run(tmp_path):
    return RunFolder(tmp_path / "run")


@pytest.mark.parametrize("name", EXACT)
def test_tensors_come_back_to_the_bit(run, name):
    run.commit({"part": Part({}, {name: EXACT[name]})})
    back = run.read("part").tensors[name]
    assert back.device.type == "cpu"
    assert bits(back) == bits(EXACT[name].resolve_neg())


@pytest.mark.parametrize("dtype", BYTE_DTYPES, ids=str)
def test_small_floats_come_back_to_the_bit(run, dtype):
    tensor = torch.arange(7, dtype=torch.uint8).view(dtype)
    run.commit({"part": Part({}, {"x": tensor})})
    assert bits(run.read("part").tensors["x"]) == bits(tensor)


def test_views_that_share_memory_and_leaves_with_gradients_are_stored_as_values(run):
    base = torch.arange(12.0).reshape(3, 4).requires_grad_()
    run.commit({"part": Part({}, {"base": base, "transposed": base.t(), "column": base[:, 1]})})
    back = run.read("part").tensors
    assert torch.equal(back["transposed"], base.detach().t())
    assert torch.equal(back["column"], base.detach()[:, 1])
    assert not back["base"].requires_grad
    back["column"].fill_(0.0)  # memory of its own
    assert torch.equal(back["base"], base.detach())


@pytest.mark.parametrize("name", ["", "a.b", "with/slash", "__metadata__", "__metadata__/", "é\n☃", "../../x"])
def test_tensor_names_are_arbitrary(run, name):
    run.commit({"part": Part({}, {name: torch.ones(2), "other": torch.zeros(1)})})
    back = run.read("part").tensors
    assert set(back) == {name, "other"}
    assert torch.equal(back[name], torch.ones(2))


JSONS = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(config=st.dictionaries(st.text(), JSONS, max_size=3))
@settings(deadline=None, max_examples=100)
def test_configs_come_back_equal(config):
    files = {name: b"".join(pieces) for name, pieces in pack("part", Part(config)).items()}
    back = unpack("part", files["config.json"], files["tensors.safetensors"])
    assert json.dumps(back.config, sort_keys=True) == json.dumps(config, sort_keys=True)  # tells 1, 1.0 and True apart
    assert back.tensors == {}
    again = pack("part", Part(dict(reversed(config.items()))))
    assert {name: b"".join(pieces) for name, pieces in again.items()} == files


def test_commit_adds_replaces_drops_and_keeps(run):
    run.commit({"posterior": Part({"v": 1}), "checkpoint-1": Part({"v": 2}), "checkpoint-2": Part({"v": 3})})
    assert run.parts() == ("checkpoint-1", "checkpoint-2", "posterior")
    run.commit({"posterior": Part({"v": 4}), "checkpoint-3": Part({"v": 5})}, drop=["checkpoint-*", "absent"])
    assert run.parts() == ("checkpoint-3", "posterior")
    assert run.read("posterior").config == {"v": 4}
    run.commit({}, drop="checkpoint-*")  # one pattern, not the letters of a word
    assert run.parts() == ("posterior",)
    assert len(os.listdir(run.path)) == 3  # manifest, lock, one part


def test_parents_are_created_and_exists_tells_whether_there_is_a_manifest(tmp_path):
    run = RunFolder(str(tmp_path / "a" / "b" / "run"))
    assert not run.exists()
    run.commit({"part": Part({})})
    assert run.exists()
    assert "run" in repr(run)


def test_equal_content_gives_equal_bytes_whatever_came_before(tmp_path):
    def parts(order):
        tensors = {name: EXACT[name] for name in order}
        return {"b": Part({"x": 1.5, "a": [1]}, tensors), "a": Part({})}

    first, second = RunFolder(tmp_path / "first"), RunFolder(tmp_path / "second")
    first.commit(parts(list(EXACT)))
    second.commit({"old": Part({"gone": True}), "b": Part({"x": 2})})
    second.commit(dict(reversed(parts(list(reversed(EXACT))).items())), drop=["old"])
    assert content(first.path) == content(second.path)
    before = content(first.path)
    first.commit(parts(list(EXACT)))
    assert content(first.path) == before


def test_manifest_lists_sizes_and_sha256_of_each_file(run):
    run.commit({"posterior": Part({"draws": 3}, {"theta": torch.ones(4)})})
    data = (run.path / "manifest.json").read_bytes()
    manifest = json.loads(data)
    assert data.endswith(b"}\n")
    assert list(manifest) == ["format", "library", "parts"]
    assert (manifest["format"], manifest["library"]) == (2, "posterity")
    part = manifest["parts"]["posterior"]
    assert part["folder"].startswith("posterior-")
    assert len(part["folder"]) == len("posterior-") + 12
    assert list(part["files"]) == ["config.json", "tensors.safetensors"]
    for name, seal in part["files"].items():
        stored = (run.path / part["folder"] / name).read_bytes()
        assert seal == {"bytes": len(stored), "sha256": hashlib.sha256(stored).hexdigest()}


def test_a_damaged_folder_of_the_same_content_is_replaced(run):
    part = Part({"v": 1}, {"x": torch.ones(3)})
    run.commit({"part": part})
    stored = next(run.path.glob("part-*"))
    before = content(run.path)
    (stored / "tensors.safetensors").write_bytes(b"damaged")
    run.commit({"part": part})
    assert content(run.path) == before
    (stored / "config.json").unlink()
    run.commit({"part": part})
    assert content(run.path) == before


def test_leftovers_are_swept_and_other_files_are_not(run):
    run.commit({"part": Part({"v": 1})})
    (run.path / ".tmp-0123456789abcdef").mkdir()
    (run.path / ".tmp-0123456789abcdef" / "config.json").write_text("{")
    (run.path / ".tmp-fedcba9876543210").write_text("{")
    (run.path / "part-0123456789ab").mkdir()
    (run.path / "part-0123456789ab" / "config.json").write_text("{}")
    (run.path / "notes.txt").write_text("mine")
    (run.path / "photos-0123456789ab").mkdir()
    (run.path / "photos-0123456789ab" / "cat.jpg").write_text("mine")
    (run.path / "photos").mkdir()
    run.commit({"part": Part({"v": 2})})
    names = {p.name for p in run.path.iterdir() if not p.name.startswith("part-")}
    assert names == {"manifest.json", ".lock", "notes.txt", "photos-0123456789ab", "photos"}
    assert len(list(run.path.glob("part-*"))) == 1
    assert (run.path / "photos-0123456789ab" / "cat.jpg").exists()


def test_a_reader_retries_when_the_folder_changes_under_it(run, monkeypatch):
    run.commit({"part": Part({"v": 1})})
    original, calls = RunFolder._file, []

    def racing(self, name, seal):
        if not calls:
            calls.append(name)
            run.commit({"part": Part({"v": 2})})
        return original(self, name, seal)

    monkeypatch.setattr(RunFolder, "_file", racing)
    assert run.read("part").config == {"v": 2}


def test_a_reader_retries_when_the_same_content_went_and_came_back(run, monkeypatch):
    run.commit({"part": Part({"v": 1})})
    original, calls = RunFolder._file, []

    def racing(self, name, seal):
        if not calls:
            calls.append(name)
            run.commit({"part": Part({"v": 2})})
            try:
                return original(self, name, seal)
            finally:
                run.commit({"part": Part({"v": 1})})
        return original(self, name, seal)

    monkeypatch.setattr(RunFolder, "_file", racing)
    assert run.read("part").config == {"v": 1}


def test_a_reader_gives_up_when_the_folder_never_rests(run, monkeypatch):
    run.commit({"part": Part({"v": 0})})
    original, count = RunFolder._file, iter(range(1, 1000))

    def racing(self, name, seal):
        run.commit({"part": Part({"v": next(count)})})
        return original(self, name, seal)

    monkeypatch.setattr(RunFolder, "_file", racing)
    with pytest.raises(BadFolder, match="changes too fast"):
        run.read("part")


def test_a_second_writer_waits_for_the_first(run):
    run.commit({"first": Part({})})
    second = threading.Thread(target=lambda: run.commit({"second": Part({})}))
    with disk.locked(run.path / ".lock", 5.0):
        second.start()
        second.join(0.2)
        waiting = second.is_alive()
        assert run.parts() == ("first",)  # readers do not wait
    second.join(10.0)
    assert waiting
    assert run.parts() == ("first", "second")


def test_writers_at_once_lose_nothing(run):
    writers = [threading.Thread(target=lambda i=i: run.commit({f"part{i}": Part({"v": i})})) for i in range(6)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert [run.read(f"part{i}").config["v"] for i in range(6)] == list(range(6))


def test_a_writer_does_not_wait_forever(run, monkeypatch):
    run.commit({"part": Part({"v": 1})})
    monkeypatch.setattr(folder, "_LOCK_SECONDS", 0.1)
    with disk.locked(run.path / ".lock", 1.0), pytest.raises(BadFolder, match="being written by another process"):
        run.commit({"part": Part({"v": 2})})
    assert run.read("part").config == {"v": 1}


@pytest.mark.skipif(disk.fcntl is None, reason="this platform has no file locks")
def test_a_file_system_without_locks_is_used_with_a_warning(run, monkeypatch, caplog):
    def refuse(handle, operation):
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(disk.fcntl, "flock", refuse)
    with caplog.at_level(logging.WARNING):
        run.commit({"part": Part({"v": 1})})
    assert "only one process may write" in caplog.text
    assert run.read("part").config == {"v": 1}


def test_a_platform_without_fcntl_still_commits(run, monkeypatch):
    monkeypatch.setattr(disk, "fcntl", None)
    run.commit({"part": Part({"v": 1})})
    assert run.read("part").config == {"v": 1}
