"""Estimators with noise in the layers: operations that replace the uses of weights."""

import logging
from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from posterity.curvature.survey import Survey, survey
from posterity.errors import positive_whole
from posterity.methods.parts.gradients.estimator import DataTerm, Estimator, Factorised, Memory, Out
from posterity.model import Batch, Buffers, Joint, Network, Problem
from posterity.numerics.random import Key

logger = logging.getLogger("posterity")

_OPERATIONS: dict[Any, int] = {functional.linear: -1, functional.conv1d: 1, functional.conv2d: 1}  # axis of channels
_LOGGED: WeakKeyDictionary[Network, set[str]] = WeakKeyDictionary()  # estimators that have logged their exceptions


class Use(NamedTuple):
    """A linear map or convolution: `operation(source, weight, bias)`, with channels along `axis` of source and output.

    `names` are the names of weight and bias, None for a tensor that is not tracked.
    """

    operation: Callable[[Tensor, Tensor, Tensor | None], Tensor]
    axis: int
    source: Tensor
    weight: Tensor
    bias: Tensor | None
    names: tuple[str | None, str | None]


Replacement = Callable[[Use], Tensor]


class ReplacedUses(TorchFunctionMode):
    """Calls `replacement` in place of every linear map or convolution by a tracked tensor inside `with`.

    The tensors must be the very objects that the operations get. Any other operation that makes a tensor of a tracked
    one raises a RuntimeError.

    >>> import torch
    >>> weight = torch.ones(1, 2)
    >>> def doubled(use):
    ...     return 2 * use.operation(use.source, use.weight, use.bias)
    >>> with ReplacedUses({"weight": weight}, doubled):
    ...     print(functional.linear(torch.ones(1, 2), weight))
    tensor([[4.]])
    """

    def __init__(self, tensors: Mapping[str, Tensor], replacement: Replacement) -> None:
        super().__init__()
        self._names = {id(tensor): name for name, tensor in tensors.items()}
        self._alive = dict(tensors)  # an id belongs to a tensor only while that lives
        self._replacement = replacement

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        touched = [self._names[id(value)] for value in (*args, *kwargs.values()) if id(value) in self._names]
        if touched and func in _OPERATIONS:
            return self._replaced(func, *args, **kwargs)
        result = func(*args, **kwargs)
        if touched and isinstance(result, Tensor):
            raise RuntimeError(
                f"'{touched[0]}' goes through {getattr(func, '__name__', func)} in this pass, though not in the one "
                "that was looked at first. Use WeightSampling, which takes every network."
            )
        return result

    def _replaced(
        self, func: Any, input: Tensor, weight: Tensor, bias: Tensor | None = None, *rest: Any, **named: Any
    ) -> Tensor:
        def operation(source: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
            output: Tensor = func(source, weight, bias, *rest, **named)
            return output

        names = self._names.get(id(weight)), None if bias is None else self._names.get(id(bias))
        return self._replacement(Use(operation, _OPERATIONS[func], input, weight, bias, names))


class DrawnLayers(Estimator):
    """Estimator that draws noise inside the layers which it may replace, and other weights once for the batch.

    It replaces layers whose weights are used once, by a linear map or a convolution; without `_positions` only where a
    weight acts once in each row. The log names the other weights once for each network. Several `draws` run as that
    many copies of the batch, one after the other in its rows. Members run one at a time.
    """

    of_batches = False

    draws: int

    def __post_init__(self) -> None:
        positive_whole(f"{type(self).__name__}.draws", self.draws)

    @property
    def _positions(self) -> bool:
        return True

    @abstractmethod
    def _replacement(self, scales: Mapping[str, Tensor], key: Key) -> Replacement:
        """The operation with noise, from the scales of its weights by name."""

    def data_term(
        self, joint: Problem, q: Factorised, batch: Batch, buffers: Buffers, memory: Memory, key: Key, out: Out = None
    ) -> DataTerm:
        joint = joint.as_joint(type(self).__name__, "Use WeightSampling.")
        names = self._replaceable(joint, batch)
        scale = q.scale
        if q.places is not None:
            scale = torch.zeros_like(joint.split(q.mean)[0]).index_copy_(-1, q.places, scale)
        if self.draws > 1:
            batch = batch.map(lambda tensor: torch.cat([tensor] * self.draws, dim=1 if batch.per_member else 0))
        if q.mean.dim() == 1:
            value, grad_mean, grad_scale, buffers = self._member_term(joint, q.mean, scale, batch, buffers, key, names)
        else:
            terms = []
            for i in range(len(q.mean)):
                own = {name: buffer[i] for name, buffer in buffers.items()}
                member, rows = joint.member(i), batch.member(i)
                terms.append(self._member_term(member, q.mean[i], scale[i], rows, own, key, names))
            value, grad_mean, grad_scale = (torch.stack(parts) for parts in list(zip(*terms, strict=True))[:3])
            buffers = {name: torch.stack([after[name] for *_, after in terms]) for name in buffers}
        return DataTerm(value, grad_mean, q.random(grad_scale), buffers, {})

    def _member_term(
        self, joint: Joint, mean: Tensor, scale: Tensor, batch: Batch, buffers: Buffers, key: Key, names: frozenset[str]
    ) -> tuple[Tensor, Tensor, Tensor, Buffers]:
        """(value, gradient in the mean (T,), in the scale (P,), buffers), from a mean (T,) and scales (P,)."""
        grad_mean, grad_scale = torch.zeros_like(mean), torch.zeros_like(scale)
        weights, raw = joint.split(mean.detach())
        means, scales = (
            [view.requires_grad_() for view in joint.network.views(flat.detach())] for flat in (weights, scale)
        )
        grads = joint.network.views(grad_mean[: joint.num_weights]) + joint.network.views(grad_scale)
        leaves = [*means, *scales]
        if raw.numel():
            leaves.append(raw.requires_grad_())
            grads.append(grad_mean[joint.num_weights :])
        random = {part.name for part in joint.random_slices}
        given, tracked, tracked_scales = [], {}, {}
        with torch.enable_grad():
            for part, m, s in zip(joint.network.layout, means, scales, strict=True):
                drawn = part.name in random and part.name not in names
                given.append(torch.addcmul(m, s, _normal(key.fold(part.name), m)) if drawn else m)
                if part.name in names:
                    tracked[part.name], tracked_scales[part.name] = m, s
        with ReplacedUses(tracked, self._replacement(tracked_scales, key)):
            value, buffers = joint.data_value(given, raw, batch, buffers)
        for leaf, grad in zip(leaves, grads, strict=True):
            leaf.grad = grad
        value.backward()  # type: ignore[no-untyped-call]
        return value.detach(), grad_mean, grad_scale, buffers

    def _replaceable(self, joint: Joint, batch: Batch) -> frozenset[str]:
        """Names of the tensors in layers that may be replaced; logs the others once for each network."""
        name, seen = type(self).__name__, survey(joint, batch.member(0).inputs)
        matrices = [layer for layer in seen.places if layer.kind == "matrix" and layer.direct]
        names = frozenset(n for layer in matrices if self._positions or layer.positions == 1 for n in layer.block.names)
        logged = _LOGGED.setdefault(joint.network, set())
        if name not in logged:
            logged.add(name)
            for part in joint.random_slices:
                if part.name not in names:
                    logger.info("%s: '%s' is drawn once a batch, because %s", name, part.name, _reason(part.name, seen))
        return names


def _reason(name: str, seen: Survey) -> str:
    if name in seen.explicit:
        return seen.explicit[name]
    if seen.times.get(name, 0) > 1:
        return "it is used more than once"
    if any(name in layer.block.names and layer.kind == "matrix" and layer.direct for layer in seen.places):
        return "it acts at several positions of a row"
    return "its layer is neither linear nor a convolution"


def _normal(key: Key, like: Tensor) -> Tensor:
    """Standard normal numbers shaped as `like`, drawn in float32 for every dtype."""
    return key.normal(tuple(like.shape), torch.float32, like.device).to(like.dtype)


@dataclass(frozen=True)
class LocalReparameterisation(DrawnLayers):
    """Pathwise gradients with noise drawn for each row in the outputs of linear layers.

    **Math**: for independent w ~ N(m, s^2) the outputs of a linear layer at a are independent normal numbers with
    means m a + b and variances s^2 a^2 + s_b^2; these are drawn, for each row anew. A weight that is used more than
    once, or otherwise than by a linear map, is drawn once for the batch, as by `WeightSampling`; which ones is logged.

    **Limit**: unbiased. A weight that acts at several positions of a row (convolutions, sequences) makes their outputs
    dependent: it is drawn too, unless `approximate` takes the positions as independent, which is biased.

    **Cost**: twice the matrix products of a pass, on `draws` copies of the batch; the first layer runs once for all.

    **References**: Kingma, Salimans and Welling (2015), Variational dropout and the local reparameterization trick.

    **Example**:

    >>> import torch, posterity as po
    >>> net = torch.nn.Linear(1, 1, bias=False)
    >>> joint = po.Joint(net, po.likelihoods.Gaussian(1.0), po.priors.Normal(), num_data=10_000)
    >>> q = Factorised(torch.zeros(1), torch.ones(1), None)
    >>> batch = po.model.Batch(torch.ones(10_000, 1), torch.ones(10_000, 1))
    >>> term = LocalReparameterisation().data_term(joint, q, batch, {}, {}, po.Key(0))
    >>> bool((term.grad_mean / 10_000 - 1.0).abs() < 0.05)  # every row has other noise
    True
    """

    draws: int = 1
    approximate: bool = False

    @property
    def _positions(self) -> bool:
        return self.approximate

    def _replacement(self, scales: Mapping[str, Tensor], key: Key) -> Replacement:
        before = True  # any noise: up to the first replaced layer the copies of the batch are alike

        def replacement(use: Use) -> Tensor:
            nonlocal before
            copies, before = self.draws if before else 1, False
            source = use.source[: len(use.source) // copies]
            spread, bias_spread = (None if name is None else scales[name].square() for name in use.names)
            mean = use.operation(source, use.weight, use.bias)
            spread = torch.zeros_like(use.weight) if spread is None else spread
            variance = use.operation(source.square(), spread, bias_spread)
            # Where no input is on there is no noise, and the square root would have no gradient.
            scale = variance.clamp_min(torch.finfo(variance.dtype).tiny).sqrt()
            if copies > 1:
                mean, scale = (torch.cat([value] * copies) for value in (mean, scale))
            return torch.addcmul(mean, scale, _normal(key.fold(f"{use.names[0] or use.names[1]} outputs"), mean))

        return replacement


@dataclass(frozen=True)
class Flipout(DrawnLayers):
    """Pathwise gradients at one draw of the weights, made almost independent between rows by random signs.

    **Math**: row n sees the weights m + (r_n s_n^T) * scale * eps, with eps shared by the batch and signs r_n for the
    outputs, s_n for the inputs of a layer; a layer's output is m a + b + r_n * ((scale * eps) (s_n * a)). Linear layers
    and convolutions (signs for each channel) whose weights are used once; others are drawn once for the batch, as by
    `WeightSampling`; which ones is logged.

    **Limit**: unbiased, since q is symmetric about its mean. Rows are uncorrelated given eps^2, not independent.

    **Cost**: twice the matrix products of a pass, on `draws` copies of the batch.

    **References**: Wen et al. (2018), Flipout: efficient pseudo-independent weight perturbations.

    **Example**:

    >>> import torch, posterity as po
    >>> net = torch.nn.Linear(1, 1, bias=False)
    >>> joint = po.Joint(net, po.likelihoods.Gaussian(1.0), po.priors.Normal(), num_data=10_000)
    >>> q = Factorised(torch.zeros(1), torch.ones(1), None)
    >>> batch = po.model.Batch(torch.ones(10_000, 1), torch.ones(10_000, 1))
    >>> term = Flipout().data_term(joint, q, batch, {}, {}, po.Key(0))
    >>> bool((term.grad_mean / 10_000 - 1.0).abs() < 0.05)
    True
    """

    draws: int = 1

    def _replacement(self, scales: Mapping[str, Tensor], key: Key) -> Replacement:
        def replacement(use: Use) -> Tensor:
            output, (name, bias_name) = use.operation(use.source, use.weight, use.bias), use.names
            if name is not None:
                own = key.fold(name)
                drawn = scales[name] * _normal(own, use.weight)
                signed = use.source * _signs(own.fold("inputs"), use.source, use.axis)
                output = output + use.operation(signed, drawn, None) * _signs(own.fold("outputs"), output, use.axis)
            if bias_name is not None and use.bias is not None:
                own = key.fold(bias_name)
                shape = [1] * output.dim()
                shape[use.axis] = -1
                drawn = (scales[bias_name] * _normal(own, use.bias)).view(shape)
                output = output + drawn * _signs(own.fold("outputs"), output, use.axis)
            return output

        return replacement


def _signs(key: Key, like: Tensor, axis: int) -> Tensor:
    """Random signs for each row and channel of a tensor, (N, 1, ..., C) or (N, C, 1, ...)."""
    shape = [like.shape[0]] + [1] * (like.dim() - 1)
    shape[axis] = like.shape[axis]
    return (key.uniform(tuple(shape), device=like.device) < 0.5).to(like.dtype).mul_(2.0).sub_(1.0)
