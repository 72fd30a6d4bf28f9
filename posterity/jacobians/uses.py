"""Uses of weights in a forward pass, and the rule by which each is differentiated."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from posterity.jacobians.convolution import Convolution, Window
from posterity.jacobians.jacobian import Explicit, Jacobian
from posterity.jacobians.linear import Lookup, Matrix, Thin


def stacked(columns: Sequence[Tensor] | Tensor) -> Tensor:
    """K tensors (N, ...) as (K, N, ...): as they are, or so that the columns of a row lie together in memory."""
    return columns if isinstance(columns, Tensor) else torch.stack(tuple(columns), 1).transpose(0, 1)


@dataclass(frozen=True, eq=False)
class Use(ABC):
    """One operation, linear in a tracked weight and in its bias, and where in the graph its output is."""

    weight: str | None
    bias: str | None
    edge: GradientEdge
    output_shape: torch.Size
    source: Tensor  # what the operation was applied to
    version: int  # of the source, which must not be written into later

    @property
    def names(self) -> tuple[str, ...]:
        """Names of its tracked tensors."""
        return tuple(name for name in (self.weight, self.bias) if name is not None)

    @property
    def overwritten(self) -> bool:
        """Whether the source was changed in place after the operation."""
        return self.source._version != self.version

    @property
    @abstractmethod
    def shape(self) -> tuple[int, int]:
        """(rows, columns) of the weight seen as a matrix."""

    @abstractmethod
    def jacobian(self, columns: Sequence[Tensor] | Tensor, differentiable: bool) -> Jacobian:
        """Derivatives in the weights of K scalars a row, whose derivatives in the output are (N, *output) each."""


@dataclass(frozen=True, eq=False)
class LinearUse(Use):
    """z = W a + b on the last axis."""

    columns: int

    @property
    def shape(self) -> tuple[int, int]:
        return self.output_shape[-1], self.columns

    def jacobian(self, columns: Sequence[Tensor] | Tensor, differentiable: bool) -> Thin | Matrix:
        if len(self.output_shape) == 2:
            thin = None
            if self.weight is not None:
                thin = self.source if differentiable else self.source.detach()
            return Thin(thin, tuple(columns), self.bias is not None)
        gradients = stacked(columns)
        count, num = gradients.shape[:2]
        features = None
        if self.weight is not None:
            source = self.source if differentiable else self.source.detach()
            features = source.reshape(num, -1, 1, self.columns)
        return Matrix(features, gradients.reshape(count, num, -1, 1, self.output_shape[-1]), self.bias is not None)


@dataclass(frozen=True, eq=False)
class ConvolutionUse(Use):
    """A convolution over one or two axes."""

    window: Window

    @property
    def shape(self) -> tuple[int, int]:
        """(output channels, input channels of a group times the kernel)."""
        return self.output_shape[1], self.source.shape[1] // self.window.groups * prod(self.window.kernel)

    def jacobian(self, columns: Sequence[Tensor] | Tensor, differentiable: bool) -> Convolution:
        """Output pixels are positions, the patches below them the features."""
        gradients = stacked(columns)
        count, num = gradients.shape[:2]
        images = None
        if self.weight is not None:
            images = self.source if differentiable else self.source.detach()
        split = gradients.reshape(count, num, self.window.groups, -1, self.output_shape[2:].numel())
        return Convolution(images, split, self.window, self.bias is not None)


@dataclass(frozen=True, eq=False)
class EmbeddingUse(Use):
    """Rows of a table, looked up by index."""

    entries: int
    padding: int | None

    @property
    def shape(self) -> tuple[int, int]:
        return self.entries, self.output_shape[-1]

    def jacobian(self, columns: Sequence[Tensor] | Tensor, differentiable: bool) -> Lookup:
        gradients = stacked(columns)
        count, num = gradients.shape[:2]
        index = self.source.reshape(num, -1)
        flat = gradients.reshape(count, num, index.shape[1], -1)
        if self.padding is not None:
            flat = flat * (index != self.padding).to(flat.dtype).unsqueeze(-1)
        return Lookup(index, flat, self.entries, self.padding)


@dataclass(frozen=True, eq=False)
class ScaleUse(Use):
    """z = w a + b entry by entry, on what a normalisation made of its input."""

    normalise: Callable[[Tensor], Tensor]
    trailing: int | None  # how many last axes the weight has; None: it has that of channels, the second

    @property
    def shape(self) -> tuple[int, int]:
        return self._entries, 1

    @property
    def _entries(self) -> int:
        return self.output_shape[1] if self.trailing is None else self.output_shape[-self.trailing :].numel()

    def jacobian(self, columns: Sequence[Tensor] | Tensor, differentiable: bool) -> Explicit:
        """Few weights, so dense: sums over the positions at which each entry acts."""
        gradients = stacked(columns)
        parts = []
        if self.weight is not None:
            with torch.set_grad_enabled(differentiable):
                parts.append(self._summed(gradients * self.normalise(self.source)))
        if self.bias is not None:
            parts.append(self._summed(gradients))
        return Explicit(torch.stack(parts, -1).flatten(2).transpose(0, 1))

    def _summed(self, values: Tensor) -> Tensor:
        """(K, N, *output) -> (K, N, entries)."""
        count, num = values.shape[:2]
        if self.trailing is None:
            return values.reshape(count, num, self._entries, -1).sum(-1)
        return values.reshape(count, num, -1, self._entries).sum(-2)


class WeightUses(TorchFunctionMode):
    """Sees every use of the tracked tensors inside `with`, and cuts the graph at them.

    Takes names of tensors, which must be the very objects that the operations get. Afterwards `uses` holds, in order,
    every operation with a rule (linear, conv1d, conv2d, embedding, batch, layer, group, instance and RMS norm), and
    `unknown` says of every other tensor that was touched by what. Tracked tensors enter the operations
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
        self._names = {id(tensor): name for name, tensor in tensors.items()}
        self._alive = dict(tensors)  # an id is one tensor's only as long as that lives

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        touched: list[str] = []
        _collect(self._names, args, touched)
        _collect(self._names, kwargs.values(), touched)
        if not touched or not torch.is_grad_enabled():  # where the module itself wants no derivatives, there are none
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
        if any(True for _ in _tensors(result)):
            self._refuse(touched, func)
        return result

    def _refuse(self, names: list[str], func: Any) -> None:
        for name in names:
            self.unknown.setdefault(name, f"it goes through {getattr(func, '__name__', str(func))}")

    def name(self, tensor: Tensor | None) -> str | None:
        """Name of a tracked tensor, else None."""
        return None if tensor is None else self._names.get(id(tensor))

    def plain(self, tensor: Tensor | None) -> Tensor | None:
        """The tensor, without a graph of its own where it is tracked."""
        return tensor.detach() if tensor is not None and self.name(tensor) is not None else tensor


def _collect(names: Mapping[int, str], values: Iterable[Any], found: list[str]) -> None:
    """Append the names of the tracked tensors among the arguments of an operation; it runs at every one of them."""
    for value in values:
        if id(value) in names:
            found.append(names[id(value)])
        elif isinstance(value, (tuple, list)):
            _collect(names, value, found)
        elif isinstance(value, dict):
            _collect(names, value.values(), found)


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _tensors(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors(item)


def _rooted(source: Tensor) -> Tensor:
    """The source as part of a graph, so that the operation's output has an edge to stop at."""
    return source if source.requires_grad else source.detach().requires_grad_()


def _record(
    mode: WeightUses,
    kind: type[Use],
    weight: Tensor | None,
    bias: Tensor | None,
    source: Tensor,
    output: Tensor,
    *rest: Any,
) -> Tensor:
    use = kind(
        mode.name(weight), mode.name(bias), get_gradient_edge(output), output.shape, source, source._version, *rest
    )
    mode.uses.append(use)
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


def _embedding(
    mode: WeightUses,
    input: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Tensor | None:
    if max_norm is not None or scale_grad_by_freq:
        return None
    if padding_idx is not None and padding_idx < 0:
        padding_idx += weight.shape[0]
    with torch.enable_grad():
        output = functional.embedding(input, weight.detach().requires_grad_(), padding_idx)
    return _record(mode, EmbeddingUse, weight, None, input, output, weight.shape[0], padding_idx)


def _scale(
    mode: WeightUses, source: Tensor, weight: Tensor | None, bias: Tensor | None,
    normalise: Callable[[Tensor, Tensor | None, Tensor | None], Tensor], trailing: int | None,
) -> Tensor | None:  # fmt: skip
    if mode.name(source) is not None:
        return None
    with torch.enable_grad():
        rooted = _rooted(source)
        output = normalise(rooted, mode.plain(weight), mode.plain(bias))
    return _record(
        mode, ScaleUse, weight, bias, rooted, output, lambda values: normalise(values, None, None), trailing
    )  # fmt: skip


def _batch_norm(
    mode: WeightUses,
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor | None:
    if training or running_mean is None:
        return None

    def normalise(values: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        return functional.batch_norm(values, running_mean, running_var, weight, bias, False, 0.0, eps)

    return _scale(mode, input, weight, bias, normalise, None)


def _instance_norm(
    mode: WeightUses,
    input: Tensor,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor | None:
    if use_input_stats and running_mean is not None:
        return None  # it would update the running statistics each time

    def normalise(values: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        return functional.instance_norm(
            values, running_mean, running_var, weight, bias, use_input_stats, momentum, eps
        )  # fmt: skip

    return _scale(mode, input, weight, bias, normalise, None)


def _layer_norm(
    mode: WeightUses,
    input: Tensor,
    normalized_shape: Any,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor | None:
    def normalise(values: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        return functional.layer_norm(values, normalized_shape, weight, bias, eps)

    return _scale(mode, input, weight, bias, normalise, len(normalized_shape))


def _rms_norm(
    mode: WeightUses, input: Tensor, normalized_shape: Any, weight: Tensor | None = None, eps: float | None = None
) -> Tensor | None:
    def normalise(values: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        return functional.rms_norm(values, normalized_shape, weight, eps)

    return _scale(mode, input, weight, None, normalise, len(normalized_shape))


def _group_norm(
    mode: WeightUses,
    input: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor | None:
    def normalise(values: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        return functional.group_norm(values, num_groups, weight, bias, eps)

    return _scale(mode, input, weight, bias, normalise, None)


_RULES: dict[Any, Callable[..., Tensor | None]] = {
    functional.linear: _linear,
    functional.conv1d: _convolution(functional.conv1d),
    functional.conv2d: _convolution(functional.conv2d),
    functional.embedding: _embedding,
    functional.batch_norm: _batch_norm,
    functional.instance_norm: _instance_norm,
    functional.layer_norm: _layer_norm,
    functional.rms_norm: _rms_norm,
    functional.group_norm: _group_norm,
}
