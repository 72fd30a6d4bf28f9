"""Surveys of how a network uses its weights: which have factored Jacobians, and which need whole ones."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from math import prod
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from posterity.curvature.explicit import float32_products, plain_recurrence
from posterity.jacobians.recording import WeightUses
from posterity.jacobians.uses import (
    LAYOUTS,
    PACKED,
    ConvolutionUse,
    EmbeddingUse,
    LinearUse,
    TransposedConvolutionUse,
    Use,
    possible_layouts,
)
from posterity.model.batch import Inputs, map_inputs, named_tensors, num_rows
from posterity.model.joint import Joint
from posterity.model.network import Network
from posterity.numerics.layout import Block

PLAIN = "plain"
"""The kind of a layer that acts neither as a matrix nor as a table."""
_VIEWS = frozenset(
    f"{name}Backward0"
    for name in ("View", "UnsafeView", "Transpose", "Permute", "T", "Unsqueeze", "Clone", "Alias", "Squeeze", "ToCopy")
) | {"SqueezeBackward1", "SqueezeBackward2", "ReshapeAliasBackward0"}
"""Nodes of a graph that move entries, or widen them from half precision, and change none."""


@dataclass(frozen=True)
class Place:
    """The weights of a layer: where they lie, and whether they act as a matrix, a table, or in another way."""

    block: Block
    kind: str  # "matrix", "table" or "plain"
    groups: int = 1
    positions: int = 1
    head: bool = False  # whether this is the output layer, with one position
    output: bool = False  # whether its outputs are those of the network, at any number of positions
    times: int = 1  # uses in a pass, which count as positions
    direct: bool = True  # whether the module itself calls a linear map or convolution by whole tensors, rows first


@dataclass(frozen=True, eq=False)
class Survey:
    """Random weights of a network: their offsets among the R, and the rules that differentiate them.

    `places` partition the random tensors; `explicit` maps tensors without a rule to the reason. R is `total`, unless
    `select` chooses entries of it.
    """

    offsets: dict[str, int]
    total: int
    select: Tensor | None
    places: tuple[Place, ...]
    tracked: tuple[str, ...]
    explicit: dict[str, str]
    event: tuple[int, ...]
    row_entries: int = 0  # entries per row for each column of derivatives
    row_features: int = 0  # entries per row of the features, patches of convolutions included
    times: Mapping[str, int] = field(default_factory=dict)  # number of uses per pass of each tensor with a rule
    layouts: Mapping[str, str] = field(default_factory=dict)  # where the rows lie in the layers of each of these

    @property
    def head(self) -> Block | None:
        """The block of the output layer, if it is linear."""
        return next((place.block for place in self.places if place.head), None)

    @property
    def output(self) -> Block | None:
        """The block of the layer whose outputs are those of the network, channel by class and position by position."""
        return next((place.block for place in self.places if place.output), None)

    @property
    def only_output(self) -> bool:
        """Whether the output layer holds all random weights, each used once."""
        return self.output is not None and self.output.size == self.total and self.select is None and not self.explicit

    @property
    def only_head(self) -> bool:
        """Whether it does so, and has one position."""
        return self.only_output and self.head is not None

    @property
    def size(self) -> int:
        """R."""
        return self.total if self.select is None else self.select.numel()

    def checked(self, uses: Sequence[Use], rows: int) -> list[Use]:
        """The uses of a pass over `rows` rows, arranged; raises a ValueError where they differ from the survey's."""
        for name, times in Counter(name for use in uses for name in use.names).items():
            if times > self.times[name]:
                raise ValueError(
                    f"'{name}' must be used equally often for all rows. A batch used it {times} times, and the rows "
                    f"looked at first {self.times[name]}. Run the layer the same number of times whatever the inputs."
                )
        for use in uses:
            if self.layouts[use.names[0]] not in possible_layouts(use.output_shape, rows):
                raise ValueError(
                    f"The layer of '{use.names[0]}' must run on all rows of a batch. It ran on "
                    f"{use.output_shape[0]} of {rows}, though on all of those looked at first. Run it on every row and "
                    "choose among its outputs."
                )
        return [use.arranged(self.layouts[use.names[0]], rows) for use in uses]

    def block(self, use: Use) -> Block:
        """The block of the weights of a use."""
        stored = use.shape[0] if use.transposed else use.shape[1]  # entries of a row as it lies in the vector
        weight = None if use.weight is None else self.offsets[use.weight] + use.first_row * stored
        bias = None if use.bias is None else self.offsets[use.bias] + use.first_bias
        return Block(use.names, *use.shape, weight, bias, use.transposed)


_KNOWN: WeakKeyDictionary[Network, dict[tuple[object, ...], Survey]] = WeakKeyDictionary()


def survey(joint: Joint, inputs: Inputs) -> Survey:
    """The survey of a joint's network, made once for each shape and dtype of the inputs."""
    shapes = tuple((name, tuple(t.shape[1:]), t.dtype) for name, t in named_tensors(inputs).items())
    key = (tuple(joint.random.tolist()) if isinstance(joint.random, Tensor) else joint.random, shapes)
    known = _KNOWN.setdefault(joint.network, {})
    if key not in known:
        known[key] = _survey(joint, inputs)
    return known[key]


def last_layer(joint: Joint, inputs: Inputs) -> tuple[str, ...]:
    """Names of the weights of the last linear or convolutional layer that the network runs."""
    network = joint.network.member(0)
    weights = [view.detach() for view in network.views(network.initial)]
    tracked = dict(zip(network.layout.names, weights, strict=True))
    row = _taken(inputs, (0,), network.device)
    network.side_effects(row)  # before the mode sees the calls
    with torch.enable_grad(), plain_recurrence(network), WeightUses(tracked) as seen:
        outputs = network.run(weights, row)[0]
    layers = [use for use in seen.uses if isinstance(use, (LinearUse, ConvolutionUse)) and use.weight is not None]
    if layers and outputs.requires_grad:
        made = [use for use in layers if use.edge.node is outputs.grad_fn]
        edges = [use.edge for use in layers]
        grads = torch.autograd.grad(outputs, edges, torch.ones_like(outputs), allow_unused=True)
        layers = made or [use for use, grad in zip(layers, grads, strict=True) if grad is not None]
    if not layers:
        raise ValueError(
            "No last layer was found: the network has no linear or convolutional layer whose weights are in theta. "
            "Name the weights yourself: subset=Matching('head.*')."
        )
    return layers[-1].names


def _taken(inputs: Inputs, rows: tuple[int, ...], device: torch.device) -> Inputs:
    """The first rows of the given quarters (0 to 3) of the batch."""
    count = num_rows(inputs)
    index = [row * max(1, count // 4) % count for row in rows]
    return map_inputs(lambda tensor: tensor[index].to(device), inputs)


def _survey(joint: Joint, inputs: Inputs) -> Survey:
    slices = joint.random_slices
    sizes = {part.name: part.size for part in slices}
    offsets = dict(zip(sizes, accumulate(sizes.values(), initial=0), strict=False))
    select = None
    if isinstance(joint.random, Tensor):
        assert joint.random_indices is not None
        where = torch.cat([torch.arange(p.offset, p.offset + p.size) for p in slices]).to(joint.device)
        select = torch.searchsorted(where, joint.random_indices)
    network = joint.network.member(0)
    if network.passes.precision is not None:  # what depends on what is told by small differences
        network = network.replace(passes=replace(network.passes, precision=None))
    uses, outputs, last, explicit, layouts = _look(network, tuple(offsets), inputs)
    count = Counter(name for use in uses for name in use.names)
    tracked = tuple(name for name in offsets if name not in explicit)
    draft = Survey(offsets, sum(sizes.values()), select, (), tracked, explicit, outputs)
    places = _placed(draft, uses, last, sizes)
    placed = {name for place in places for name in place.block.names}
    places += [Place(Block((name,), sizes[name], 1, offsets[name]), PLAIN) for name in offsets if name not in placed]
    entries = sum(prod(use.row_shape[1:]) for use in uses)
    features = sum(_positions(use) * use.shape[1] for use in uses if not isinstance(use, EmbeddingUse))
    entries = max(entries, sum(sizes[name] for name in explicit))
    return replace(
        draft, places=tuple(places), row_entries=entries, row_features=features, times=count, layouts=layouts
    )


_KINDS: dict[type[Use], str] = {
    **dict.fromkeys((LinearUse, ConvolutionUse, TransposedConvolutionUse), "matrix"),
    EmbeddingUse: "table",
}


def _placed(draft: Survey, uses: Sequence[Use], last: Use | None, sizes: Mapping[str, int]) -> list[Place]:
    """The layers whose weights are used by one rule: once, or several times by linear maps."""
    blocks: dict[Block, list[Use]] = {}
    for use in uses:
        if not any(name in draft.explicit for name in use.names):
            blocks.setdefault(draft.block(use), []).append(use)
    places = []
    for block, own in blocks.items():
        several = len(own) > 1 and not all(isinstance(use, LinearUse) for use in own)
        if several or any(block.overlaps(other) for other in blocks if other != block):
            continue  # tied to another layer
        use = own[0]
        kind = _KINDS.get(type(use), PLAIN)
        groups = use.window.groups if isinstance(use, ConvolutionUse) else 1
        output = use is last and use.weight is not None and len(own) == 1
        head = output and isinstance(use, LinearUse) and use.layout == "first" and len(use.output_shape) == 2
        direct = len(own) == 1 and use.direct and use.layout == "first"
        place = Place(block, kind, groups, sum(map(_positions, own)), head, output, len(own), direct)
        places.append((place, use))
    while True:  # a tensor of which only some rows are in such layers is in none
        covered: Counter[str] = Counter()
        for _, use in places:
            covered.update({} if use.weight is None else {use.weight: prod(use.shape)})
            covered.update({} if use.bias is None else {use.bias: use.shape[0]})
        whole = [(place, use) for place, use in places if all(covered[name] == sizes[name] for name in use.names)]
        if len(whole) == len(places):
            return [place for place, _ in places]
        places = whole


def _positions(use: Use) -> int:
    if isinstance(use, TransposedConvolutionUse):
        return prod(use.source.shape[2:])
    return prod(use.output_shape[2:] if isinstance(use, ConvolutionUse) else use.row_shape[1:-1])


def _look(
    network: Network, names: tuple[str, ...], inputs: Inputs
) -> tuple[list[Use], tuple[int, ...], Use | None, dict[str, str], dict[str, str]]:
    """(uses with a rule, shape of an output row, the use that makes the outputs, weights without a rule, layouts)."""
    weights = [view.detach().clone() for view in network.views(network.initial)]
    tracked = {n: w.requires_grad_() for n, w in zip(network.layout.names, weights, strict=True) if n in names}
    runs = []
    network.side_effects(_taken(inputs, (0, 1), network.device)).refuse_draws()  # before the mode sees the calls
    for rows in ((0, 1), (3, 1, 2, 0)):  # the last: other rows before, between and after
        with torch.enable_grad(), plain_recurrence(network), float32_products(), WeightUses(tracked) as seen:
            outputs = network.run(weights, _taken(inputs, rows, network.device))[0]
        runs.append((outputs, seen))
    _refuse_mixing(runs[0][0], runs[1][0][[3, 1]])
    outputs, seen = runs[-1]
    explicit = {name: reason for name, reason in seen.unknown.items() if name in names}
    packed = next((name for name, reason in explicit.items() if reason == PACKED), None)
    if packed is not None:
        raise ValueError(
            f"Curvature of '{packed}' needs a tensor with rows. Its layer runs on a packed sequence. Run it on the "
            "padded tensor and take each row's last step by its length, or use subset=LastLayer()."
        )
    layouts, without = _layouts([(run_outputs, run.uses) for run_outputs, run in runs])
    for name, reason in without.items():
        explicit.setdefault(name, reason)
    uses = [use.arranged(layouts[use.names[0]], len(outputs)) for use in seen.uses]
    for use in uses:
        if use.overwritten:
            explicit.update(dict.fromkeys(use.names, "the input of its layer is overwritten in place later"))
    if outputs.requires_grad:
        grads = torch.autograd.grad(outputs, list(tracked.values()), torch.ones_like(outputs), allow_unused=True)
        for name, grad in zip(tracked, grads, strict=True):
            if grad is not None:
                explicit.setdefault(name, "it acts through an operation that could not be seen")
    last = next((use for use in uses if is_output(use, outputs) and _in_order(use, outputs)), None)
    return uses, tuple(outputs.shape[1:]), last, explicit, layouts


def _layouts(runs: Sequence[tuple[Tensor, Sequence[Use]]]) -> tuple[dict[str, str], dict[str, str]]:
    """Where the rows lie in the layers of each tensor, and reasons for those of which that cannot be told.

    A layout is right if the output of a layer at one row affects the network's output at no other. An order that
    depends on the rows shows in one of two runs on other rows.
    """
    possible: dict[str, list[str]] = {}
    for outputs, uses in runs:
        for use in uses:
            allowed = [name for name in possible_layouts(use.output_shape, len(outputs)) if name in use.layouts]
            for name in use.names:
                possible[name] = [layout for layout in possible.get(name, allowed) if layout in allowed]
    refuted: dict[str, set[str]] = {}
    moved: set[str] = set()  # tensors that the outputs depend on
    for outputs, uses in runs:
        for row in range(len(outputs) if uses and outputs.requires_grad else 0):
            seed = torch.zeros_like(outputs)
            rising = torch.arange(1.0, seed[row].numel() + 1.0, device=seed.device)  # sums of softmax outputs are flat
            seed[row] = rising.view_as(seed[row])
            edges = [use.edge for use in uses]
            grads = torch.autograd.grad(outputs, edges, seed, retain_graph=True, allow_unused=True)
            for use, grad in zip(uses, grads, strict=True):
                if grad is None or not bool((grad := grad.nan_to_num(0.0)).any()):
                    continue
                moved |= set(use.names)
                for name in use.names:
                    for layout in possible[name]:
                        values = LAYOUTS[layout](grad, len(outputs))
                        if bool(torch.cat([values[:row], values[row + 1 :]]).any()):
                            refuted.setdefault(name, set()).add(layout)
    chosen, without = {}, {}
    for name, layouts in possible.items():
        left = [layout for layout in layouts if layout not in refuted.get(name, ())]
        if not layouts:
            without[name] = "its layer does not have the rows on an axis of its own"
        elif not left:
            without[name] = "its layer runs on the rows in another order"
        elif len(left) > 1 and name not in moved:
            without[name] = "the rows of its layer cannot be told from its derivatives, which are zero"
        chosen[name] = left[0] if left else "first"
    return chosen, without


def is_output(use: Use, outputs: Tensor) -> bool:
    """Whether the outputs are those of a layer with one group, or views of all of them."""
    node = outputs.grad_fn
    while node is not None and node is not use.edge.node and node.name() in _VIEWS:
        node = node.next_functions[0][0]
    linear = isinstance(use, LinearUse) or (isinstance(use, ConvolutionUse) and use.window.groups == 1)
    return node is use.edge.node and linear and outputs.dim() > 1 and outputs.numel() == use.output_shape.numel()


def _in_order(use: Use, outputs: Tensor) -> bool:
    """Whether the channels of a layer are the classes of outputs (N, C, *positions), position by position."""
    numbers = torch.arange(outputs[0].numel(), device=outputs.device).view(1, outputs.shape[1], -1)
    positions = numbers.shape[2]
    for seed in (numbers // positions, numbers % positions):  # the class, and the position
        values = seed.to(outputs.dtype).expand(len(outputs), -1, -1)
        (moved,) = torch.autograd.grad(outputs, [use.edge], values.reshape(outputs.shape), retain_graph=True)
        if not torch.equal(use.by_label(moved), values.transpose(1, 2).flatten(0, 1)):
            return False
    return True


def _refuse_mixing(first: Tensor, among_others: Tensor) -> None:
    """Raise a ValueError where the outputs of the same rows differ among others, so that the module mixes rows."""
    rounding = 8.0 * torch.finfo(first.dtype).eps if first.is_floating_point() else 0.0  # matters in half precision
    close = max(1e-5, rounding) * float(first.detach().abs().max())
    if not torch.allclose(first, among_others, rtol=max(1e-3, rounding), atol=close, equal_nan=True):
        raise ValueError(
            "The module mixes the rows of a batch: a row's outputs change with the rows beside it. Curvature, local "
            "reparameterisation and flipout need a likelihood that factorises over rows: use a layer that treats rows "
            "one by one (batch norm with track_running_stats=True, layer norm), or MeanField with WeightSampling."
        )
