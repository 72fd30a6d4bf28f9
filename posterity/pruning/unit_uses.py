"""Which units of a network only later layers see, and through what: from a symbolic trace of its forward code."""

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
    """A later layer that sees units, each in `span` columns of its weight, and what is done to them on the way.

    `assumes` says whether that holds for inputs in a batch (N, ...) only, which nothing but the inputs would tell.
    """

    layer: Layer
    span: int
    passages: tuple[Passage, ...]
    norms: tuple[_BatchNorm, ...]
    assumes: bool


@dataclass(frozen=True)
class Units:
    """The outputs of a layer that nothing but the layers of `uses` sees."""

    name: str
    layer: Layer
    uses: tuple[Use, ...]


def hidden_units(module: nn.Module, graph: fx.Graph) -> tuple[tuple[Units, ...], dict[str, str]]:
    """The layers of a module in evaluation mode whose outputs are seen by later layers alone, in order.

    With them, by name, why the units of other layers must stay, but for those that give the outputs.
    """
    own = _Own(module, graph)
    own.note_known_ranks(graph)
    found, stay = [], {}
    for node in graph.nodes:
        layer = own.layer(node)
        if layer is None:
            if isinstance(own.called(node), LAYERS):
                stay[str(node.target)] = _NOT_ALONE
            continue
        try:
            found.append(Units(str(node.target), layer, _uses(own, node, layer)))
        except _Seen as reason:
            if str(reason) != _OUTPUT:
                stay[str(node.target)] = str(reason)
    return tuple(found), stay


def input_layers(module: nn.Module) -> tuple[Layer, ...]:
    """The layers that see the module's inputs, entry by entry; none where anything else sees them, too."""
    graph = traced(module)
    own = _Own(module, graph)
    ways = [node for node in graph.nodes if node.op == "placeholder"]
    found: list[Layer] = []
    if len(ways) != 1:
        return ()
    while ways:
        before = ways.pop()
        for user in before.users:
            layer = own.module(user)
            if isinstance(layer, LAYERS):
                found.append(layer)
            elif own.flattens(user, before) or (user.all_input_nodes == [before] and passage_of(user, layer, 0)):
                ways.append(user)
            elif not reads_rows(user):
                return ()
    return tuple(found) if len({(type(layer), num_inputs(layer)) for layer in found}) == 1 else ()


def num_inputs(layer: Layer) -> int:
    """How many features or channels go into a layer, in all its groups."""
    return layer.in_features if isinstance(layer, nn.Linear) else layer.in_channels


class _Own:
    """What a call in the graph stands for, and whether it may be changed: called once, with tensors of its own."""

    def __init__(self, module: nn.Module, graph: fx.Graph) -> None:
        self._modules = dict(module.named_modules())
        self._calls = Counter(node.target for node in graph.nodes if node.op == "call_module")
        self._read = {str(node.target).rpartition(".")[0] for node in graph.nodes if node.op == "get_attr"}
        self._shared = Counter(id(p) for _, p in module.named_parameters(remove_duplicate=False))

    def called(self, node: fx.Node) -> nn.Module | None:
        """The module that a node calls."""
        return self._modules[str(node.target)] if node.op == "call_module" else None

    def module(self, node: fx.Node) -> nn.Module | None:
        """The module that a node calls with one tensor, if nothing hangs on it that the graph does not show."""
        found = self.called(node)
        if found is None or len(node.args) != 1 or node.kwargs:
            return None
        return None if found._forward_hooks or found._forward_pre_hooks else found

    def changeable(self, node: fx.Node) -> nn.Module | None:
        """As `module`, where its weights are its own and it is called once."""
        found = self.module(node)
        if found is None or self._calls[node.target] > 1 or node.target in self._read:
            return None
        return None if any(self._shared[id(p)] > 1 for p in found.parameters()) else found

    def layer(self, node: fx.Node) -> Layer | None:
        """The linear layer or convolution that a node calls."""
        found = self.changeable(node)
        if type(found) not in LAYERS or getattr(found, "groups", 1) != 1:
            return None
        assert isinstance(found, LAYERS)
        return found

    def note_known_ranks(self, graph: fx.Graph) -> None:
        """Write how many axes tensors have into the nodes' `meta`, where inputs have not told but the layers do."""
        for node in graph.nodes:
            module = self.module(node)
            before = node.all_input_nodes[0] if node.all_input_nodes else node
            if "rank" in node.meta:
                continue
            if self.flattens(node, before):
                node.meta["rank"] = 2
            elif isinstance(module, (nn.BatchNorm2d, nn.BatchNorm3d)):  # others are refused by it
                node.meta["rank"] = 2 + NORMS[type(module)]
            elif "rank" in before.meta and keeps_rows(node, module):
                node.meta["rank"] = before.meta["rank"]

    def flattens(self, node: fx.Node, before: fx.Node) -> bool:
        """Whether a node puts the positions of each channel of `before` side by side, as x.view(x.size(0), -1) does."""
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
    """Why the units of a layer cannot be taken away."""


@dataclass(frozen=True)
class _Way:
    """Where units have come to: `axes` of positions stand behind them; `flat`, those of a unit are side by side."""

    node: fx.Node
    axes: int
    flat: bool = False
    shared: bool = False
    passages: tuple[Passage, ...] = ()
    norms: tuple[_BatchNorm, ...] = ()
    assumes: bool = False

    @property
    def rank(self) -> int | None:
        """How many axes the tensor has, where that is known."""
        rank: int | None = self.node.meta.get("rank")
        return rank

    @property
    def in_rows(self) -> bool:
        """Whether the tensor is (N, units, *positions): known, or taken for granted."""
        return self.rank in (None, 2 + self.axes)


def _uses(own: _Own, node: fx.Node, layer: Layer) -> tuple[Use, ...]:
    """All that see the outputs of a layer; `_Seen` where one of them is no such layer, or sees them with others."""
    found: list[Use] = []
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
                found.append(_use(own, user, layer, way))
            else:
                ways.append(_onward(own, user, layer, way))
    return tuple(found)


def _use(own: _Own, user: fx.Node, layer: Layer, way: _Way) -> Use:
    """The later layer that a way ends in."""
    later = own.layer(user)
    if later is None:
        raise _Seen(f"{user.target} sees them, and {_NOT_ALONE}")
    span = _span(layer, later, way.flat)
    if not span:
        raise _Seen(f"{user.target} does not take them for its inputs")
    return Use(later, span, way.passages, way.norms, way.assumes)


def _onward(own: _Own, user: fx.Node, layer: Layer, way: _Way) -> _Way:
    """The way through an operation that keeps units apart."""
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
        # One of one axis also takes (N, units).
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
    if way.shared and writes:  # what others see would be changed under them
        raise _Seen(f"{_words(own, user)} may change them in place, and others see them")
    shared = way.shared and (writes or may_give_itself(user, module))
    return replace(way, node=user, shared=shared, passages=(*way.passages, passage))


def _words(own: _Own, node: fx.Node) -> str:
    """An operation as a message names it."""
    module = own.called(node)
    if module is not None:
        return f"{node.target} ({type(module).__name__})"
    return node.target if isinstance(node.target, str) else str(getattr(node.target, "__name__", node.target))


def _span(layer: Layer, later: nn.Module, flat: bool) -> int:
    """How many columns of `later` belong to each unit of `layer`; 0 where that cannot be told."""
    count = len(layer.weight)
    if isinstance(layer, nn.Linear):
        return int(isinstance(later, nn.Linear) and later.in_features == count)
    if flat:
        return later.in_features // count if isinstance(later, nn.Linear) and later.in_features % count == 0 else 0
    return int(type(later) is type(layer) and later.in_channels == count)
