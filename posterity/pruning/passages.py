"""Operations between a unit and the layers that use it, read from a symbolic trace."""

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx.node import map_arg
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm

from posterity.errors import shown
from posterity.model.batch import Inputs, map_inputs, named_tensors


def traced(module: nn.Module) -> fx.Graph:
    """Trace the operations of a module in evaluation mode; raise a TypeError where its code cannot be traced."""
    before = set(vars(module))
    try:
        graph = fx.Tracer().trace(module)
    except Exception as error:  # the user's code runs on proxies for tensors, and may fail in any way
        raise TypeError(
            f"pruned: the forward code of {type(module).__name__} cannot be traced: {str(error).splitlines()[0]} "
            "Code that decides by the values or shapes of its inputs has no fixed layers. Prune a part that has, "
            "such as an nn.Sequential."
        ) from error
    # The trace stores tensors that the code makes as attributes of the module: they move into the graph.
    made = vars(module).keys() - before
    for node in graph.nodes:
        if node.op == "get_attr" and str(node.target) in made:
            node.meta["made"] = getattr(module, str(node.target))
    for name in made:
        delattr(module, name)
    return graph


def note_ranks(module: nn.Module, graph: fx.Graph, inputs: Inputs) -> None:
    """Run the graph on `inputs`, and store the number of axes of every tensor in its node's `meta` ("rank")."""
    if isinstance(inputs, dict):
        names = [str(node.target) for node in graph.nodes if node.op == "placeholder"]
        given = tuple(inputs[name] for name in names if name in inputs)
    else:
        given = inputs if isinstance(inputs, tuple) else (inputs,)
    if not all(isinstance(value, Tensor) for value in given):
        raise TypeError(f"pruned: inputs must be a tensor, a tuple of them or a dict by name. Got {shown(inputs)}.")
    try:
        with torch.no_grad():
            _Ranks(module, graph=graph).run(*map_inputs(Tensor.clone, given))  # the code may write into them
    except Exception as error:
        shapes = ", ".join(f"{name} {tuple(value.shape)}" for name, value in named_tensors(inputs).items())
        raise ValueError(
            f"pruned: {type(module).__name__} does not accept these inputs ({shapes}): {str(error).splitlines()[0]} "
            "Pass a batch of those that it is made for."
        ) from error


class _Ranks(fx.Interpreter):
    """Runs a graph, and stores the number of axes of its tensors."""

    def run_node(self, n: fx.Node) -> Any:
        result = n.meta["made"] if "made" in n.meta else super().run_node(n)
        if isinstance(result, Tensor):
            n.meta["rank"] = result.dim()
        return result


def check_same_code(before: fx.Graph, after: fx.Graph, name: str) -> None:
    """Raise a TypeError where the code of a module, traced again, has other operations."""
    old, new = _operations(before), _operations(after)
    changed = [str(node) for node, was, now in zip(before.nodes, old, new, strict=False) if was != now]
    if changed or len(old) != len(new):
        raise TypeError(
            f"pruned: the forward code of {name} uses the sizes of its layers (in {', '.join(changed[:3]) or 'all'}), "
            "and would compute another function with fewer units. Keep such numbers in attributes of the module, as "
            "self.width = ..., or prune a part that does not use them."
        )


def _operations(graph: fx.Graph) -> list[tuple[Any, ...]]:
    """The operation of each node, for comparison."""
    number = {node: index for index, node in enumerate(graph.nodes)}

    def plain(value: Any) -> Any:
        return repr(map_arg(value, lambda node: f"%{number[node]}"))

    return [
        (node.op, "a tensor" if "made" in node.meta else node.target, plain(node.args), plain(node.kwargs))
        + ((node.meta["made"].tolist(),) if "made" in node.meta else ())
        for node in graph.nodes
    ]


Layer = nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d
LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
NORMS = {nn.BatchNorm1d: 1, nn.BatchNorm2d: 2, nn.BatchNorm3d: 3}  # with their number of spatial axes
_DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)
_ENTRYWISE = (
    *(nn.Identity, nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.ELU, nn.CELU, nn.SELU, nn.GELU, nn.SiLU, nn.Mish, nn.Softplus),
    *(nn.Tanh, nn.Sigmoid, nn.LogSigmoid, nn.Softsign, nn.Tanhshrink, nn.Hardtanh, nn.Hardswish, nn.Hardsigmoid),
    *(nn.Hardshrink, nn.Softshrink, nn.Threshold),
)
_ENTRYWISE_FUNCTIONS: set[Any] = {
    *(F.relu, F.relu6, F.leaky_relu, F.elu, F.selu, F.gelu, F.silu, F.mish, F.softplus, F.tanh, F.sigmoid),
    *(F.logsigmoid, F.softsign, F.hardtanh, F.hardswish, F.hardsigmoid),
    *(torch.relu, torch.tanh, torch.sigmoid, torch.erf, torch.mul, torch.add, torch.sub, torch.div),
    *(operator.mul, operator.add, operator.sub, operator.truediv),
}
_ENTRYWISE_METHODS = {"relu", "tanh", "sigmoid", "erf", "mul", "add", "sub", "div", "contiguous"}
_AUGMENTED: set[Any] = {operator.mul, operator.add, operator.sub, operator.truediv}
_DROPOUT_FUNCTIONS: set[Any] = {
    *(F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout)
}
# Pooling by its number of spatial axes: with another number it would pool over units, or take rows for units.
_MAXIMA: dict[Any, int] = {
    **{nn.MaxPool1d: 1, nn.AdaptiveMaxPool1d: 1, nn.AdaptiveAvgPool1d: 1},
    **{nn.MaxPool2d: 2, nn.AdaptiveMaxPool2d: 2, nn.AdaptiveAvgPool2d: 2},
    **{nn.MaxPool3d: 3, nn.AdaptiveMaxPool3d: 3, nn.AdaptiveAvgPool3d: 3},
    **{F.max_pool1d: 1, torch.max_pool1d: 1, F.adaptive_max_pool1d: 1, F.adaptive_avg_pool1d: 1},
    **{F.max_pool2d: 2, torch.max_pool2d: 2, F.adaptive_max_pool2d: 2, F.adaptive_avg_pool2d: 2},
    **{F.max_pool3d: 3, torch.max_pool3d: 3, F.adaptive_max_pool3d: 3, F.adaptive_avg_pool3d: 3},
}
_AVERAGES: dict[Any, int] = {
    **{nn.AvgPool1d: 1, nn.AvgPool2d: 2, nn.AvgPool3d: 3},
    **{F.avg_pool1d: 1, F.avg_pool2d: 2, F.avg_pool3d: 3},
}
_AVERAGE_SETTINGS = ("stride", "padding", "ceil_mode", "count_include_pad", "divisor_override")
_OVER_AXES: set[Any] = {torch.mean, torch.amax, "mean", "amax"}
_RESHAPES: set[Any] = {torch.reshape, "reshape", "view"}


@dataclass(frozen=True)
class Constants:
    """Outputs of units (C,) that do not depend on the inputs: `values`, where the mask `known` is true."""

    values: Tensor
    known: Tensor

    def through(self, function: Callable[[Tensor], Tensor]) -> "Constants":
        """Apply an entrywise function to the values."""
        values = function(self.values.clone())
        return Constants(values, self.known & torch.isfinite(values))


Passage = Callable[[Constants], Constants]


def space(layer: nn.Module) -> int:
    """The number of spatial axes of a layer's outputs, 0 for a linear layer."""
    return 0 if isinstance(layer, nn.Linear) else len(layer.kernel_size)  # type: ignore[arg-type]


def flattens(node: fx.Node, module: nn.Module | None) -> bool:
    """Whether a node flattens all axes behind the first."""
    if isinstance(module, nn.Flatten):
        return module.start_dim == 1 and module.end_dim == -1
    if (node.op, node.target) in (("call_function", torch.flatten), ("call_method", "flatten")):
        return [*node.args[1:], *node.kwargs.values()] in ([1], [1, -1])
    return False


def reshaped_rows(node: fx.Node) -> fx.Node | None:
    """The node n of x.view(n, -1) or x.reshape(n, -1)."""
    if node.op not in ("call_function", "call_method") or node.target not in _RESHAPES or node.kwargs:
        return None
    sizes: Any = node.args[1:]
    sizes = sizes[0] if len(sizes) == 1 and isinstance(sizes[0], (tuple, list)) else sizes
    return sizes[0] if len(sizes) == 2 and sizes[1] == -1 and isinstance(sizes[0], fx.Node) else None


def num_rows_of(node: fx.Node) -> fx.Node | None:
    """The tensor x of a node that is x.size(0), x.shape[0] or x.size()[0]."""
    if node.op == "call_method" and node.target == "size":
        return node.all_input_nodes[0] if [*node.args[1:], *node.kwargs.values()] == [0] else None
    if node.target is operator.getitem and node.args[1] == 0 and isinstance(node.args[0], fx.Node):
        return node.args[0].all_input_nodes[0] if _gives_shape(node.args[0]) else None
    return None


def reads_rows(node: fx.Node) -> bool:
    """Whether a node uses the first size of a tensor only, which is not the number of units."""
    if _gives_shape(node):
        return all(num_rows_of(user) is not None for user in node.users)
    return num_rows_of(node) is not None


def _gives_shape(node: fx.Node) -> bool:
    if node.target is getattr:
        return node.args[1] == "shape"
    return node.op == "call_method" and node.target == "size" and len(node.args) + len(node.kwargs) == 1


def over_space(node: fx.Node, axes: int, rank: int | None) -> bool | None:
    """Whether a mean or maximum over all positions of each unit keeps the spatial axes; None for other operations.

    `axes` is the number of spatial axes, `rank` the number of all axes, None for a batch (N, units, *positions).
    """
    if node.op not in ("call_function", "call_method") or node.target not in _OVER_AXES or not axes:
        return None
    given = dict(zip(("dim", "keepdim"), node.args[1:], strict=False)) | node.kwargs
    if len(node.args) > 3 or not given.keys() <= {"dim", "keepdim"}:
        return None
    rank = axes + 2 if rank is None else rank
    over = {axis + rank if axis < 0 else axis for axis in _numbers(given.get("dim", ()))}
    return bool(given.get("keepdim", False)) if over == set(range(rank - axes, rank)) else None


def averages_space(node: fx.Node) -> bool:
    """Whether a node is a mean or maximum over the spatial axes of a batch (N, channels, *positions)."""
    return any(over_space(node, axes, None) is not None for axes in set(NORMS.values()))


def passage_of(node: fx.Node, module: nn.Module | None, axes: int) -> Passage | None:
    """The effect on constants of an operation that keeps units apart; None for other operations.

    `axes` is the number of spatial axes: pooling over other axes would mix units.
    """
    kind: Any = node.target if module is None else type(module)
    if module is None and node.op not in ("call_function", "call_method"):
        return None
    if kind in _DROPOUTS or (kind in _DROPOUT_FUNCTIONS and node.kwargs.get("training") is False):
        return as_they_are
    if module is not None and kind in _ENTRYWISE:
        return lambda constants: constants.through(module)
    if axes and _MAXIMA.get(kind) == axes:
        return as_they_are
    if axes and _AVERAGES.get(kind) == axes:
        given = dict(zip(_AVERAGE_SETTINGS, node.args[2:], strict=False)) | node.kwargs
        return _averaging(given if module is None else vars(module))
    if kind not in (_ENTRYWISE_METHODS if node.op == "call_method" else _ENTRYWISE_FUNCTIONS):
        return None

    def called(values: Tensor) -> Tensor:
        function: Any = getattr(Tensor, node.target) if isinstance(node.target, str) else node.target
        arguments: Any = map_arg(node.args, lambda _: values)
        settings: Any = map_arg(node.kwargs, lambda _: values)
        result: Tensor = function(*arguments, **settings)
        return result

    return lambda constants: constants.through(called)


def keeps_rows(node: fx.Node, module: nn.Module | None) -> bool:
    """Whether a node has a single input and keeps its first axis and, unless it flattens, the number of axes."""
    if len(node.all_input_nodes) != 1:
        return False
    if flattens(node, module) or isinstance(module, (*LAYERS, *NORMS)):
        return True
    return any(passage_of(node, module, axes) is not None for axes in range(4))


def may_write(node: fx.Node, module: nn.Module | None) -> bool:
    """Whether an operation may work in place: a trace does not distinguish h * 2 from h *= 2."""
    given = (*node.args, *node.kwargs.values())
    return bool(getattr(module, "inplace", False)) or node.target in _AUGMENTED or any(value is True for value in given)


def may_give_itself(node: fx.Node, module: nn.Module | None) -> bool:
    """Whether an operation may return its input, or a view of it."""
    aliases = node.target == "contiguous" or node.target in _DROPOUT_FUNCTIONS
    return isinstance(module, (nn.Identity, *_DROPOUTS)) or aliases


def as_they_are(constants: Constants) -> Constants:
    """The identity, for pooling and dropout."""
    return constants


def _averaging(settings: Mapping[str, Any]) -> Passage:
    """Average pooling: windows beyond the edge include zeros, and keep no constant but zero."""
    whole = set(_numbers(settings.get("padding", 0))) == {0} and not settings.get("ceil_mode", False)
    if whole and settings.get("divisor_override") is None:
        return as_they_are
    return lambda c: Constants(c.values, c.known & (c.values == 0))


def _numbers(value: Any) -> tuple[int, ...]:
    return tuple(value) if isinstance(value, (tuple, list)) else (value,)


def through_norm(norm: _BatchNorm) -> Passage:
    """Batch norm by its running statistics; a unit with a scale of zero is constant."""

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
