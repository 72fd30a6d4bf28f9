"""The generalised Gauss-Newton matrix."""

from dataclasses import dataclass

from torch import Tensor

from posterity.curvature.curvature import Curvature
from posterity.likelihoods.likelihood import Likelihood
from posterity.numerics.random import Key


@dataclass(frozen=True)
class GaussNewton(Curvature):
    """The generalised Gauss-Newton matrix: the Hessian without the curvature of the network itself.

    **Math**: G = sum_n w_n J_n^T F_n J_n, J_n = d f(x_n) / d theta, F_n the likelihood's `output_fisher`. Its columns
    are a root of F_n: C - 1 of them for C classes.

    **Limit**: positive semi-definite always; equals the Hessian when f is linear in theta, or at zero residuals.

    **Cost**: a forward pass, and a backward pass for each column.

    **References**: Schraudolph (2002); Martens (2020), section 8.

    **Example**:

    >>> import torch, posterity as po
    >>> from posterity.model import Batch
    >>> noise, prior = po.likelihoods.Gaussian(scale=0.5), po.priors.Normal()
    >>> joint = po.Joint(torch.nn.Linear(1, 1, bias=False), noise, prior, num_data=2)
    >>> batch = Batch(torch.tensor([[1.0], [2.0]]), torch.zeros(2, 1))
    >>> GaussNewton().matrix(joint, torch.zeros(1), batch, None)  # (1 + 4) / 0.25
    tensor([[20.]], dtype=torch.float64)
    """

    def columns(self, likelihood: Likelihood, outputs: Tensor, targets: Tensor, key: Key) -> Tensor:
        """A root of the Fisher information of the outputs."""
        return likelihood.output_root(outputs, outputs.dim() - 1)
