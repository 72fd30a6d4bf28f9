"""Rows in files: what is read, in which order, and what is refused."""

import os
from concurrent.futures import thread

import numpy as np
import pyarrow as pa
import pyarrow.dataset
import pytest
import shardfiles
import torch
from pyarrow import feather, parquet

from posterity.datasets import read_shards, shard_files, shards
from posterity.errors import BadData
from posterity.numerics.random import Key

KINDS = ("parquet", "arrow", "npy")


@pytest.fixture
def small(monkeypatch):
    """Shards of ten rows of three float32 each."""
    monkeypatch.setattr(shards, "SHARD_BYTES", 120)
    monkeypatch.setattr(shard_files, "SHARD_BYTES", 120)


def opened(folder, kind, **settings):
    if kind == "npy":
        return read_shards(folder / "x", folder / "y", **settings)
    return read_shards(folder, "y", **settings)


def joined(blocks):
    blocks = list(blocks)
    return torch.cat([block.inputs for block in blocks]), torch.cat([block.targets for block in blocks])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.usefixtures("small")
def test_a_pass_gives_every_row_in_its_order_in_shards(tmp_path, kind):
    inputs, targets = shardfiles.rows()
    data = opened(shardfiles.write(tmp_path, kind, inputs, targets), kind)
    assert len(data) == 100
    assert data.has_targets
    assert data.row_shape == (3,)
    assert [shard.rows for shard in data.shards] == [10, 10, 10, 7, 10, 10, 10, 7, 10, 10, 6]
    blocks = list(data.blocks())
    assert [block.start for block in blocks] == [0, 10, 20, 30, 37, 47, 57, 67, 74, 84, 94]
    for held, wanted in zip(joined(blocks), (inputs, targets), strict=True):
        assert torch.equal(held, wanted)
    assert torch.equal(data.head.inputs, inputs[:10])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.usefixtures("small")
def test_a_shuffled_pass_permutes_the_shards_and_the_rows_within_a_window(tmp_path, kind):
    inputs, targets = shardfiles.rows()
    data = opened(shardfiles.write(tmp_path, kind, inputs, targets), kind, window=3)
    blocks = list(data.blocks(Key(5)))
    seen, goals = joined(blocks)
    rows = seen[:, 0].long()
    assert torch.equal(rows.sort().values, torch.arange(100, device="cpu"))
    assert torch.equal(goals, targets[rows])
    edges = torch.tensor([0, 10, 20, 30, 37, 47, 57, 67, 74, 84, 94, 100], device="cpu")
    for block in blocks:  # a window has whole shards, three of them but for the last
        numbers = block.inputs[:, 0].long()
        of_shards = torch.bucketize(numbers, edges, right=True).unique() - 1
        assert len(of_shards) == (3 if block is not blocks[-1] else 2)
        assert len(numbers) == sum(data.shards[index].rows for index in of_shards)
        assert not torch.equal(numbers, numbers.sort().values)
    assert torch.equal(joined(data.blocks(Key(5)))[0], seen)
    assert not torch.equal(joined(data.blocks(Key(6)))[0], seen)


@pytest.mark.usefixtures("small")
def test_all_orders_of_shards_and_of_rows_in_them_come_up_equally_often(tmp_path):
    inputs, targets = shardfiles.rows(20)
    data = opened(shardfiles.write(tmp_path, "npy", inputs, targets), "npy", window=1)
    passes = 600
    first = torch.stack([next(data.blocks(Key(3).fold(index))).inputs[0, 0] for index in range(passes)])
    counts = torch.bincount(first.long(), minlength=20).double()
    assert float((counts - passes / 20).abs().max()) < 5 * (passes / 20 * 0.95) ** 0.5


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("key", [None, Key(2)])
@pytest.mark.usefixtures("small")
def test_a_pass_from_a_row_on_reads_nothing_before_its_block(tmp_path, kind, key, monkeypatch):
    inputs, targets = shardfiles.rows()
    data = opened(shardfiles.write(tmp_path, kind, inputs, targets), kind, window=2)
    whole = list(data.blocks(key))
    read, reads = shards.Shards._read, list[int]()
    monkeypatch.setattr(shards.Shards, "_read", lambda own, index: (reads.append(index), read(own, index))[1])
    for first in (0, 9, 10, 55, 99):
        reads.clear()
        late = list(data.blocks(key, first))
        wanted = [block for block in whole if block.start + len(block.inputs) > first]
        assert [block.start for block in late] == [block.start for block in wanted]
        assert all(torch.equal(a.inputs, b.inputs) for a, b in zip(late, wanted, strict=True))
        assert sum(data.shards[index].rows for index in reads) == sum(len(block.inputs) for block in wanted)


def test_a_reader_that_stops_early_leaves_no_thread(tmp_path):
    import threading

    inputs, targets = shardfiles.rows()
    data = opened(shardfiles.write(tmp_path, "parquet", inputs, targets), "parquet")
    blocks = data.blocks()
    next(blocks)
    blocks.close()
    assert not [thread for thread in threading.enumerate() if "posterity-shards" in thread.name]


@pytest.mark.usefixtures("small")
def test_a_reader_that_is_left_to_the_end_of_the_interpreter_ends_without_an_error(tmp_path, monkeypatch):
    blocks = opened(shardfiles.write(tmp_path, "npy", *shardfiles.rows()), "npy").blocks()
    next(blocks)
    monkeypatch.setattr(thread, "_shutdown", True)
    blocks.close()


@pytest.mark.usefixtures("small")
def test_rows_are_taken_by_their_numbers(tmp_path):
    inputs, targets = shardfiles.rows()
    data = opened(shardfiles.write(tmp_path, "arrow", inputs, targets), "arrow")
    numbers = torch.tensor([99, 0, 41, 41, 12], device="cpu")
    assert torch.equal(data.take(numbers), inputs[numbers])


def test_columns_of_many_types_come_as_numbers_labels_and_weights(tmp_path):
    values = {
        "small": np.array([1, 2, 60000], dtype=np.uint16),
        "whole": np.array([-1, 2, 2**24], dtype=np.int64),
        "half": np.array([0.5, 1.5, 2.5], dtype=np.float16),
        "double": np.array([0.1, 0.2, 0.3]),
        "yes": np.array([True, False, True]),
        "label": np.array([2, 0, 1], dtype=np.int32),
        "other": np.array([1.0, 2.0, 3.0], dtype=np.float32),
        "share": np.array([1.0, 0.0, 2.0]),
    }
    parquet.write_table(pa.table(values), tmp_path / "rows.parquet")
    names = ["double", "small", "whole", "half", "yes"]
    data = read_shards(tmp_path / "rows.parquet", "label", inputs=names, weights="share", dtype=torch.float64)
    block = next(data.blocks())
    assert torch.equal(block.inputs, torch.from_numpy(np.stack([values[name] for name in names], 1).astype(np.float64)))
    assert block.targets.dtype == torch.int64
    assert block.targets.tolist() == [2, 0, 1]
    assert block.weights.tolist() == [1.0, 0.0, 2.0]
    several = read_shards(tmp_path / "rows.parquet", ["other", "share"], inputs=["half"])
    assert next(several.blocks()).targets.tolist() == [[1.0, 1.0], [2.0, 0.0], [3.0, 2.0]]
    assert next(read_shards(tmp_path / "rows.parquet", "yes", inputs=["half"]).blocks()).targets.tolist() == [1, 0, 1]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_columns_come_in_any_dtype_of_floating_point(tmp_path, dtype):
    parquet.write_table(pa.table({"a": [1.5, -2.0], "b": [3, 4], "w": [0.5, 1.0]}), tmp_path / "rows.parquet")
    (block,) = read_shards(tmp_path / "rows.parquet", weights="w", dtype=dtype).blocks()
    assert torch.equal(block.inputs, torch.tensor([[1.5, 3.0], [-2.0, 4.0]], dtype=dtype, device="cpu"))
    assert torch.equal(block.weights, torch.tensor([0.5, 1.0], dtype=dtype, device="cpu"))


def test_arrays_of_images_of_other_byte_orders_and_memory_maps_are_read(tmp_path):
    images = np.arange(48.0).reshape(4, 3, 2, 2)
    np.save(tmp_path / "x.npy", images.astype(">f8"))
    np.save(tmp_path / "y.npy", np.array([3, 1, 2, 0], dtype=np.uint8))
    for source in (tmp_path / "x.npy", np.load(tmp_path / "x.npy", mmap_mode="r")):
        block = next(read_shards(source, tmp_path / "y.npy").blocks())
        assert torch.equal(block.inputs, torch.from_numpy(images).float())
        assert block.targets.tolist() == [3, 1, 2, 0]
        assert block.targets.dtype == torch.int64
    with pytest.raises(BadData, match=r"must be of a whole file, in rows"):
        read_shards(np.load(tmp_path / "x.npy", mmap_mode="r")[1:])


def test_sources_are_files_folders_lists_and_data_sets_of_arrow(tmp_path):
    inputs, targets = shardfiles.rows()
    folder = shardfiles.write(tmp_path / "rows", "parquet", inputs, targets)
    (folder / "_SUCCESS").touch()
    files = sorted(folder.glob("*.parquet"))
    for source in (folder, str(folder), files, pyarrow.dataset.dataset([str(file) for file in files])):
        assert torch.equal(joined(read_shards(source, "y").blocks())[0], inputs)


def test_fingerprints_differ_when_files_or_the_way_of_reading_do(tmp_path):
    inputs, targets = shardfiles.rows(4000)
    prints = set()
    for place in (None, 0, 2000, 3999):
        changed = inputs.clone()
        if place is not None:
            changed[place, 1] += 1.0
        for window in (1, 2):
            folder = shardfiles.write(tmp_path / "x", "npy", changed, targets, each=4000)
            prints.add(opened(folder, "npy", window=window).fingerprint)
    assert len(prints) == 8
    assert opened(folder, "npy", window=2).fingerprint in prints


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"a": ["u", "v"], "y": [0.0, 1.0]}, "column 'a' is string, and shards hold numbers"),
        ({"a": [[1.0], [2.0]], "y": [0.0, 1.0]}, "column 'a' is list<"),
        ({"y": [0.0, 1.0]}, "no column is left as an input"),
        ({"a": [0.0, 1.0], "z": [0.0, 1.0]}, "there is no column 'y'"),
        ({"a": [], "y": []}, "the data have no rows"),
    ],
)
def test_other_columns_are_refused(tmp_path, columns, message):
    parquet.write_table(pa.table(columns), tmp_path / "rows.parquet")
    with pytest.raises(BadData, match=message):
        read_shards(tmp_path / "rows.parquet", "y")


@pytest.mark.parametrize("bad", [None, float("nan"), float("inf")])
def test_missing_and_infinite_inputs_are_refused_by_file_and_row(tmp_path, bad):
    values = pa.array([0.0] * 14 + [bad] + [0.0] * 5, pa.float32())
    parquet.write_table(pa.table({"a": values, "y": [0.0] * 20}), tmp_path / "rows.parquet", row_group_size=10)
    with pytest.raises(BadData, match=r"has 1 missing values" if bad is None else "row 14, column 'a' must be finite"):
        list(read_shards(tmp_path / "rows.parquet", "y").blocks())


def test_files_with_other_schemas_are_refused(tmp_path):
    inputs, targets = shardfiles.rows(10)
    first = shardfiles.table(inputs, targets)
    others = {
        "type": (
            first.set_column(1, "b", pa.array([1.0] * 10, pa.float64())),
            "column 'b' is double, and column 'b' is",
        ),
        "name": (first.rename_columns(["a", "b", "other", "y"]), "there is no column 'c'"),
        "more": (first.append_column("d", pa.array([1.0] * 10)), "its columns are not those of 0.parquet"),
    }
    for name, (other, message) in others.items():
        (folder := tmp_path / name).mkdir()
        parquet.write_table(first, folder / "0.parquet")
        parquet.write_table(other, folder / "1.parquet")
        with pytest.raises(BadData, match=message):
            read_shards(folder, "y")
    feather.write_feather(first, tmp_path / "name" / "2.arrow")
    with pytest.raises(BadData, match=r"files must be of one kind"):
        read_shards(tmp_path / "name", "y")


def test_a_file_that_changed_or_went_away_is_refused(tmp_path):
    inputs, targets = shardfiles.rows()
    folder = shardfiles.write(tmp_path, "parquet", inputs, targets)
    data = opened(folder, "parquet")
    os.utime(folder / "1.parquet", ns=(0, 0))
    with pytest.raises(BadData, match=r"1.parquet: the file has changed since it was opened"):
        list(data.blocks())
    (folder / "1.parquet").unlink()
    with pytest.raises(BadData, match=r"1.parquet: the file is gone since it was opened"):
        list(data.blocks(Key(0)))


def test_files_that_cannot_be_read_are_refused(tmp_path):
    inputs, targets = shardfiles.rows()
    folder = shardfiles.write(tmp_path / "a", "parquet", inputs, targets)
    file = folder / "0.parquet"
    file.write_bytes(file.read_bytes()[:-40])
    with pytest.raises(BadData, match=r"not a Parquet file that can be read"):
        opened(folder, "parquet")
    arrays = shardfiles.write(tmp_path / "b", "npy", inputs, targets, each=100)
    array = arrays / "x" / "0.npy"
    array.write_bytes(array.read_bytes()[:-4])
    with pytest.raises(BadData, match=r"the file must have 1328 bytes. Got 1324"):
        opened(arrays, "npy")
    np.save(array, inputs[:99].numpy())
    with pytest.raises(BadData, match=r"must be a .npy file of 99 rows. Got 100 rows"):
        opened(arrays, "npy")
    np.save(array, np.asfortranarray(inputs.numpy()))
    with pytest.raises(BadData, match=r"must be stored by rows"):
        opened(arrays, "npy")
    np.save(array, np.array(["a"]))
    with pytest.raises(BadData, match=r"must hold numbers"):
        opened(arrays, "npy")
    (tmp_path / "c").mkdir()
    with pytest.raises(BadData, match=r"must have files that end in .* Got none"):
        read_shards(tmp_path / "c")
    (tmp_path / "c" / "rows.csv").write_text("a,b\n1,2\n")
    with pytest.raises(BadData, match=r"Got \['rows.csv'\]"):
        read_shards(tmp_path / "c")
    with pytest.raises(BadData, match=r"not a Parquet, Arrow or .npy file"):
        read_shards(tmp_path / "c" / "rows.csv")
    with pytest.raises(BadData, match=r"cannot be read: No such file"):
        read_shards(tmp_path / "none.parquet")
    with pytest.raises(TypeError, match=r"wanted a file, a folder"):
        read_shards(3)


def test_other_settings_are_refused(tmp_path):
    inputs, targets = shardfiles.rows()
    folder = shardfiles.write(tmp_path, "parquet", inputs, targets)
    for settings, message in (
        ({"window": 0}, "window must be"),
        ({"dtype": torch.int64}, "dtype must be of floating-point numbers"),
        ({"target": 3}, "target must be the name of a column"),
        ({"target": "y", "inputs": ["a", "y"]}, "'y' cannot be an input and a target"),
        ({"target": "y", "inputs": ["q"]}, "there is no column 'q'"),
    ):
        with pytest.raises((ValueError, TypeError, BadData), match=message):
            read_shards(folder, **settings)
