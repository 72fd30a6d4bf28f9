"""Dropout by masks from outside, wherever a network calls for it."""

import inspect
import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode, handle_torch_function, has_torch_function

from posterity.numerics.layered_recurrence import by_layers

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
