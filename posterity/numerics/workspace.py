"""Scratch tensors that the steps of a run reuse, so that memory is not allocated and freed in each."""

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
    """Uninitialised contiguous tensor with the shape of `like`, kept by this thread under `name` for the owner.

    Its content is valid until the next call with that name: nothing that outlives a step may be kept in it. It serves
    vectors as long as theta, whose pages the system would otherwise release after each step and clear before the next.
    """
    table = _LOCAL.tables.setdefault(owner, {})
    dtype = dtype or like.dtype
    tensor = table.get(name)
    if tensor is None or tensor.shape != like.shape or tensor.dtype != dtype or tensor.device != like.device:
        tensor = table[name] = torch.empty(like.shape, dtype=dtype, device=like.device)
    return tensor


@contextmanager
def own_workspaces() -> Iterator[None]:
    """Use separate workspaces inside `with`: a recording holds on to the addresses of its memory."""
    before, _LOCAL.tables = _LOCAL.tables, WeakKeyDictionary()
    try:
        yield
    finally:
        _LOCAL.tables = before
