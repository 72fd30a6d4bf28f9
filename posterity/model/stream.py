"""Rows that come batch by batch from a `DataLoader`, a `Dataset` or files."""

import logging
import random
from collections.abc import Callable, Iterator, Sized
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
    default_collate,
)

from posterity.datasets.shards import Block, Shards
from posterity.errors import BadData
from posterity.model.augmentation import Augmentation
from posterity.model.batch import LABELS, Batch, Data, Feed, as_batch, joined
from posterity.numerics.random import GlobalStates, Key

logger = logging.getLogger("posterity")

CPU = torch.device("cpu")
FIRST_ROWS = 256  # rows of a Dataset that are checked before a run


@dataclass(frozen=True, eq=False)
class StreamData(Data):
    """Rows that are streamed in batches from a `DataLoader`, from a `Dataset` indexed here, or from `Shards` of files.

    A loader keeps its own batch size, order and workers. Each pass begins from random states that depend on the
    key and the pass alone, so that a resumed run sees the same batches. A pass over an `IterableDataset` is one over
    its iterator, in its own order, and must give `num_data` rows. Batches that are mappings hold their targets in the
    entry `labels`. Blocks of `Shards` are checked and moved to the device once, and batches are cut from them.
    """

    source: Any
    num_data: int
    device: torch.device = CPU
    prepare: Callable[[Batch], Batch] | None = None
    augmentation: Augmentation | None = None
    labels: str = LABELS

    def minibatches(self, size: int | None, steps: int, key: Key) -> Feed:
        """See `Data`. A pass over a `Dataset` drops the last incomplete batch; a loader decides for itself."""
        each = self._each(size, shuffled=True)

        def from_step(start: int) -> Iterator[Batch]:
            for epoch in range(start // each, -(-steps // each)):
                first, last = max(start - epoch * each, 0), min(steps - epoch * each, each)
                batches = self._pass(size, key.fold(epoch), each, first)
                for index, batch in enumerate(islice(batches, max(0, last - first)), first):
                    yield batch.augmented(self.augmentation, key, epoch * each + index)

        return Feed(steps, from_step)

    def passes(self, size: int | None, count: int = 1) -> Feed:
        """See `Data`. A loader keeps its own order, and is refused unless it gives every row once."""
        if isinstance(self.source, DataLoader):
            _refuse_partial(self.source, self.num_data)
        each = self._each(size, shuffled=False)
        if isinstance(self.source, Shards):

            def from_batch(start: int) -> Iterator[Batch]:
                for number in range(start // each, count):
                    yield from self._pass(size, None, each, max(start - number * each, 0))

            return Feed(each * count, from_batch)

        def from_step(start: int) -> Iterator[Batch]:
            for number in range(start // each, count):
                rows = 0
                for index, batch in enumerate(self._pass(size, None, each)):
                    rows += batch.size
                    if index == each - 1 and rows != self.num_data:
                        raise BadData(f"A pass must see each of the {self.num_data} rows once. The loader gave {rows}.")
                    if number * each + index >= start:
                        yield batch

        return Feed(each * count, from_step)

    def to(self, device: torch.device) -> "StreamData":
        return replace(self, device=device)

    def prepared(self, prepare: Callable[[Batch], Batch]) -> "StreamData":
        """The data with `prepare` applied to every batch."""
        return replace(self, prepare=prepare)

    def first(self) -> Batch:
        """The first batch of a loader, the first rows of a `Dataset` or of files."""
        if isinstance(self.source, Shards):
            return self._whole(self.source.head)
        return next(self._pass(FIRST_ROWS, None, 1))

    def fingerprint(self) -> str:
        """Kind, length, a loader's batch size, the first batch's bytes, marks of files, and the augmentation.

        Of a loader or a `Dataset` no other bytes are read.
        """
        if isinstance(self.source, Shards):
            return self._marked(f"{self.num_data} rows of files {self.source.fingerprint}")
        batches = f" in batches of {self.source.batch_size}" if isinstance(self.source, DataLoader) else ""
        kind = f"{type(self.source).__name__} of {self.num_data} rows{batches}"
        return self._marked(f"{kind}, first {self.first().fingerprint()}")

    def refuse_unrepeatable(self) -> None:
        """Raise BadData for a loader whose workers keep random states between passes, which cannot be resumed."""
        if isinstance(self.source, DataLoader) and self.source.persistent_workers:
            raise BadData(
                "A run with checkpoints needs a DataLoader whose passes can be repeated, and persistent workers keep "
                "their random states. Pass one with persistent_workers=False."
            )

    def _each(self, size: int | None, shuffled: bool) -> int:
        """Number of batches of a pass."""
        if isinstance(self.source, DataLoader):
            return _num_batches(self.source, self.num_data) if self._iterable else len(self.source)
        size = self.num_data if size is None else min(size, self.num_data)
        return self.num_data // size if shuffled and not self._iterable else -(-self.num_data // size)

    @property
    def _iterable(self) -> bool:
        dataset = self.source.dataset if isinstance(self.source, DataLoader) else self.source
        return isinstance(dataset, IterableDataset)

    def _pass(self, size: int | None, key: Key | None, each: int, first: int = 0) -> Iterator[Batch]:
        """The `each` batches of one pass from number `first` on, in the order of `key`, or in their own without one."""
        if isinstance(self.source, Shards):
            return self._cut(self.source, self.num_data if size is None else min(size, self.num_data), key, first)
        return islice(self._loaded(size, key, each), first, None)

    def _cut(self, source: Shards, size: int, key: Key | None, first: int) -> Iterator[Batch]:
        """Batches of `size` rows from number `first` on, the last of the rows that are left, cut from blocks."""
        rest: Batch | None = None
        for block in source.blocks(key, first * size):
            batch, low = self._whole(block), max(0, first * size - block.start)
            if rest is not None:
                low = min(size - rest.size, batch.size)
                rest = joined([rest, _rows(batch, 0, low)])
                if rest.size < size:
                    continue
                yield rest
            while low + size <= batch.size:
                yield _rows(batch, low, size)
                low += size
            rest = _rows(batch, low, batch.size - low) if low < batch.size else None
        if rest is not None:
            yield rest

    def _whole(self, block: Block) -> Batch:
        """A block as a batch on the device, checked."""
        assert block.targets is not None
        batch = as_batch(Batch(block.inputs, block.targets, block.weights), "the files").map(
            lambda tensor: tensor.to(self.device)
        )
        return batch if self.prepare is None else self.prepare(batch)

    def _loaded(self, size: int | None, key: Key | None, each: int) -> Iterator[Batch]:
        """The `each` batches of one pass over a loader or a `Dataset`."""
        if isinstance(self.source, DataLoader):
            items = _keyed(lambda: iter(self.source), _generators(self.source), key or Key(0))
        else:
            items = _keyed(lambda: self._collated(size, key), [], key or Key(0))
        count, aside = 0, self.device.type != "cpu"  # towards the CPU, rows could be read before they have come
        batches = (as_batch(item, "each batch of the loader", labels=self.labels) for item in items)
        for given in islice(self._counted(batches) if self._iterable else batches, each):
            count += 1
            batch = given.map(lambda t: t.to(self.device, non_blocking=aside))
            yield batch if self.prepare is None else self.prepare(batch)
        if count < each:
            raise BadData(f"The DataLoader says that it has {each} batches and gave {count}. Make its __len__ right.")

    def _counted(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        """The batches of a pass over an iterator; BadData before its last one unless there are `num_data` rows."""
        left_out = 0
        if isinstance(self.source, DataLoader) and self.source.drop_last:
            left_out = max(1, self.source.num_workers) * ((self.source.batch_size or 1) - 1)
        rows, batch = 0, None
        while True:
            following = next(batches, None)
            rows += 0 if following is None else following.size
            if rows > self.num_data or (following is None and rows < self.num_data - left_out):
                raise BadData(
                    f"A pass over the IterableDataset must give num_data = {self.num_data} rows. Got "
                    f"{'' if following is None else 'at least '}{rows}. Make the Joint with the right num_data; with "
                    "several workers, let each give its own share of the rows (torch.utils.data.get_worker_info)."
                )
            if batch is not None:
                yield batch
            if following is None:
                return
            batch = following

    def _collated(self, size: int | None, key: Key | None) -> Iterator[object]:
        size = self.num_data if size is None else min(size, self.num_data)
        if self._iterable:
            items = iter(self.source)
            while rows := list(islice(items, size)):
                yield default_collate(rows)
            return
        order = range(self.num_data) if key is None else key.permutation(self.num_data, "cpu").tolist()
        for low in range(0, self.num_data, size):
            yield default_collate([self.source[index] for index in order[low : low + size]])


def _rows(batch: Batch, low: int, count: int) -> Batch:
    return batch.map(lambda tensor: tensor.narrow(0, low, count))


class _Sampling(NamedTuple):
    """The sampler of a loader's rows, the size of its batches (1 if unknown), and whether it drops the last rows."""

    rows: Any
    batch_size: int
    drop_last: bool


def _sampling(loader: "DataLoader[Any]") -> _Sampling:
    batches: Any = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
    rows = getattr(batches, "sampler", batches) if isinstance(batches, BatchSampler) else batches
    return _Sampling(rows, getattr(batches, "batch_size", 1), getattr(batches, "drop_last", False))


def check_loader(loader: "DataLoader[Any]", num_data: int | None = None) -> int:
    """Number of rows of a loader's data, or `num_data` where they are iterated over; BadData where it is unknown."""
    sampler, dataset = _sampling(loader).rows, loader.dataset
    if isinstance(sampler, SubsetRandomSampler):
        return len(sampler)
    single = loader.batch_sampler is None and not isinstance(loader.sampler, BatchSampler)
    if single and not isinstance(dataset, IterableDataset):
        raise BadData("The DataLoader must give batches, not single rows. Give it a batch_size.")
    return check_dataset(dataset, num_data)


def check_dataset(dataset: "Dataset[Any]", num_data: int | None) -> int:
    """Number of rows of a data set, or `num_data` where it is iterated over; BadData where it is unknown."""
    if isinstance(dataset, Sized):
        return len(dataset)
    if isinstance(dataset, IterableDataset) and num_data is not None:
        return num_data
    raise BadData(
        "The data have no known number of rows, so the likelihood cannot be scaled to the whole data. Give the Dataset "
        "a __len__; that of an IterableDataset may be said by as_data(data, num_data=...)."
    )


_COUNTED: "WeakKeyDictionary[DataLoader[Any], int]" = WeakKeyDictionary()


def _num_batches(loader: "DataLoader[Any]", num_data: int) -> int:
    """Number of batches of a pass over an iterator; where workers share it, or it gives batches, by reading them."""
    if loader.batch_size is not None and loader.num_workers <= 1:
        return num_data // loader.batch_size if loader.drop_last else -(-num_data // loader.batch_size)
    if loader not in _COUNTED:
        logger.info("an IterableDataset is read once to count its batches")
        _COUNTED[loader] = sum(1 for _ in _keyed(lambda: iter(loader), _generators(loader), Key(0)))
    return _COUNTED[loader]


def _refuse_partial(loader: "DataLoader[Any]", num_data: int) -> None:
    """Refuse a loader whose passes evidently do not see every row once."""
    sampling, reason = _sampling(loader), ""
    if sampling.drop_last and num_data % sampling.batch_size:
        reason = "drop_last=True"
    elif isinstance(sampling.rows, WeightedRandomSampler):
        reason = "a WeightedRandomSampler"
    elif isinstance(sampling.rows, RandomSampler) and sampling.rows.replacement:
        reason = "a RandomSampler with replacement"
    if reason:
        raise BadData(
            f"This method needs every row once, but the DataLoader has {reason}. Pass one that visits each row in turn."
        )


def in_order(loader: "DataLoader[Any]") -> Iterator[object]:
    """The items of a loader that gives every row once, in order (else BadData); generators keep their states."""
    sampling = _sampling(loader)
    shuffled = (RandomSampler, SubsetRandomSampler, WeightedRandomSampler, DistributedSampler)
    if isinstance(sampling.rows, shuffled) or (
        sampling.drop_last
        and (isinstance(loader.dataset, IterableDataset) or check_loader(loader) % sampling.batch_size)
    ):
        raise BadData(
            "The DataLoader shuffles or drops rows, so what comes out would not line up with the rows. "
            "Pass one with shuffle=False and drop_last=False."
        )
    return _keyed(lambda: iter(loader), _generators(loader), Key(0))


def input_parts(inputs: object) -> Iterator[object]:
    """Yield the inputs of a loader batch by batch and in order, those of files block by block, and others whole."""
    if isinstance(inputs, DataLoader):
        yield from (item[0] if isinstance(item, (tuple, list)) else item for item in in_order(inputs))
    elif isinstance(inputs, Shards):
        yield from (block.inputs for block in inputs.blocks())
    else:
        yield inputs


def _generators(loader: "DataLoader[Any]") -> list[torch.Generator]:
    """The generators of a loader and its samplers, each once."""
    owners = (loader, loader.sampler, loader.batch_sampler, _sampling(loader).rows)
    return list({id(g): g for o in owners if isinstance(g := getattr(o, "generator", None), torch.Generator)}.values())


def _keyed(begin: Callable[[], Iterator[object]], own: list[torch.Generator], key: Key) -> Iterator[object]:
    """The items of `begin()`, made under random states that depend on `key` alone.

    The states of torch, numpy, `random` and the generators `own` are restored after each item.
    """
    generators = [torch.default_generator, *own]
    numpy_state = np.random.RandomState(key.seed % 2**32).get_state()
    torch_states = [key.generator(generator.device).get_state() for generator in generators]
    inside = GlobalStates(random.Random(key.seed).getstate(), numpy_state, torch_states)
    iterator: Iterator[object] | None = None
    while True:
        outside = GlobalStates.now(generators)
        inside.restore(generators)
        try:
            iterator = begin() if iterator is None else iterator
            item = next(iterator)
        except StopIteration:
            return
        finally:
            inside = GlobalStates.now(generators)
            outside.restore(generators)
        yield item
