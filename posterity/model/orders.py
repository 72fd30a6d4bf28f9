"""Rows in other orders: one for each member, or that of one member."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from posterity.model.batch import Batch, Data, Feed
from posterity.model.data import TensorData
from posterity.numerics.random import Key


@dataclass(frozen=True, eq=False)
class OwnOrders(Data):
    """Rows in memory that each member sees newly shuffled by a key of its own.

    Takes the data and a function from a key to the keys of the members. Mini-batches have a member axis, (M, n, ...),
    as all batches that are augmented, by draws of each member's own; batches of all rows, and passes over them in their
    own order, are those of the data.

    >>> data = TensorData(Batch(torch.arange(6.0).unsqueeze(1), torch.arange(6)))
    >>> orders = OwnOrders(data, lambda key: [key.fold(member) for member in range(2)])
    >>> orders.num_data, len(orders.minibatches(3, 10, Key(0)))
    (6, 10)
    """

    data: TensorData
    keys: Callable[[Key], Sequence[Key]]

    def __post_init__(self) -> None:
        object.__setattr__(self, "num_data", self.data.num_data)
        object.__setattr__(self, "augmentation", self.data.augmentation)

    def minibatches(self, size: int | None, steps: int, key: Key) -> Feed:
        """See `Data`; a row of `order` is the order of a member."""
        rows, count, policy, keys = self.data.rows, self.num_data, self.augmentation, self.keys(key)
        if size is None or size >= count:
            if policy is None:
                return self.data.minibatches(size, steps, key)
            if not rows.per_member:
                rows = rows.map(lambda tensor: tensor.expand(len(keys), *tensor.shape))._replace(per_member=True)
            every = rows
            return Feed(steps, lambda start: (every.augmented(policy, keys, t) for t in range(start, steps)))
        each, device = count // size, rows.targets.device
        if rows.per_member:  # members one behind the other
            rows = rows.map(lambda tensor: tensor.flatten(0, 1))._replace(per_member=False)
        members = torch.arange(len(keys), device="cpu").unsqueeze(1) * (count if self.data.rows.per_member else 0)

        def taken(tensor: Tensor, index: Tensor) -> Tensor:
            return tensor.index_select(0, index).view(len(keys), -1, *tensor.shape[1:])

        def from_step(start: int) -> Iterator[Batch]:
            for epoch in range(start // each, -(-steps // each)):
                orders = torch.stack([own.fold(epoch).permutation(count, "cpu") for own in keys])
                first, last = max(start - epoch * each, 0), min(steps - epoch * each, each)
                # By batch, then by member: the rows of a batch lie behind each other.
                orders = (orders + members)[:, : each * size].view(len(keys), each, size).transpose(0, 1)
                for place, index in enumerate(orders.reshape(each, -1).to(device)[first:last], first):
                    batch = rows.map(lambda tensor, index=index: taken(tensor, index))  # type: ignore[misc]
                    yield batch._replace(per_member=True).augmented(policy, keys, epoch * each + place)

        return Feed(steps, from_step)

    def passes(self, size: int | None, count: int = 1) -> Feed:
        """Those of the data."""
        return self.data.passes(size, count)

    def to(self, device: torch.device) -> "OwnOrders":
        """See `Data`."""
        return OwnOrders(self.data.to(device), self.keys)

    def first(self) -> Batch:
        """All rows."""
        return self.data.first()

    def fingerprint(self) -> str:
        """That of the data: the orders follow from keys."""
        return self.data.fingerprint()


@dataclass(frozen=True, eq=False)
class Reordered(Data):
    """The data, shuffled by the key that is folded with `label`: as one member of many sees them."""

    data: TensorData
    label: str

    def __post_init__(self) -> None:
        object.__setattr__(self, "num_data", self.data.num_data)
        object.__setattr__(self, "augmentation", self.data.augmentation)

    def minibatches(self, size: int | None, steps: int, key: Key) -> Feed:
        """See `Data`."""
        return self.data.minibatches(size, steps, key.fold(self.label))

    def passes(self, size: int | None, count: int = 1) -> Feed:
        """Those of the data."""
        return self.data.passes(size, count)

    def to(self, device: torch.device) -> "Reordered":
        """See `Data`."""
        return Reordered(self.data.to(device), self.label)

    def first(self) -> Batch:
        """All rows."""
        return self.data.first()

    def fingerprint(self) -> str:
        """That of the data, and the label."""
        return f"{self.data.fingerprint()} {self.label}"
