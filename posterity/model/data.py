"""Data as batches: tensors, arrays, datasets and loaders behind one face."""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset, default_collate

from posterity.datasets.dataset import LabelledData
from posterity.errors import BadData, positive, shown
from posterity.model.inputs import Inputs, map_inputs, named_tensors, num_rows
from posterity.numerics.random import Key


class Batch(NamedTuple):
    """Rows: inputs and targets, weights (n,) that multiply each row's log-likelihood, or None for ones.

    `per_member` says that every tensor has a leading member axis, (M, n, ...).
    """

    inputs: Inputs
    targets: Tensor
    weights: Tensor | None = None
    per_member: bool = False

    @property
    def size(self) -> int:
        """How many rows there are (for each member)."""
        return self.targets.shape[1 if self.per_member else 0]

    def member(self, index: int) -> "Batch":
        """The batch as member `index` sees it."""
        if not self.per_member:
            return self
        weights = None if self.weights is None else self.weights[index]
        return Batch(map_inputs(lambda x: x[index], self.inputs), self.targets[index], weights)

    def map(self, function: Callable[[Tensor], Tensor]) -> "Batch":
        """`function` applied to every tensor."""
        weights = None if self.weights is None else function(self.weights)
        return Batch(map_inputs(function, self.inputs), function(self.targets), weights, self.per_member)


@dataclass(frozen=True)
class Feed:
    """The batches a run eats: `steps` of them, the t-th always the same whatever was drawn before."""

    steps: int
    from_step: Callable[[int], Iterator[Batch | None]]

    def __len__(self) -> int:
        return self.steps


class Data(ABC):
    """Rows to learn from, and the orders in which a method may ask for them."""

    num_data: int

    @abstractmethod
    def minibatches(self, size: int | None, steps: int, key: Key) -> Feed:
        """`steps` batches of `size` rows (None: all rows), newly shuffled by `key` in every pass."""

    @abstractmethod
    def passes(self, size: int | None, count: int = 1) -> Feed:
        """`count` passes over all rows in their own order, in batches of at most `size`."""

    @abstractmethod
    def to(self, device: torch.device) -> "Data":
        """The data with its batches on `device`."""

    @abstractmethod
    def first(self) -> Batch:
        """A batch to check shapes and kinds against: all rows where they are in memory."""

    @abstractmethod
    def fingerprint(self) -> str:
        """A short text that differs when the data differ."""


@dataclass(frozen=True, eq=False)
class TensorData(Data):
    """Rows held in memory. A pass drops the last incomplete batch; the next order gives its rows their turn.

    Takes a `Batch` of all rows. Batches have one shape, so that a step can be captured or compiled.
    """

    rows: Batch

    def __post_init__(self) -> None:
        object.__setattr__(self, "num_data", self.rows.size)

    def _take(self, index: Tensor) -> Batch:
        axis = 1 if self.rows.per_member else 0
        return self.rows.map(lambda tensor: tensor.index_select(axis, index))

    def minibatches(self, size: int | None, steps: int, key: Key) -> Feed:
        """See `Data`. With `size` None or at least the number of rows, every batch is all rows in order."""
        count = self.num_data
        if size is None or size >= count:
            return Feed(steps, lambda start: (self.rows for _ in range(start, steps)))
        each = count // size
        device = self.rows.targets.device

        def from_step(start: int) -> Iterator[Batch]:
            step = start
            while step < steps:
                epoch, position = divmod(step, each)
                order = key.fold(epoch).permutation(count).to(device)
                for place in range(position, min(each, position + steps - step)):
                    yield self._take(order[place * size : (place + 1) * size])
                step += each - position

        return Feed(steps, from_step)

    def passes(self, size: int | None, count: int = 1) -> Feed:
        """See `Data`."""
        size = self.num_data if size is None else size
        each = -(-self.num_data // size)
        axis = 1 if self.rows.per_member else 0

        def from_step(start: int) -> Iterator[Batch]:
            for step in range(start, each * count):
                low = (step % each) * size
                length = min(size, self.num_data - low)
                yield self.rows.map(lambda tensor, low=low, length=length: tensor.narrow(axis, low, length))  # type: ignore[misc]

        return Feed(each * count, from_step)

    def to(self, device: torch.device) -> "TensorData":
        """See `Data`; the rows are moved once."""
        return TensorData(self.rows.map(lambda tensor: tensor.to(device)))

    def first(self) -> Batch:
        """All rows."""
        return self.rows

    def fingerprint(self) -> str:
        """Hash of every byte."""
        digest = hashlib.blake2b(digest_size=16)
        tensors = {**named_tensors(self.rows.inputs), "targets": self.rows.targets}
        if self.rows.weights is not None:
            tensors["weights"] = self.rows.weights
        for name, tensor in tensors.items():
            digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
            flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
            digest.update(memoryview(flat.numpy()))
        return digest.hexdigest()


@dataclass(frozen=True, eq=False)
class StreamData(Data):
    """Rows that come from elsewhere, batch by batch: a `DataLoader`, or a `Dataset` indexed here.

    A loader keeps its own batch size, order and workers; each pass begins from a generator state that depends
    on the key and the pass alone, so that a resumed run sees the same batches.
    """

    source: Any
    num_data: int
    device: torch.device = torch.device("cpu")
    prepare: Callable[[Batch], Batch] | None = None

    def _pass(self, size: int | None, order_key: Key | None) -> Iterator[Batch]:
        if isinstance(self.source, DataLoader):
            yield from (self._batch(item) for item in _keyed(self.source, order_key or Key(0)))
            return
        order = torch.arange(self.num_data) if order_key is None else order_key.permutation(self.num_data)
        size = self.num_data if size is None else min(size, self.num_data)
        last = self.num_data if order_key is None else self.num_data - self.num_data % size
        for low in range(0, last, size):
            yield self._batch(default_collate([self.source[int(i)] for i in order[low : low + size]]))

    def _batch(self, item: object) -> Batch:
        batch = _as_batch(item, "each batch of the loader").map(lambda t: t.to(self.device, non_blocking=True))
        return batch if self.prepare is None else self.prepare(batch)

    def _each(self, size: int | None, shuffled: bool) -> int:
        if isinstance(self.source, DataLoader):
            return len(self.source)
        size = self.num_data if size is None else min(size, self.num_data)
        return self.num_data // size if shuffled else -(-self.num_data // size)

    def minibatches(self, size: int | None, steps: int, key: Key) -> Feed:
        """See `Data`."""
        each = self._each(size, shuffled=True)

        def from_step(start: int) -> Iterator[Batch]:
            step = start
            while step < steps:
                epoch, position = divmod(step, each)
                for place, batch in enumerate(self._pass(size, key.fold(epoch))):
                    if place >= position and step < steps:
                        yield batch
                        step += 1
                    if step >= steps:
                        return

        return Feed(steps, from_step)

    def passes(self, size: int | None, count: int = 1) -> Feed:
        """See `Data`. A loader that shuffles or drops its last batch is refused: a pass must see every row."""
        if isinstance(self.source, DataLoader) and self.source.drop_last and self.num_data % (self.source.batch_size or 1):
            raise BadData(
                "This method needs every row once, but the DataLoader has drop_last=True. Pass one with drop_last=False."
            )
        each = self._each(size, shuffled=False)

        def from_step(start: int) -> Iterator[Batch]:
            for step, batch in enumerate(b for _ in range(count) for b in self._pass(size, None)):
                if step >= start:
                    yield batch

        return Feed(each * count, from_step)

    def to(self, device: torch.device) -> "StreamData":
        """See `Data`; batches are moved as they come."""
        return StreamData(self.source, self.num_data, device, self.prepare)

    def prepared(self, prepare: Callable[[Batch], Batch]) -> "StreamData":
        """The data whose every batch goes through `prepare` before it is used."""
        return StreamData(self.source, self.num_data, self.device, prepare)

    def first(self) -> Batch:
        """The first batch."""
        return next(self._pass(None if isinstance(self.source, DataLoader) else 256, None))

    def fingerprint(self) -> str:
        """Kind and length only: the rows are not read."""
        return f"{type(self.source).__name__} of {self.num_data} rows"


@dataclass(frozen=True)
class NoData(Data):
    """No rows: for a `Density`, which has its data inside."""

    num_data: int = 0

    def minibatches(self, size: int | None, steps: int, key: Key) -> Feed:
        """`steps` times None."""
        return Feed(steps, lambda start: (None for _ in range(start, steps)))

    def passes(self, size: int | None, count: int = 1) -> Feed:
        """`count` times None."""
        return Feed(count, lambda start: (None for _ in range(start, count)))

    def to(self, device: torch.device) -> "NoData":
        """Itself."""
        return self

    def first(self) -> Batch:
        """There is none."""
        raise BadData("This needs data. Pass (inputs, targets), a Dataset or a DataLoader.")

    def fingerprint(self) -> str:
        """A constant."""
        return "none"


def as_data(data: object, *, per_member: bool = False) -> Data:
    """`Data` from (inputs, targets[, weights]) tensors or arrays, a `Dataset`, a `DataLoader`, `Data` or None.

    `per_member` says that all tensors have a leading member axis, (M, N, ...).

    >>> as_data((torch.zeros(5, 2), torch.zeros(5, 1))).num_data
    5
    """
    if data is None:
        return NoData()
    if isinstance(data, Data):
        return data
    if isinstance(data, TensorDataset):
        data = data.tensors
    if isinstance(data, LabelledData):
        data = data.pair
    if isinstance(data, DataLoader):
        if isinstance(data.dataset, IterableDataset) or not hasattr(data.dataset, "__len__"):
            raise BadData(
                "The DataLoader has no known length, so the likelihood cannot be scaled to the whole data. "
                "Use a map-style Dataset with __len__."
            )
        rows, source = len(data.dataset), data
        return _not_empty(StreamData(source, rows))
    if isinstance(data, Dataset):
        if not hasattr(data, "__len__"):
            raise BadData("The Dataset has no __len__, so the likelihood cannot be scaled to the whole data. Give it one.")
        return _not_empty(StreamData(data, len(data)))
    return _not_empty(TensorData(_as_batch(data, "the data", per_member)))


def as_inputs(inputs: object) -> Inputs:
    """Network inputs from a tensor or array, a tuple or list of them, or a dict of them."""
    if isinstance(inputs, Mapping):
        return {str(name): _tensor(value, f"inputs['{name}']") for name, value in inputs.items()}
    if isinstance(inputs, (tuple, list)) and inputs and isinstance(inputs[0], (Tensor, np.ndarray)):
        return tuple(_tensor(value, f"inputs[{i}]") for i, value in enumerate(inputs))
    return _tensor(inputs, "inputs")


def _not_empty(data: Data) -> Data:
    if data.num_data == 0:
        raise BadData("The data have no rows. Pass at least one.")
    return data


def _as_batch(item: object, what: str, per_member: bool = False) -> Batch:
    """(inputs, targets[, weights]) as a Batch of tensors with equal numbers of rows."""
    if isinstance(item, Batch):
        return item
    if not isinstance(item, (tuple, list)) or len(item) not in (2, 3):
        raise BadData(
            f"Wanted {what} as (inputs, targets) or (inputs, targets, weights). Got {shown(item)}. "
            "Pass a pair of tensors or arrays; several inputs go in a tuple or a dict as the first of the pair."
        )
    inputs = as_inputs(item[0])
    targets = _tensor(item[1], "targets")
    weights = _tensor(item[2], "weights") if len(item) == 3 and item[2] is not None else None
    axis = 1 if per_member else 0
    tensors = {**named_tensors(inputs), "targets": targets, **({} if weights is None else {"weights": weights})}
    for name, tensor in tensors.items():
        if tensor.dim() <= axis:
            raise BadData(f"{name} must have one row for each data point. Got shape {tuple(tensor.shape)}.")
        if tensor.shape[axis] != num_rows(inputs, axis):
            raise BadData(
                f"inputs, targets and weights must have the same number of rows. Got {num_rows(inputs, axis)} rows of "
                f"inputs and {tensor.shape[axis]} of {name}."
            )
    if weights is not None and (weights.dim() != axis + 1 or not bool((torch.isfinite(weights) & (weights >= 0)).all())):
        raise BadData(f"weights must be one finite number >= 0 for each row. Got {shown(weights)}.")
    return Batch(inputs, targets, weights, per_member)


def _tensor(value: object, name: str) -> Tensor:
    if isinstance(value, Tensor):
        return value.detach()
    if isinstance(value, np.ndarray) or hasattr(value, "__array__"):
        array = np.asarray(value)
        if array.dtype.kind in "fiub":
            return torch.from_numpy(np.ascontiguousarray(array))
        raise BadData(f"{name} must hold numbers. Got an array of {array.dtype}. Encode it as numbers first.")
    raise BadData(f"{name} must be a tensor or an array. Got {shown(value)}.")


def _keyed(loader: "DataLoader[Any]", key: Key) -> Iterator[object]:
    """One pass of `loader` under random states that depend on `key` alone; the global one is left untouched."""
    inside = key.generator().get_state()
    if isinstance(loader.generator, torch.Generator):
        loader.generator.manual_seed(key.seed)
    sampler_generator = getattr(loader.sampler, "generator", None)
    if isinstance(sampler_generator, torch.Generator):
        sampler_generator.manual_seed(key.seed)
    iterator: Iterator[object] | None = None
    while True:
        outside = torch.random.get_rng_state()
        torch.random.set_rng_state(inside)
        try:
            iterator = iter(loader) if iterator is None else iterator
            item = next(iterator)
        except StopIteration:
            return
        finally:
            inside = torch.random.get_rng_state()
            torch.random.set_rng_state(outside)
        yield item


def check_batch_size(name: str, size: int | None) -> None:
    """Refuse a batch size that is not None or a positive whole number."""
    if size is not None:
        positive(name, size, "of rows, or None for all of them")
