"""Rows in files that need not fit into memory: their columns, the order in which they are read, and reading ahead."""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from posterity.datasets.arrow import release
from posterity.datasets.shard_files import ARRAY, SHARD_BYTES, Column, ShardFile, find_files, open_file
from posterity.errors import BadData, positive_whole, shown
from posterity.numerics.random import Key

HEAD_ROWS = 256  # rows that are looked at before a run
WINDOW_BYTES = 1 << 26  # of rows that are shuffled together, where `window` is left out
_FLOATS = ("halffloat", "float", "double", "float16", "float32", "float64", "bool")
_NUMBERS = {*_FLOATS, *(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64))}


class Shard(NamedTuple):
    """Parts of a file that are read together."""

    file: int
    low: int
    high: int
    rows: int


class Block(NamedTuple):
    """Rows that were read together: the number of rows before them in the pass, and their tensors."""

    start: int
    inputs: Tensor  # (n, D), or (n, ...) of an array
    targets: Tensor | None
    weights: Tensor | None

    def map(self, function: Callable[[Tensor], Tensor]) -> "Block":
        """`function` applied to every tensor."""
        targets, weights = (None if each is None else function(each) for each in (self.targets, self.weights))
        return self._replace(inputs=function(self.inputs), targets=targets, weights=weights)


class Shards:
    """Rows in Parquet, Arrow or .npy files, read in shards: made by `read_shards`, taken by `infer` and by mixtures.

    A pass sees every row once. In a shuffled pass the shards come in a random order, all orders being equally likely;
    each `window` of them in this order is read together, and its rows are permuted, all permutations being equally
    likely. So two rows of one shard are never further apart than a window, and rows of a shard come from all of a pass
    only if the rows of the files are in random order. A pass can begin at any row: what comes before is not read.
    A thread reads the next window while the present one is used, so that about four windows are in memory.
    """

    def __init__(
        self,
        files: Sequence[ShardFile],
        target_files: Sequence[ShardFile],
        inputs: tuple[str, ...],
        target: str | tuple[str, ...] | None,
        weights: str | None,
        dtype: torch.dtype,
        window: int | None,
    ) -> None:
        self.files, self.target_files, self.dtype = tuple(files), tuple(target_files), dtype
        self.columns, self.target, self.weights = inputs, target, weights
        row = sum(int(np.prod(file.row, dtype=np.int64)) for file in map(self._input_shape, inputs)) * dtype.itemsize
        self.shards = tuple(shard for number, file in enumerate(files) for shard in _shards(number, file, row))
        self._rows = sum(shard.rows for shard in self.shards)
        largest = max((shard.rows for shard in self.shards), default=1)
        self.window = max(1, WINDOW_BYTES // max(1, largest * row)) if window is None else window

    def __len__(self) -> int:
        """Number of rows."""
        return self._rows

    def __repr__(self) -> str:
        kinds = f"{len(self.files)} {self.files[0].kind} file{'s' * (len(self.files) > 1)}"
        return f"Shards({len(self):,} rows of {kinds}, {len(self.shards)} shards, {self.window} shuffled together)"

    @property
    def has_targets(self) -> bool:
        """Whether a target is read."""
        return self.target is not None or bool(self.target_files)

    @property
    def row_shape(self) -> tuple[int, ...]:
        """The shape of the inputs of a row."""
        return self._input_shape("").row if self.files[0].kind == ARRAY else (len(self.columns),)

    def blocks(self, key: Key | None = None, first: int = 0) -> Iterator[Block]:
        """Yield the rows of a pass, from the block with row number `first` of the pass on; shuffled if by a `key`."""
        count = len(self.shards)
        order = range(count) if key is None else key.fold("shards").permutation(count, "cpu").tolist()
        each, start = 1 if key is None else self.window, 0
        wanted: list[tuple[int, list[int], Key | None]] = []
        for low in range(0, count, each):
            group = list(order[low : low + each])
            rows = sum(self.shards[index].rows for index in group)
            if start + rows > first:
                wanted.append((start, group, None if key is None else key.fold("rows").fold(low)))
            start += rows
        with ThreadPoolExecutor(1, thread_name_prefix="posterity-shards") as reader:
            ahead: Future[Block] | None = None
            try:
                for number in range(len(wanted)):
                    block = self._block(*wanted[0]) if ahead is None else ahead.result()
                    ahead = reader.submit(self._block, *wanted[number + 1]) if number + 1 < len(wanted) else None
                    yield block
            finally:
                if ahead is not None:
                    ahead.cancel()
                with suppress(RuntimeError):  # of an interpreter that ends
                    reader.submit(release)  # Arrow's allocator keeps what a thread has freed, even after its end

    @cached_property
    def head(self) -> Block:
        """The first rows, at most 256."""
        block = self._read(next(index for index, shard in enumerate(self.shards) if shard.rows))
        return block.map(lambda tensor: tensor[:HEAD_ROWS].clone())

    def take(self, rows: Tensor) -> Tensor:
        """Return the inputs at the row numbers (n,), by a pass over all rows."""
        rows = rows.cpu()
        order = torch.argsort(rows)
        numbers, parts = rows[order], list[Tensor]()
        for block in self.blocks():
            ends = torch.tensor([block.start, block.start + len(block.inputs)], device="cpu")
            low, high = torch.searchsorted(numbers, ends).tolist()
            parts.append(block.inputs[numbers[low:high] - block.start])
        taken = torch.cat(parts)
        return torch.empty_like(taken).index_copy_(0, order, taken)

    @cached_property
    def fingerprint(self) -> str:
        """A hash of names, sizes and blocks of bytes of the files, of the columns, and of how rows are shuffled."""
        of_files = [(file.path.name, file.digest()) for file in (*self.files, *self.target_files)]
        reading = self.columns, self.target, self.weights, str(self.dtype), self.window
        return hashlib.blake2b(repr((of_files, reading)).encode(), digest_size=16).hexdigest()

    def _input_shape(self, name: str) -> Column:
        return self.files[0].columns[name]

    def _block(self, start: int, group: list[int], key: Key | None) -> Block:
        """Read some shards as one block, shuffled if by a key."""
        parts = [self._read(index) for index in group]
        inputs = parts[0].inputs if len(parts) == 1 else torch.cat([part.inputs for part in parts])
        block = Block(start, inputs, _joined(part.targets for part in parts), _joined(part.weights for part in parts))
        del parts
        if key is None:
            return block
        order = key.permutation(len(block.inputs), "cpu")
        return block.map(lambda tensor: tensor.index_select(0, order))

    def _read(self, index: int) -> Block:
        """Read a shard, which must have finite inputs."""
        number, low, high, rows = self.shards[index]
        file = self.files[number]
        if file.kind == ARRAY:
            inputs = torch.from_numpy(file.read(low, high, [""])[""]).to(self.dtype)
            self._refuse_not_finite(file, inputs, index)
            if not self.target_files:
                return Block(0, inputs, None, None)
            return Block(0, inputs, self._labels(self.target_files[number].read(low, high, [""])[""]), None)
        target = (self.target,) if isinstance(self.target, str) else self.target or ()
        more = () if self.weights is None else (self.weights,)
        columns = file.read(low, high, [*self.columns, *target, *more])
        inputs = self._stacked(columns, self.columns, rows)
        self._refuse_not_finite(file, inputs, index)
        goal = None
        if isinstance(self.target, str):
            goal = self._labels(columns[self.target])
        elif self.target is not None:
            goal = self._stacked(columns, self.target, rows)
        weights = None if self.weights is None else self._stacked(columns, (self.weights,), rows)[:, 0]
        return Block(0, inputs, goal, weights)

    def _labels(self, values: Any) -> Tensor:
        """A single target: labels where it holds whole numbers."""
        whole = values.dtype.kind in "iub"
        values = np.require(values, np.int64 if whole else None, ["C", "W"])  # torch takes none that are read-only
        targets = torch.from_numpy(values)
        return targets if whole else targets.to(self.dtype)

    def _stacked(self, columns: dict[str, Any], names: tuple[str, ...], rows: int) -> Tensor:
        """Columns of numbers as one tensor (n, D)."""
        known = torch.float32 if self.dtype == torch.bfloat16 else self.dtype  # numpy has no bfloat16
        result = torch.empty(rows, len(names), dtype=known, device="cpu")
        np.stack([columns[name] for name in names], 1, out=result.numpy(), casting="unsafe")
        return result.to(self.dtype)

    def _refuse_not_finite(self, file: ShardFile, inputs: Tensor, index: int) -> None:
        if bool(torch.isfinite(inputs.sum())) or not (bad := ~torch.isfinite(inputs)).any():
            return
        row, *place = bad.nonzero()[0].tolist()
        before = sum(shard.rows for shard in self.shards[:index] if shard.file == self.shards[index].file)
        name = f"column {shown(self.columns[place[0]])}" if file.kind != ARRAY else f"entry {place}"
        raise BadData(
            f"{file.path}: row {before + row}, {name} must be finite. Got NaN or infinity. Fill it, or leave the row "
            "out before writing the file."
        )


def _joined(parts: Iterable[Tensor | None]) -> Tensor | None:
    """One tensor of those that there are."""
    known = [part for part in parts if part is not None]
    return torch.cat(known) if len(known) > 1 else known[0] if known else None


def _shards(number: int, file: ShardFile, row: int) -> Iterator[Shard]:
    """Parts of a file that are read together: as many in a row as fit into `SHARD_BYTES`, at least one."""
    most, low, rows = max(1, SHARD_BYTES // max(1, row)), 0, 0
    for index, count in enumerate(file.counts):
        if rows and rows + count > most:
            yield Shard(number, low, index, rows)
            low, rows = index, 0
        rows += count
    if rows:
        yield Shard(number, low, len(file.counts), rows)


def read_shards(
    source: object,
    target: object = None,
    *,
    inputs: Sequence[str] | None = None,
    weights: str | None = None,
    dtype: torch.dtype = torch.float32,
    window: int | None = None,
) -> Shards:
    """Open files of rows that need not fit into memory; no rows are read yet.

    `source` is a Parquet or Arrow file, a folder of such files (all of one kind, in the order of their names), a list
    of files or a `pyarrow.dataset`; or .npy files, or a memory map of one, whose first axis is that of the rows.
    `target` names the column of targets, or several in a list; for arrays it is as many .npy files of targets. `inputs`
    are the columns of inputs (None: all others), and `weights` is a column of row weights. Numbers come as `dtype`; a
    target of whole numbers comes as labels, int64, unless it is named in a list. `window` shards are shuffled together
    (None: as many as fit into 64 MiB), see `Shards`.

    Columns must hold numbers, of the same types in all files, and none may be missing. A row group of Parquet, or a
    record batch of Arrow, is read whole: write files whose row groups fit into memory several times.

    >>> import tempfile
    >>> folder = tempfile.TemporaryDirectory()
    >>> path = f"{folder.name}/rows.npy"
    >>> np.save(path, np.arange(6.0).reshape(3, 2))
    >>> rows = read_shards(path)
    >>> len(rows), next(rows.blocks()).inputs.shape
    (3, torch.Size([3, 2]))
    >>> folder.cleanup()
    """
    if window is not None:
        positive_whole("read_shards: window", window)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise TypeError(f"read_shards: dtype must be of floating-point numbers, such as torch.float32. Got {dtype!r}.")
    files = [open_file(path) for path in find_files(source)]
    kinds = {file.kind: file.path for file in files}
    if len(kinds) > 1:
        named = " and ".join(f"{path.name} ({kind})" for kind, path in kinds.items())
        raise BadData(f"read_shards: files must be of one kind. Got {named}. Read them apart, or convert some.")
    if not sum(file.num_rows for file in files):
        raise BadData(f"{files[0].path}: the data have no rows. Pass at least one.")
    if files[0].kind == ARRAY:
        if inputs is not None or weights is not None:
            raise BadData("read_shards: an array has no names of columns. Leave inputs and weights out.")
        _refuse_other_columns(files, ("",))
        goals = [] if target is None else _target_arrays(files, [open_file(path) for path in find_files(target)])
        return Shards(files, goals, ("",), None, None, dtype, window)
    goal = _target_names(target)
    named_goals = (goal,) if isinstance(goal, str) else goal or ()
    others = {*named_goals, *(() if weights is None else (weights,))}
    names = tuple(name for name in files[0].columns if name not in others) if inputs is None else tuple(inputs)
    if not names:
        raise BadData(f"{files[0].path}: no column is left as an input. Name some: inputs=[...].")
    if clash := [name for name in names if name in others]:
        raise BadData(f"read_shards: column {shown(clash[0])} cannot be an input and a target or weight. Name it once.")
    _refuse_other_columns(files, (*names, *named_goals, *(() if weights is None else (weights,))), whole=inputs is None)
    return Shards(files, (), names, goal, weights, dtype, window)


def _target_names(target: object) -> str | tuple[str, ...] | None:
    if target is None or isinstance(target, str):
        return target
    if isinstance(target, (list, tuple)) and target and all(isinstance(name, str) for name in target):
        return tuple(target)
    raise TypeError(f"read_shards: target must be the name of a column, or a list of names. Got {shown(target)}.")


def _refuse_other_columns(files: Sequence[ShardFile], names: tuple[str, ...], whole: bool = False) -> None:
    """Raise BadData unless all files have these columns, of the same types of numbers, and with `whole` no others."""
    first = files[0]
    for file in files:
        for name in names:
            if name not in file.columns:
                raise BadData(f"{file.path}: there is no column {shown(name)}. It has {shown(list(file.columns))}.")
            if file.columns[name] != first.columns[name]:
                raise BadData(
                    f"{file.path}: {_described(name, file.columns[name])}, and {_described(name, first.columns[name])} "
                    f"in {first.path.name}. Write all files with one schema."
                )
        if whole and (other := set(file.columns) ^ set(first.columns)):
            raise BadData(
                f"{file.path}: its columns are not those of {first.path.name}: {shown(sorted(other))} are in one of "
                "them. Write all files with one schema, or name the inputs."
            )
    for name in names:
        kind = first.columns[name].type
        if kind not in _NUMBERS:
            raise BadData(
                f"{first.path}: {_described(name, first.columns[name])}, and shards hold numbers. Encode it as "
                "numbers, or leave it out: inputs=[...]."
            )


def _described(name: str, column: Column) -> str:
    row = f" of rows {column.row}" if column.row else ""
    return f"{f'column {shown(name)}' if name else 'the array'} is {column.type}{row}"


def _target_arrays(files: Sequence[ShardFile], goals: Sequence[ShardFile]) -> list[ShardFile]:
    """Return files of targets with the parts of the files of inputs; BadData unless each has as many rows."""
    if len(files) != len(goals):
        raise BadData(
            f"read_shards: each .npy file needs one of targets. Got {len(files)} of inputs and {len(goals)} of targets."
        )
    for file, goal in zip(files, goals, strict=True):
        if goal.kind != ARRAY or goal.num_rows != file.num_rows:
            got = f"{goal.num_rows} rows" if goal.kind == ARRAY else f"a {goal.kind} file"
            raise BadData(
                f"{goal.path}: the targets of {file.path.name} must be a .npy file of {file.num_rows} rows. Got {got}."
            )
    _refuse_other_columns(goals, ("",))
    return [goal.with_parts_of(file) for file, goal in zip(files, goals, strict=True)]
