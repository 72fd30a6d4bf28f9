"""Distributions of neurons in wide networks, and their prior."""

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from posterity.errors import positive, shown
from posterity.priors import Normal


def parts(theta: Tensor, outputs: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Split rows (..., 2 (C + D)) into outer means and scales (..., C), and inner means and scales (..., D)."""
    inputs = theta.shape[-1] // 2 - outputs
    pieces = torch.split_with_sizes(theta, [outputs, outputs, inputs, inputs], -1)
    return pieces[0], pieces[1], pieces[2], pieces[3]


@dataclass(frozen=True, eq=False)
class Neurons:
    """nu = sum over j of share_j delta(theta_j), where theta_j is a factorised Gaussian over the weights of a neuron.

    A neuron a sigma(<b, x>) has outer weights a ~ N(outer_mean, outer_scale^2) (..., J, C) and inner weights b ~
    N(inner_mean, inner_scale^2) (..., J, D), all independent. `shares` (..., J) add up to 1 (1/J each by default): a
    network of width N has N share_j neurons of kind j, so that one nu describes networks of every width at which these
    are whole numbers (the formulas also hold in between, where no network exists). Leading axes hold many such
    distributions at once. All tensors are float64.

    >>> neuron = Neurons(torch.ones(1, 1), torch.ones(1, 1), torch.zeros(1, 2), torch.ones(1, 2))
    >>> neuron.theta
    tensor([[1., 1., 0., 0., 1., 1.]], dtype=torch.float64)
    """

    outer_mean: Tensor
    outer_scale: Tensor
    inner_mean: Tensor
    inner_scale: Tensor
    shares: Tensor | None = None

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if value is not None:
                object.__setattr__(self, field.name, value.to(torch.float64))
        for name in ("outer", "inner"):
            mean, scale = getattr(self, f"{name}_mean"), getattr(self, f"{name}_scale")
            if mean.shape != scale.shape or mean.dim() < 2:
                raise ValueError(
                    f"Neurons.{name}_mean and {name}_scale must both be (..., J, weights of a neuron). "
                    f"Got {shown(mean)} and {shown(scale)}."
                )
            positive(f"Neurons.{name}_scale", scale)
        if self.outer_mean.shape[:-1] != self.inner_mean.shape[:-1]:
            raise ValueError(
                "Neurons.outer_mean and inner_mean must be of the same neurons, (..., J, C) and (..., J, D). "
                f"Got {shown(self.outer_mean)} and {shown(self.inner_mean)}."
            )
        shares = self.shares
        if shares is None:
            return
        good = shares.shape[-1:] == self.inner_mean.shape[-2:-1] and bool((shares >= 0.0).all())
        if not good or not bool(((shares.sum(-1) - 1.0).abs() <= 1e-9).all()):
            raise ValueError(
                f"Neurons.shares must be (..., {self.inner_mean.shape[-2]}), of at least 0 and with the sum 1. "
                f"Got {shown(shares)}."
            )

    @classmethod
    def from_theta(cls, theta: Tensor, outputs: int = 1, shares: Tensor | None = None) -> "Neurons":
        """Build neurons from rows (..., J, 2 (C + D)): outer means, outer scales, inner means, inner scales."""
        size = theta.shape[-1] - 2 * outputs if theta.dim() else 0
        if theta.dim() < 2 or size < 2 or size % 2:
            raise ValueError(
                f"Neurons.from_theta: theta must be (..., J, 2 (C + D)) with C = {outputs} outputs. Got {shown(theta)}."
            )
        return cls(*parts(theta, outputs), shares)

    @property
    def theta(self) -> Tensor:
        """All parameters of each neuron, (..., J, 2 (C + D)), in the order of `from_theta`."""
        return torch.cat([self.outer_mean, self.outer_scale, self.inner_mean, self.inner_scale], -1)

    @property
    def count(self) -> int:
        """The number J of kinds of neurons."""
        return int(self.inner_mean.shape[-2])

    @property
    def num_outputs(self) -> int:
        """The number C of outputs."""
        return int(self.outer_mean.shape[-1])

    def average(self, values: Tensor, behind: int = 0) -> Tensor:
        """Integrate values (..., J, *rest) over nu, where `rest` has `behind` axes."""
        if self.shares is None:
            return values.mean(-1 - behind)
        return (values * self.shares.reshape(*self.shares.shape, *([1] * behind))).sum(-1 - behind)


@dataclass(frozen=True)
class NeuronPrior:
    """Independent normal weights: outer ones N(outer_mean, outer_scale^2), inner ones N(0, inner_scale^2).

    The default is variance 1/5 for all of them, whatever the number of inputs (no scaling by fan-in).

    >>> NeuronPrior().neurons(inputs=2).outer_scale
    tensor([[0.4472]], dtype=torch.float64)
    """

    outer_scale: float = 0.2**0.5
    inner_scale: float = 0.2**0.5
    outer_mean: float = 0.0

    def __post_init__(self) -> None:
        positive("NeuronPrior.outer_scale", self.outer_scale)
        positive("NeuronPrior.inner_scale", self.inner_scale)
        Normal(self.outer_scale, self.outer_mean)  # checks the mean

    def kl(self, neurons: Neurons) -> Tensor:
        """KL(q_theta || P0) of each neuron, (..., J), without cancellation near the prior."""
        outer = Normal(self.outer_scale, self.outer_mean).kl(neurons.outer_mean, neurons.outer_scale)
        return outer + Normal(self.inner_scale).kl(neurons.inner_mean, neurons.inner_scale)

    def neurons(self, inputs: int, outputs: int = 1, like: Tensor | None = None) -> Neurons:
        """One neuron whose posterior is this prior, on the device of `like`."""
        if inputs < 1 or outputs < 1:
            raise ValueError(f"NeuronPrior.neurons needs inputs and outputs. Got {shown((inputs, outputs))}.")
        device = None if like is None else like.device
        outer, inner = (torch.ones(1, size, dtype=torch.float64, device=device) for size in (outputs, inputs))
        return Neurons(self.outer_mean * outer, self.outer_scale * outer, 0.0 * inner, self.inner_scale * inner)
