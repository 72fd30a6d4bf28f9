"""Noise in the outputs of layers: the local reparameterisation."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from posterity.errors import positive_whole
from posterity.methods.parts.gradients.by_use import Operation, Replacement, normal, term_by_use
from posterity.methods.parts.gradients.estimator import DataTerm, Estimator, Factorised, Memory, Out
from posterity.model import Batch, Buffers, Problem
from posterity.numerics.random import Key


@dataclass(frozen=True)
class LocalReparameterisation(Estimator):
    """Pathwise gradients with noise drawn for each row in the outputs of linear layers.

    **Math**: for independent w ~ N(m, s^2) the outputs of a linear layer at a are independent normal numbers with
    means m a + b and variances s^2 a^2 + s_b^2; these are drawn, for each row anew. A weight that is used more than
    once, or otherwise than by a linear map, is drawn once for the batch, as by `WeightSampling`; which ones is logged.

    **Limit**: unbiased. A weight that acts at several positions of a row (convolutions, sequences) makes their outputs
    dependent: it is drawn too, unless `approximate` takes the positions as independent, which is biased.

    **Cost**: twice the matrix products of a pass, on `draws` copies of the batch, which share those of the first layer.

    **References**: Kingma, Salimans and Welling (2015), Variational dropout and the local reparameterization trick.

    **Example**:

    >>> import torch, posterity as po
    >>> net = torch.nn.Linear(1, 1, bias=False)
    >>> joint = po.Joint(net, po.likelihoods.Gaussian(1.0), po.priors.Normal(), num_data=10_000)
    >>> q = Factorised(torch.zeros(1), torch.ones(1), None)
    >>> batch = po.model.Batch(torch.ones(10_000, 1), torch.ones(10_000, 1))
    >>> term = LocalReparameterisation().data_term(joint, q, batch, {}, {}, po.Key(0))
    >>> bool((term.grad_mean / 10_000 - 1.0).abs() < 0.05)  # every row has noise of its own
    True
    """

    draws: int = 1
    approximate: bool = False

    def __post_init__(self) -> None:
        positive_whole("LocalReparameterisation.draws", self.draws)

    def data_term(
        self, joint: Problem, q: Factorised, batch: Batch, buffers: Buffers, memory: Memory, key: Key, out: Out = None
    ) -> DataTerm:
        name = type(self).__name__
        return term_by_use(name, joint, q, batch, buffers, key, self.draws, _rule, positions=self.approximate)


def _rule(scales: Mapping[str, Tensor], key: Key, draws: int) -> Replacement:
    before = True  # any noise: up to the first replaced layer the copies of the batch are alike

    def replacement(
        operation: Operation,
        axis: int,
        source: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        names: tuple[str | None, str | None],
    ) -> Tensor:
        nonlocal before
        copies, before = draws if before else 1, False
        source = source[: len(source) // copies]
        spread, bias_spread = (None if name is None else scales[name].square() for name in names)
        mean = operation(source, weight, bias)
        variance = operation(source.square(), torch.zeros_like(weight) if spread is None else spread, bias_spread)
        # Where no input is on there is no noise, and the square root would have no gradient.
        scale = variance.clamp_min(torch.finfo(variance.dtype).tiny).sqrt()
        if copies > 1:
            mean, scale = (torch.cat([value] * copies) for value in (mean, scale))
        noise = normal(key.fold(f"{names[0] or names[1]} outputs"), mean.shape, mean)
        return torch.addcmul(mean, scale, noise)

    return replacement
