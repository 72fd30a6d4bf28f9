"""Files of rows that are read in parts: Parquet, Arrow and NumPy files, what each holds, and reading of one part."""

import hashlib
import mmap
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from posterity.errors import BadData, shown

PARQUET, ARROW, ARRAY = "Parquet", "Arrow", "NumPy"
MAGIC = {b"PAR1": PARQUET, b"ARROW1": ARROW, b"\x93NUMPY": ARRAY}
SUFFIXES = (".parquet", ".pq", ".arrow", ".feather", ".ipc", ".npy")
SHARD_BYTES = 1 << 24  # of a part of a file that is read at once, where the file leaves the choice
_UNREADABLE = (OSError, ValueError, KeyError, TypeError, IndexError, NotImplementedError)  # of Arrow and numpy
_SAMPLE, _SAMPLES = 1 << 14, 32  # bytes of a block of a file, and how many of them, that a fingerprint is made of


class Column(NamedTuple):
    """The dtype of a column, or of an array with the shape of a row."""

    type: str
    row: tuple[int, ...] = ()


@dataclass(frozen=True, eq=False)
class ShardFile:
    """A file of rows: its columns, its parts with their numbers of rows, and the state of the file when it was opened.

    Parts are row groups of Parquet, record batches of Arrow, and ranges of rows of an array, which has one column, "".
    """

    path: Path
    kind: str
    columns: dict[str, Column]
    counts: tuple[int, ...]  # rows of each part
    stamp: tuple[int, int]  # bytes, and nanoseconds of the last change
    details: Any = field(repr=False, default=None)  # metadata of Parquet; offset, dtype and shape of an array

    @property
    def num_rows(self) -> int:
        """Number of rows."""
        return sum(self.counts)

    def read(self, low: int, high: int, names: Sequence[str]) -> dict[str, Any]:
        """Return the columns `names` of the parts from `low` to `high` as arrays; BadData if the file has changed."""
        self._refuse_changed()
        try:
            columns = _READERS[self.kind](self, low, high, names)
        except _UNREADABLE as error:
            self._refuse_changed()
            reason = " ".join(str(error).split())[:200].rstrip(".")
            raise BadData(f"{self.path}: cannot be read: {reason}. Write it again.") from error
        self._refuse_changed()
        return columns

    def with_parts_of(self, other: "ShardFile") -> "ShardFile":
        """The array in the parts of another array with as many rows."""
        offset, dtype, _ = self.details
        return replace(self, counts=other.counts, details=(offset, dtype, other.details[2]))

    def digest(self) -> str:
        """Return a hash of the size of the file and of blocks of its bytes at equal distances, the ends included."""
        size, digest = self.stamp[0], hashlib.blake2b(str(self.stamp[0]).encode(), digest_size=16)
        with self.path.open("rb") as stream:
            for place in range(_SAMPLES):
                stream.seek(max(0, size - _SAMPLE) * place // (_SAMPLES - 1))
                digest.update(stream.read(_SAMPLE))
        return digest.hexdigest()

    def _refuse_changed(self) -> None:
        try:
            now: object = _stamp(self.path)
        except OSError:
            now = None
        if now != self.stamp:
            was = "is gone" if now is None else "has changed"
            raise BadData(f"{self.path}: the file {was} since it was opened. Put it back, and begin again.")


def _stamp(path: Path) -> tuple[int, int]:
    state = os.stat(path)
    return state.st_size, state.st_mtime_ns


def find_files(source: object) -> list[Path]:
    """Return the files of a folder (by name), of a list, of a `pyarrow.dataset`, of a memory map, or a single file."""
    if isinstance(source, np.memmap):
        base: object = source.base
        if not isinstance(base, mmap.mmap) or not source.flags.c_contiguous or source.filename is None:
            raise BadData("read_shards: a memory map must be of a whole file, in rows. Pass numpy.load's, not a part.")
        return [Path(str(source.filename))]
    if isinstance(source, (list, tuple)):
        files = [path for item in source for path in find_files(item)]
        if not files:
            raise BadData("read_shards: there must be at least one file. Got an empty list.")
        return files
    if isinstance(listed := getattr(source, "files", None), list):  # of pyarrow.dataset
        return [Path(name) for name in listed]
    if not isinstance(source, (str, os.PathLike)):
        raise TypeError(
            f"read_shards: wanted a file, a folder, a list of files, a pyarrow.dataset or a memory map. Got "
            f"{shown(source)}."
        )
    path = Path(source)
    if not path.is_dir():
        return [path]
    names = sorted(
        file
        for file in path.rglob("*")
        if file.is_file() and not any(part.startswith((".", "_")) for part in file.relative_to(path).parts)
    )
    others = [file for file in names if file.suffix not in SUFFIXES]
    if others or not names:
        raise BadData(
            f"{path}: the folder must have files that end in {', '.join(SUFFIXES)} and no others. Got "
            f"{shown([file.name for file in others[:3]]) if others else 'none'}. Name the files in a list."
        )
    return names


def open_file(path: Path) -> ShardFile:
    """Read what a file says of its columns and parts, and none of its rows; BadData if it is of no known kind."""
    try:
        stamp = _stamp(path)
        with path.open("rb") as stream:
            start = stream.read(8)
    except (OSError, ValueError) as error:
        raise BadData(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}.") from error
    kind = next((kind for magic, kind in MAGIC.items() if start.startswith(magic)), None)
    if kind is None:
        raise BadData(
            f"{path}: not a Parquet, Arrow or .npy file. Write it as one (an Arrow stream as an Arrow file); other "
            "tables are read by read_table."
        )
    try:
        return _OPENERS[kind](path, stamp)
    except BadData:
        raise
    except (*_UNREADABLE, SyntaxError) as error:
        reason = " ".join(str(error).split())[:200].rstrip(".")
        raise BadData(f"{path}: not a {kind} file that can be read: {reason}. Get it again.") from error


def _open_parquet(path: Path, stamp: tuple[int, int]) -> ShardFile:
    from pyarrow import parquet

    with parquet.ParquetFile(path) as file:
        metadata, schema = file.metadata, file.schema_arrow
    counts = tuple(metadata.row_group(index).num_rows for index in range(metadata.num_row_groups))
    return ShardFile(path, PARQUET, {part.name: Column(str(part.type)) for part in schema}, counts, stamp, metadata)


def _open_arrow(path: Path, stamp: tuple[int, int]) -> ShardFile:
    import pyarrow as pa

    # A single column is asked for: the numbers of rows lie with the columns, and compressed ones would be unpacked.
    with pa.memory_map(str(path)) as source:
        reader = pa.ipc.open_file(source, options=pa.ipc.IpcReadOptions(included_fields=[0]))
        counts = tuple(reader.get_batch(index).num_rows for index in range(reader.num_record_batches))
    with pa.OSFile(str(path)) as source:
        schema = pa.ipc.open_file(source).schema
    return ShardFile(path, ARROW, {part.name: Column(str(part.type)) for part in schema}, counts, stamp)


def _open_array(path: Path, stamp: tuple[int, int]) -> ShardFile:
    with path.open("rb") as stream:
        version = np.lib.format.read_magic(stream)
        header = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, fortran, dtype = header(stream)
        offset = stream.tell()
    if fortran and len(shape) > 1:
        raise BadData(f"{path}: the array must be stored by rows. Got columns. Save numpy.ascontiguousarray(array).")
    if dtype.kind not in "fiub":
        raise BadData(f"{path}: the array must hold numbers. Got {dtype}. Encode it as numbers first.")
    if not shape:
        raise BadData(f"{path}: the array must have one row for each data point. Got a single number.")
    row = int(np.prod(shape[1:], dtype=np.int64)) * dtype.itemsize
    if offset + shape[0] * row != stamp[0]:
        raise BadData(f"{path}: the file must have {offset + shape[0] * row} bytes. Got {stamp[0]}. Write it again.")
    each = max(1, SHARD_BYTES // max(1, row))
    edges = [*range(0, shape[0], each), shape[0]]
    counts = tuple(high - low for low, high in pairwise(edges))
    return ShardFile(
        path, ARRAY, {"": Column(str(dtype.newbyteorder("=")), shape[1:])}, counts, stamp, (offset, dtype, edges)
    )


def _read_parquet(file: ShardFile, low: int, high: int, names: Sequence[str]) -> dict[str, Any]:
    from pyarrow import parquet

    with parquet.ParquetFile(file.path, metadata=file.details) as source:
        table = source.read_row_groups(list(range(low, high)), columns=list(names), use_threads=False)
    return {name: _numbers(file, name, table.column(name).chunks) for name in names}


def _read_arrow(file: ShardFile, low: int, high: int, names: Sequence[str]) -> dict[str, Any]:
    import pyarrow as pa

    wanted = [index for index, name in enumerate(file.columns) if name in names]
    with pa.OSFile(str(file.path)) as source:  # not mapped: pages of a map count as memory until the system takes them
        reader = pa.ipc.open_file(source, options=pa.ipc.IpcReadOptions(included_fields=wanted, use_threads=False))
        batches = [reader.get_batch(index) for index in range(low, high)]
    return {name: _numbers(file, name, [batch.column(name) for batch in batches]) for name in names}


def _read_array(file: ShardFile, low: int, high: int, names: Sequence[str]) -> dict[str, Any]:
    offset, dtype, edges = file.details
    row = file.columns[""].row
    first, count, entries = edges[low], edges[high] - edges[low], int(np.prod(row, dtype=np.int64))
    values = np.fromfile(file.path, dtype, count * entries, offset=offset + first * entries * dtype.itemsize)
    return {"": values.astype(dtype.newbyteorder("="), copy=False).reshape(count, *row)}


def _numbers(file: ShardFile, name: str, chunks: Sequence[Any]) -> Any:
    """Return a column of Arrow arrays as one array of numpy; missing values are refused."""
    missing = sum(chunk.null_count for chunk in chunks)
    if missing:
        raise BadData(
            f"{file.path}: column {shown(name)} has {missing} missing values in {sum(map(len, chunks))} rows. "
            "Fill them or leave the rows out before writing the file."
        )
    arrays = [chunk.to_numpy(zero_copy_only=False) for chunk in chunks]
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)


_OPENERS: dict[str, Callable[[Path, tuple[int, int]], ShardFile]] = {
    PARQUET: _open_parquet,
    ARROW: _open_arrow,
    ARRAY: _open_array,
}
_READERS: dict[str, Callable[[ShardFile, int, int, Sequence[str]], dict[str, Any]]] = {
    PARQUET: _read_parquet,
    ARROW: _read_arrow,
    ARRAY: _read_array,
}
