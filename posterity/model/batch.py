"""Inputs, batches of rows with targets and weights, and the interface of data."""

import hashlib
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice, pairwise
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor

from posterity.errors import BadData, shown
from posterity.model.augmentation import Augmentation, check_images
from posterity.numerics.random import Key

logger = logging.getLogger("posterity")

Inputs: TypeAlias = Tensor | tuple["Inputs", ...] | dict[str, "Inputs"]

LABELS = "labels"
"""The entry of a batch that holds the targets, by the convention of Hugging Face, where the batch is a mapping."""


def map_inputs(function: Callable[[Tensor], Tensor], inputs: Inputs) -> Inputs:
    """`function` applied to every tensor of `inputs`."""
    if isinstance(inputs, Tensor):
        return function(inputs)
    if isinstance(inputs, Mapping):
        return {name: map_inputs(function, value) for name, value in inputs.items()}
    return tuple(map_inputs(function, value) for value in inputs)


def named_tensors(inputs: Inputs, name: str = "inputs") -> dict[str, Tensor]:
    """Every tensor of `inputs` under a name fit for an error message."""
    if isinstance(inputs, Tensor):
        return {name: inputs}
    parts = inputs.items() if isinstance(inputs, Mapping) else enumerate(inputs)
    return {own: tensor for key, part in parts for own, tensor in named_tensors(part, f"{name}[{key!r}]").items()}


def num_rows(inputs: Inputs, axis: int = 0) -> int:
    """Number of rows of the tensors along `axis`."""
    return next(iter(named_tensors(inputs).values())).shape[axis]


class Batch(NamedTuple):
    """Rows: inputs, targets, and weights (n,) that multiply each row's log-likelihood, or None.

    Weights may also be one for each entry of a row's target, (n, *entries): tokens, pixels, outputs. `per_member` says
    that every tensor has a leading member axis, (M, n, ...). `checked` says that a `Joint` has checked the targets;
    others are checked in every call, since a label out of range would end a GPU's context. `complete` says that it
    saw no missing target.
    """

    inputs: Inputs
    targets: Tensor
    weights: Tensor | None = None
    per_member: bool = False
    checked: bool = False
    complete: bool = False

    @property
    def rows_axis(self) -> int:
        """The axis of the rows, after that of members."""
        return 1 if self.per_member else 0

    @property
    def size(self) -> int:
        """Number of rows (for each member)."""
        return self.targets.shape[self.rows_axis]

    @property
    def tensors(self) -> dict[str, Tensor]:
        """Every tensor under a name fit for an error message."""
        weights = {} if self.weights is None else {"weights": self.weights}
        return {**named_tensors(self.inputs), "targets": self.targets, **weights}

    def member(self, index: int) -> "Batch":
        """The batch as member `index` sees it."""
        if not self.per_member:
            return self
        weights = None if self.weights is None else self.weights[index]
        inputs, targets = map_inputs(lambda x: x[index], self.inputs), self.targets[index]
        return Batch(inputs, targets, weights, checked=self.checked, complete=self.complete)

    def rows(self, low: int, high: int) -> "Batch":
        """The rows low .. high - 1, in the same memory."""
        return self.map(lambda tensor: tensor.narrow(self.rows_axis, low, high - low))

    def fingerprint(self) -> str:
        """Hash of every byte."""
        digest = hashlib.blake2b(str(self.per_member).encode(), digest_size=16)
        for name, tensor in self.tensors.items():
            digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
            digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
        return digest.hexdigest()

    def map(self, function: Callable[[Tensor], Tensor]) -> "Batch":
        """`function` applied to every tensor, in the order of `tensors`."""
        inputs, targets = map_inputs(function, self.inputs), function(self.targets)
        weights = None if self.weights is None else function(self.weights)
        return self._replace(inputs=inputs, targets=targets, weights=weights)

    def augmented(self, augmentation: Augmentation | None, key: Key | Sequence[Key], step: int) -> "Batch":
        """The batch of a step with augmented images, by the key of the feed or a key for each member."""
        if augmentation is None:
            return self
        check_images(augmentation, self.inputs, self.per_member)
        assert isinstance(self.inputs, Tensor)
        own = [each.fold("augmentation").fold(step) for each in ([key] if isinstance(key, Key) else key)]
        return self._replace(inputs=augmentation(self.inputs, own))


@dataclass(frozen=True)
class Feed:
    """The batches of a run: `steps` of them, the t-th independent of what was drawn before."""

    steps: int
    from_step: Callable[[int], Iterator[Batch | None]]

    def __len__(self) -> int:
        return self.steps

    def with_passes(self, passes: "Feed", after: Sequence[int]) -> "Feed":
        """These batches, with all of `passes` inserted after each of the increasing step numbers `after`.

        >>> letters, digits = (Feed(len(text), lambda start, text=text: iter(text[start:])) for text in ("abc", "12"))
        >>> "".join(letters.with_passes(digits, (1, 3)).from_step(2))
        '2bc12'
        """
        pieces = []  # (feed, first step, last step)
        for first, last in pairwise((0, *after)):
            pieces += [(self, first, last), (passes, 0, len(passes))]
        pieces.append((self, after[-1] if after else 0, self.steps))

        def from_step(start: int) -> Iterator[Batch | None]:
            for feed, first, last in pieces:
                if start < last - first:
                    yield from islice(feed.from_step(first + start), last - first - start)
                start = max(0, start - (last - first))

        return Feed(self.steps + len(after) * len(passes), from_step)


class Data(ABC):
    """Training rows, and the orders in which methods request them.

    An `augmentation` changes the images of mini-batches, by draws keyed by the step; full passes (curvature, M-steps,
    scores) see the rows unchanged.
    """

    num_data: int
    augmentation: Augmentation | None = None

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

    def sample(self, count: int, *, for_all: bool = True) -> Batch:
        """At most `count` rows at equal distances through a pass, with their own weights, or `for_all` for all rows.

        Where the shapes of batches differ, they are those of the shape that most of them have, which is logged; where a
        loader does not give every row once, those of the first batch.
        """
        try:
            parts = list(_every(-(-self.num_data // count), self.passes(1024).from_step(0)))
        except BadData:
            first = self.first()
            parts = list(_every(-(-first.size // count), [first]))
        groups: dict[object, list[Batch]] = {}
        for part in parts:
            shapes = tuple(tensor.shape[part.rows_axis + 1 :] for tensor in batch_tensors(part))
            groups.setdefault(shapes, []).append(part)
        sizes = {shapes: sum(part.size for part in group) for shapes, group in groups.items()}
        largest = max(sizes, key=lambda shapes: sizes[shapes])
        if len(groups) > 1:
            total = sum(sizes.values())
            logger.warning(
                f"batches differ in shape: settings are chosen by {sizes[largest]} rows of one shape, out of {total}. "
                "Pad all rows to one length, or give what is chosen."
            )
        sample = joined(groups[largest])
        if not for_all:
            return sample
        weights = sample.targets.new_ones(sample.targets.shape[: sample.rows_axis + 1], dtype=torch.float64)
        weights = (weights if sample.weights is None else sample.weights) * (self.num_data / sample.size)
        return sample._replace(weights=weights)

    @abstractmethod
    def fingerprint(self) -> str:
        """A short string that differs when the data differ."""

    def _marked(self, fingerprint: str) -> str:
        """Append the augmentation, if any, to the fingerprint of the rows."""
        return fingerprint if self.augmentation is None else f"{fingerprint} augmented by {self.augmentation!r}"


def _every(stride: int, batches: Iterable[Batch | None]) -> Iterator[Batch]:
    """Every `stride`-th row of these batches."""
    seen = 0
    for batch in batches:
        assert batch is not None
        rows = torch.arange(-seen % stride, batch.size, stride, device=batch.targets.device)
        yield batch.map(partial(torch.index_select, dim=batch.rows_axis, index=rows))
        seen += batch.size


def batch_tensors(batch: Batch) -> tuple[Tensor, ...]:
    """The tensors of a batch, in the order of its `map`."""
    return tuple(batch.tensors.values())


def joined(parts: Sequence[Batch]) -> Batch:
    """One batch of the rows of all parts."""
    each = zip(*map(batch_tensors, parts), strict=True)
    tensors = iter([torch.cat(tensors, parts[0].rows_axis) for tensors in each])
    return parts[0].map(lambda _: next(tensors))._replace(complete=all(part.complete for part in parts))


def as_batch(item: object, what: str, per_member: bool = False, labels: str = LABELS) -> Batch:
    """(inputs, targets[, weights]) as a Batch of tensors with equal numbers of rows; `what` names them in errors.

    A mapping holds its targets in the entry `labels`; the others are the inputs, by name.
    """
    if isinstance(item, Batch):
        return _consistent(item)
    if isinstance(item, Mapping):
        if labels not in item:
            raise BadData(
                f"Wanted {what} as a mapping with its targets in '{labels}'. Got entries {', '.join(map(repr, item))}. "
                "Name the one that holds them: Network(module, labels='...')."
            )
        item = (without_labels(item, labels), item[labels])
    if not isinstance(item, (tuple, list)) or len(item) not in (2, 3):
        raise BadData(
            f"Wanted {what} as (inputs, targets) or (inputs, targets, weights). Got {shown(item)}. "
            "Pass a pair of tensors or arrays; several inputs go in a tuple or a dict as the first of the pair."
        )
    weights = as_tensor(item[2], "weights") if len(item) == 3 and item[2] is not None else None
    return _consistent(Batch(as_inputs(item[0]), as_tensor(item[1], "targets"), weights, per_member))


def without_labels(batch: Mapping[Any, Any], labels: str) -> dict[Any, Any]:
    """The entries of a batch but its labels."""
    return {name: value for name, value in batch.items() if name != labels}


def as_inputs(inputs: object, attached: bool = False, name: str = "inputs") -> Inputs:
    """Network inputs from a tensor or array, or a tuple, list or mapping of inputs, nested in any way.

    Tensors are detached from their graph unless `attached`.
    """
    if isinstance(inputs, (Mapping, tuple, list)) and not len(inputs):
        raise BadData(f"{name} must hold at least one tensor. Got none.")
    if isinstance(inputs, Mapping):
        return {str(key): as_inputs(value, attached, f"{name}['{key}']") for key, value in inputs.items()}
    nested = (Tensor, Mapping, tuple, list)
    if isinstance(inputs, (tuple, list)) and (isinstance(inputs[0], nested) or hasattr(inputs[0], "__array__")):
        return tuple(as_inputs(value, attached, f"{name}[{index}]") for index, value in enumerate(inputs))
    return as_tensor(inputs, name, attached)


def as_tensor(value: object, name: str, attached: bool = False) -> Tensor:
    """Convert a tensor or array to a tensor, detached unless `attached`; it shares memory where it can."""
    if isinstance(value, Tensor):
        return value if attached else value.detach()
    if not hasattr(value, "__array__"):
        remedy = " Leave out of a batch what is no tensor, as by a collate_fn." if name.startswith("inputs[") else ""
        raise BadData(f"{name} must be a tensor or an array. Got {shown(value)}.{remedy}")
    array = np.asarray(value)
    if array.dtype.kind not in "fiub":
        raise BadData(f"{name} must hold numbers. Got an array of {array.dtype}. Encode it as numbers first.")
    # torch takes neither foreign byte orders nor negative strides, and warns of arrays that may not be written to
    array = np.require(array, array.dtype.newbyteorder("="), ["C", "W"])
    try:
        return torch.from_numpy(array)
    except TypeError as error:
        raise BadData(
            f"{name}: torch has no numbers of {array.dtype}. Convert with array.astype('float64')."
        ) from error


def _consistent(batch: Batch) -> Batch:
    """Return the batch; raises BadData unless all tensors have the same rows (and members)."""
    lead = 2 if batch.per_member else 1
    for name, tensor in batch.tensors.items():
        if tensor.dim() < lead:
            raise BadData(
                f"{name} must have one row for each data point{' of each member' if batch.per_member else ''}. "
                f"Got shape {tuple(tensor.shape)}."
            )
        if batch.per_member and tensor.shape[0] != num_rows(batch.inputs):
            raise BadData(
                "inputs, targets and weights must have the same number of members. "
                f"Got {num_rows(batch.inputs)} of inputs and {tensor.shape[0]} of {name}."
            )
        if tensor.shape[lead - 1] != num_rows(batch.inputs, lead - 1):
            raise BadData(
                "inputs, targets and weights must have the same number of rows. "
                f"Got {num_rows(batch.inputs, lead - 1)} rows of inputs and {tensor.shape[lead - 1]} of {name}."
            )
    weights = batch.weights
    fits = weights is None or weights.dim() == lead or weights.shape == batch.targets.shape
    if weights is not None and not (fits and bool((torch.isfinite(weights) & (weights >= 0)).all())):
        raise BadData(
            "weights must be one finite number >= 0 for each row, or one for each target, "
            f"{tuple(batch.targets.shape)}. Got {shown(weights)}."
        )
    return batch
