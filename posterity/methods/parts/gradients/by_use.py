"""Noise in layers instead of weights: operations put in place of the uses of weights."""

import logging
from collections.abc import Callable, Mapping
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from posterity.curvature.survey import Survey, survey
from posterity.methods.parts.gradients.estimator import DataTerm, Factorised
from posterity.model import Batch, Buffers, Joint, Network, Problem
from posterity.numerics.random import Key

_OPERATIONS: dict[Any, int] = {functional.linear: -1, functional.conv1d: 1, functional.conv2d: 1}  # axis of channels

Operation = Callable[[Tensor, Tensor, Tensor | None], Tensor]
Replacement = Callable[[Operation, int, Tensor, Tensor, Tensor | None, tuple[str | None, str | None]], Tensor]


class ReplacedUses(TorchFunctionMode):
    """Calls `replacement` in the place of every linear map or convolution by a tracked tensor inside `with`.

    The replacement gets the operation as a function of source, weight and bias, the axis of its channels, those three,
    and the names of weight and bias (None for one that is not tracked). The tensors must be the very objects that the
    operations get; any other operation that makes a tensor of one is refused by a RuntimeError.

    >>> import torch
    >>> weight = torch.ones(1, 2)
    >>> def doubled(operation, axis, source, weight, bias, names):
    ...     return 2 * operation(source, weight, bias)
    >>> with ReplacedUses({"weight": weight}, doubled):
    ...     print(functional.linear(torch.ones(1, 2), weight))
    tensor([[4.]])
    """

    def __init__(self, tensors: Mapping[str, Tensor], replacement: Replacement) -> None:
        """Track these tensors."""
        super().__init__()
        self._names = {id(tensor): name for name, tensor in tensors.items()}
        self._alive = dict(tensors)  # an id is one tensor's only as long as that lives
        self._replacement = replacement

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        touched = [self._names[id(value)] for value in (*args, *kwargs.values()) if id(value) in self._names]
        if not touched:
            return func(*args, **kwargs)
        if func in _OPERATIONS:
            return self._replaced(func, *args, **kwargs)
        result = func(*args, **kwargs)
        if isinstance(result, Tensor):
            raise RuntimeError(
                f"'{touched[0]}' goes through {getattr(func, '__name__', func)} in this pass, though not in the one "
                "that was looked at first. Use WeightSampling, which takes every network."
            )
        return result

    def _replaced(
        self, func: Any, input: Tensor, weight: Tensor, bias: Tensor | None = None, *rest: Any, **named: Any
    ) -> Tensor:
        def operation(source: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
            made: Tensor = func(source, weight, bias, *rest, **named)
            return made

        names = self._names.get(id(weight)), None if bias is None else self._names.get(id(bias))
        return self._replacement(operation, _OPERATIONS[func], input, weight, bias, names)


logger = logging.getLogger("posterity")

_SAID: WeakKeyDictionary[Network, set[str]] = WeakKeyDictionary()


def term_by_use(
    name: str,
    joint: Problem,
    q: Factorised,
    batch: Batch,
    buffers: Buffers,
    key: Key,
    draws: int,
    rule: Callable[[Mapping[str, Tensor], Key, int], Replacement],
    positions: bool,
) -> DataTerm:
    """The data term of a pass in which `rule` replaces the layers that it may, from the scales of their weights.

    It may those whose weights are used once, by a linear map or a convolution; without `positions` only where a weight
    acts once in each row. All other weights are drawn once for the whole batch, which is said once. Several
    `draws` are as many copies of the batch, one behind the other. Members run one after the other.
    """
    joint = joint.as_joint(name, "Use WeightSampling.")
    names = _replaceable(name, joint, batch, positions)
    weights = joint.split(q.mean)[0]
    full = torch.zeros_like(weights)
    scale = full.index_copy_(-1, q.places, q.scale) if q.places is not None else q.scale
    if draws > 1:
        batch = batch.map(lambda tensor: torch.cat([tensor] * draws, dim=1 if batch.per_member else 0))
    if q.mean.dim() == 1:
        value, grad_mean, grad_scale, buffers = _one(joint, q.mean, scale, batch, buffers, key, draws, names, rule)
    else:
        found = [
            _one(joint.member(i), q.mean[i], scale[i], batch.member(i), _of(buffers, i), key, draws, names, rule)
            for i in range(len(q.mean))
        ]
        value, grad_mean, grad_scale = (torch.stack(parts) for parts in list(zip(*found, strict=True))[:3])
        buffers = {each: torch.stack([after[each] for *_, after in found]) for each in buffers}
    return DataTerm(value, grad_mean, q.random(grad_scale), buffers, {})


def _of(buffers: Buffers, index: int) -> Buffers:
    return {name: buffer[index] for name, buffer in buffers.items()}


def _one(
    joint: Joint,
    mean: Tensor,
    scale: Tensor,
    batch: Batch,
    buffers: Buffers,
    key: Key,
    draws: int,
    names: frozenset[str],
    rule: Callable[[Mapping[str, Tensor], Key, int], Replacement],
) -> tuple[Tensor, Tensor, Tensor, Buffers]:
    """(value, gradient in the mean (T,), in the scale (P,), buffers), from a mean (T,) and scales (P,)."""
    grad_mean, grad_scale = torch.zeros_like(mean), torch.zeros_like(scale)
    weights, raw = joint.split(mean.detach())
    means, scales = (
        [view.requires_grad_() for view in joint.network.views(flat.detach())] for flat in (weights, scale)
    )
    places = joint.network.views(grad_mean[: joint.num_weights]) + joint.network.views(grad_scale)
    leaves = [*means, *scales]
    if raw.numel():
        leaves.append(raw.requires_grad_())
        places.append(grad_mean[joint.num_weights :])
    random = {part.name for part in joint.random_slices}
    parts = joint.network.layout
    given = []
    with torch.enable_grad():
        for part, m, s in zip(parts, means, scales, strict=True):
            drawn = part.name in random and part.name not in names
            given.append(torch.addcmul(m, s, normal(key.fold(part.name), part.shape, m)) if drawn else m)
    tracked = {part.name: m for part, m in zip(parts, means, strict=True) if part.name in names}
    known = {part.name: s for part, s in zip(parts, scales, strict=True) if part.name in names}
    with ReplacedUses(tracked, rule(known, key, draws)):
        value, buffers = joint.data_value(given, raw, batch, buffers)
    for leaf, place in zip(leaves, places, strict=True):
        leaf.grad = place
    value.backward()  # type: ignore[no-untyped-call]
    return value.detach(), grad_mean, grad_scale, buffers


def normal(key: Key, shape: tuple[int, ...], like: Tensor) -> Tensor:
    """Standard normal numbers, drawn in float32 for every number type."""
    return key.normal(tuple(shape), torch.float32, like.device).to(like.dtype)


def _replaceable(name: str, joint: Joint, batch: Batch, positions: bool) -> frozenset[str]:
    """Names of the tensors in layers that may be replaced; a word about the others, once for each network."""
    seen = survey(joint, batch.member(0).inputs)
    matrices = [place for place in seen.places if place.kind == "matrix"]
    names = frozenset(n for place in matrices if positions or place.positions == 1 for n in place.block.names)
    said = _SAID.setdefault(joint.network, set())
    if name not in said:
        said.add(name)
        for part in joint.random_slices:
            if part.name not in names:
                logger.info("%s: '%s' is drawn once a batch, because %s", name, part.name, _reason(part.name, seen))
    return names


def _reason(name: str, seen: Survey) -> str:
    if name in seen.explicit:
        return seen.explicit[name]
    if seen.times.get(name, 0) > 1:
        return "it is used more than once"
    if any(name in place.block.names and place.kind == "matrix" for place in seen.places):
        return "it acts at several positions of a row"
    return "its layer is neither linear nor a convolution"
