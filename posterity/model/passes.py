"""Passes through a network in the steps of a run: their precision, the rows that go at a time, compiled modules."""

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypeVar, get_args

import torch
from torch import Tensor, nn
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext

from posterity.errors import positive_whole, shown
from posterity.model.batch import Batch, Inputs, map_inputs
from posterity.numerics.modules import uncompiled, without_parallel
from posterity.processes import Group

if TYPE_CHECKING:
    from posterity.model.network import Network

logger = logging.getLogger("posterity")

T = TypeVar("T")

Precision: TypeAlias = Literal["bf16"]
"""The precision of passes, where it is not that of the weights."""


@dataclass(frozen=True)
class Passes:
    """How a network runs in the steps of a run.

    - `precision`: "bf16" runs its layers under torch.autocast; weights, outputs, gradients and states stay float32.
    - `micro_batch`: most rows in a pass; gradients of the passes add up to that of the batch.
    - `compiled`: whether a module from torch.compile runs as compiled where a graph is kept, too: its graphs have first
      derivatives only.
    - `processes`: those that share the rows of each pass.

    >>> rows = Batch(torch.zeros(5, 2), torch.zeros(5))
    >>> [piece.size for piece in Passes(micro_batch=2).pieces(rows)]
    [2, 2, 1]
    """

    precision: Precision | None = None
    micro_batch: int | None = None
    compiled: bool = False
    processes: Group | None = None

    def __post_init__(self) -> None:
        if self.precision is not None and self.precision not in get_args(Precision):
            raise ValueError(f"infer: precision must be 'bf16' or None. Got {shown(self.precision)}.")
        if self.micro_batch is not None:
            positive_whole("infer: micro_batch", self.micro_batch, "of rows")

    def autocast(self, device: torch.device) -> AbstractContextManager[Any]:
        """The context of a forward pass; casts of weights are not cached, so that a pass may be recorded."""
        if self.precision is None:
            return nullcontext()
        return torch.autocast(device.type, torch.bfloat16, cache_enabled=False)

    def pieces(self, batch: Batch) -> list[Batch]:
        """The batch in pieces of at most `micro_batch` rows."""
        size = self.micro_batch
        if size is None or size >= batch.size:
            return [batch]
        return [batch.rows(low, min(low + size, batch.size)) for low in range(0, batch.size, size)]

    def over(self, batch: Batch, run: Callable[[Batch], tuple[Tensor, T]]) -> tuple[Tensor, T]:
        """The sum of a function's values over the pieces, and what the last of them returned beside it."""
        if self.micro_batch is None:
            return run(batch)
        results = [run(piece) for piece in self.pieces(batch)]
        return torch.stack([value for value, _ in results]).sum(0), results[-1][1]


def rows_apart(network: "Network", inputs: Inputs) -> bool:
    """Return whether the outputs of two rows together are those of each alone, up to rounding, in evaluation mode."""
    pair, first = (map_inputs(lambda t, n=n: t[:n].to(network.device), inputs) for n in (2, 1))  # type: ignore[misc]
    with torch.no_grad(), network.without_dropout(pair):
        both, alone = (network.member(0).outputs(network.initial, rows) for rows in (pair, first))
    slack = 100.0 * float(torch.finfo(both.dtype).eps) ** 0.75
    return bool(torch.isclose(both[:1], alone, rtol=slack, atol=slack * float(both.abs().max())).all())


class CompiledModule:
    """The private copy of a module, compiled as the user's was by torch.compile; nothing for other modules.

    Copies in other processes are plain: what is compiled belongs to one process.
    """

    def __init__(self, given: nn.Module | None = None, private: nn.Module | None = None) -> None:
        self._call: Callable[..., Any] | None = None
        given = None if given is None else without_parallel(given)
        wrap = getattr(given, "dynamo_ctx", None)
        if given is None or uncompiled(given) is given:
            return
        if wrap is None or private is None:
            logger.info("the model runs as it was before torch.compile: how it was compiled is not known")
            return
        self._call = wrap(private)
        logger.info(
            "the model runs as compiled for one theta at a time; for members together, curvature and second "
            "derivatives it runs as it was before torch.compile"
        )

    @classmethod
    def whole(cls, private: nn.Module) -> "CompiledModule":
        """The private copy as torch.compile makes it, at its first call for each shape of inputs."""
        own = cls()
        own._call = torch.compile(private, dynamic=False)
        return own

    def __bool__(self) -> bool:
        return self._call is not None

    def __reduce__(self) -> tuple[type["CompiledModule"], tuple[()]]:
        return CompiledModule, ()

    def call(self, first_order: bool) -> Callable[..., Any] | None:
        """The compiled module if it may run here: without a graph, or with one of first derivatives, outside of modes.

        Transforms of torch.func and modes that see single operations need the module as it was; the mode of a default
        device does not.
        """
        if self._call is None or (torch.is_grad_enabled() and not first_order):
            return None
        outer: Any = torch._C._functorch.peek_interpreter_stack()  # pyright: ignore[reportAttributeAccessIssue]
        return self._call if outer is None and unobserved() and not torch._C._len_torch_dispatch_stack() else None


def unobserved() -> bool:
    """Return whether no mode sees the functions of torch that are called, but for that of a default device."""
    modes: Any = _get_current_function_mode_stack
    return all(isinstance(mode, DeviceContext) for mode in modes())
