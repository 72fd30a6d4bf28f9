"""Data in memory or from a loader, and separate orders of the rows for each member."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, TensorDataset

from posterity.datasets.dataset import LabelledData
from posterity.datasets.shards import Shards
from posterity.errors import BadData, shown
from posterity.model.augmentation import Augmentation, check_images
from posterity.model.batch import LABELS, Batch, Data, Feed, as_batch, as_inputs, joined
from posterity.model.stream import StreamData, check_dataset, check_loader
from posterity.numerics.random import Key

__all__ = ["Batch", "Data", "Feed", "NoData", "StreamData", "TensorData", "as_data", "as_inputs"]


@dataclass(frozen=True, eq=False)
class TensorData(Data):
    """Rows in memory: a `Batch` of all rows, and an optional augmentation of images.

    A pass drops the last incomplete batch, so that batches have one shape and a step can be captured or compiled; the
    next pass shuffles its rows anew.
    """

    rows: Batch
    augmentation: Augmentation | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "num_data", self.rows.size)

    @property
    def _axis(self) -> int:
        """The axis of the rows."""
        return 1 if self.rows.per_member else 0

    def minibatches(self, size: int | None, steps: int, key: Key) -> Feed:
        """See `Data`. With `size` None or at least the number of rows, every batch is all rows in order."""
        policy = self.augmentation
        if size is None or size >= self.num_data:
            return Feed(steps, lambda start: (self.rows.augmented(policy, key, step) for step in range(start, steps)))
        each = self.num_data // size
        device, axis = self.rows.targets.device, self._axis

        def from_step(start: int) -> Iterator[Batch]:
            for epoch in range(start // each, -(-steps // each)):
                order = key.fold(epoch).permutation(self.num_data, "cpu").to(device)
                first, last = max(start - epoch * each, 0), min(steps - epoch * each, each)
                for number in range(first, last):
                    index = order.narrow(0, number * size, size)
                    batch = self.rows.map(lambda tensor, index=index: tensor.index_select(axis, index))  # type: ignore[misc]
                    yield batch.augmented(policy, key, epoch * each + number)

        return Feed(steps, from_step)

    def passes(self, size: int | None, count: int = 1) -> Feed:
        size = self.num_data if size is None else size
        each = -(-self.num_data // size)

        def part(tensor: Tensor, step: int) -> Tensor:
            low = (step % each) * size
            return tensor.narrow(self._axis, low, min(size, self.num_data - low))

        def from_step(start: int) -> Iterator[Batch]:
            for step in range(start, each * count):
                yield self.rows.map(lambda tensor, step=step: part(tensor, step))  # type: ignore[misc]

        return Feed(each * count, from_step)

    def to(self, device: torch.device) -> "TensorData":
        return replace(self, rows=self.rows.map(lambda tensor: tensor.to(device)))

    def first(self) -> Batch:
        return self.rows

    def fingerprint(self) -> str:
        return self._marked(self.rows.fingerprint())


@dataclass(frozen=True)
class NoData(Data):
    """No rows: for a `Density`, which contains its data."""

    num_data: int = 0

    def minibatches(self, size: int | None, steps: int, key: Key) -> Feed:
        return Feed(steps, lambda start: (None for _ in range(start, steps)))

    def passes(self, size: int | None, count: int = 1) -> Feed:
        return Feed(count, lambda start: (None for _ in range(start, count)))

    def to(self, device: torch.device) -> "NoData":
        return self

    def first(self) -> Batch:
        raise BadData("This needs data. Pass (inputs, targets), a Dataset or a DataLoader.")

    def fingerprint(self) -> str:
        return "none"


def as_data(
    data: object,
    *,
    per_member: bool = False,
    augmentation: Augmentation | None = None,
    labels: str = LABELS,
    num_data: int | None = None,
) -> Data:
    """`Data` from (inputs, targets[, weights]) tensors or arrays, `Shards`, a `Dataset`, a `DataLoader`, `Data`, None.

    A mapping in place of the tuple, also as a batch of a loader, holds its targets in the entry `labels`. `per_member`
    says that all tensors have a leading member axis, (M, N, ...). `augmentation` changes the images of mini-batches
    only. `num_data` is the number of rows of an `IterableDataset` that does not know it (`infer` takes the joint's): a
    pass that gives another number is refused.

    >>> as_data((torch.zeros(5, 2), torch.zeros(5, 1))).num_data
    5
    """
    rows = _as_data(data, per_member, labels, num_data)
    if augmentation is None:
        return rows
    given: object = augmentation
    if not isinstance(given, Augmentation):
        hint = f" Call it: {given.__name__}()." if isinstance(given, type) else " Use Compose for several."
        raise TypeError(f"augmentation must be a policy such as Crop(4). Got {shown(given)}.{hint}")
    if not isinstance(rows, (TensorData, StreamData)):
        raise BadData(
            f"Augmentation needs rows of images, and {type(rows).__name__} has none. Pass tensors or a loader."
        )
    first = rows.first()
    check_images(augmentation, first.inputs, first.per_member)
    return replace(rows, augmentation=augmentation)


def _as_data(data: object, per_member: bool, labels: str, num_data: int | None) -> Data:
    if data is None:
        return NoData()
    if isinstance(data, Data):
        return data
    if isinstance(data, TensorDataset):
        data = data.tensors
    if isinstance(data, LabelledData):
        data = data.pair
    rows: Data
    if isinstance(data, Shards):
        if not data.has_targets:
            raise BadData("The files must have targets. Name them: read_shards(source, target=...).")
        rows = StreamData(data, len(data))
    elif isinstance(data, DataLoader):
        rows = StreamData(data, check_loader(data, num_data), labels=labels)
    elif isinstance(data, Dataset):
        rows = StreamData(data, check_dataset(data, num_data), labels=labels)
    else:
        rows = TensorData(as_batch(data, "the data", per_member, labels))
    if rows.num_data == 0:
        raise BadData("The data have no rows. Pass at least one.")
    return rows


def in_memory(data: Data) -> Data:
    """Read the rows of a `Dataset` or loader into memory, in their order; return other data unchanged.

    It serves methods that need all rows in every step. A loader that does not give every row once is refused.

    >>> rows = TensorDataset(torch.ones(5, 2), torch.zeros(5))
    >>> in_memory(as_data(DataLoader(rows, batch_size=2))).first().size
    5
    """
    if not isinstance(data, StreamData):
        return data
    batches = [batch for batch in data.passes(None).from_step(0) if batch is not None]
    return TensorData(joined(batches), data.augmentation)


class _Reading(Data):
    """Rows in memory, with mini-batches in other orders; full passes are in the order of `data`."""

    data: TensorData

    def __post_init__(self) -> None:
        object.__setattr__(self, "num_data", self.data.num_data)
        object.__setattr__(self, "augmentation", self.data.augmentation)

    def passes(self, size: int | None, count: int = 1) -> Feed:
        return self.data.passes(size, count)

    def to(self, device: torch.device) -> "_Reading":
        return replace(self, data=self.data.to(device))  # type: ignore[type-var]  # each kind is a dataclass

    def first(self) -> Batch:
        return self.data.first()

    def fingerprint(self) -> str:
        return self.data.fingerprint()


@dataclass(frozen=True, eq=False)
class OwnOrders(_Reading):
    """Rows in memory, shuffled separately for each member.

    Takes the data and a function from a key to the keys of the members. Mini-batches and augmented batches have a
    member axis, (M, n, ...); each member has its own draws of the augmentation. Other batches of all rows, and full
    passes, are those of the data.

    >>> data = TensorData(Batch(torch.arange(6.0).unsqueeze(1), torch.arange(6)))
    >>> orders = OwnOrders(data, lambda key: [key.fold(member) for member in range(2)])
    >>> orders.num_data, len(orders.minibatches(3, 10, Key(0)))
    (6, 10)
    """

    data: TensorData
    keys: Callable[[Key], Sequence[Key]]

    def minibatches(self, size: int | None, steps: int, key: Key) -> Feed:
        """See `Data`; a row of `orders` is the order of a member."""
        rows, count, policy, keys = self.data.rows, self.num_data, self.augmentation, self.keys(key)
        if size is None or size >= count:
            if policy is None:
                return self.data.minibatches(size, steps, key)
            if not rows.per_member:
                rows = rows.map(lambda tensor: tensor.expand(len(keys), *tensor.shape))._replace(per_member=True)
            every = rows
            return Feed(steps, lambda start: (every.augmented(policy, keys, t) for t in range(start, steps)))
        each, device = count // size, rows.targets.device
        if rows.per_member:  # the rows of all members, concatenated
            rows = rows.map(lambda tensor: tensor.flatten(0, 1))._replace(per_member=False)
        members = torch.arange(len(keys), device="cpu").unsqueeze(1) * (count if self.data.rows.per_member else 0)

        def taken(tensor: Tensor, index: Tensor) -> Tensor:
            return tensor.index_select(0, index).view(len(keys), -1, *tensor.shape[1:])

        def from_step(start: int) -> Iterator[Batch]:
            for epoch in range(start // each, -(-steps // each)):
                orders = torch.stack([own.fold(epoch).permutation(count, "cpu") for own in keys])
                first, last = max(start - epoch * each, 0), min(steps - epoch * each, each)
                # By batch, then by member: the rows of a batch are adjacent.
                orders = (orders + members)[:, : each * size].view(len(keys), each, size).transpose(0, 1)
                for number, index in enumerate(orders.reshape(each, -1).to(device)[first:last], first):
                    batch = rows.map(lambda tensor, index=index: taken(tensor, index))  # type: ignore[misc]
                    yield batch._replace(per_member=True).augmented(policy, keys, epoch * each + number)

        return Feed(steps, from_step)


@dataclass(frozen=True, eq=False)
class Reordered(_Reading):
    """The data shuffled by the key folded with `label`: the order of one member."""

    data: TensorData
    label: str

    def minibatches(self, size: int | None, steps: int, key: Key) -> Feed:
        return self.data.minibatches(size, steps, key.fold(self.label))

    def fingerprint(self) -> str:
        return f"{self.data.fingerprint()} {self.label}"
