"""Units of a network that only later layers use, and the operations between: from a trace of its forward code."""

from collections import Counter
from dataclasses import dataclass, replace

from torch import fx, nn
from torch.nn.modules.batchnorm import _BatchNorm

from posterity.pruning.passages import (
    LAYERS,
    NORMS,
    Layer,
    Passage,
    averages_space,
    flattens,
    keeps_rows,
    may_give_itself,
    may_write,
    num_rows_of,
    over_space,
    passage_of,
    reads_rows,
    reshaped_rows,
    space,
    through_norm,
    traced,
)

_OUTPUT = "they are outputs"
_NOT_ALONE = "it has groups or hooks, shares its weights, or is called more than once"


@dataclass(frozen=True)
class Use:
    """A later layer that uses units, each in `span` columns of its weight, and the operations on the way.

    `assumes` says whether that holds for inputs in a batch (N, ...) only, where no inputs were given.
    """

    layer: Layer
    span: int
    passages: tuple[Passage, ...]
    norms: tuple[_BatchNorm, ...]
    assumes: bool


@dataclass(frozen=True)
class Units:
    """The outputs of a layer that only the layers of `uses` see."""

    name: str
    layer: Layer
    uses: tuple[Use, ...]


def hidden_units(module: nn.Module, graph: fx.Graph) -> tuple[tuple[Units, ...], dict[str, str]]:
    """The layers of a module in evaluation mode whose outputs only later layers see, in order.

    Returns them with the reasons why the units of other layers must stay, by name, except for the output layers.
    """
    own = _Own(module, graph)
    own.note_known_ranks(graph)
    hidden, stay = [], {}
    for node in graph.nodes:
        layer = own.layer(node)
        if layer is None:
            if isinstance(own.called(node), LAYERS):
                stay[str(node.target)] = _NOT_ALONE
            continue
        try:
            hidden.append(Units(str(node.target), layer, _uses(own, node, layer)))
        except _Seen as reason:
            if str(reason) != _OUTPUT:
                stay[str(node.target)] = str(reason)
    return tuple(hidden), stay


def input_layers(module: nn.Module) -> tuple[Layer, ...]:
    """The layers that see the module's inputs, entry by entry; none where any other operation sees them."""
    graph = traced(module)
    own = _Own(module, graph)
    ways = [node for node in graph.nodes if node.op == "placeholder"]
    layers: list[Layer] = []
    if len(ways) != 1:
        return ()
    while ways:
        before = ways.pop()
        for user in before.users:
            layer = own.module(user)
            if isinstance(layer, LAYERS):
                layers.append(layer)
            elif own.flattens(user, before) or (user.all_input_nodes == [before] and passage_of(user, layer, 0)):
                ways.append(user)
            elif not reads_rows(user):
                return ()
    return tuple(layers) if len({(type(layer), num_inputs(layer)) for layer in layers}) == 1 else ()


def num_inputs(layer: Layer) -> int:
    """The number of input features or channels of a layer, in all its groups."""
    return layer.in_features if isinstance(layer, nn.Linear) else layer.in_channels


class _Own:
    """The modules that a graph calls, and whether they may be changed: called once, with parameters of their own."""

    def __init__(self, module: nn.Module, graph: fx.Graph) -> None:
        self._modules = dict(module.named_modules())
        self._calls = Counter(node.target for node in graph.nodes if node.op == "call_module")
        self._read = {str(node.target).rpartition(".")[0] for node in graph.nodes if node.op == "get_attr"}
        self._shared = Counter(id(p) for _, p in module.named_parameters(remove_duplicate=False))

    def called(self, node: fx.Node) -> nn.Module | None:
        """The module that a node calls."""
        return self._modules[str(node.target)] if node.op == "call_module" else None

    def module(self, node: fx.Node) -> nn.Module | None:
        """The module that a node calls with one tensor, if it has no hooks, which the graph does not show."""
        module = self.called(node)
        if module is None or len(node.args) != 1 or node.kwargs:
            return None
        return None if module._forward_hooks or module._forward_pre_hooks else module

    def changeable(self, node: fx.Node) -> nn.Module | None:
        """As `module`, if it is called once and shares no parameters."""
        module = self.module(node)
        if module is None or self._calls[node.target] > 1 or node.target in self._read:
            return None
        return None if any(self._shared[id(p)] > 1 for p in module.parameters()) else module

    def layer(self, node: fx.Node) -> Layer | None:
        """The changeable linear layer or convolution, without groups, that a node calls."""
        module = self.changeable(node)
        if not isinstance(module, LAYERS) or type(module) not in LAYERS or getattr(module, "groups", 1) != 1:
            return None
        return module

    def note_known_ranks(self, graph: fx.Graph) -> None:
        """Store the number of axes of tensors in the nodes' `meta`, where the layers determine it and no inputs did."""
        for node in graph.nodes:
            module = self.module(node)
            before = node.all_input_nodes[0] if node.all_input_nodes else node
            if "rank" in node.meta:
                continue
            if self.flattens(node, before):
                node.meta["rank"] = 2
            elif isinstance(module, (nn.BatchNorm2d, nn.BatchNorm3d)):  # which refuse other ranks
                node.meta["rank"] = 2 + NORMS[type(module)]
            elif "rank" in before.meta and keeps_rows(node, module):
                node.meta["rank"] = before.meta["rank"]

    def flattens(self, node: fx.Node, before: fx.Node) -> bool:
        """Whether a node flattens all axes of `before` behind the first, as x.view(x.size(0), -1) does."""
        if node.all_input_nodes == [before] and flattens(node, self.module(node)):
            return True
        rows = reshaped_rows(node)
        if rows is None or node.all_input_nodes != [before, rows]:
            return False
        counted, at = num_rows_of(rows), before
        while at is not counted and (keeps_rows(at, self.module(at)) or averages_space(at)):
            at = at.all_input_nodes[0]
        return at is counted


class _Seen(Exception):
    """The reason why the units of a layer must stay."""


@dataclass(frozen=True)
class _Way:
    """A node that units have reached, with `axes` spatial axes behind them; `flat` if these are flattened."""

    node: fx.Node
    axes: int
    flat: bool = False
    shared: bool = False
    passages: tuple[Passage, ...] = ()
    norms: tuple[_BatchNorm, ...] = ()
    assumes: bool = False

    @property
    def rank(self) -> int | None:
        """The number of axes of the tensor, if known."""
        rank: int | None = self.node.meta.get("rank")
        return rank

    @property
    def in_rows(self) -> bool:
        """Whether the tensor is (N, units, *positions), known or assumed."""
        return self.rank in (None, 2 + self.axes)


def _uses(own: _Own, node: fx.Node, layer: Layer) -> tuple[Use, ...]:
    """All layers that use the outputs of a layer; raises `_Seen` where any other operation sees them."""
    uses: list[Use] = []
    ways = [_Way(node, space(layer))]
    while ways:
        way = ways.pop()
        readers = [user for user in way.node.users if not reads_rows(user)]
        if not readers:
            raise _Seen("nothing sees them")
        counted = len(readers) < len(way.node.users)
        if counted and not way.in_rows and (way.axes or way.rank == 1):
            raise _Seen("their number is taken for one of rows, as inputs are no batch")
        assumes = way.assumes or (counted and way.rank is None)
        way = replace(way, shared=way.shared or len(readers) > 1, assumes=assumes)
        for user in readers:
            if isinstance(own.module(user), LAYERS):
                later = own.layer(user)
                if later is None:
                    raise _Seen(f"{user.target} sees them, and {_NOT_ALONE}")
                span = _span(layer, later, way.flat)
                if not span:
                    raise _Seen(f"{user.target} does not take them for its inputs")
                uses.append(Use(later, span, way.passages, way.norms, way.assumes))
            else:
                ways.append(_onward(own, user, layer, way))
    return tuple(uses)


def _onward(own: _Own, user: fx.Node, layer: Layer, way: _Way) -> _Way:
    """Follow units through an operation that keeps them apart; raise `_Seen` for other operations."""
    module = own.module(user)
    if own.flattens(user, way.node):
        if way.axes and not way.in_rows:
            raise _Seen(f"{_words(own, user)} takes them for rows, as inputs are no batch")
        assumes = way.assumes or (way.axes > 0 and way.rank is None)
        return replace(way, node=user, axes=0, flat=way.flat or way.axes > 0, assumes=assumes)
    if user.op == "output":
        raise _Seen(_OUTPUT)
    if user.all_input_nodes != [way.node]:
        raise _Seen(f"{_words(own, user)} sees them together with others")
    if type(module) in NORMS:
        norm = own.changeable(user)
        if not isinstance(norm, _BatchNorm) or norm.running_mean is None:
            raise _Seen(f"{_words(own, user)} has no statistics, or {_NOT_ALONE}")
        # BatchNorm1d also takes (N, units).
        if norm.num_features != len(layer.weight) or max(way.axes, 1) != NORMS[type(norm)] or not way.in_rows:
            raise _Seen(f"{_words(own, user)} works along another axis")
        passages, norms = (*way.passages, through_norm(norm)), (*way.norms, norm)
        assumes = way.assumes or (NORMS[type(norm)] == 1 and way.rank is None)
        return replace(way, node=user, shared=False, passages=passages, norms=norms, assumes=assumes)
    kept = over_space(user, way.axes, way.rank)
    if kept is not None:
        return replace(way, node=user, axes=way.axes if kept else 0, flat=not kept, shared=False)
    passage = passage_of(user, module, way.axes)
    if passage is None:
        raise _Seen(f"{_words(own, user)} sees them")
    writes = may_write(user, module)
    if way.shared and writes:  # it would change the tensor that others see
        raise _Seen(f"{_words(own, user)} may change them in place, and others see them")
    shared = way.shared and (writes or may_give_itself(user, module))
    return replace(way, node=user, shared=shared, passages=(*way.passages, passage))


def _words(own: _Own, node: fx.Node) -> str:
    """The name of an operation in messages."""
    module = own.called(node)
    if module is not None:
        return f"{node.target} ({type(module).__name__})"
    return node.target if isinstance(node.target, str) else str(getattr(node.target, "__name__", node.target))


def _span(layer: Layer, later: nn.Module, flat: bool) -> int:
    """The number of columns of `later` for each unit of `layer`; 0 where the layers do not fit."""
    count = len(layer.weight)
    if isinstance(layer, nn.Linear):
        return int(isinstance(later, nn.Linear) and later.in_features == count)
    if flat:
        return later.in_features // count if isinstance(later, nn.Linear) and later.in_features % count == 0 else 0
    return int(type(later) is type(layer) and later.in_channels == count)
