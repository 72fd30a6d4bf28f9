"""The exact Hessian of the negative log-likelihood."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from posterity.curvature.curvature import Curvature
from posterity.likelihoods.likelihood import Likelihood
from posterity.numerics.random import Key


@dataclass(frozen=True)
class Hessian(Curvature):
    """The exact Hessian of -log p(D | theta).

    **Math**: H = - sum_n w_n d^2 log p(y_n | f_theta(x_n)) / d theta^2.

    **Limit**: exact, but indefinite away from a mode of the likelihood; with the prior it must be positive
    definite at a mode of the posterior.

    **Cost**: R backward passes of the gradient, in chunks; with a structure that asks for products only (`LowRank`,
    `Hutchinson`), one for each product.

    **References**: MacKay (1992), A practical Bayesian framework for backpropagation networks.

    **Example**:

    >>> import torch
    >>> from posterity import Density
    >>> density = Density(lambda u: 7.0 * u - 2.0 * u.exp(), {"u": ()}, dtype=torch.float64)
    >>> Hessian().matrix(density, torch.tensor([3.5], dtype=torch.float64).log(), None, None)
    tensor([[7.]], dtype=torch.float64)
    """

    factored: ClassVar[bool] = False

    def columns(self, likelihood: Likelihood, outputs: Tensor, targets: Tensor, key: Key) -> Tensor:
        """There are none: it is no sum of squares."""
        raise TypeError(
            "The Hessian has no columns, because it need not be positive semi-definite. Use GaussNewton() for "
            "structures made of them, or one of Full(), BlockDiagonal(), Diagonal(), LowRank() and Hutchinson()."
        )
