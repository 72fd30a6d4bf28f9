"""One draw of the weights with signs of its own for each row: flipout."""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from posterity.errors import positive_whole
from posterity.methods.parts.gradients.by_use import Operation, Replacement, normal, term_by_use
from posterity.methods.parts.gradients.estimator import DataTerm, Estimator, Factorised, Memory, Out
from posterity.model import Batch, Buffers, Problem
from posterity.numerics.random import Key


@dataclass(frozen=True)
class Flipout(Estimator):
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

    def __post_init__(self) -> None:
        positive_whole("Flipout.draws", self.draws)

    def data_term(
        self, joint: Problem, q: Factorised, batch: Batch, buffers: Buffers, memory: Memory, key: Key, out: Out = None
    ) -> DataTerm:
        return term_by_use(type(self).__name__, joint, q, batch, buffers, key, self.draws, _rule, positions=True)


def _rule(scales: Mapping[str, Tensor], key: Key, draws: int) -> Replacement:
    def replacement(
        operation: Operation,
        axis: int,
        source: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        names: tuple[str | None, str | None],
    ) -> Tensor:
        output = operation(source, weight, bias)
        if names[0] is not None:
            own = key.fold(names[0])
            drawn = scales[names[0]] * normal(own, weight.shape, weight)
            signed = source * _signs(own.fold("inputs"), source, axis)
            output = output + operation(signed, drawn, None) * _signs(own.fold("outputs"), output, axis)
        if names[1] is not None and bias is not None:
            own = key.fold(names[1])
            drawn = scales[names[1]] * normal(own, bias.shape, bias)
            shape = [1] * output.dim()
            shape[axis] = -1
            output = output + drawn.view(shape) * _signs(own.fold("outputs"), output, axis)
        return output

    return replacement


def _signs(key: Key, like: Tensor, axis: int) -> Tensor:
    """Signs for each row and channel of a tensor, (N, 1, ..., C) or (N, C, 1, ...)."""
    shape = [like.shape[0]] + [1] * (like.dim() - 1)
    shape[axis] = like.shape[axis]
    return (key.uniform(tuple(shape), device=like.device) < 0.5).to(like.dtype).mul_(2.0).sub_(1.0)
