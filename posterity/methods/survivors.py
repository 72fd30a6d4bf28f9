"""Which members of a state are finite, and a state in which the others have the numbers of one that is."""

from typing import Any

import torch
from torch import Tensor

from posterity.storage import flatten


def finite_members(state: Any, size: int) -> Tensor:
    """Whether all numbers of each member of a state are finite, (M,) on the CPU.

    Members are the rows of tensors with M of them and the entries of lists of that length.

    >>> finite_members((torch.tensor([[1.0], [torch.nan]]), [{"sum": torch.zeros(3)}] * 2), 2)
    tensor([ True, False])
    """
    own = _own(state, size)
    if own is not None:
        return own
    parts = state.values() if isinstance(state, dict) else state if isinstance(state, (tuple, list)) else ()
    found = [finite_members(part, size) for part in parts]
    return torch.stack(found).all(0) if found else torch.ones(size, dtype=torch.bool, device="cpu")


def repaired(state: Any, alive: Tensor, size: int) -> Any:
    """The state with the numbers of the first member that is alive in place of those of members that are not.

    >>> repaired((torch.tensor([1.0, torch.nan]), 7), torch.tensor([True, False]), 2)
    (tensor([1., 1.]), 7)
    """
    if _own(state, size) is not None:
        chosen = torch.where(alive, torch.arange(size, device=alive.device), alive.int().argmax())
        if isinstance(state, Tensor):
            return state.index_select(0, chosen.to(state.device))
        return [state[index] for index in chosen.tolist()]
    if isinstance(state, dict):
        return {name: repaired(part, alive, size) for name, part in state.items()}
    if isinstance(state, (tuple, list)):
        parts = [repaired(part, alive, size) for part in state]
        return type(state)(*parts) if hasattr(state, "_fields") else type(state)(parts)
    return state


def _own(value: Any, size: int) -> Tensor | None:
    """Which members of a tensor or list are finite; None where it has no members."""
    if isinstance(value, Tensor) and value.is_floating_point() and value.dim() and len(value) == size:
        return torch.isfinite(value).reshape(size, -1).all(1).cpu()
    if isinstance(value, list) and len(value) == size:
        entries = [[t for t in flatten([entry]).tensors.values() if t.is_floating_point()] for entry in value]
        good = [all(bool(torch.isfinite(tensor).all()) for tensor in entry) for entry in entries]
        return torch.tensor(good, device="cpu") if any(entries) else None
    return None
