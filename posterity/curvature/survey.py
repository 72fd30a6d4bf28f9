"""How a network uses its random weights: found by running it on a few rows, which also shows what it must not do."""

import logging
from collections import Counter
from dataclasses import dataclass
from math import prod
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from posterity.model.inputs import Inputs, map_inputs, named_tensors, num_rows
from posterity.model.joint import Joint
from posterity.model.network import Network
from posterity.numerics.block import Block
from posterity.numerics.uses import ConvolutionUse, EmbeddingUse, LinearUse, Use
from posterity.numerics.weight_uses import WeightUses

logger = logging.getLogger("posterity")


@dataclass(frozen=True)
class Place:
    """A block of weights that go together, and how they act: as a matrix, as a table, or in some other way."""

    block: Block
    kind: str  # "matrix", "table" or "plain"
    groups: int = 1
    positions: int = 1
    head: bool = False  # whether the output of the layer is that of the network


@dataclass(frozen=True, eq=False)
class Survey:
    """What is known of a network's random weights: where they lie among the R, and which rules they have.

    `places` part the weights of all random tensors; `explicit` are the tensors without a rule, with the reason. R is
    `total`, unless `select` chooses entries of it.
    """

    offsets: dict[str, int]
    total: int
    select: Tensor | None
    places: tuple[Place, ...]
    tracked: tuple[str, ...]
    explicit: dict[str, str]
    event: tuple[int, ...]
    row_entries: int = 0  # numbers that a row takes for each column of derivatives
    row_features: int = 0  # numbers that its features take, patches of convolutions included

    @property
    def head(self) -> Block | None:
        """Where the weights of the output layer lie, if the network ends in a linear one."""
        return next((place.block for place in self.places if place.head), None)

    @property
    def only_head(self) -> bool:
        """Whether all random weights are those of the output layer, each used once."""
        return self.head is not None and self.head.size == self.total and self.select is None and not self.explicit

    @property
    def size(self) -> int:
        """R."""
        return self.total if self.select is None else self.select.numel()

    def block(self, use: Use) -> Block:
        """Where the weights of a use lie."""
        weight = None if use.weight is None else self.offsets[use.weight]
        bias = None if use.bias is None else self.offsets[use.bias]
        return Block(use.names, *use.shape, weight, bias)


_KNOWN: WeakKeyDictionary[Network, dict[tuple[object, ...], Survey]] = WeakKeyDictionary()


def survey(joint: Joint, inputs: Inputs) -> Survey:
    """The survey of a joint's network at inputs of this kind, made once for each."""
    shapes = tuple((name, tuple(t.shape[1:]), t.dtype) for name, t in named_tensors(inputs).items())
    key = (id(joint.random) if isinstance(joint.random, Tensor) else joint.random, shapes)
    known = _KNOWN.setdefault(joint.network, {})
    if key not in known:
        known[key] = _survey(joint, inputs)
    return known[key]


def last_layer(joint: Joint, inputs: Inputs) -> tuple[str, ...]:
    """Names of the weights of the last linear or convolutional layer that the network runs."""
    network = joint.network.member(0)
    weights = [view.detach() for view in network.views(network.initial)]
    with WeightUses(dict(zip(network.layout.names, weights, strict=True))) as seen:
        network.run(weights, _few(inputs, 1))
    layers = [use for use in seen.uses if isinstance(use, (LinearUse, ConvolutionUse)) and use.weight is not None]
    if not layers:
        raise ValueError(
            "No last layer was found: the network has no linear or convolutional layer whose weights are in theta. "
            "Name the weights yourself: subset=Matching('head.*')."
        )
    return layers[-1].names


def _few(inputs: Inputs, count: int) -> Inputs:
    """`count` rows, beginning again where there are fewer."""
    index = torch.arange(count) % num_rows(inputs)
    return map_inputs(lambda tensor: tensor[index.to(tensor.device)], inputs)


def _survey(joint: Joint, inputs: Inputs) -> Survey:
    network = joint.network.member(0)
    slices = joint.random_slices
    offsets, total = {}, 0
    for part in slices:
        offsets[part.name] = total
        total += part.size
    select = None
    if isinstance(joint.random, Tensor):
        assert joint.random_indices is not None
        where = torch.cat([torch.arange(p.offset, p.offset + p.size) for p in slices]).to(joint.device)
        select = torch.searchsorted(where, joint.random_indices)
    uses, outputs, last, explicit = _look(network, tuple(offsets), inputs)
    count = Counter(name for use in uses for name in use.names)
    tied = {name for name, times in count.items() if times > 1}
    draft = Survey(offsets, total, select, (), tuple(n for n in offsets if n not in explicit), explicit, outputs)
    places, placed = [], set()
    for use in uses:
        if tied.isdisjoint(use.names) and not any(name in explicit for name in use.names):
            kind = {LinearUse: "matrix", ConvolutionUse: "matrix", EmbeddingUse: "table"}.get(type(use), "plain")
            groups = use.window.groups if isinstance(use, ConvolutionUse) else 1
            head = use is last and isinstance(use, LinearUse) and use.weight is not None and len(use.output_shape) == 2
            places.append(Place(draft.block(use), kind, groups, _positions(use), head))
            placed |= set(use.names)
    sizes = {part.name: part.size for part in slices}
    places += [Place(Block((name,), sizes[name], 1, offsets[name]), "plain") for name in offsets if name not in placed]
    entries = sum(prod(use.output_shape[1:]) for use in uses)
    features = sum(_positions(use) * use.shape[1] for use in uses if not isinstance(use, EmbeddingUse))
    for name, reason in explicit.items():
        logger.info("curvature of '%s' by whole Jacobians, because %s", name, reason)
    return Survey(
        offsets, total, select, tuple(places), draft.tracked, explicit, outputs,
        max(entries, sum(sizes[name] for name in explicit)), features,
    )  # fmt: skip


def _positions(use: Use) -> int:
    if isinstance(use, ConvolutionUse):
        return prod(use.output_shape[2:])
    return prod(use.output_shape[1:-1])


def _look(
    network: Network, names: tuple[str, ...], inputs: Inputs
) -> tuple[list[Use], tuple[int, ...], Use | None, dict[str, str]]:
    """(uses with a rule, shape of an output row, the use that makes the outputs, {weight without a rule: why})."""
    weights = [view.detach().clone() for view in network.views(network.initial)]
    tracked = {n: w.requires_grad_() for n, w in zip(network.layout.names, weights, strict=True) if n in names}
    leading: dict[str, list[int]] = {}
    runs = []
    for rows in (2, 2, 3):
        with torch.enable_grad(), WeightUses(tracked) as seen:
            outputs = network.run(weights, _few(inputs, rows))[0]
        for use in seen.uses:
            for name in use.names:
                leading.setdefault(name, []).append(use.output_shape[0] - rows)
        runs.append((outputs, seen))
    _refuse_random(*(outputs for outputs, _ in runs))
    outputs, seen = runs[-1]
    explicit = {name: reason for name, reason in seen.unknown.items() if name in names}
    for name, differences in leading.items():
        if any(differences):
            explicit.setdefault(name, "its layer does not have the rows on the first axis")
    for use in seen.uses:
        if use.overwritten:
            explicit.update(dict.fromkeys(use.names, "the input of its layer is overwritten in place later"))
    if outputs.requires_grad:
        grads = torch.autograd.grad(outputs, list(tracked.values()), torch.ones_like(outputs), allow_unused=True)
        for name, grad in zip(tracked, grads, strict=True):
            if grad is not None:
                explicit.setdefault(name, "it acts through an operation that could not be seen")
    made = [use for use in seen.uses if use.edge.node is outputs.grad_fn]
    return seen.uses, tuple(outputs.shape[1:]), made[0] if made else None, explicit


def _refuse_random(first: Tensor, again: Tensor, more: Tensor) -> None:
    """A ValueError where equal inputs give unequal outputs, or a row depends on those beside it."""
    if not torch.allclose(first, again, rtol=1e-6, atol=1e-8, equal_nan=True):
        raise ValueError(
            "The module draws random numbers even in evaluation mode: two runs on the same rows differ. Curvature "
            "needs a fixed function: draw with torch.nn.Dropout, which is off here, or remove the noise."
        )
    if not torch.allclose(first, more[:2], rtol=1e-3, atol=1e-5 * float(first.detach().abs().max()), equal_nan=True):
        raise ValueError(
            "The module mixes the rows of a batch: a row's outputs change with the rows beside it. Curvature needs a "
            "likelihood that factorises over rows: use a layer that treats rows one by one (batch norm with "
            "track_running_stats=True, layer norm)."
        )
