"""Gaussian weights of a ReLU network whose outputs have moments by propagation from layer to layer."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from posterity.model.batch import Inputs
from posterity.model.joint import Joint
from posterity.model.problem import Problem
from posterity.numerics.random import Key
from posterity.posteriors.functions import Evaluation
from posterity.posteriors.gaussian import Gaussian, OfGaussian
from posterity.posteriors.moments import forward, relu_chain
from posterity.posteriors.standalone import Propagation


@dataclass(frozen=True, eq=False, repr=False)
class Propagated(OfGaussian):
    """Independent Gaussian weights of a ReLU network, whose output moments are propagated through its layers.

    **Math**: a layer a = W z has E a = E[W] E[z] and Var a = E[W]^2 Var[z] + Var[W] E[z^2]; a ReLU takes N(E a, Var a)
    to the moments of the rectified Gaussian. With Gaussian noise, y ~ N(E f, Var f + noise^2).

    **Limit**: mean and variance are exact for one hidden layer, whose inputs to the ReLUs are Gaussian and independent.
    Deeper ones count as such. The output itself counts as Gaussian.

    **Predictions**: `predict(x)` integrates over these moments; `gaussian.predict(x, draws=...)` draws weights instead.

    **Cost**: three forward passes in float64.

    **References**: Hernandez-Lobato and Adams (2015), Probabilistic backpropagation, section 3.1.

    **Example**:

    >>> from posterity.likelihoods import Gaussian as Noise
    >>> from posterity.precisions import Diagonal
    >>> from posterity.priors import Normal
    >>> joint = Joint(torch.nn.Linear(1, 1, bias=False), Noise(scale=1.0), Normal(), num_data=1)
    >>> q = Propagated(joint, Gaussian(joint, torch.zeros(1), Diagonal(torch.tensor([4.0]).double())))
    >>> q.predict(torch.tensor([[2.0]])).epistemic  # 2^2 / 4
    tensor([[1.]])
    """

    joint: Problem
    gaussian: Gaussian

    def outputs(self, inputs: Inputs, draws: int, key: Key) -> Tensor:
        return self.gaussian.outputs(inputs, draws, key)

    def drawn_functions(self, draws: int, key: Key) -> Evaluation:
        return self.gaussian.drawn_functions(draws, key)

    @property
    def by_draws(self) -> bool:
        return False

    def standalone(self, draws: int | None, share: float, key: Key) -> nn.Module:
        joint = self.joint.as_joint("module")
        if joint.likelihood.link != "identity":
            raise TypeError(
                f"module: propagated moments are for Gaussian noise. Got {type(joint.likelihood).__name__}. Use "
                "q.gaussian.module(draws=...), which draws weights."
            )
        return Propagation(joint.likelihood, relu_chain(joint.network), self.gaussian.mean, self.gaussian.variance)

    def output_moments(
        self, inputs: Inputs, *, marginal: bool = False, memory_budget: int | None = None
    ) -> tuple[Tensor, Tensor]:
        """Propagated mean (N, C), and variances of outputs that count as independent."""
        self._alone()
        assert isinstance(self.joint, Joint)
        assert isinstance(inputs, Tensor)
        chain = relu_chain(self.joint.network)
        weights = (self.gaussian.mean.double(), self.gaussian.variance.double())
        means, variances = (chain.matrices(flat[chain.order].unsqueeze(0)) for flat in weights)
        mean, variance, _ = forward(chain, means, variances, inputs.double().unsqueeze(0))
        mean, variance = (moment[0].to(self.gaussian.mean.dtype) for moment in (mean, variance))
        return mean, variance if marginal else torch.diag_embed(variance)
