"""Inputs of a network: a tensor, a tuple of positional ones or a dict of named ones."""

from collections.abc import Callable, Mapping
from typing import TypeAlias

from torch import Tensor

Inputs: TypeAlias = Tensor | tuple[Tensor, ...] | dict[str, Tensor]


def map_inputs(function: Callable[[Tensor], Tensor], inputs: Inputs) -> Inputs:
    """`function` applied to every tensor of `inputs`."""
    if isinstance(inputs, Tensor):
        return function(inputs)
    if isinstance(inputs, Mapping):
        return {name: function(value) for name, value in inputs.items()}
    return tuple(function(value) for value in inputs)


def named_tensors(inputs: Inputs) -> dict[str, Tensor]:
    """Every tensor of `inputs` under a name fit for an error message."""
    if isinstance(inputs, Tensor):
        return {"inputs": inputs}
    if isinstance(inputs, Mapping):
        return {f"inputs['{name}']": value for name, value in inputs.items()}
    return {f"inputs[{index}]": value for index, value in enumerate(inputs)}


def num_rows(inputs: Inputs, axis: int = 0) -> int:
    """How many rows the tensors share along `axis`."""
    return next(iter(named_tensors(inputs).values())).shape[axis]
