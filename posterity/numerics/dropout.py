"""Dropout with given masks: the operations of torch that drop, the sites of a network, and kinds of masks."""

import inspect
import math
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import prod
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode, handle_torch_function, has_torch_function

from posterity.numerics.random import Key


@contextmanager
def scattered_weights() -> Iterator[None]:
    """Silence cuDNN's warning about recurrent weights that are not one contiguous chunk of memory.

    It asks for `flatten_parameters`, which has no effect on views of theta or on a single layer: cuDNN makes its own
    copy in every call.

    >>> with scattered_weights():
    ...     warnings.warn("RNN module weights are not part of single contiguous chunk of memory.")
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="RNN module weights are not part of single contiguous chunk")
        yield


_ALPHA = 1.7580993408473766  # minus the value at which SELU saturates


class Masks(ABC):
    """Decides which units stay in each call of dropout within one pass of a network."""

    @abstractmethod
    def keep(self, index: int, shape: tuple[int, ...], rate: float | Tensor, like: Tensor) -> Tensor | None:
        """Mask of call number `index`: 1 where a unit stays, 0 where it is dropped; None keeps all units.

        `shape` has one entry for each unit that is dropped independently, and length 1 along axes that share an entry.
        The mask must broadcast to it. A learnt `rate` is a tensor with a graph.
        """

    def sees(self, func: Any, args: Any, kwargs: Any) -> None:  # noqa: B027  most have no use for it
        """Observe any other operation before it runs."""

    def dropped(self, index: int, output: Tensor) -> None:  # noqa: B027
        """Observe the output of call number `index` of a multiplicative dropout."""


class Dropping(TorchFunctionMode):
    """Apply the masks to every dropout of one pass inside `with`, whether or not the module is in training mode.

    It covers the modules and functions of torch named dropout, `scaled_dot_product_attention` with a `dropout_p`,
    `nn.MultiheadAttention`, recurrent layers with dropout between layers, and `concrete_dropout`. What stays is divided
    by 1 - rate, as torch does. torch's own generator is not used.

    >>> class Second(Masks):
    ...     def keep(self, index, shape, rate, like):
    ...         return torch.tensor([0.0, 1.0])
    >>> with Dropping(Second()):
    ...     functional.dropout(torch.ones(1, 2), p=0.5, training=False)
    tensor([[0., 2.]])
    """

    def __init__(self, masks: Masks) -> None:
        super().__init__()
        self._masks = masks
        self._calls = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        rule = _RULES.get(func)
        if rule is not None:
            return rule(self, *args, **(kwargs or {}))
        self._masks.sees(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))

    def next_keep(self, shape: tuple[int, ...], rate: float | Tensor, like: Tensor) -> tuple[int, Tensor | None]:
        """Number and mask of this call."""
        if not isinstance(rate, Tensor) and not 0 <= rate < 1:
            raise ValueError(f"Dropout: the rate must be at least 0 and below 1. Got {rate}. Change it in the model.")
        index = self._calls
        self._calls += 1
        return index, self._masks.keep(index, shape, rate, like)

    def drop(self, input: Tensor, rate: float | Tensor, shape: tuple[int, ...], inplace: bool = False) -> Tensor:
        """Set the masked units of the input to zero and divide the others by 1 - rate."""
        if isinstance(rate, (int, float)) and rate == 0:
            return input
        index, keep = self.next_keep(shape, rate, input)
        if keep is None:
            output = input.view_as(input)  # a new tensor, by whose id `LayersAfter` recognises it
        else:
            scaled = keep / (1.0 - rate)
            output = input.mul_(scaled) if inplace else input * scaled
        self._masks.dropped(index, output)
        return output

    def alpha(self, input: Tensor, rate: float, shape: tuple[int, ...], inplace: bool = False) -> Tensor:
        """Alpha dropout: masked units take SELU's saturation value; mean 0 and variance 1 are preserved."""
        keep = None if rate == 0 else self.next_keep(shape, rate, input)[1]
        if keep is None:
            return input
        gain = 1.0 / math.sqrt((_ALPHA**2 * rate + 1.0) * (1.0 - rate))
        shift = (keep - 1.0) * (_ALPHA * gain) + _ALPHA * gain * rate
        return input.mul_(keep * gain).add_(shift) if inplace else input * (keep * gain) + shift


def concrete_dropout(input: Tensor, rate: Tensor, channels: int = -1) -> Tensor:
    """Dropout at a learnt rate (), one mask for each channel; the input itself where nothing is dropped.

    `channels` is the axis of the units: -1 (every position has its own mask) or 1 (all positions share one).
    """
    if has_torch_function((input, rate)):
        result: Tensor = handle_torch_function(concrete_dropout, (input, rate), input, rate, channels)
        return result
    return input


def _features(shape: torch.Size, batched: bool = True) -> tuple[int, ...]:
    """Shape of a mask of whole channels."""
    lead = 2 if batched else 1
    return (*shape[:lead], *(1 for _ in shape[lead:]))


def _rule(
    apply: Callable[..., Tensor], shape: Callable[[torch.Size], tuple[int, ...]], always_inplace: bool = False
) -> Callable[..., Tensor]:
    """Rule for an operation of torch that drops by `apply`, with a mask of `shape(input.shape)`."""

    def rule(mode: Dropping, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        return apply(mode, input, p, shape(input.shape), inplace or always_inplace)

    return rule


_plain = _rule(Dropping.drop, tuple)


def _attention(
    mode: Dropping,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    if dropout_p == 0:
        return functional.scaled_dot_product_attention(
            query, key, value, attn_mask, 0.0, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    if enable_gqa:
        key, value = (t.repeat_interleave(query.shape[-3] // t.shape[-3], -3) for t in (key, value))
    scores = query @ key.transpose(-2, -1) * (1.0 / math.sqrt(query.shape[-1]) if scale is None else scale)
    if is_causal:
        before = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
        scores = scores.masked_fill(~before, -math.inf)
    if attn_mask is not None:
        scores = scores.masked_fill(~attn_mask, -math.inf) if attn_mask.dtype == torch.bool else scores + attn_mask
    weights = scores.softmax(-1)
    return mode.drop(weights, dropout_p, tuple(weights.shape)) @ value


def _multi_head_attention(mode: Dropping, *args: Any, **kwargs: Any) -> Any:
    """Run torch's own code of multi-head attention with the dropout of this file."""
    call = inspect.signature(functional.multi_head_attention_forward).bind(*args, **kwargs)
    call.arguments["training"] = True
    own = functional.multi_head_attention_forward
    names = {
        **vars(functional),
        "has_torch_function": lambda tensors: False,
        "dropout": lambda *args, **kwargs: _plain(mode, *args, **kwargs),
        "scaled_dot_product_attention": lambda *args, **kwargs: _attention(mode, *args, **kwargs),
    }
    inner = FunctionType(own.__code__, names, own.__name__, own.__defaults__, own.__closure__)
    inner.__kwdefaults__ = own.__kwdefaults__
    return inner(*call.args, **call.kwargs)


def _concrete(mode: Dropping, input: Tensor, rate: Tensor, channels: int = -1) -> Tensor:
    return mode.drop(input, rate, tuple(input.shape) if channels == -1 else _features(input.shape))


def _recurrent(func: Any) -> Callable[..., Any]:
    """Rule for torch.lstm, torch.gru, torch.rnn_tanh and torch.rnn_relu: drop the output of each layer but the last.

    Packed sequences with a rate above 0 are refused, since the rows of their data cannot be told apart.
    """

    def rule(
        mode: Dropping, input: Any, hx: Any, weights: Any, bias: Any, layers: Any, rate: Any, *modes: Any, **named: Any
    ) -> Any:
        if not isinstance(bias, bool):  # packed: data, batch sizes, hx, weights, bias, layers, *(rate, ...)
            if modes[0]:
                raise ValueError(
                    "Dropout between the layers of a recurrent network needs a tensor. Got a packed sequence. Pad it, "
                    "or make the layer with dropout=0."
                )
            return func(input, hx, weights, bias, layers, rate, *modes, **named)
        if not rate:
            return func(input, hx, weights, bias, layers, 0.0, *modes, **named)
        states: list[Any] = []
        pair = isinstance(hx, (tuple, list))  # of an LSTM; each (layers * directions, rows, hidden)
        each, directions = len(weights) // layers, len(hx[0] if pair else hx) // layers
        for layer in range(layers):
            own = slice(layer * directions, (layer + 1) * directions)
            first = tuple(h[own] for h in hx) if pair else hx[own]
            some = list(weights[layer * each : (layer + 1) * each])
            with scattered_weights():
                output, *state = func(input, first, some, bias, 1, 0.0, *modes, **named)
            states.append(state)
            input = output if layer == layers - 1 else mode.drop(output, rate, tuple(output.shape))
        return (input, *(torch.cat(parts) for parts in zip(*states, strict=True)))

    return rule


_RULES: dict[Any, Callable[..., Any]] = {
    functional.dropout: _plain,
    torch.dropout: _plain,
    torch.dropout_: _rule(Dropping.drop, tuple, always_inplace=True),
    functional.dropout1d: _rule(Dropping.drop, lambda shape: _features(shape, len(shape) != 2)),
    functional.dropout2d: _rule(Dropping.drop, _features),
    functional.dropout3d: _rule(Dropping.drop, lambda shape: _features(shape, len(shape) != 4)),
    torch.feature_dropout: _rule(Dropping.drop, _features),
    torch.feature_dropout_: _rule(Dropping.drop, _features, always_inplace=True),
    functional.alpha_dropout: _rule(Dropping.alpha, tuple),
    torch.alpha_dropout: _rule(Dropping.alpha, tuple),
    torch.alpha_dropout_: _rule(Dropping.alpha, tuple, always_inplace=True),
    functional.feature_alpha_dropout: _rule(Dropping.alpha, _features),
    torch.feature_alpha_dropout: _rule(Dropping.alpha, _features),
    torch.feature_alpha_dropout_: _rule(Dropping.alpha, _features, always_inplace=True),
    functional.scaled_dot_product_attention: _attention,
    functional.multi_head_attention_forward: _multi_head_attention,
    concrete_dropout: _concrete,
    **{func: _recurrent(func) for func in (torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu)},
}


@dataclass(frozen=True)
class Site:
    """One call of dropout in a pass: its `rate`, and the rows of the batch in its mask.

    `shape` is the shape of the mask of one row. Rows lie along `axis`, as `repeats` adjacent entries each (the heads of
    an attention); `axis` is None for a mask without rows. `clear` is False where the rows cannot be identified.
    `entries` counts the activations of one row that the mask multiplies, more than its units where these share entries.
    """

    rate: float
    shape: tuple[int, ...]
    axis: int | None
    repeats: int = 1
    clear: bool = True
    entries: int = field(default=0, compare=False)

    @property
    def units(self) -> int:
        """Number of units of one row that are dropped independently."""
        return prod(self.shape)

    def spread(self, keep: Tensor, shape: tuple[int, ...]) -> Tensor:
        """Repeat the mask of one row for all rows of a mask of `shape`."""
        if self.axis is None or self.repeats == 1:
            return keep
        times = [1] * len(shape)
        times[self.axis] = shape[self.axis] // self.repeats
        return keep.repeat(times)


class Flips(NamedTuple):
    """The number (rows,) behind each flipped unit, kept where it is at least the rate, and the units to draw from."""

    numbers: Tensor
    units: int


class KeyedMasks(Masks):
    """Masks drawn under the `key` of a pass: one for each row, or (`shared`) the same for all rows.

    `sites` are its dropout calls. Numbers are drawn in float32 whatever the network's dtype. `relaxed` is the
    temperature of the concrete distribution, whose masks have a gradient in a learnt rate; None draws binary masks.
    With `flipped`, the number of a call, one unit of that call has the opposite mask: in each row one drawn at random,
    or (`shared`, or rows that cannot be told) one in all. `flips` says afterwards which.
    """

    def __init__(
        self, key: Key, sites: Sequence[Site], *, shared: bool, relaxed: float | None = None, flipped: int | None = None
    ) -> None:
        self._key, self._sites, self._shared, self._relaxed = key, sites, shared, relaxed
        self._flipped = flipped
        self.flips: Flips | None = None

    def keep(self, index: int, shape: tuple[int, ...], rate: float | Tensor, like: Tensor) -> Tensor:
        site = site_of(self._sites, index)
        if self._shared and not site.clear:
            raise ValueError(
                f"One mask for all rows: the rows of dropout number {index + 1}, a mask of shape {shape}, cannot be "
                "told. Use masks of their own for all rows."
            )
        drawn = shape
        if self._shared:
            drawn = tuple(site.repeats if axis == site.axis else length for axis, length in enumerate(shape))
        numbers = self._key.fold(index).uniform(drawn, torch.float32, like.device)
        if self._relaxed is not None and isinstance(rate, Tensor):
            close = torch.finfo(torch.float32).eps  # the coin u >= p becomes sigmoid((logit u - logit p) / temperature)
            noise = numbers.to(like.dtype).clamp(close, 1.0 - close)
            keep = torch.sigmoid((torch.logit(noise) - torch.logit(rate)) / self._relaxed)
        else:
            keep = (numbers >= rate).to(like.dtype)
        if index == self._flipped:
            keep = torch.where(self._flip(index, site, numbers), 1.0 - keep, keep)
        return site.spread(keep, shape) if self._shared else keep

    def _flip(self, index: int, site: Site, numbers: Tensor) -> Tensor:
        """Mask of the units that are flipped, in the shape of the numbers; notes them in `flips`."""
        axis = None if self._shared or not site.clear else site.axis
        before = 1 if axis is None else prod(numbers.shape[:axis])
        rows = 1 if axis is None else numbers.shape[axis] // site.repeats
        by_row = numbers.reshape(before, rows, -1).transpose(0, 1)  # (rows, before, entries of a row behind)
        table = by_row.reshape(rows, -1)
        drawn = self._key.fold("flips").fold(index).uniform((rows, 1), torch.float32, numbers.device)
        chosen = (drawn * table.shape[1]).long().clamp_max(table.shape[1] - 1)
        self.flips = Flips(table.gather(1, chosen).squeeze(1), table.shape[1])
        mask = torch.zeros_like(table).scatter(1, chosen, 1.0).reshape(by_row.shape)
        return mask.transpose(0, 1).reshape(numbers.shape) > 0


class NumberedMasks(Masks):
    """One mask for all rows, from `numbers` in [0, 1] drawn ahead for each site, of its shape; >= rate stays."""

    def __init__(self, numbers: Sequence[Tensor], sites: Sequence[Site]) -> None:
        self._numbers, self._sites = numbers, sites

    def keep(self, index: int, shape: tuple[int, ...], rate: float | Tensor, like: Tensor) -> Tensor:
        site = site_of(self._sites, index)
        return site.spread((self._numbers[index] >= rate).to(like.dtype), shape)


class NoMasks(Masks):
    """Drops nothing, and notes the mask's shape, the rate and the number of entries of every call in `calls`."""

    def __init__(self) -> None:
        self.calls: list[tuple[tuple[int, ...], float, int]] = []

    def keep(self, index: int, shape: tuple[int, ...], rate: float | Tensor, like: Tensor) -> None:
        self.calls.append((shape, float(rate), like.numel()))


class LayersAfter(Masks):
    """Drops nothing, and notes in `layers`, for each call, the names of the weights that multiply its output.

    `weights` are the very tensors that the network runs with. `elsewhere` holds the calls whose output enters another
    operation than a linear map or convolution by these weights, `unmasked` the weights that act on anything else than
    one such output.
    """

    def __init__(self, weights: dict[str, Tensor]) -> None:
        self.layers: dict[int, list[str]] = {}
        self.elsewhere: set[int] = set()
        self.unmasked: set[str] = set()
        self._names = {id(tensor): name for name, tensor in weights.items()}
        self._outputs: dict[int, tuple[int, Tensor]] = {}  # the tensors live as long as their ids are looked up

    def keep(self, index: int, shape: tuple[int, ...], rate: float | Tensor, like: Tensor) -> None:
        self.layers[index] = []

    def dropped(self, index: int, output: Tensor) -> None:
        self._outputs[id(output)] = index, output

    def sees(self, func: Any, args: Any, kwargs: Any) -> None:
        """Note the layer or other operation that takes an output of dropout."""
        if getattr(func, "__name__", "") in ("__get__", "dim", "size"):
            return
        given = (*args, *kwargs.values())
        sites = [self._outputs[id(value)][0] for value in given if id(value) in self._outputs]
        name = self._names.get(id(args[1])) if func in _MAPS and len(args) > 1 else None
        if name is not None and len(sites) == 1 and (len(args) < 7 or args[6] == 1):  # no groups
            taken = any(name in names for names in self.layers.values())
            self.unmasked.update({name} if taken else ())
            self.layers[sites[0]].append(name)
        else:
            self.elsewhere.update(sites)
            self.unmasked.update(self._names[id(value)] for value in given if id(value) in self._names)


_MAPS: tuple[Any, ...] = (functional.linear, functional.conv1d, functional.conv2d, functional.conv3d)


def site_of(sites: Sequence[Site], index: int) -> Site:
    """The site of call number `index`."""
    if index >= len(sites):
        raise RuntimeError(
            f"The network called for dropout more than the {len(sites)} times of the pass that was looked at first. "
            "Its calls must not depend on its inputs."
        )
    return sites[index]
