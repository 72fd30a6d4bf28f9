"""Recording of the operations of a forward pass that use weights: the mode, and a rule for each operation."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import cache, partial
from inspect import signature
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from posterity.jacobians.convolution import Window, laid_out
from posterity.jacobians.fixed_norm import batch_norm
from posterity.jacobians.fused import Cell, gru_cell, lstm_cell, plain_cell, recurrence
from posterity.jacobians.jacobian import small_parts
from posterity.jacobians.uses import (
    PACKED,
    BroadcastUse,
    ConvolutionUse,
    EmbeddingUse,
    LinearUse,
    Region,
    ScaleUse,
    TransposedConvolutionUse,
    Use,
)


class WeightUses(TorchFunctionMode):
    """Records every use of the tracked tensors inside `with`, and cuts the graph at them.

    Takes tensors by name, which must be the very objects that the operations get. Afterwards `uses` holds, in order,
    every operation with a rule (linear, addmm, matmul, conv1d, conv2d and their transposes, embedding, batch, layer,
    group, instance and RMS norm, sums and copies), and `unknown` maps each tensor that another operation took to the
    reason it has no rule. Recurrent layers run step by step, and attention by torch's own code, so that their parts are
    seen; transposes and ranges of rows of a tracked tensor are tracked, too. Tracked tensors enter the operations
    detached, so that a backward pass to the edges of the uses computes no gradient of any weight.

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
        self._regions = {id(tensor): Region(name) for name, tensor in tensors.items()}
        self._alive = list(tensors.values())  # an id is unique only while its tensor lives

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        touched: list[str] = []
        _collect(self._regions, args, touched)
        _collect(self._regions, kwargs.values(), touched)
        if not touched or not torch.is_grad_enabled():  # under no_grad inside the module there are no derivatives
            return func(*args, **kwargs)
        rule = _RULES.get(func)
        if rule is not None:
            before = len(self.uses)
            result = rule(self, *args, **kwargs)
            if func not in _DIRECT:
                self.uses[before:] = [replace(use, direct=False) for use in self.uses[before:]]
            if result is not None:
                seen = [name for use in self.uses[before:] for name in use.names]
                self._refuse([name for name in touched if name not in seen], func)
                return result
        result = func(*args, **kwargs)
        if func in _PARTS and self._tracked_parts(args[0], result):
            return result
        if _holds_tensor(result):
            self._refuse(touched, func)
        return result

    def _tracked_parts(self, whole: Tensor, result: Any) -> bool:
        """Track results that are rows of a tracked tensor, or its transpose; False where one of them is neither."""
        region = self._regions.get(id(whole))
        parts = result if isinstance(result, (tuple, list)) else (result,)
        regions = [None if region is None else _region(region, whole, part) for part in parts]
        if None in regions:
            return False
        self._regions.update({id(part): own for part, own in zip(parts, regions, strict=True) if own is not None})
        self._alive += parts
        return True

    def _refuse(self, names: list[str], func: Any) -> None:
        for name in names:
            self.unknown.setdefault(name, f"it goes through {getattr(func, '__name__', str(func))}")

    def region(self, tensor: Tensor | None) -> Region | None:
        """The region of a tracked tensor, else None."""
        return None if tensor is None else self._regions.get(id(tensor))

    def name(self, tensor: Tensor | None) -> str | None:
        """The name of a tensor that is tracked as a whole, else None."""
        region = self.region(tensor)
        return None if region is None or region != Region(region.name) else region.name

    def in_part(self, *tensors: Tensor | None) -> bool:
        """Whether one of the tensors is a part or a transpose of a tracked one."""
        return any(self.region(tensor) is not None and self.name(tensor) is None for tensor in tensors)

    def plain(self, tensor: Tensor | None) -> Tensor | None:
        """The tensor, detached where it is tracked."""
        return tensor.detach() if tensor is not None and self.region(tensor) is not None else tensor


def _region(region: Region, whole: Tensor, part: Tensor) -> Region | None:
    """The region of a view of a tracked tensor with this region; None where it is no range of rows and no transpose."""
    if part.untyped_storage().data_ptr() != whole.untyped_storage().data_ptr():
        return None  # a copy
    shift = int(part.storage_offset()) - int(whole.storage_offset())
    if part.shape[1:] == whole.shape[1:] and part.stride() == whole.stride() and part.dim() == whole.dim() > 0:
        if part.shape == whole.shape:
            return region
        rows = shift // max(1, int(whole.stride(0)))
        return None if region.transposed else region._replace(low=region.low + rows, whole=False)
    turned = part.dim() == whole.dim() == 2 and part.shape == whole.mT.shape and part.stride() == whole.mT.stride()
    return region._replace(transposed=not region.transposed) if turned and not shift else None


def _collect(regions: Mapping[int, Region], values: Iterable[Any], touched: list[str]) -> None:
    """Append the names of the tracked tensors among the arguments of an operation (called for every operation)."""
    for value in values:
        if id(value) in regions:
            touched.append(regions[id(value)].name)
        elif isinstance(value, (tuple, list)):
            _collect(regions, value, touched)
        elif isinstance(value, dict):
            _collect(regions, value.values(), touched)


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
    return _affine(mode, input, weight, bias, mode.region(weight))


def _affine(
    mode: WeightUses, input: Tensor, weight: Tensor, bias: Tensor | None, region: Region | None
) -> Tensor | None:
    """The rule of z = W a + b for weights (rows, columns) that are this region of a tracked tensor, if of any."""
    own = mode.region(bias)
    if mode.region(input) is not None or weight.dim() != 2 or (bias is not None and bias.dim() != 1):
        return None
    if (region is None and own is None) or (own is not None and own.transposed):
        return None
    with torch.enable_grad():
        source = _rooted(input)
        output = functional.linear(source, weight.detach() if region else weight, mode.plain(bias))
    names = None if region is None else region.name, None if own is None else own.name
    use = LinearUse(*names, get_gradient_edge(output), output.shape, source, source._version, weight.shape[1])
    first_row, transposed = (0, False) if region is None else (region.low, region.transposed)
    first_bias, direct = 0 if own is None else own.low, not mode.in_part(weight, bias)
    rows = replace(use, first_row=first_row, first_bias=first_bias, transposed=transposed, direct=direct)
    mode.uses.append(rows)
    return output


def _turned(region: Region | None) -> Region | None:
    return None if region is None else region._replace(transposed=not region.transposed)


def _addmm(
    mode: WeightUses, input: Tensor, mat1: Tensor, mat2: Tensor, *, beta: float = 1, alpha: float = 1
) -> Tensor | None:
    if beta != 1 or alpha != 1:
        return None
    return _affine(mode, mat1, mat2.mT, input, _turned(mode.region(mat2)))


def _matmul(mode: WeightUses, input: Tensor, other: Tensor) -> Tensor | None:
    if input.dim() < 2 or other.dim() != 2 or mode.region(other) is None:
        return None
    return _affine(mode, input, other.mT, None, _turned(mode.region(other)))


def _sum(mode: WeightUses, input: Any, other: Any, *, alpha: float = 1) -> Tensor | None:
    if not isinstance(input, Tensor) or not isinstance(other, Tensor):
        return None
    weight, source = (other, input) if mode.name(input) is None else (input, other)
    if alpha != 1 or mode.name(weight) is None or mode.region(source) is not None or weight.dim() > source.dim():
        return None
    if weight.dim() == source.dim() and weight.shape[:1] != (1,):
        return None  # entries of its own for each row, or for each position of rows on another axis
    with torch.enable_grad():
        output = _rooted(source) + weight.detach()
    return _record(mode, BroadcastUse, weight, None, weight.detach(), output, weight.shape)


def _expand(mode: WeightUses, input: Tensor, *sizes: Any) -> Tensor | None:
    if mode.name(input) is None or input.shape[:1] != (1,):
        return None
    with torch.enable_grad():
        output = input.detach().requires_grad_().expand(*sizes)
    if output.dim() != input.dim():
        return None
    return _record(mode, BroadcastUse, input, None, input.detach(), output, input.shape)


def _recurrent(cell: Cell) -> Callable[..., tuple[Tensor, ...] | None]:
    """The rule of a recurrent layer: a loop over time, whose products with weights are seen."""

    def rule(
        mode: WeightUses, inputs: Tensor, states: Any, weights: Any, has_biases: Any, layers: Any, *rest: Any
    ) -> tuple[Tensor, ...] | None:
        if not isinstance(has_biases, bool):  # data, batch sizes, states, weights, has_biases, layers, ...
            for name in map(mode.name, has_biases):
                if name is not None:
                    mode.unknown[name] = PACKED
            return None
        _, _, bidirectional, batch_first = rest
        states = (states,) if isinstance(states, Tensor) else tuple(states)
        sizes = layers, bidirectional, batch_first
        return recurrence(cell, partial(_product, mode), inputs, states, weights, has_biases, *sizes)

    return rule


def _recurrent_cell(cell: Cell) -> Callable[..., Any]:
    """The rule of a single step."""

    def rule(
        mode: WeightUses,
        inputs: Tensor,
        states: Any,
        weight: Tensor,
        recurrent: Tensor,
        bias: Tensor | None = None,
        recurrent_bias: Tensor | None = None,
    ) -> Any:
        held = (states,) if isinstance(states, Tensor) else tuple(states)
        inside, own = _product(mode, inputs, weight, bias), _product(mode, held[0], recurrent, recurrent_bias)
        with torch.enable_grad():
            after = cell(inside, own, held)
        return after[0] if isinstance(states, Tensor) else after

    return rule


def _product(mode: WeightUses, source: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """W a + b, recorded where a tracked tensor is in it and the rule takes it."""
    output = _linear(mode, source, weight, bias)
    return functional.linear(source, weight, bias) if output is None else output


def _attention(mode: WeightUses, *args: Any, **kwargs: Any) -> Any:
    """Run torch's own code of multi-head attention inside the mode, which sees its linear maps."""
    own = functional.multi_head_attention_forward
    names = {**vars(functional), "has_torch_function": lambda tensors: False}
    inner = FunctionType(own.__code__, names, own.__name__, own.__defaults__, own.__closure__)
    inner.__kwdefaults__ = own.__kwdefaults__
    with mode:
        return inner(*args, **kwargs)


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
        if mode.region(input) is not None or input.dim() != weight.dim() or mode.in_part(weight, bias):
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
            kernels = laid_out(weight.detach(), source) if mode.name(weight) else weight
            output = function(source, kernels, mode.plain(bias), stride, padding, dilation, groups)
        window = Window(kernel, stride, padding, dilation, groups)
        return _record(mode, ConvolutionUse, weight, bias, source, output, window)

    return rule


def _transposed_convolution(function: Callable[..., Tensor]) -> Callable[..., Tensor | None]:
    def rule(
        mode: WeightUses,
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        stride: Any = 1,
        padding: Any = 0,
        output_padding: Any = 0,
        groups: int = 1,
        dilation: Any = 1,
    ) -> Tensor | None:
        axes, given = weight.dim() - 2, (stride, padding, dilation)
        if mode.region(input) is not None or input.dim() != weight.dim() or mode.in_part(weight, bias) or groups != 1:
            return None
        stride, padding, dilation = (_each(value, axes) for value in given)
        if any(extra >= step for extra, step in zip(_each(output_padding, axes), stride, strict=True)):
            return None  # pixels that no pixel of the input reaches in full
        with torch.enable_grad():
            source = _rooted(input)
            output = function(source, mode.plain(weight), None, stride, padding, output_padding, groups, dilation)
        if mode.name(weight) is not None:
            window = Window(tuple(weight.shape[2:]), stride, padding, dilation, 1)
            _record(mode, TransposedConvolutionUse, weight, None, source, output, window)
            mode.uses[-1] = replace(mode.uses[-1], transposed=True)
        if bias is None:
            return output
        with torch.enable_grad():
            shifted = output + bias.detach().view(-1, *[1] * axes)
        return shifted if mode.name(bias) is None else _record(mode, ScaleUse, None, bias, output, shifted, _same, None)

    return rule


def _same(values: Tensor) -> Tensor:
    return values


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
    if mode.name(weight) is None:
        return None
    if padding is not None and padding < 0:
        padding += weight.shape[0]
    with torch.enable_grad():
        output = functional.embedding(index, weight.detach().requires_grad_(), padding)
    return _record(mode, EmbeddingUse, weight, None, index, output, weight.shape[0], padding)


def _norm(function: Callable[..., Tensor]) -> Callable[..., Tensor | None]:
    """The rule of a normalisation followed by a scale and a shift, unless it uses or updates statistics of a batch."""

    def rule(mode: WeightUses, *args: Any, **kwargs: Any) -> Tensor | None:
        given = dict(zip(_argument_names(function), args, strict=False)) | kwargs
        if mode.region(given["input"]) is not None or mode.in_part(given.get("weight"), given.get("bias")):
            return None
        fixed = given.get("running_mean") is not None
        if function is functional.batch_norm and (given.get("training", False) or not fixed):
            return None
        if function is functional.instance_norm and given.get("use_input_stats", True) and fixed:
            return None
        source, tensors = given.pop("input"), {name: given.pop(name) for name in ("weight", "bias") if name in given}
        trailing = len(given["normalized_shape"]) if "normalized_shape" in given else None
        plain: dict[str, Any] = {name: mode.plain(tensor) for name, tensor in tensors.items()}
        with torch.enable_grad():
            rooted = _rooted(source)
            if function is functional.batch_norm and not small_parts(rooted.device):
                output = batch_norm(rooted, **given, **plain)
            else:
                output = function(rooted, **given, **plain)
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
_RULES: dict[Any, Callable[..., Any]] = {
    functional.linear: _linear,
    functional.conv1d: _convolution(functional.conv1d),
    functional.conv2d: _convolution(functional.conv2d),
    functional.conv_transpose1d: _transposed_convolution(functional.conv_transpose1d),
    functional.conv_transpose2d: _transposed_convolution(functional.conv_transpose2d),
    functional.embedding: _embedding,
    functional.multi_head_attention_forward: _attention,
    torch.addmm: _addmm,
    torch.Tensor.expand: _expand,
    **dict.fromkeys((torch.matmul, torch.mm, torch.Tensor.matmul, torch.Tensor.mm, torch.Tensor.__matmul__), _matmul),
    **dict.fromkeys((torch.add, torch.Tensor.add, torch.Tensor.__add__, torch.Tensor.__radd__), _sum),
    **{
        function: rule(cell)
        for cell, layer, step in (
            (lstm_cell, torch.lstm, torch.lstm_cell),
            (gru_cell, torch.gru, torch.gru_cell),
            (plain_cell(torch.tanh), torch.rnn_tanh, torch.rnn_tanh_cell),
            (plain_cell(torch.relu), torch.rnn_relu, torch.rnn_relu_cell),
        )
        for function, rule in ((layer, _recurrent), (step, _recurrent_cell))
    },
    **{function: _norm(function) for function in _NORMS},
}
_DIRECT = {functional.linear, functional.conv1d, functional.conv2d}
_PARTS = {
    *(torch.chunk, torch.split, torch.split_with_sizes, torch.narrow, torch.t, torch.transpose),
    *(torch.Tensor.chunk, torch.Tensor.split, torch.Tensor.split_with_sizes, torch.Tensor.narrow),
    *(torch.Tensor.t, torch.Tensor.transpose, torch.Tensor.__getitem__),
    *(getattr(torch.Tensor, name).__get__ for name in ("T", "mT")),
}
