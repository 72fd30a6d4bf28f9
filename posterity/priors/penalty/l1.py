"""The sum of the weights' absolute values: the lasso."""

import math
from dataclasses import dataclass

from torch import Tensor

from posterity.errors import positive
from posterity.priors.laplace import Laplace
from posterity.priors.members import check_members
from posterity.priors.penalty.penalty import Penalty, summable


@dataclass(frozen=True)
class L1(Penalty):
    """The sum of absolute values of all weights, r(w) = |w|_1.

    **Math**: by points, exp(-lambda r) / Z is Laplace(1 / lambda), of variance 2 / lambda^2, so that lambda =
    sqrt(2 / v) for a variance v.

    **Limit**: exact by points. On the means of Gaussians it is the KL to no prior: a KL is smooth in them.

    **Cost**: one pass over the weights.

    **References**: Tibshirani (1996), Regression shrinkage and selection via the lasso.

    **Example**:

    >>> import torch
    >>> L1()(torch.tensor([[3.0, -4.0]])), L1().prior(4.0).scale, L1().factor(2.0, (1, 2))
    (tensor(7.), 0.25, 1.0)
    """

    def __call__(self, weight: Tensor) -> Tensor:
        """|w|_1."""
        return summable(weight).abs().sum()

    def prior(self, factor: float | Tensor = 1.0) -> Laplace:
        """Laplace(1 / factor)."""
        check_members("factor", factor)
        return Laplace(1.0 / factor)

    def factor(self, variance: float, shape: tuple[int, ...]) -> float:
        """sqrt(2 / variance)."""
        positive("variance", variance)
        return math.sqrt(2.0 / variance)

    def each(self, mean: Tensor, scale: Tensor) -> Tensor:
        """|mu|."""
        return mean.abs()

    @property
    def formula(self) -> str:
        """In plain text."""
        return "sum of |w|"
