"""Recording of the operations of a forward pass that use weights: the mode, and a rule for each operation."""

from collections.abc import Callable, Iterable, Mapping
from functools import cache, partial
from inspect import signature
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from posterity.jacobians.convolution import Window
from posterity.jacobians.uses import ConvolutionUse, EmbeddingUse, LinearUse, ScaleUse, Use


class WeightUses(TorchFunctionMode):
    """Records every use of the tracked tensors inside `with`, and cuts the graph at them.

    Takes tensors by name, which must be the very objects that the operations get. Afterwards `uses` holds, in order,
    every operation with a rule (linear, conv1d, conv2d, embedding, batch, layer, group, instance and RMS norm), and
    `unknown` maps each tensor that another operation took to the reason it has no rule. Tracked tensors enter the
    operations detached, so that a backward pass to the edges of the uses computes no gradient of any weight.

    >>> weight = torch.ones(1, 2)
    >>> with WeightUses({"weight": weight}) as seen:
    ...     _ = functional.linear(torch.ones(3, 2), weight)
    >>> [type(use).__name__ for use in seen.uses], seen.unknown
    (['LinearUse'], {})
    """

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        """Track these tensors."""
        super().__init__()
        self.uses: list[Use] = []
        self.unknown: dict[str, str] = {}
        self._names = {id(tensor): name for name, tensor in tensors.items()}
        self._alive = dict(tensors)  # an id is unique only while its tensor lives

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        touched: list[str] = []
        _collect(self._names, args, touched)
        _collect(self._names, kwargs.values(), touched)
        if not touched or not torch.is_grad_enabled():  # under no_grad inside the module there are no derivatives
            return func(*args, **kwargs)
        rule = _RULES.get(func)
        if rule is not None:
            before = len(self.uses)
            result = rule(self, *args, **kwargs)
            if result is not None:
                seen = [name for use in self.uses[before:] for name in use.names]
                self._refuse([name for name in touched if name not in seen], func)
                return result
        result = func(*args, **kwargs)
        if _holds_tensor(result):
            self._refuse(touched, func)
        return result

    def _refuse(self, names: list[str], func: Any) -> None:
        for name in names:
            self.unknown.setdefault(name, f"it goes through {getattr(func, '__name__', str(func))}")

    def name(self, tensor: Tensor | None) -> str | None:
        """The name of a tracked tensor, else None."""
        return None if tensor is None else self._names.get(id(tensor))

    def plain(self, tensor: Tensor | None) -> Tensor | None:
        """The tensor, detached where it is tracked."""
        return tensor.detach() if tensor is not None and self.name(tensor) is not None else tensor


def _collect(names: Mapping[int, str], values: Iterable[Any], touched: list[str]) -> None:
    """Append the names of the tracked tensors among the arguments of an operation (called for every operation)."""
    for value in values:
        if id(value) in names:
            touched.append(names[id(value)])
        elif isinstance(value, (tuple, list)):
            _collect(names, value, touched)
        elif isinstance(value, dict):
            _collect(names, value.values(), touched)


def _holds_tensor(value: Any) -> bool:
    if isinstance(value, dict):
        value = list(value.values())
    return isinstance(value, Tensor) or (isinstance(value, (tuple, list)) and any(map(_holds_tensor, value)))


def _rooted(source: Tensor) -> Tensor:
    """The source as part of a graph, so that a backward pass can stop at the operation's output."""
    return source if source.requires_grad else source.detach().requires_grad_()


def _record(
    mode: WeightUses, kind: type[Use], weight: Any, bias: Any, source: Tensor, output: Tensor, *rest: Any
) -> Tensor:
    names, edge = (mode.name(weight), mode.name(bias)), get_gradient_edge(output)
    mode.uses.append(kind(*names, edge, output.shape, source, source._version, *rest))
    return output


def _linear(mode: WeightUses, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor | None:
    if mode.name(input) is not None or weight.dim() != 2:
        return None
    with torch.enable_grad():
        source = _rooted(input)
        output = functional.linear(source, mode.plain(weight), mode.plain(bias))  # type: ignore[arg-type]
    return _record(mode, LinearUse, weight, bias, source, output, weight.shape[1])


def _convolution(function: Callable[..., Tensor]) -> Callable[..., Tensor | None]:
    def rule(
        mode: WeightUses,
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        stride: Any = 1,
        padding: Any = 0,
        dilation: Any = 1,
        groups: int = 1,
    ) -> Tensor | None:
        axes = weight.dim() - 2
        if mode.name(input) is not None or input.dim() != weight.dim():
            return None
        kernel, stride, dilation = tuple(weight.shape[2:]), _each(stride, axes), _each(dilation, axes)
        if isinstance(padding, str):
            total = [(d * (k - 1)) if padding == "same" else 0 for d, k in zip(dilation, kernel, strict=True)]
            if any(length % 2 for length in total):
                return None  # unequal on the two sides
            padding = tuple(length // 2 for length in total)
        padding = _each(padding, axes)
        with torch.enable_grad():
            source = _rooted(input)
            output = function(source, mode.plain(weight), mode.plain(bias), stride, padding, dilation, groups)
        window = Window(kernel, stride, padding, dilation, groups)
        return _record(mode, ConvolutionUse, weight, bias, source, output, window)

    return rule


def _each(value: Any, axes: int) -> tuple[int, ...]:
    values = tuple(value) if isinstance(value, (tuple, list)) else (value,)
    return values * axes if len(values) == 1 else values


@cache
def _argument_names(function: Callable[..., Tensor]) -> tuple[str, ...]:
    return tuple(signature(function).parameters)


def _embedding(mode: WeightUses, *args: Any, **kwargs: Any) -> Tensor | None:
    given = dict(zip(_argument_names(functional.embedding), args, strict=False)) | kwargs
    if given.get("max_norm") is not None or given.get("scale_grad_by_freq"):
        return None
    index, weight, padding = given["input"], given["weight"], given.get("padding_idx")
    if padding is not None and padding < 0:
        padding += weight.shape[0]
    with torch.enable_grad():
        output = functional.embedding(index, weight.detach().requires_grad_(), padding)
    return _record(mode, EmbeddingUse, weight, None, index, output, weight.shape[0], padding)


def _norm(function: Callable[..., Tensor]) -> Callable[..., Tensor | None]:
    """The rule of a normalisation followed by a scale and a shift, unless it uses or updates statistics of a batch."""

    def rule(mode: WeightUses, *args: Any, **kwargs: Any) -> Tensor | None:
        given = dict(zip(_argument_names(function), args, strict=False)) | kwargs
        if mode.name(given["input"]) is not None:
            return None
        fixed = given.get("running_mean") is not None
        if function is functional.batch_norm and (given.get("training", False) or not fixed):
            return None
        if function is functional.instance_norm and given.get("use_input_stats", True) and fixed:
            return None
        source, tensors = given.pop("input"), {name: given.pop(name) for name in ("weight", "bias") if name in given}
        trailing = len(given["normalized_shape"]) if "normalized_shape" in given else None
        with torch.enable_grad():
            rooted = _rooted(source)
            output = function(rooted, **given, **{name: mode.plain(tensor) for name, tensor in tensors.items()})
        weight, bias = tensors.get("weight"), tensors.get("bias")
        return _record(mode, ScaleUse, weight, bias, rooted, output, partial(function, **given), trailing)

    return rule


_NORMS: tuple[Callable[..., Tensor], ...] = (
    functional.batch_norm,
    functional.instance_norm,
    functional.layer_norm,
    functional.rms_norm,
    functional.group_norm,
)
_RULES: dict[Any, Callable[..., Tensor | None]] = {
    functional.linear: _linear,
    functional.conv1d: _convolution(functional.conv1d),
    functional.conv2d: _convolution(functional.conv2d),
    functional.embedding: _embedding,
    **{function: _norm(function) for function in _NORMS},
}
