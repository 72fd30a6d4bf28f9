"""The squared length of the weights: weight decay."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from posterity.errors import positive
from posterity.priors.members import check_members
from posterity.priors.normal import Normal
from posterity.priors.penalty.penalty import Penalty, summable


@dataclass(frozen=True)
class SquaredL2(Penalty):
    """The sum of squares of all weights, r(w) = |w|^2.

    **Math**: by points, exp(-lambda r) / Z is N(0, 1 / (2 lambda)), so that lambda = 1 / (2 v) for a variance v. On the
    means of Gaussians of a fixed scale it is the KL to the same prior, up to a constant.

    **Limit**: exact. With a scale that is trained it is the KL to no prior, since that has the scale in it.

    **Cost**: one pass over the weights.

    **References**: Bishop (2006), section 5.5.

    **Example**:

    >>> import torch
    >>> SquaredL2()(torch.tensor([[3.0, -4.0]])), SquaredL2().prior(0.5).scale, SquaredL2().factor(1.0, (1, 2))
    (tensor(25.), 1.0, 0.5)
    """

    def __call__(self, weight: Tensor) -> Tensor:
        """|w|^2."""
        return summable(weight).square().sum()

    def prior(self, factor: float | Tensor = 1.0) -> Normal:
        """N(0, 1 / (2 factor))."""
        check_members("factor", factor)
        scale: Any = (2.0 * factor) ** -0.5
        return Normal(scale)

    def factor(self, variance: float, shape: tuple[int, ...]) -> float:
        """1 / (2 variance)."""
        positive("variance", variance)
        return 0.5 / variance

    def each(self, mean: Tensor, scale: Tensor) -> Tensor:
        """mu^2."""
        return mean.square()

    @property
    def formula(self) -> str:
        """In plain text."""
        return "sum of w^2"
