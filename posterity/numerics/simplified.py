"""Traced graphs without the operations whose results are known beforehand, or are their own arguments."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx

_aten = torch.ops.aten
_FILLED: dict[Any, Callable[..., Tensor]] = {
    _aten.ones_like.default: torch.ones,
    _aten.zeros_like.default: torch.zeros,
    _aten.new_ones.default: torch.ones,
    _aten.new_zeros.default: torch.zeros,
    _aten.ones.default: torch.ones,
    _aten.zeros.default: torch.zeros,
}
_OF_SAME_SHAPE = {_aten.detach.default, _aten.alias.default, _aten.view.default, _aten.expand.default}
_LARGEST = 1 << 16  # numbers of a result that is kept


def simplify(graph: fx.GraphModule) -> None:
    """Leave out operations of a graph that depend on shapes alone, and those that change nothing; in place.

    Autograd leaves many behind: the gradient that a backward pass begins with is 1, and what becomes of it often does
    not depend on the arguments. The numbers stay the same to the bit, but for the sign of zeros. A graph that writes
    into its tensors stays as it is, and so does what makes a result: each call returns tensors of its own.

    >>> from torch.fx.experimental.proxy_tensor import make_fx
    >>> graph = make_fx(lambda x: (x.detach() + torch.zeros_like(x)) * 2, tracing_mode="fake")(torch.ones(3))
    >>> simplify(graph)
    >>> [node.op for node in graph.graph.nodes], graph(torch.ones(3))
    (['placeholder', 'call_function', 'output'], tensor([2., 2., 2.]))
    """
    calls = [node for node in graph.graph.nodes if node.op == "call_function"]
    schemas = [node.target._schema for node in calls if isinstance(node.target, torch._ops.OpOverload)]
    if any(schema.is_mutable for schema in schemas):
        return
    known: dict[fx.Node, Tensor] = {}
    results = _results(calls)
    for node in calls:
        if node in results:
            continue
        value = _known(node, known)
        if value is not None:
            known[node] = value
            continue
        same = _argument(node, known)
        if same is not None:
            node.replace_all_uses_with(same)
    for number, (node, value) in enumerate(known.items()):
        if any(user not in known for user in node.users):
            name = f"_known_{number}"
            graph.register_buffer(name, value)
            with graph.graph.inserting_before(node):
                kept = graph.graph.get_attr(name)
            kept.meta = node.meta
            node.replace_all_uses_with(kept)
    graph.graph.eliminate_dead_code()
    graph.recompile()


def _results(calls: list[fx.Node]) -> set[fx.Node]:
    """Return the nodes whose memory the graph returns: its results, and what results are views of."""
    found: set[fx.Node] = set()
    for node in reversed(calls):
        if any(user.op == "output" or (user in found and _is_view(user)) for user in node.users):
            found.add(node)
    return found


def _is_view(node: fx.Node) -> bool:
    kind = node.target  # a part of a tuple is no operation
    return not isinstance(kind, torch._ops.OpOverload) or any(each.alias_info for each in kind._schema.returns)


def _known(node: fx.Node, known: dict[fx.Node, Tensor]) -> Tensor | None:
    """Return the result of a node if it does not depend on the graph's arguments, else None."""
    result, kind = node.meta.get("val"), node.target
    if not isinstance(result, Tensor) or result.numel() > _LARGEST or not isinstance(kind, torch._ops.OpOverload):
        return None
    if kind in _FILLED:
        return _FILLED[kind](result.shape, dtype=result.dtype, device=result.device)
    inputs = node.all_input_nodes
    if not inputs or any(each not in known for each in inputs) or torch.Tag.nondeterministic_seeded in kind.tags:
        return None
    given = fx.map_arg((node.args, node.kwargs), known.__getitem__)
    value: Tensor = kind(*given[0], **given[1])
    return value


def _argument(node: fx.Node, known: dict[fx.Node, Tensor]) -> fx.Node | None:
    """Return the argument of a node that equals its result, else None."""
    kind, arguments = node.target, node.args
    first = arguments[0] if arguments else None
    if kind is _aten.cat.default and isinstance(first, (list, tuple)) and len(first) == 1:
        return _if_alike(node, first[0])
    if kind in _OF_SAME_SHAPE or (kind is _aten.pow.Tensor_Scalar and arguments[1] == 1):
        return _if_alike(node, first)
    if kind in (_aten.add.Tensor, _aten.mul.Tensor) and not node.kwargs:
        neutral = 0 if kind is _aten.add.Tensor else 1
        for own, other in ((first, arguments[1]), (arguments[1], first)):
            if isinstance(other, fx.Node) and other in known and bool((known[other] == neutral).all()):
                return _if_alike(node, own)
    return None


def _if_alike(node: fx.Node, argument: Any) -> fx.Node | None:
    """Return the argument if it has the shape, dtype and strides of the node."""
    if not isinstance(argument, fx.Node):
        return None
    first, second = node.meta.get("val"), argument.meta.get("val")
    if not isinstance(first, Tensor) or not isinstance(second, Tensor):
        return None
    same = (first.shape, first.dtype, first.stride()) == (second.shape, second.dtype, second.stride())
    return argument if same else None
