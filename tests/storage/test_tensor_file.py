"""Files of tensors, written piece by piece: what safetensors reads in them, and that large ones stay where they are."""

import pytest
import torch
from safetensors.torch import load

from posterity.errors import BadFolder
from posterity.storage import Part, RunFolder, folder
from posterity.storage import part as tensor_file
from posterity.storage.part import TensorFile, dtype_name

pytestmark = pytest.mark.cpu  # files hold tensors of the CPU

DTYPES = [
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
]


def many():
    whole = {str(dtype): torch.arange(12, device="cpu").reshape(3, 4).to(dtype) for dtype in DTYPES}
    whole |= {"number": torch.tensor(0.1), "nothing": torch.zeros(0, 2), 'ü "quoted"\n': torch.ones(3, device="cpu")}
    whole["turned"] = torch.arange(24.0, device="cpu").reshape(2, 3, 4).permute(2, 0, 1)
    whole["apart"] = torch.arange(24.0, device="cpu").reshape(4, 6)[::2, 1:5:2]
    whole["one for all"] = torch.ones(1, device="cpu").expand(5, 2)
    return whole | {"shared": whole["turned"][1]}


@pytest.mark.parametrize("piece", [1, 8, 20, 1 << 24])
def test_safetensors_reads_what_was_written(piece, monkeypatch):
    monkeypatch.setattr(tensor_file, "PIECE", piece)
    written = many()
    pieces = list(TensorFile(written))
    assert all(len(one) <= max(piece, 8) for one in pieces[1:])
    back = load(b"".join(pieces))
    assert back.keys() == written.keys()
    for name, tensor in written.items():
        assert back[name].dtype == tensor.dtype
        assert torch.equal(back[name], tensor.cpu())


def test_the_bytes_do_not_depend_on_the_order_nor_on_the_pieces(monkeypatch):
    written = many()
    data = b"".join(TensorFile(written))
    assert b"".join(TensorFile(dict(reversed(written.items())))) == data
    monkeypatch.setattr(tensor_file, "PIECE", 5)
    file = TensorFile(written)
    assert b"".join(file) == b"".join(file) == data


def test_a_negated_view_is_written_as_it_reads():
    number = torch.tensor([1.0 + 2.0j], device="cpu")
    for name, view in (("x", number.conj()), ("y", number.conj().imag)):
        assert torch.equal(load(b"".join(TensorFile({name: view})))[name], view)


def test_dtypes_have_the_names_of_safetensors():
    assert dtype_name(torch.float64) == "F64"
    assert dtype_name(torch.bool) == "BOOL"
    assert dtype_name(torch.quint8) is None


@pytest.fixture
def large(tmp_path, monkeypatch):
    """A folder whose tensors are too many for memory, as far as it knows."""
    monkeypatch.setattr(folder, "_MAPPED", 64)
    run = RunFolder(tmp_path / "run")
    run.commit({"draws": Part({"v": 1}, {"theta": torch.arange(100.0), "steps": torch.arange(3)})})
    return run


def test_large_tensors_stay_in_their_file(large):
    tensors = large.read("draws").tensors
    assert torch.equal(tensors["theta"], torch.arange(100.0, device="cpu"))
    large.commit({"draws": Part({"v": 2}, {"theta": torch.zeros(100)})})  # the file goes, and what was read stays
    assert torch.equal(tensors["theta"], torch.arange(100.0, device="cpu"))
    assert torch.equal(tensors["steps"], torch.arange(3, device="cpu"))
    assert large.read("draws").config == {"v": 2}


@pytest.mark.parametrize("damage", ["altered", "truncated", "missing"])
def test_damage_to_large_tensors_is_seen(large, damage):
    (path,) = large.path.glob("draws-*/tensors.safetensors")
    data = path.read_bytes()
    if damage == "missing":
        path.unlink()
    else:
        path.write_bytes(data[:-1] if damage == "truncated" else data[:-1] + b"x")
    with pytest.raises(BadFolder, match=f"tensors.safetensors' (was|is) {damage}"):
        large.read("draws")
