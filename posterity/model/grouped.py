"""Networks with convolutions whose members run as groups of channels, by rules for single functions of torch."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

from posterity.model.layer_chains import products
from posterity.model.layouts import aligned


class Grouped(Tensor):
    """A tensor of each member, which a module sees as that of one member.

    The numbers of all members are in `joined`: with a member axis first, (M, *shape), or, as `channels`, side by side
    along the second axis, (n, M C, ...) for the shape (n, C, ...). Functions of torch between convolutions have rules
    that keep to channels; `vmap` runs all others, on views. So members of a network make as many calls as one, and the
    memory layout of images stays that of the first convolution.

    >>> kernels, images = torch.ones(3, 5, 2, 1, 1), torch.ones(4, 2, 6, 6)
    >>> result = F.conv2d(images, Grouped.of(kernels, 3))
    >>> result.shape, result.joined.shape, result.stacked().shape
    (torch.Size([4, 5, 6, 6]), torch.Size([4, 15, 6, 6]), torch.Size([3, 4, 5, 6, 6]))
    """

    joined: Tensor
    count: int
    channels: bool

    @staticmethod
    def of(joined: Tensor, count: int, channels: bool = False) -> "Grouped":
        """Wrap the numbers of `count` members."""
        shape = (joined.shape[0], joined.shape[1] // count, *joined.shape[2:]) if channels else joined.shape[1:]
        own: Grouped = Tensor._make_wrapper_subclass(Grouped, shape, dtype=joined.dtype, device=joined.device)
        own.joined, own.count, own.channels = joined, count, channels
        return own

    def stacked(self) -> Tensor:
        """The numbers as (M, *shape), a view."""
        return _apart(self.joined, self.count).transpose(0, 1) if self.channels else self.joined

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _FACTS:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        result = _RULES[func](func, *args, **kwargs) if func in _RULES else NotImplemented
        return _each(func, args, kwargs) if result is NotImplemented else result

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        raise NotImplementedError(f"{func} has reached the tensors of all members together.")


def _each(func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Call the function for each member by vmap."""
    leaves, tree = tree_flatten((args, kwargs))
    own = [index for index, leaf in enumerate(leaves) if isinstance(leaf, Grouped)]

    def call(*tensors: Tensor) -> Any:
        given = [*leaves]
        for index, tensor in zip(own, tensors, strict=True):
            given[index] = tensor
        member_args, member_kwargs = tree_unflatten(given, tree)
        return func(*member_args, **member_kwargs)

    result = torch.func.vmap(call, randomness="error")(*(leaves[index].stacked() for index in own))
    return tree_map_only(Tensor, lambda tensor: Grouped.of(tensor, leaves[own[0]].count), result)


def _apart(joined: Tensor, count: int) -> Tensor:
    """Values (n, M C, ...) of all members as (n, M, C, ...), a view."""
    return joined.view(joined.shape[0], count, joined.shape[1] // count, *joined.shape[2:])


def _count(*values: Any) -> int:
    """The number of members of the first value that has them."""
    return next(value.count for value in values if isinstance(value, Grouped))


def _side_by_side(value: Tensor, count: int) -> Tensor:
    """Values (n, C, ...) of all members as (n, M C, ...), shared ones repeated."""
    if isinstance(value, Grouped):
        return value.joined if value.channels else value.joined.transpose(0, 1).flatten(1, 2)
    return value.unsqueeze(1).expand(-1, count, *value.shape[1:]).flatten(1, 2)


def _in_a_row(value: Any, count: int) -> Any:
    """A weight (M, O, ...) of each member or a shared one (O, ...), as (M O, ...); None stays."""
    if value is None:
        return None
    return (value.stacked() if isinstance(value, Grouped) else value.expand(count, *value.shape)).flatten(0, 1)


def _convolved(func: Any, input: Tensor, weight: Tensor, bias: Any = None, *args: Any, **kwargs: Any) -> Any:
    names = ("stride", "padding", "dilation", "groups")
    settings = {**dict(zip(names, args, strict=False)), **kwargs}
    count, groups = _count(input, weight, bias), settings.pop("groups", 1)
    if input.dim() != weight.dim():  # a single image, whose first axis has the channels
        return NotImplemented
    if isinstance(input, Grouped) or groups > 1:
        input, groups = _side_by_side(input, count), groups * count  # shared images take all kernels as they are
    made = func(input, _in_a_row(weight, count), _in_a_row(bias, count), groups=groups, **settings)
    return Grouped.of(made, count, channels=True)


def _normalised(
    func: Any,
    input: Tensor,
    running_mean: Any,
    running_var: Any,
    weight: Any = None,
    bias: Any = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Any:
    count = _count(input, running_mean, running_var, weight, bias)
    mean, variance = (_in_a_row(value, count) for value in (running_mean, running_var))
    if training and mean is not None and not running_mean.stacked().is_contiguous():
        return NotImplemented  # the updated statistics would be a copy's
    scale, shift = (aligned(_in_a_row(value, count)) for value in (weight, bias))
    made = func(_side_by_side(input, count), mean, variance, scale, shift, training, momentum, eps)
    return Grouped.of(made, count, channels=True)


def _normalised_by_groups(
    func: Any, input: Tensor, num_groups: int, weight: Any = None, bias: Any = None, eps: float = 1e-5
) -> Any:
    count = _count(input, weight, bias)
    scale, shift = (_in_a_row(value, count) for value in (weight, bias))
    made = func(_side_by_side(input, count), num_groups * count, scale, shift, eps)
    return Grouped.of(made, count, channels=True)


def _pixelwise(func: Any, input: Tensor, *args: Any, **kwargs: Any) -> Any:
    """A function of each channel by itself."""
    if not (isinstance(input, Grouped) and input.channels and input.dim() > 2):
        return NotImplemented
    made = func(input.joined, *args, **kwargs)
    return Grouped.of(made, input.count, channels=True) if isinstance(made, Tensor) else NotImplemented


def _entrywise(func: Any, *args: Any, **kwargs: Any) -> Any:
    tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
    first = tensors[0]
    for value in tensors:
        if not (isinstance(value, Grouped) and value.channels):
            return NotImplemented
        if value.dim() != first.dim() or value.shape[1] != first.shape[1]:
            return NotImplemented
    joined = tree_map_only(Grouped, lambda value: value.joined, (args, kwargs))
    return Grouped.of(func(*joined[0], **joined[1]), _count(first), channels=True)


def _taken(func: Any, input: Tensor, index: Any) -> Any:
    """Some pixels of all images and channels."""
    index = index if isinstance(index, tuple) else (index,)
    pixels = len(index) > 2 and index[:2] == (slice(None),) * 2 and all(isinstance(part, slice) for part in index)
    return _pixelwise(func, input, index) if pixels else NotImplemented


def _padded(func: Any, input: Tensor, pad: Sequence[int], mode: str = "constant", value: Any = None) -> Any:
    if len(pad) == 2 * (input.dim() - 2):
        return _pixelwise(func, input, pad, mode, value)
    if not (isinstance(input, Grouped) and input.channels) or len(pad) > 2 * (input.dim() - 1) or mode != "constant":
        return NotImplemented
    images = _apart(input.joined, input.count)
    return Grouped.of(_like(input.joined, func(images, pad, mode, value).flatten(1, 2)), input.count, channels=True)


def _concatenated(func: Any, tensors: Sequence[Tensor], dim: int = 0) -> Any:
    count = _count(*tensors)
    if dim != 1 or tensors[0].dim() < 3:
        return NotImplemented
    images = [_side_by_side(tensor, count) for tensor in tensors]
    made = func([_apart(part, count) for part in images], 2).flatten(1, 2)
    return Grouped.of(_like(images[0], made), count, channels=True)


def _like(images: Tensor, made: Tensor) -> Tensor:
    """The result in the memory layout of the images it is made from."""
    last = images.dim() == 4 and images.is_contiguous(memory_format=torch.channels_last)
    return made.contiguous(memory_format=torch.channels_last) if last else made


def _multiplied(func: Any, input: Tensor, weight: Tensor, bias: Any = None) -> Any:
    if not (isinstance(input, Grouped) and isinstance(weight, Grouped)) or input.dim() != 2:
        return NotImplemented
    if bias is not None and not isinstance(bias, Grouped):
        return NotImplemented
    return Grouped.of(products(input.stacked(), weight.joined, None if bias is None else bias.joined), input.count)


def _of_torch(*names: str) -> set[Any]:
    """The functions of these names that torch has, its `functional` and its tensors, and those that work in place."""
    owners = (torch, F, torch._C._nn, Tensor)  # pyright: ignore[reportAttributeAccessIssue]
    wanted = (*names, *(f"{name}_" for name in names), *(f"__{name}__" for name in names))
    return {getattr(owner, name) for owner in owners for name in wanted if hasattr(owner, name)}


_POOLS = ("max_pool", "avg_pool", "adaptive_avg_pool", "adaptive_max_pool")
_RULES: dict[Any, Callable[..., Any]] = {
    **dict.fromkeys(
        _of_torch(
            *("relu", "relu6", "leaky_relu", "elu", "selu", "celu", "gelu", "silu", "mish", "softplus", "tanh"),
            *("sigmoid", "hardtanh", "hardswish", "hardsigmoid", "logsigmoid", "erf", "exp", "square", "sqrt", "abs"),
            *("add", "sub", "mul", "div", "neg", "radd", "rsub", "rmul", "iadd", "isub", "imul", "truediv", "clamp"),
        ),
        _entrywise,
    ),
    **dict.fromkeys(_of_torch(*(f"{pool}{axes}d" for pool in _POOLS for axes in (1, 2, 3))), _pixelwise),
    **dict.fromkeys(_of_torch("conv1d", "conv2d", "conv3d"), _convolved),
    **dict.fromkeys((torch.cat, torch.concat), _concatenated),
    F.batch_norm: _normalised,
    F.group_norm: _normalised_by_groups,
    F.pad: _padded,
    F.linear: _multiplied,
    Tensor.__getitem__: _taken,
}
_FACTS = {
    *(getattr(Tensor, name) for name in ("size", "dim", "numel", "is_floating_point", "__len__")),
    *(getattr(Tensor, name).__get__ for name in ("shape", "ndim", "dtype", "device", "is_cuda")),
}
