"""The prior of one neuron."""

from dataclasses import dataclass

import torch
from torch import Tensor

from posterity.errors import positive, shown
from posterity.evidence.wide.neurons import Neurons
from posterity.priors import Normal


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
        Normal(self.outer_scale, self.outer_mean)  # says what is wrong with a mean

    def kl(self, neurons: Neurons) -> Tensor:
        """KL(q_theta || P0) of each neuron, (..., J), with all its digits near the prior."""
        outer = Normal(self.outer_scale, self.outer_mean).kl(neurons.outer_mean, neurons.outer_scale)
        return outer + Normal(self.inner_scale).kl(neurons.inner_mean, neurons.inner_scale)

    def neurons(self, inputs: int, outputs: int = 1, like: Tensor | None = None) -> Neurons:
        """One neuron whose posterior is this prior, on the device of `like`."""
        if inputs < 1 or outputs < 1:
            raise ValueError(f"NeuronPrior.neurons needs inputs and outputs. Got {shown((inputs, outputs))}.")
        device = None if like is None else like.device
        outer, inner = (torch.ones(1, size, dtype=torch.float64, device=device) for size in (outputs, inputs))
        return Neurons(self.outer_mean * outer, self.outer_scale * outer, 0.0 * inner, self.inner_scale * inner)
