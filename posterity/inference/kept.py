"""The states that a run keeps for its posterior, in memory or in a memory-mapped file."""

import logging
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar, overload

import torch
from torch import Tensor

from posterity.errors import shown
from posterity.inference.memory import device_memory, human, tensor_bytes
from posterity.model.problem import Problem
from posterity.numerics.finite import finite_rows
from posterity.storage import clone, disk, leaves, mapped

logger = logging.getLogger("posterity")

SHARE = 4  # kept states that take more than a quarter of the memory go to a file
UNKNOWN = 4 << 30  # bytes for kept states if the memory of the machine is unknown
BLOCK = 64  # states that stay on a GPU before they are moved together, since each move stalls it
WAITING = 1 << 28  # most bytes of states that stay there
LOOK = 1 << 24  # numbers that are checked together for being finite
FEW = 16  # states to allocate first if their number is unknown

State = TypeVar("State")


class Kept(Sequence[Any]):
    """States of one shape, oldest first; each tensor is a row of a column on the CPU, so `stacked` copies nothing.

    - `expected`: the expected number of states; there may be more.
    - `folder`: where the file is made if the states take more than a quarter of the memory; None: the folder for
      temporary files. The file has no name: it is freed with the last tensor on it, or with the process.

    >>> kept = Kept()
    >>> for value in (1.0, 2.0):
    ...     kept.append((torch.tensor([value]), 3))
    >>> len(kept), kept[-1], stacked(kept)[0].tolist()
    (2, (tensor([2.]), 3), [[1.0], [2.0]])
    """

    def __init__(self, expected: int = 0, folder: str | os.PathLike[str] | None = None) -> None:
        self._expected = expected
        self._folder = Path(tempfile.gettempdir() if folder is None else folder)
        self._first: Any = None  # for the structure
        self._shapes: dict[str, tuple[torch.Size, torch.dtype]] = {}  # of the tensors, by path
        self._columns: dict[str, Tensor] = {}  # by path, (room, *shape)
        self._others: list[dict[str, Any]] = []  # leaves of each state that are not tensors, by path
        self._count = 0  # rows written
        self._waiting: list[Any] = []

    def __len__(self) -> int:
        return self._count + len(self._waiting)

    @overload
    def __getitem__(self, index: int) -> Any: ...
    @overload
    def __getitem__(self, index: slice) -> list[Any]: ...
    def __getitem__(self, index: int | slice) -> Any:
        self._move()
        if isinstance(index, slice):
            return [self._state(row) for row in range(*index.indices(self._count))]
        return self._state(range(self._count)[index])

    def __iter__(self) -> Iterator[Any]:
        return (self[index] for index in range(len(self)))

    def _state(self, row: int) -> Any:
        own = {**{path: column[row] for path, column in self._columns.items()}, **self._others[row]}
        values = iter([own[path] for path in leaves(self._first)])
        return mapped(lambda _: next(values), self._first)

    def append(self, state: Any) -> None:
        """Copy a state; states on a GPU are moved to the CPU in blocks."""
        own = leaves(state)
        tensors = {path: leaf for path, leaf in own.items() if isinstance(leaf, Tensor)}
        shapes = {path: (tensor.shape, tensor.dtype) for path, tensor in tensors.items()}
        if self._first is None:
            self._first, self._shapes = clone(state), shapes
            self._room(tensors, self._expected or FEW)
        if shapes != self._shapes:
            both = shapes.keys() | self._shapes.keys()
            differing = sorted(path for path in both if shapes.get(path) != self._shapes.get(path))
            raise TypeError(
                "The states that a method keeps must have the same tensors each time, of the same shape and dtype. "
                f"Got others at {', '.join(map(shown, differing))}. Let Method.keep leave out what varies."
            )
        if _on_cpu(tensors.values()):
            self._move()
            self._write([own])
            return
        self._waiting.append(clone(state))
        if len(self._waiting) >= min(BLOCK, max(1, WAITING // max(1, tensor_bytes(list(tensors.values()))))):
            self._move()

    def _move(self) -> None:
        if self._waiting:
            waiting, self._waiting = [leaves(state) for state in self._waiting], []
            self._write(waiting)

    def _write(self, states: Sequence[dict[str, Any]]) -> None:
        low, high = self._count, self._count + len(states)
        if self._columns and high > len(next(iter(self._columns.values()))):
            self._room({path: column[0] for path, column in self._columns.items()}, max(2 * low, high))
        for path, column in self._columns.items():
            if len(states) == 1:
                column[low].copy_(states[0][path].detach())
            else:
                column[low:high] = torch.stack([state[path].detach() for state in states]).cpu()
        self._others += [{path: leaf for path, leaf in own.items() if path not in self._columns} for own in states]
        self._count = high

    def _room(self, tensors: dict[str, Tensor], rows: int) -> None:
        """Allocate columns of this many rows, and copy the present rows into them."""
        total = rows * tensor_bytes(list(tensors.values()))
        on_disk = total > memory_for_kept()
        if on_disk:
            _refuse_small_disk(rows, total, self._folder)
            logger.info("%d kept states take %s: they go to a file in %s", rows, human(total), self._folder)
        for path, tensor in tensors.items():
            shape = (rows, *tensor.shape)
            if on_disk and tensor.numel():
                new = _mapped_file(self._folder, shape, tensor.dtype)
            else:
                new = torch.empty(shape, dtype=tensor.dtype, device="cpu")
            if self._count:
                new[: self._count] = self._columns[path][: self._count]
            self._columns[path] = new

    def stacked(self) -> Any:
        """Return all states as one; see the function of this name."""
        self._move()
        columns = {path: column[: self._count] for path, column in self._columns.items()}
        others = {path: _joined([own[path] for own in self._others]) for path in (self._others or [{}])[0]}
        values = iter([{**columns, **others}[path] for path in leaves(self._first)])
        return mapped(lambda _: next(values), self._first)

    def first(self, count: int) -> "Kept":
        """Return the oldest `count` states, on the same memory."""
        self._move()
        part = Kept(count, self._folder)
        part._first, part._shapes = self._first, self._shapes
        part._count, part._others = min(count, self._count), self._others[:count]
        part._columns = {path: column[: part._count] for path, column in self._columns.items()}
        return part

    def num_finite(self) -> int:
        """Return the number of states before the first that is not finite."""
        self._move()
        columns = [column.flatten(1) for column in self._columns.values() if column.is_floating_point()]
        step = max(1, LOOK // max(1, sum(column.shape[1] for column in columns)))
        for low in range(0, self._count, step):
            high = min(low + step, self._count)
            good = [finite_rows(column[low:high]) for column in columns]
            if good and not bool(torch.stack(good).all()):
                return low + int((~torch.stack(good).all(0)).nonzero()[0])
        return self._count


def stacked(kept: Sequence[State]) -> State:
    """Stack states into one: each tensor gets a leading axis of states, numbers become tensors, None stays.

    The kept states of a run are not copied: `theta (D, C, P)` of a sampler's states is `theta.transpose(0, 1)` of its
    `Samples`.

    >>> stacked([(torch.zeros(2), 1), (torch.ones(2), 2)])
    (tensor([[0., 0.],
            [1., 1.]]), tensor([1, 2]))
    """
    if isinstance(kept, Kept):
        return kept.stacked()  # type: ignore[no-any-return]
    columns = zip(*(leaves(state).values() for state in kept), strict=True)
    values = iter([_joined(column) for column in columns])
    return mapped(lambda _: next(values), kept[0])


def memory_for_kept() -> int:
    """Return the bytes that kept states may take before they go to a file: a quarter of the memory."""
    memory = device_memory(torch.device("cpu"))
    return UNKNOWN if memory is None else memory // SHARE


def kept_bytes(joint: Problem, chains: int, draws: int, statistics: int = 8) -> dict[str, int]:
    """Return the bytes of the draws of chains in the device's memory, for a footprint; more go to a file.

    Each draw has theta and this many `statistics` of 8 bytes. On a GPU only the draws that wait to be moved count.
    """
    each = chains * (joint.size * joint.dtype.itemsize + 8 * statistics)
    if joint.device.type != "cpu":
        return {"draws that wait": min(draws, BLOCK, max(1, WAITING // each)) * each}
    return {"draws": min(draws * each, memory_for_kept())}


def refuse_too_many(state: Any, expected: int, folder: str | os.PathLike[str] | None) -> None:
    """Raise a ValueError if this many states fit neither into memory nor on disk, before the first is kept."""
    total = expected * tensor_bytes([leaf for leaf in leaves(state).values() if isinstance(leaf, Tensor)])
    if total > memory_for_kept():
        _refuse_small_disk(expected, total, Path(tempfile.gettempdir() if folder is None else folder))


def _refuse_small_disk(rows: int, total: int, folder: Path) -> None:
    existing = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.is_dir())
    free = shutil.disk_usage(existing).free
    if total > free:
        raise ValueError(
            f"{rows:,} kept states take {human(total)}: more than the {human(memory_for_kept())} of memory for them, "
            f"and than the {human(free)} free in '{folder}', where a file would be. Keep fewer (draws=, thin=), or "
            "give checkpoint= a folder on a larger disk."
        )


def _mapped_file(folder: Path, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return a tensor in a memory-mapped file without a name."""
    path = disk.temporary(folder)
    folder.mkdir(parents=True, exist_ok=True)  # of several processes the first alone writes a checkpoint there
    try:
        flat = torch.from_file(str(path), shared=True, size=torch.Size(shape).numel(), dtype=dtype, device="cpu")
    finally:
        disk.remove(path)  # the mapping stays; a file that cannot be removed in use goes with the next commit
    return flat.view(shape)


def _on_cpu(tensors: Iterable[Tensor]) -> bool:
    return all(tensor.device.type == "cpu" for tensor in tensors)


def _joined(values: Sequence[Any]) -> Any:
    first = values[0]
    if isinstance(first, Tensor):
        return torch.stack(list(values))
    return torch.tensor(values, device="cpu") if isinstance(first, (bool, int, float)) else first
