"""What the forward code of a module does, from a symbolic trace of it."""

from typing import Any

import torch
from torch import Tensor, fx, nn

from posterity.errors import shown
from posterity.model.inputs import Inputs, map_inputs, named_tensors


def traced(module: nn.Module) -> fx.Graph:
    """The operations of a module in evaluation mode; a TypeError where its code cannot be followed."""
    there = set(vars(module))
    try:
        graph = fx.Tracer().trace(module)
    except Exception as error:  # the user's code runs on stand-ins for tensors, and may fail in any way
        raise TypeError(
            f"pruned: the forward code of {type(module).__name__} cannot be traced: {str(error).splitlines()[0]} "
            "Code that decides by the values or shapes of its inputs has no fixed layers. Prune a part that has, "
            "such as an nn.Sequential."
        ) from error
    # Tensors that the code makes are put into the module by the trace, and are none of its own.
    for node in graph.nodes:
        if node.op == "get_attr" and str(node.target) in vars(module).keys() - there:
            node.meta["made"] = getattr(module, str(node.target))
    for name in vars(module).keys() - there:
        delattr(module, name)
    return graph


def note_ranks(module: nn.Module, graph: fx.Graph, inputs: Inputs) -> None:
    """Write how many axes every tensor has, as `inputs` make it, into the nodes' `meta` ("rank")."""
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
    """Runs a graph, and notes how many axes its tensors have."""

    def run_node(self, n: fx.Node) -> Any:
        """As ever; a tensor that the code had made comes from where the trace has put it."""
        result = n.meta["made"] if "made" in n.meta else super().run_node(n)
        if isinstance(result, Tensor):
            n.meta["rank"] = result.dim()
        return result


def check_same_code(before: fx.Graph, after: fx.Graph, name: str) -> None:
    """A TypeError where the code of a module, traced again, does something else with its layers."""
    one, other = (_operations(graph) for graph in (before, after))
    changed = [str(node) for node, mine, its in zip(before.nodes, one, other, strict=False) if mine != its]
    if changed or len(one) != len(other):
        raise TypeError(
            f"pruned: the forward code of {name} uses the sizes of its layers (in {', '.join(changed[:3]) or 'all'}), "
            "and would compute another function with fewer units. Keep such numbers in attributes of the module, as "
            "self.width = ..., or prune a part that does not use them."
        )


def _operations(graph: fx.Graph) -> list[tuple[Any, ...]]:
    """What each node does, for comparison."""
    number = {node: index for index, node in enumerate(graph.nodes)}

    def plain(value: Any) -> Any:
        return repr(fx.node.map_arg(value, lambda node: f"%{number[node]}"))

    return [
        (node.op, "a tensor" if "made" in node.meta else node.target, plain(node.args), plain(node.kwargs))
        + ((node.meta["made"].tolist(),) if "made" in node.meta else ())
        for node in graph.nodes
    ]
