"""The distribution of a wide network's outputs under independent neurons."""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from posterity.evidence.wide.activation import Activation, Moments
from posterity.evidence.wide.neurons import Neurons
from posterity.numerics.complex_logarithm import complex_log1p

_LEAST = 1e-30  # a scale of pre-activations that is positive at inputs of zero, too
_BUDGET = 2**12  # characteristic functions at a time, each of which holds some hundred numbers


@dataclass(frozen=True, eq=False)
class OutputLaw:
    """f(x) = (1/N) sum over j of a_j sigma(<b_j, x>) at rows x, for N = `width` independent neurons distributed as nu.

    `width` (...) broadcasts with the leading axes of the neurons: all widths at once. An infinite one gives E f.
    """

    neurons: Neurons
    activation: Activation
    inputs: Tensor  # (P, D)
    width: Tensor  # (...)

    @cached_property
    def pre_activations(self) -> tuple[Tensor, Tensor]:
        """Mean and scale of <b, x>, (..., J, P) each."""
        variance = self.neurons.inner_scale.square() @ self.inputs.square().mT
        return self.neurons.inner_mean @ self.inputs.mT, variance.clamp_min(_LEAST**2).sqrt()

    @cached_property
    def moments(self) -> Moments:
        """Of sigma(<b, x>), (..., J, P) each."""
        return self.activation.moments(*self.pre_activations)

    @cached_property
    def neuron_means(self) -> Tensor:
        """E phi, (..., J, P, C)."""
        return self.activation.mean(*self.pre_activations).unsqueeze(-1) * self.neurons.outer_mean.unsqueeze(-2)

    @cached_property
    def neuron_covariances(self) -> Tensor:
        """Cov phi = diag(outer_scale^2) E r^2 + outer_mean outer_mean^T Var r, (..., J, P, C, C)."""
        outer = self.neurons.outer_mean
        products = (outer.unsqueeze(-1) * outer.unsqueeze(-2)).unsqueeze(-3)  # (..., J, 1, C, C)
        own = torch.diag_embed(self.neurons.outer_scale.square()).unsqueeze(-3)
        return own * self.moments.second[..., None, None] + products * self.moments.variance[..., None, None]

    @cached_property
    def mean(self) -> Tensor:
        """E f, (..., P, C); the same at every width."""
        return self.neurons.average(self.neuron_means, behind=2)

    @cached_property
    def covariance(self) -> Tensor:
        """Cov f = (1/N) times the average of Cov phi, (..., P, C, C)."""
        return self.neurons.average(self.neuron_covariances, behind=3) / self.width[..., None, None, None]

    @cached_property
    def total_variance(self) -> Tensor:
        """tr Cov f, (..., P), without the matrices."""
        own = self.neurons.outer_scale.square().sum(-1, keepdim=True) * self.moments.second
        shared = self.neurons.outer_mean.square().sum(-1, keepdim=True) * self.moments.variance
        return self.neurons.average(own + shared, behind=1) / self.width[..., None]

    def log_characteristic(self, times: Tensor) -> Tensor:
        """log E exp(i t (f - E f)) = N times the average of log E exp(i (t/N) (phi - E phi)), (T,) -> (..., P, T).

        For one output. Zero at infinite width, to which it goes as 1/N.
        """
        width = self.width[..., None, None, None]  # against (..., J, P, T)
        mean, scale = (value.unsqueeze(-1) for value in self.pre_activations)
        outer_mean, outer_scale = (
            value.unsqueeze(-1) for value in (self.neurons.outer_mean, self.neurons.outer_scale)
        )  # (..., J, 1, 1)
        of_a_row = (mean[..., :1, :] + width).numel()
        rows = max(1, min(_BUDGET // of_a_row, len(self.inputs)))
        blocks = []
        for row_mean, row_scale in zip(torch.split(mean, rows, -2), torch.split(scale, rows, -2), strict=True):
            pieces = []
            for part in torch.split(times, max(1, _BUDGET // (rows * of_a_row))):
                found = self.activation.characteristic(outer_mean, outer_scale, row_mean, row_scale, part / width)
                pieces.append(self.neurons.average(complex_log1p(found), behind=2))
            blocks.append(torch.cat(pieces, -1))
        finite = torch.where(self.width.isinf(), torch.zeros_like(self.width), self.width)
        return torch.cat(blocks, -2) * finite[..., None, None]
