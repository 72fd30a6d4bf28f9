"""Which units of a network only later layers see, and through what: from a symbolic trace of its forward code."""

import operator
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm

from posterity.model.traces import traced

Layer = nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d
LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
_DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)
_ENTRYWISE = (
    *(nn.Identity, nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.ELU, nn.CELU, nn.SELU, nn.GELU, nn.SiLU, nn.Mish, nn.Softplus),
    *(nn.Tanh, nn.Sigmoid, nn.LogSigmoid, nn.Softsign, nn.Tanhshrink, nn.Hardtanh, nn.Hardswish, nn.Hardsigmoid),
    *(nn.Hardshrink, nn.Softshrink, nn.Threshold),
)
_MAXIMA = (
    *(nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d),
    *(nn.AdaptiveMaxPool1d, nn.AdaptiveMaxPool2d, nn.AdaptiveMaxPool3d),
    *(nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d),
)
_AVERAGES = (nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d)
_ENTRYWISE_FUNCTIONS: set[Any] = {
    *(F.relu, F.relu6, F.leaky_relu, F.elu, F.selu, F.gelu, F.silu, F.mish, F.softplus, F.tanh, F.sigmoid),
    *(F.logsigmoid, F.softsign, F.hardtanh, F.hardswish, F.hardsigmoid),
    *(torch.relu, torch.tanh, torch.sigmoid, torch.erf, torch.mul, torch.add, torch.sub, torch.div),
    *(operator.mul, operator.add, operator.sub, operator.truediv),
}
_ENTRYWISE_METHODS = {"relu", "tanh", "sigmoid", "erf", "mul", "add", "sub", "div", "contiguous"}
_AUGMENTED: set[Any] = {operator.mul, operator.add, operator.sub, operator.truediv}
_POOLING_FUNCTIONS: set[Any] = {
    *(F.max_pool1d, F.max_pool2d, F.max_pool3d),
    *(F.adaptive_avg_pool1d, F.adaptive_avg_pool2d, F.adaptive_avg_pool3d),
    *(F.adaptive_max_pool1d, F.adaptive_max_pool2d, F.adaptive_max_pool3d),
}


@dataclass(frozen=True)
class Constants:
    """What units (C,) give that do not depend on the inputs: `known` says which these are, and `values` what."""

    values: Tensor
    known: Tensor

    def through(self, function: Callable[[Tensor], Tensor]) -> "Constants":
        """After a function of each number by itself."""
        values = function(self.values.clone())
        return Constants(values, self.known & torch.isfinite(values))


Passage = Callable[[Constants], Constants]


@dataclass(frozen=True)
class Use:
    """A later layer that sees units, each in `span` columns of its weight, and what is done to them on the way."""

    layer: Layer
    span: int
    passages: tuple[Passage, ...]
    norms: tuple[_BatchNorm, ...]


@dataclass(frozen=True)
class Units:
    """The outputs of a layer that nothing but the layers of `uses` sees."""

    name: str
    layer: Layer
    uses: tuple[Use, ...]


def hidden_units(module: nn.Module, graph: fx.Graph) -> tuple[Units, ...]:
    """The layers of a module in evaluation mode whose outputs are seen by later layers alone, in order."""
    own = _Own(module, graph)
    found = []
    for node in graph.nodes:
        layer = own.layer(node)
        uses = None if layer is None else _uses(own, node, layer)
        if layer is not None and uses:
            found.append(Units(str(node.target), layer, tuple(uses)))
    return tuple(found)


def input_layers(module: nn.Module) -> tuple[Layer, ...]:
    """The layers that see the module's inputs, entry by entry; none where anything else sees them, too."""
    graph = traced(module)
    own = _Own(module, graph)
    ways = [node for node in graph.nodes if node.op == "placeholder"]
    found: list[Layer] = []
    if len(ways) != 1:
        return ()
    while ways:
        for user in ways.pop().users:
            layer = own.module(user)
            if isinstance(layer, LAYERS):
                found.append(layer)
            elif len(user.all_input_nodes) == 1 and (_flattens(user, layer) or _passage(user, layer, True)):
                ways.append(user)
            else:
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

    def module(self, node: fx.Node) -> nn.Module | None:
        """The module that a node calls with one tensor, if nothing hangs on it that the graph does not show."""
        if node.op != "call_module" or len(node.args) != 1 or node.kwargs:
            return None
        found = self._modules[str(node.target)]
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


def _uses(own: _Own, node: fx.Node, layer: Layer) -> list[Use] | None:
    """All that see the outputs of a layer; None where one of them is no such layer, or sees them with others."""
    count = layer.weight.shape[0]
    found: list[Use] = []
    ways: list[tuple[fx.Node, bool, bool, tuple[Passage, ...], tuple[_BatchNorm, ...]]]
    ways = [(node, False, False, (), ())]
    while ways:
        before, flat, shared, passages, norms = ways.pop()
        if not before.users:
            return None
        shared = shared or len(before.users) > 1
        for user in before.users:
            if user.all_input_nodes != [before]:
                return None
            module = own.module(user)
            if isinstance(module, LAYERS):
                later, span = own.layer(user), _span(layer, module, count, flat)
                if later is None or not span:
                    return None
                found.append(Use(later, span, passages, norms))
                continue
            if type(module) in NORMS:
                norm = own.changeable(user)
                if not isinstance(norm, _BatchNorm) or norm.num_features != count or norm.running_mean is None:
                    return None
                ways.append((user, flat, False, (*passages, _through_norm(norm)), (*norms, norm)))
                continue
            if _flattens(user, module):
                ways.append((user, True, shared, passages, norms))
                continue
            passage = _passage(user, module, isinstance(layer, nn.Linear) or flat)
            writes = _may_write(user, module)
            if passage is None or (shared and writes):  # what others see would be changed under them
                return None
            kept = writes or _may_give_itself(user, module)
            ways.append((user, flat, shared and kept, (*passages, passage), norms))
    return found


def _span(layer: Layer, later: nn.Module, count: int, flat: bool) -> int:
    """How many columns of `later` belong to each unit of `layer`; 0 where that cannot be told."""
    if isinstance(layer, nn.Linear):
        return int(isinstance(later, nn.Linear) and later.in_features == count)
    if flat:
        return later.in_features // count if isinstance(later, nn.Linear) and later.in_features % count == 0 else 0
    return int(type(later) is type(layer) and later.in_channels == count)


def _flattens(node: fx.Node, module: nn.Module | None) -> bool:
    """Whether a node puts the positions of each channel side by side."""
    if isinstance(module, nn.Flatten):
        return module.start_dim == 1 and module.end_dim == -1
    if (node.op, node.target) in (("call_function", torch.flatten), ("call_method", "flatten")):
        return [*node.args[1:], *node.kwargs.values()] in ([1], [1, -1])
    return False


def _passage(node: fx.Node, module: nn.Module | None, features: bool) -> Passage | None:
    """What an operation that keeps units apart does to constants; None where it is none."""
    if module is not None:
        if type(module) in _DROPOUTS:
            return _as_they_are
        if type(module) in _ENTRYWISE:
            return lambda constants: constants.through(module)
        if features:
            return None  # pooling would mix units, which are on its last axis
        if type(module) in _MAXIMA:
            return _as_they_are
        return _averaging(module) if isinstance(module, _AVERAGES) and type(module) in _AVERAGES else None
    if node.op == "call_function" and node.target in _POOLING_FUNCTIONS:
        return None if features else _as_they_are
    known = (node.op == "call_function" and node.target in _ENTRYWISE_FUNCTIONS) or (
        node.op == "call_method" and node.target in _ENTRYWISE_METHODS
    )
    return (lambda constants: constants.through(lambda values: _called(node, values))) if known else None


def _may_write(node: fx.Node, module: nn.Module | None) -> bool:
    """Whether an operation may work in place; of h * 2 and h *= 2 a trace makes the same."""
    given = (*node.args, *node.kwargs.values())
    return bool(getattr(module, "inplace", False)) or node.target in _AUGMENTED or any(value is True for value in given)


def _may_give_itself(node: fx.Node, module: nn.Module | None) -> bool:
    """Whether an operation may give the tensor that it was given, or a view of it."""
    return isinstance(module, (nn.Identity, *_DROPOUTS)) or node.target == "contiguous"


def _called(node: fx.Node, values: Tensor) -> Tensor:
    """The operation of a node on other values."""
    arguments: Sequence[Any] = fx.node.map_arg(node.args, lambda _: values)
    settings: dict[str, Any] = fx.node.map_arg(node.kwargs, lambda _: values)
    function = getattr(torch.Tensor, node.target) if isinstance(node.target, str) else node.target
    result: Tensor = function(*arguments, **settings)
    return result


def _as_they_are(constants: Constants) -> Constants:
    return constants


def _averaging(pool: nn.Module) -> Passage:
    """Windows that reach beyond the edge average in zeros: only zero stays what it is."""
    whole = (
        set(_numbers(pool.padding)) == {0} and not pool.ceil_mode and getattr(pool, "divisor_override", None) is None
    )
    return _as_they_are if whole else lambda c: Constants(c.values, c.known & (c.values == 0))


def _numbers(value: Any) -> tuple[int, ...]:
    return tuple(value) if isinstance(value, (tuple, list)) else (value,)


def _through_norm(norm: _BatchNorm) -> Passage:
    """Batch norm by its running statistics; a scale of zero makes every unit a constant."""

    def passage(constants: Constants) -> Constants:
        assert norm.running_mean is not None
        assert norm.running_var is not None
        values = (constants.values - norm.running_mean) * torch.rsqrt(norm.running_var + norm.eps)
        known = constants.known
        if norm.affine:
            known = known | (norm.weight.detach() == 0)
            values = torch.where(norm.weight.detach() == 0, 0.0, values * norm.weight.detach()) + norm.bias.detach()
        return Constants(values, known & torch.isfinite(values))

    return passage
