"""The excess of any loss by Monte Carlo, with its second-order expansion as control variate."""

from typing import NamedTuple

import torch
from torch import Tensor

from posterity.errors import positive_whole, shown
from posterity.evidence.wide.loss import Loss
from posterity.evidence.wide.neurons import Neurons
from posterity.evidence.wide.output_law import OutputLaw
from posterity.numerics.random import Key

_BUDGET = 2**21  # numbers of a block of draws


class Sampled(NamedTuple):
    """An estimate and its standard error, (P,) each."""

    value: Tensor
    standard_error: Tensor


def sampled_excess(loss: Loss, law: OutputLaw, targets: Tensor, draws: int, key: Key) -> Sampled:
    """E l(f, y) - l(E f, y) for each row, from `draws` networks of the law's width.

    **Math**: with d = f - E f, g and H the slope and curvature of l at E f, the average of l(f) - l(E f) - <g, d> -
    d^T H d / 2 over draws, plus 1/2 tr(H Cov f). What is averaged is of third order in d: O(N^-3/2), where l itself
    varies as N^-1/2.

    **Limit**: unbiased. For one network: neurons without leading axes, and a width of which every share is a whole
    number.

    **Cost**: draws times width times rows.
    """
    positive_whole("sampled_excess: draws", draws)
    mean, curvature = law.mean, loss.curvature(law.mean)
    base, slope = loss.value(mean, targets), loss.slope(mean, targets)
    residuals = []
    for outputs in _outputs(law, draws, key):  # (S, P, C)
        deviation = outputs - mean
        bent = (deviation * (curvature @ deviation.unsqueeze(-1)).squeeze(-1)).sum(-1)
        residuals.append(loss.value(outputs, targets) - base - (slope * deviation).sum(-1) - 0.5 * bent)
    rest = torch.cat(residuals)  # (draws, P)
    return Sampled(rest.mean(0) + loss.second_order(law), rest.std(0) / draws**0.5)


def _outputs(law: OutputLaw, draws: int, key: Key) -> list[Tensor]:
    """f at the law's rows for so many networks, in blocks (S, P, C)."""
    kinds = _kinds(law.neurons, law.width)
    neurons, (rows, inputs), width = law.neurons, law.inputs.shape, len(kinds)
    block, found = max(1, _BUDGET // (width * (rows + inputs + neurons.num_outputs))), []
    for start in range(0, draws, block):
        count, own = min(block, draws - start), key.fold(start)
        outer, inner = (
            mean[kinds] + scale[kinds] * own.fold(name).normal((count, width, size), torch.float64, mean.device)
            for name, mean, scale, size in (
                ("outer", neurons.outer_mean, neurons.outer_scale, neurons.num_outputs),
                ("inner", neurons.inner_mean, neurons.inner_scale, inputs),
            )
        )
        found.append(law.activation(inner @ law.inputs.mT).mT @ outer / width)
    return found


def _kinds(neurons: Neurons, width: Tensor) -> Tensor:
    """The number of the kind of each of the N neurons, (N,)."""
    shares = neurons.average(torch.eye(neurons.count, dtype=torch.float64, device=neurons.inner_mean.device), behind=1)
    copies = shares * width
    whole = copies.round()
    if neurons.inner_mean.dim() != 2 or width.dim() or not bool((copies - whole).abs().max() < 1e-6):
        raise ValueError(
            "sampled_excess takes one network at a time, with a whole number of neurons of each kind. "
            f"Got a width of {shown(width)} and shares {shown(shares)}."
        )
    return torch.repeat_interleave(torch.arange(neurons.count, device=whole.device), whole.long())
