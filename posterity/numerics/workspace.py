"""Tensors that the steps of a run use one after the other, so that memory is not asked for and given back each time."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeAlias
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

Tables: TypeAlias = WeakKeyDictionary[object, dict[str, Tensor]]


class _Local(threading.local):
    def __init__(self) -> None:
        self.tables: Tables = WeakKeyDictionary()


_LOCAL = _Local()


def workspace(owner: object, name: str, like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """A contiguous tensor shaped as `like`, with any content, that this thread has under this name for the owner.

    It is good until the next call of that name: nothing that outlives a step may be kept in it. For vectors as long as
    theta, whose pages the system would otherwise take back after each step and clear before the next.
    """
    table = _LOCAL.tables.setdefault(owner, {})
    wanted = dtype or like.dtype
    found = table.get(name)
    if found is None or found.shape != like.shape or found.dtype != wanted or found.device != like.device:
        found = table[name] = torch.empty(like.shape, dtype=wanted, device=like.device)
    return found


@contextmanager
def own_workspaces() -> Iterator[None]:
    """Workspaces that nobody else uses, now or later: for work that is recorded with the places of its memory."""
    before, _LOCAL.tables = _LOCAL.tables, WeakKeyDictionary()
    try:
        yield
    finally:
        _LOCAL.tables = before
