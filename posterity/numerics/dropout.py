"""Dropout with masks from outside: the calls that drop, recurrences layer by layer, and the masks."""

import inspect
import math
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import prod
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode, handle_torch_function, has_torch_function

from posterity.numerics.random import Key


@contextmanager
def scattered_weights() -> Iterator[None]:
    """Where recurrent layers run with weights of another place than their own: without cuDNN's warning about that.

    It asks for `flatten_parameters`, which can do nothing for parts of theta or for a layer by itself: cuDNN wants one
    piece of memory in an order of its own, and makes it in every call.

    >>> with scattered_weights():
    ...     warnings.warn("RNN module weights are not part of single contiguous chunk of memory.")
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="RNN module weights are not part of single contiguous chunk")
        yield


def by_layers(
    func: Callable[..., Any],
    between: Callable[[Tensor, float], Tensor],
    input: Tensor,
    hidden: Any,
    weights: Any,
    biases: Any,
    layers: Any,
    rate: Any,
    train: Any,
    bidirectional: Any,
    batch_first: Any = False,
) -> Any:
    """`func` (torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu) with `between(output, rate)` after each layer.

    The other arguments are those of `func`. The last layer's output stays as it is. Packed sequences with a rate
    above 0 are refused, since the rows of their data cannot be told apart.
    """
    if not isinstance(biases, bool):  # data, batch sizes, hidden, weights, biases, layers, rate, train, bidirectional
        packed_rate = train
        if packed_rate:
            raise ValueError(
                "Dropout between the layers of a recurrent network needs a tensor. Got a packed sequence. Pad it, or "
                "make the layer with dropout=0."
            )
        return func(input, hidden, weights, biases, layers, rate, train, bidirectional, batch_first)
    if not rate:
        return func(input, hidden, weights, biases, layers, 0.0, train, bidirectional, batch_first)
    each, directions = len(weights) // layers, 2 if bidirectional else 1
    states: list[Any] = []
    for layer in range(layers):
        own = slice(layer * directions, (layer + 1) * directions)
        first = tuple(h[own] for h in hidden) if isinstance(hidden, (tuple, list)) else hidden[own]
        some = list(weights[layer * each : (layer + 1) * each])
        with scattered_weights():
            output, *state = func(input, first, some, biases, 1, 0.0, train, bidirectional, batch_first)
        states.append(state)
        input = output if layer == layers - 1 else between(output, rate)
    return (input, *_joined(states))


def _joined(states: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    """The last states of all layers behind each other."""
    return [torch.cat(list(parts)) for parts in zip(*states, strict=True)]


_ALPHA = 1.7580993408473766  # minus the value at which SELU saturates


class Masks(ABC):
    """What decides which units stay in each call of dropout within one pass of a network."""

    @abstractmethod
    def keep(self, index: int, shape: tuple[int, ...], rate: float | Tensor, like: Tensor) -> Tensor | None:
        """1 where a unit stays, 0 where it goes, for call number `index` of the pass; None lets everything through.

        `shape` is one entry for each unit that is dropped by itself, axes along which units go together having length
        1; the mask may have length 1 where that has more. A learnt `rate` is a tensor with a graph.
        """

    def sees(self, func: Any, args: Any, kwargs: Any) -> None:  # noqa: B027  most have no use for it
        """Any other operation, before it runs."""

    def dropped(self, index: int, output: Tensor) -> None:  # noqa: B027
        """The output of call number `index`, by a mask that multiplies."""


class Dropping(TorchFunctionMode):
    """Every dropout of one pass inside `with` by the masks given, whether or not the module is in training mode.

    That is `nn.Dropout` and its kin, `torch.nn.functional.dropout` and its kin, `scaled_dot_product_attention` with a
    `dropout_p`, `nn.MultiheadAttention`, recurrent layers with dropout between layers, and `concrete_dropout`.
    What stays is divided by 1 - rate, as torch does. torch's own generator is not used.

    >>> class Second(Masks):
    ...     def keep(self, index, shape, rate, like):
    ...         return torch.tensor([0.0, 1.0])
    >>> with Dropping(Second()):
    ...     functional.dropout(torch.ones(1, 2), p=0.5, training=False)
    tensor([[0., 2.]])
    """

    def __init__(self, masks: Masks) -> None:
        """Take the masks of this pass."""
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
        """The number of this call, and its mask."""
        if not isinstance(rate, Tensor) and not 0 <= rate < 1:
            raise ValueError(f"Dropout: the rate must be at least 0 and below 1. Got {rate}. Change it in the model.")
        index = self._calls
        self._calls += 1
        return index, self._masks.keep(index, shape, rate, like)

    def drop(self, input: Tensor, rate: float | Tensor, shape: tuple[int, ...], inplace: bool = False) -> Tensor:
        """The input with some units at zero, the others divided by 1 - rate."""
        if isinstance(rate, (int, float)) and rate == 0:
            return input
        index, keep = self.next_keep(shape, rate, input)
        if keep is None:
            output = input.view_as(input)  # a tensor of its own, by which it is known again
        else:
            scaled = keep / (1.0 - rate)
            output = input.mul_(scaled) if inplace else input * scaled
        self._masks.dropped(index, output)
        return output

    def alpha(self, input: Tensor, rate: float, shape: tuple[int, ...], inplace: bool = False) -> Tensor:
        """Dropout to SELU's lower end, scaled so that mean 0 and variance 1 stay what they are."""
        keep = None if rate == 0 else self.next_keep(shape, rate, input)[1]
        if keep is None:
            return input
        gain = 1.0 / math.sqrt((_ALPHA**2 * rate + 1.0) * (1.0 - rate))
        shift = (keep - 1.0) * (_ALPHA * gain) + _ALPHA * gain * rate
        return input.mul_(keep * gain).add_(shift) if inplace else input * (keep * gain) + shift


def concrete_dropout(input: Tensor, rate: Tensor, channels: int = -1) -> Tensor:
    """Dropout at a learnt rate (), one mask for each channel; the input itself where nothing is dropped.

    `channels` is the axis of the units: the last one, where every position has its own mask, or 1, where all
    positions after it share one.
    """
    if has_torch_function((input, rate)):
        result: Tensor = handle_torch_function(concrete_dropout, (input, rate), input, rate, channels)
        return result
    return input


def _features(shape: torch.Size, batched: bool) -> tuple[int, ...]:
    """A mask of whole channels."""
    lead = 2 if batched else 1
    return (*shape[:lead], *(1 for _ in shape[lead:]))


def _plain(mode: Dropping, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    return mode.drop(input, p, tuple(input.shape), inplace)


def _channels(unbatched: int | None) -> Callable[..., Tensor]:
    def rule(mode: Dropping, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        return mode.drop(input, p, _features(input.shape, input.dim() != unbatched), inplace)

    return rule


def _alpha(mode: Dropping, input: Tensor, p: float = 0.5, training: bool = False, inplace: bool = False) -> Tensor:
    return mode.alpha(input, p, tuple(input.shape), inplace)


def _feature_alpha(
    mode: Dropping, input: Tensor, p: float = 0.5, training: bool = False, inplace: bool = False
) -> Tensor:
    return mode.alpha(input, p, _features(input.shape, True), inplace)


def _inplace(rule: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda mode, input, p=0.5, train=True: rule(mode, input, p, train, True)


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
    """torch's own code of multi-head attention, with this file's dropout in the place of torch's."""
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
    shape = tuple(input.shape) if channels == -1 else _features(input.shape, True)
    return mode.drop(input, rate, shape)


def _recurrent(func: Any) -> Callable[..., Any]:
    def rule(mode: Dropping, *args: Any, **kwargs: Any) -> Any:
        return by_layers(func, lambda between, rate: mode.drop(between, rate, tuple(between.shape)), *args, **kwargs)

    return rule


_RULES: dict[Any, Callable[..., Any]] = {
    functional.dropout: _plain,
    torch.dropout: _plain,
    torch.dropout_: _inplace(_plain),
    functional.dropout1d: _channels(2),
    functional.dropout2d: _channels(None),
    functional.dropout3d: _channels(4),
    torch.feature_dropout: _channels(None),
    torch.feature_dropout_: _inplace(_channels(None)),
    functional.alpha_dropout: _alpha,
    torch.alpha_dropout: _alpha,
    torch.alpha_dropout_: _inplace(_alpha),
    functional.feature_alpha_dropout: _feature_alpha,
    torch.feature_alpha_dropout: _feature_alpha,
    torch.feature_alpha_dropout_: _inplace(_feature_alpha),
    functional.scaled_dot_product_attention: _attention,
    functional.multi_head_attention_forward: _multi_head_attention,
    concrete_dropout: _concrete,
    torch.lstm: _recurrent(torch.lstm),
    torch.gru: _recurrent(torch.gru),
    torch.rnn_tanh: _recurrent(torch.rnn_tanh),
    torch.rnn_relu: _recurrent(torch.rnn_relu),
}


@dataclass(frozen=True)
class Site:
    """One call of dropout in a pass: its `rate`, and where the rows are in its mask.

    `shape` is the mask's for one row. The rows are on `axis`, `repeats` entries each, the entries of a row beside each
    other (the heads of an attention); `axis` None: the mask has no rows. `clear` is False where they cannot be found.
    `entries` of a row are multiplied by the mask, more than it has where units go together.
    """

    rate: float
    shape: tuple[int, ...]
    axis: int | None
    repeats: int = 1
    clear: bool = True
    entries: int = field(default=0, compare=False)

    @property
    def units(self) -> int:
        """How many units are dropped by themselves, in one row."""
        return prod(self.shape)

    def spread(self, keep: Tensor, shape: tuple[int, ...]) -> Tensor:
        """The mask of one row for all rows of a mask of `shape`."""
        if self.axis is None or self.repeats == 1:
            return keep
        times = [1] * len(shape)
        times[self.axis] = shape[self.axis] // self.repeats
        return keep.repeat(times)


class KeyedMasks(Masks):
    """Masks drawn under a key, call by call: one for each row, or (`shared`) the same for all rows.

    Numbers are drawn in float32 whatever the network's number type. With `relaxed` the mask of a learnt rate is a
    sigmoid of `temperature` in place of a step, which has a gradient in the rate.
    """

    def __init__(self, key: Key, sites: Sequence[Site], *, shared: bool, relaxed: float | None = None) -> None:
        """Take the key of the pass, the sites that a pass has, and the temperature where learnt rates are relaxed."""
        self._key, self._sites, self._shared, self._relaxed = key, sites, shared, relaxed

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
            keep = _relaxed(numbers.to(like.dtype), rate, self._relaxed)
        else:
            keep = (numbers >= rate).to(like.dtype)
        return site.spread(keep, shape) if self._shared else keep


def _relaxed(numbers: Tensor, rate: Tensor, temperature: float) -> Tensor:
    """The concrete distribution in place of the coin u >= p: sigmoid((logit u - logit p) / temperature)."""
    close = torch.finfo(torch.float32).eps
    noise = numbers.clamp(close, 1.0 - close)
    return torch.sigmoid((torch.logit(noise) - torch.logit(rate)) / temperature)


class NumberedMasks(Masks):
    """One mask for all rows, from numbers in [0, 1] drawn ahead: a unit stays if its number is not below the rate."""

    def __init__(self, numbers: Sequence[Tensor], sites: Sequence[Site]) -> None:
        """Take numbers of the site's shape for each site."""
        self._numbers, self._sites = numbers, sites

    def keep(self, index: int, shape: tuple[int, ...], rate: float | Tensor, like: Tensor) -> Tensor:
        site = site_of(self._sites, index)
        return site.spread((self._numbers[index] >= rate).to(like.dtype), shape)


class NoMasks(Masks):
    """Nothing is dropped; `calls` has the mask's shape, the rate and the number of entries of every call."""

    def __init__(self) -> None:
        """Begin with no calls."""
        self.calls: list[tuple[tuple[int, ...], float, int]] = []

    def keep(self, index: int, shape: tuple[int, ...], rate: float | Tensor, like: Tensor) -> None:
        self.calls.append((shape, float(rate), like.numel()))


class LayersAfter(Masks):
    """Nothing is dropped; `layers` has, for each call, the names of the weights that multiply its output.

    `elsewhere` has the calls whose output goes into other operations, too, than linear maps and convolutions by the
    weights given; `unmasked` the weights that act on anything else than one such output.
    """

    def __init__(self, weights: dict[str, Tensor]) -> None:
        """Take the very tensors that the network runs with, by name."""
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
        """Note a layer that takes a remembered output, or that something else does."""
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


_MAPS: frozenset[Any] = frozenset(
    {torch.nn.functional.linear, torch.nn.functional.conv1d, torch.nn.functional.conv2d, torch.nn.functional.conv3d}
)


def site_of(sites: Sequence[Site], index: int) -> Site:
    """The site of call number `index`."""
    if index >= len(sites):
        raise RuntimeError(
            f"The network called for dropout more than the {len(sites)} times of the pass that was looked at first. "
            "Its calls must not depend on its inputs."
        )
    return sites[index]
