"""Tensors that the steps of a run use one after the other, so that memory is not asked for and given back each time."""

import threading
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from posterity.inference.method import Target

_LOCAL = threading.local()


def workspace(owner: Target, name: str, like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """A contiguous tensor shaped as `like`, with any content, that this thread has under this name for the problem.

    It is good until the next call of that name: nothing that outlives a step may be kept in it. For vectors as long as
    theta, whose pages the system would otherwise take back after each step and clear before the next.
    """
    tables: WeakKeyDictionary[Target, dict[str, Tensor]] = _LOCAL.__dict__.setdefault("tables", WeakKeyDictionary())
    table = tables.setdefault(owner, {})
    wanted = dtype or like.dtype
    found = table.get(name)
    if found is None or found.shape != like.shape or found.dtype != wanted or found.device != like.device:
        found = table[name] = torch.empty(like.shape, dtype=wanted, device=like.device)
    return found
