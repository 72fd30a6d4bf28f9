"""Moments of the outputs of a ReLU network with independent Gaussian weights, and their derivatives, in closed form."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from posterity.model.layer_chains import linear_chain
from posterity.model.network import Network

_DENSITY = 1.0 / math.sqrt(math.pi)


class Layer(NamedTuple):
    """A linear layer: numbers of outputs and inputs, whether it has a bias, and whether a ReLU follows it."""

    outputs: int
    inputs: int
    bias: bool
    rectified: bool

    @property
    def columns(self) -> int:
        """Weights of one output, its bias among them."""
        return self.inputs + self.bias


class Rectified(NamedTuple):
    """Moments of r = max(u, 0), u ~ N(m, v), and what their derivatives are made of."""

    mean: Tensor
    variance: Tensor
    twice: Tensor  # 2 P(u > 0)
    density: Tensor  # the density of u at 0


def rectified(mean: Tensor, variance: Tensor) -> Rectified:
    """Return the moments of max(u, 0), u ~ N(mean, variance), entry by entry; differentiable.

    With z = m / s: E r = m Phi(z) + s phi(z), and since max(u, 0) max(-u, 0) = 0,
    Var r = v Phi(z) - E r (E r - m). The derivatives are dE/dm = Phi, dE/dv = phi / (2 s), dVar/dm = 2 E (1 - Phi) and
    dVar/dv = Phi - E phi / s.

    >>> moments = rectified(torch.tensor(0.0), torch.tensor(1.0))
    >>> round(moments.mean.item(), 4), round(moments.variance.item(), 4)  # 1 / sqrt(2 pi), 1 / 2 - 1 / (2 pi)
    (0.3989, 0.3408)
    """
    inverse = (variance + variance).rsqrt()
    ratio = -mean * inverse  # -z / sqrt 2
    density = (ratio * -ratio).exp() * inverse * _DENSITY  # phi / s
    twice = ratio.erfc()
    first = torch.addcmul(variance * density, mean, twice, value=0.5)
    spread = torch.addcmul(first * (mean - first), variance, twice, value=0.5)
    return Rectified(first.clamp_min(0.0), spread.clamp_min(0.0), twice, density)


class Passage(NamedTuple):
    """What a backward pass needs of a layer: moments of its inputs, and of its outputs where a ReLU follows."""

    mean: Tensor  # (M, n, columns), ones for the bias
    variance: Tensor | None  # (M, n, columns); None where the inputs are known
    second: Tensor  # E z^2
    squares: Tensor | None  # squared means of the weights, where the inputs are not known
    after: Rectified | None


@dataclass(frozen=True, eq=False)
class Chain:
    """A network of linear layers with ReLUs between them.

    Its weights are kept as a vector in the order of the layers, each output's weights before its bias. `order` (P,)
    leads from there to theta: `theta[..., order]` is that vector.
    """

    layers: tuple[Layer, ...]
    order: Tensor = field(repr=False)

    @property
    def fans(self) -> Tensor:
        """The number of inputs of each weight's layer, with 1 for the bias: (P,), float64."""
        sizes = [layer.outputs * layer.columns for layer in self.layers]
        fans = torch.tensor([float(layer.columns) for layer in self.layers], dtype=torch.float64, device="cpu")
        return fans.repeat_interleave(torch.tensor(sizes, device="cpu")).to(self.order.device)

    def matrices(self, flat: Tensor) -> list[Tensor]:
        """The vector (M, P) as one matrix (M, outputs, columns) for each layer."""
        parts = torch.split(flat, [layer.outputs * layer.columns for layer in self.layers], dim=1)
        return [part.view(-1, layer.outputs, layer.columns) for part, layer in zip(parts, self.layers, strict=True)]

    def in_theta(self, flat: Tensor) -> Tensor:
        """The vector (..., P) in the order of theta."""
        return torch.empty_like(flat).index_copy_(-1, self.order, flat)


def relu_chain(network: Network) -> Chain:
    """Return the chain of a network whose weights are all in theta; a ValueError for another network."""
    module = network.module
    chain = linear_chain(module)
    layers = () if chain is None else tuple(layer for layer in chain.layers if not isinstance(layer, nn.Identity))
    kinds = [type(layer) for layer in layers]
    if not layers or set(kinds) - {nn.Linear, nn.ReLU} or kinds[-1] is not nn.Linear:
        shown = type(module).__name__ if not layers else ", ".join(dict.fromkeys(kind.__name__ for kind in kinds))
        raise ValueError(
            "Moments are propagated through linear layers with ReLUs between them, and a linear one at the end. "
            f"Got {shown}. Use nn.Sequential(nn.Linear(...), nn.ReLU(), nn.Linear(...)), or another method."
        )
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    where = {part.name: part for part in network.layout}
    described, order = list[Layer](), list[Tensor]()
    for layer, after in zip(layers, [*kinds[1:], None], strict=True):
        if not isinstance(layer, nn.Linear):
            continue
        columns = []
        for parameter in layer.parameters():  # the weight, and the bias if there is one
            part = where.pop(names[id(parameter)], None)
            if part is None:
                raise ValueError(
                    f"Moments are propagated where each weight is random, and used once. '{names[id(parameter)]}' is "
                    "frozen or shared. Leave all weights in the joint, or use another method."
                )
            place = torch.arange(part.offset, part.offset + part.size, device="cpu")
            columns.append(place.reshape(layer.out_features, -1))
        described.append(Layer(layer.out_features, layer.in_features, layer.bias is not None, after is nn.ReLU))
        order.append(torch.cat(columns, 1).reshape(-1))
    return Chain(tuple(described), torch.cat(order).to(network.device))


def forward(
    chain: Chain, means: Sequence[Tensor], variances: Sequence[Tensor], rows: Tensor
) -> tuple[Tensor, Tensor, list[Passage]]:
    """Propagate moments: weights N(means, variances), one matrix a layer, and rows (M, n, D) to moments (M, n, C).

    A layer a = W z has E a = E[W] E[z] and Var a = E[W]^2 Var[z] + Var[W] E[z^2]; units count as independent, and the
    input of a ReLU as Gaussian. The passages are for `backward`.
    """
    mean, variance, passages = rows, None, []
    for layer, weights, spreads in zip(chain.layers, means, variances, strict=True):
        squares = None
        if layer.bias:
            mean = F.pad(mean, (0, 1), value=1.0)
            variance = None if variance is None else F.pad(variance, (0, 1))
        second = mean * mean if variance is None else torch.addcmul(variance, mean, mean)
        output, spread = torch.bmm(mean, weights.mT), torch.bmm(second, spreads.mT)
        if variance is not None:
            squares = weights * weights  # faster than a power
            spread = torch.baddbmm(spread, variance, squares.mT)
        after = rectified(output, spread) if layer.rectified else None
        passages.append(Passage(mean, variance, second, squares, after))
        mean, variance = (output, spread) if after is None else (after.mean, after.variance)
    assert variance is not None
    return mean, variance, passages


def backward(
    chain: Chain,
    means: Sequence[Tensor],
    variances: Sequence[Tensor],
    passages: Sequence[Passage],
    mean: Tensor,
    variance: Tensor,
) -> tuple[Tensor, Tensor]:
    """Return the gradients in the means and in the variances of the weights, (M, P) each, summed over rows.

    `mean` and `variance` (M, n, C) are the gradients in the moments of the outputs.
    """
    in_means, in_variances = list[Tensor](), list[Tensor]()
    for index in reversed(range(len(passages))):
        passage, weights, spreads = passages[index], means[index], variances[index]
        if (after := passage.after) is not None:
            shift = variance * after.mean
            rest = torch.sub(mean, shift, alpha=2.0)
            mean = torch.addcmul(shift + shift, rest, after.twice, value=0.5)
            variance = torch.addcmul(rest * after.density, variance, after.twice) * 0.5
        slope = _products(mean, passage.mean)
        if passage.variance is not None:
            slope = torch.addcmul(slope, weights, _products(variance, passage.variance), value=2.0)
        in_means.append(slope.flatten(1))
        in_variances.append(_products(variance, passage.second).flatten(1))
        if index:
            assert passage.squares is not None
            across = torch.bmm(variance, spreads)
            inputs = chain.layers[index].inputs  # not the bias
            mean, variance = (
                torch.addcmul(torch.bmm(mean, weights), passage.mean, across, value=2.0)[..., :inputs],
                torch.baddbmm(across, variance, passage.squares)[..., :inputs],
            )
    return torch.cat(in_means[::-1], 1), torch.cat(in_variances[::-1], 1)


def _products(first: Tensor, second: Tensor) -> Tensor:
    """Return the outer products (M, a, b) of vectors (M, n, a) and (M, n, b), summed over n."""
    return first.mT * second if first.shape[1] == 1 else torch.bmm(first.mT, second)
