"""What a call of a module does beside returning its outputs: writes into its arguments, and random draws."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from posterity.model.batch import Inputs, map_inputs, named_tensors
from posterity.numerics.random import GlobalStates, global_generators

_ROWS = 2  # rows of the calls that are looked at

_REMEDY = (
    "No seed would fix its results, and no run could be resumed. Draw by torch.nn.Dropout under MCDropout (dropout is "
    "off in every other method), move noise on images into an Augmentation of the data, or remove it."
)


class RandomDraws(ValueError):
    """The model draws random numbers that have no key."""


@dataclass(frozen=True)
class SideEffects:
    """Side effects of a call in evaluation mode.

    `inputs`: whether it writes into its inputs. `buffers`: the buffers it writes into (None: perhaps all). `draws`: how
    it draws random numbers, `differs` whether that shows in the outputs alone and not in a global generator.
    """

    inputs: bool
    buffers: frozenset[str] | None = frozenset()
    draws: Literal["", "by dropout", "by other means"] = ""
    differs: bool = False

    def refuse_draws(self) -> None:
        """Raise `RandomDraws` if the module draws random numbers."""
        if not self.draws:
            return
        how = "draws random numbers even in evaluation mode"
        if self.differs:
            how = f"must be a function of weights and inputs. Two calls on the same rows differ: it {how}, or"
            raise RandomDraws(f"Network: the model {how} keeps a state between calls. {_REMEDY}")
        raise RandomDraws(f"Network: the model {how}. {_REMEDY}")


UNKNOWN = SideEffects(inputs=True, buffers=None)
"""Before a call was looked at: everything that could be written into is copied."""


def watchable(inputs: Inputs) -> bool:
    """Return whether a call on such inputs shows its side effects: on rows with values, outside of transforms."""
    outer: Any = torch._C._functorch.peek_interpreter_stack()  # pyright: ignore[reportAttributeAccessIssue]
    if outer is not None or torch._C._len_torch_dispatch_stack():  # torch.func; tracing
        return False
    return all(tensor.dim() > 0 and len(tensor) > 0 for tensor in named_tensors(inputs).values())


def write_counts(inputs: Inputs) -> tuple[int, ...] | None:
    """Return how often each tensor was written into; None where torch does not count (inference mode).

    >>> x = torch.zeros(2)
    >>> before = write_counts(x)
    >>> write_counts(x.add_(1.0)) == before
    False
    """
    tensors = (inputs,) if isinstance(inputs, Tensor) else tuple(named_tensors(inputs).values())
    if any(tensor.is_inference() for tensor in tensors):
        return None
    return tuple(tensor._version for tensor in tensors)


def check_unwritten(inputs: Inputs, before: tuple[int, ...] | None) -> None:
    """Raise a ValueError where inputs that are no copies were written into since `write_counts` gave `before`."""
    if before is not None and write_counts(inputs) != before:
        raise ValueError(
            "Network: the model wrote into its inputs in this call, and not in the first one, so rows may have "
            "changed. Let it compute with a copy: x = x.clone() before x is written into."
        )


class _Watched:
    """Tensors by name, and which of them were written into since, by torch or around it (`.data`, numpy)."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = tensors
        self._before = {name: (t._version, t.data_ptr(), t.clone()) for name, t in tensors.items()}

    def written(self) -> list[str]:
        """Return the names of the tensors that were written into."""
        return [name for name, before in self._before.items() if self._changed(self._tensors[name], *before)]

    @staticmethod
    def _changed(tensor: Tensor, version: int, address: int, values: Tensor) -> bool:
        equal = torch.allclose(tensor, values, rtol=0.0, atol=0.0, equal_nan=True)
        moved = tensor.data_ptr() != address  # as cuDNN lays the weights of a recurrent layer out anew
        return not equal or (tensor._version != version and not moved)


def side_effects(
    call: Callable[[dict[str, Tensor], Inputs, dict[str, Tensor]], Tensor],
    undropped: Callable[[dict[str, Tensor], Inputs, dict[str, Tensor]], Tensor],
    weights: Mapping[str, Tensor],
    inputs: Inputs,
    buffers: Mapping[str, Tensor],
) -> SideEffects:
    """Return the side effects of `call(weights, inputs, buffers)`, seen on copies of the first rows.

    `undropped` is the same call with all dropout off. Raises a ValueError where the module writes into its weights.
    """
    generators = global_generators(next(iter(weights.values())).device)
    before = GlobalStates.now(generators)
    with torch.inference_mode(False), torch.no_grad():

        def copies() -> tuple[dict[str, Tensor], Inputs, dict[str, Tensor]]:
            rows = map_inputs(lambda tensor: tensor[:_ROWS].clone(), inputs)
            return {k: w.clone() for k, w in weights.items()}, rows, {k: b.clone() for k, b in buffers.items()}

        def differ(function: Callable[..., Tensor]) -> tuple[bool, bool]:
            """Return whether two calls differ, and whether they move a global generator."""
            first, second = function(*copies()), function(*copies())
            drew = not before.equals(GlobalStates.now(generators))
            before.restore(generators)
            return not _close(first, second), drew

        own, rows, tables = copies()
        watched = [_Watched(own), _Watched(named_tensors(rows)), _Watched(tables)]
        try:
            call(own, rows, tables)
            in_weights, in_inputs, in_buffers = (tensors.written() for tensors in watched)
            differs, drew = differ(call)
            quiet = not (differs or drew) or not any(differ(undropped))
        finally:
            before.restore(generators)
    if in_weights:
        raise ValueError(
            f"Network: the model writes into its own weights ('{in_weights[0]}') in every call, so it is no function "
            "of theta. Compute with a changed copy: weight = self.weight.clamp(min=0)."
        )
    draws: Literal["", "by dropout", "by other means"] = ""
    if differs or drew:
        draws = "by dropout" if quiet else "by other means"
    return SideEffects(bool(in_inputs), frozenset(in_buffers), draws, differs and not drew)


def _close(first: object, second: object) -> bool:
    """Return whether outputs are equal but for the order of sums, which may differ from call to call on a GPU."""
    if not isinstance(first, Tensor) or not isinstance(second, Tensor):
        return True  # refused where the outputs are used
    if first.shape != second.shape:
        return False
    if not first.is_floating_point():
        return torch.equal(first, second)
    finite = first[torch.isfinite(first)].abs()
    size = float(finite.max()) if finite.numel() else 0.0
    relative = torch.finfo(first.dtype).eps ** 0.5
    return torch.allclose(first, second, rtol=0.0, atol=relative * size, equal_nan=True)
