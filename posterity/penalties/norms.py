"""Norms as penalties: squared L2, L1, group lasso."""

import math
from dataclasses import dataclass
from typing import Any, get_args

import torch
from torch import Tensor

from posterity.errors import positive, shown
from posterity.numerics.layout import Layout
from posterity.penalties.penalty import Penalty, checked_shape, summable
from posterity.priors.group_lasso import Grouping
from posterity.priors.group_lasso import GroupLasso as GroupLassoPrior
from posterity.priors.independent import check_members
from posterity.priors.laplace import Laplace
from posterity.priors.normal import Normal


@dataclass(frozen=True)
class SquaredL2(Penalty):
    """The sum of squares of all weights, r(w) = |w|^2.

    **Math**: by points, exp(-lambda r) / Z is N(0, 1 / (2 lambda)), so that lambda = 1 / (2 v) for a variance v. On the
    means of Gaussians of a fixed scale it is the KL to the same prior, up to a constant.

    **Limit**: exact. With a trained scale it is the KL to no prior, since a KL depends on the scale.

    **Cost**: one pass over the weights.

    **References**: Bishop (2006), section 5.5.

    **Example**:

    >>> SquaredL2()(torch.tensor([[3.0, -4.0]])), SquaredL2().prior(0.5).scale, SquaredL2().factor(1.0, (1, 2))
    (tensor(25.), 1.0, 0.5)
    """

    def __call__(self, weight: Tensor) -> Tensor:
        return summable(weight).square().sum()

    def prior(self, factor: float | Tensor = 1.0) -> Normal:
        check_members("factor", factor)
        scale: Any = (2.0 * factor) ** -0.5
        return Normal(scale)

    def factor(self, variance: float, shape: tuple[int, ...]) -> float:
        positive("variance", variance)
        return 0.5 / variance

    def each(self, mean: Tensor, scale: Tensor) -> Tensor:
        return mean.square()

    @property
    def formula(self) -> str:
        return "sum of w^2"


@dataclass(frozen=True)
class L1(Penalty):
    """The sum of absolute values of all weights, r(w) = |w|_1.

    **Math**: by points, exp(-lambda r) / Z is Laplace(1 / lambda), of variance 2 / lambda^2, so that lambda =
    sqrt(2 / v) for a variance v.

    **Limit**: exact by points. On the means of Gaussians it is the KL to no prior: a KL is smooth in them.

    **Cost**: one pass over the weights.

    **References**: Tibshirani (1996), Regression shrinkage and selection via the lasso.

    **Example**:

    >>> L1()(torch.tensor([[3.0, -4.0]])), L1().prior(4.0).scale, L1().factor(2.0, (1, 2))
    (tensor(7.), 0.25, 1.0)
    """

    def __call__(self, weight: Tensor) -> Tensor:
        return summable(weight).abs().sum()

    def prior(self, factor: float | Tensor = 1.0) -> Laplace:
        check_members("factor", factor)
        return Laplace(1.0 / factor)

    def factor(self, variance: float, shape: tuple[int, ...]) -> float:
        positive("variance", variance)
        return math.sqrt(2.0 / variance)

    def each(self, mean: Tensor, scale: Tensor) -> Tensor:
        return mean.abs()

    @property
    def formula(self) -> str:
        return "sum of |w|"


@dataclass(frozen=True)
class GroupLasso(Penalty):
    """The sum over groups g of ||w_g||, with the groups of `priors.GroupLasso`.

    Of a weight (out, in, *kernel) a group is, by `over`, the incoming weights of a neuron or output channel ("rows"),
    the outgoing weights of an input at one kernel position ("columns") or at all of them ("channels"). Each entry of a
    tensor of one axis is a group of its own. In a grouped convolution, where `in` counts the inputs of each of its
    groups, columns and channels hold the inputs with one index in all of them.

    **Math**: by points, exp(-lambda ||w_g||) / Z_n for each group of n weights; the variance of one is
    (n + 1) / lambda^2, so that lambda = sqrt((n + 1) / v) for a variance v.

    **Limit**: exact by points. On the means of Gaussians it is the KL to no prior: a KL is smooth in them.

    **Cost**: one pass over the weights.

    **References**: Yuan and Lin (2006), Model selection and estimation in regression with grouped variables.

    **Example**:

    >>> weight = torch.tensor([[3.0, -4.0], [0.0, 3.0]])
    >>> GroupLasso()(weight), GroupLasso("columns")(weight)
    (tensor(8.), tensor(8.))
    >>> GroupLasso().factor(0.5, (10, 1)), GroupLasso("columns").factor(0.5, (7, 3))
    (2.0, 4.0)
    """

    over: Grouping = "rows"

    def __post_init__(self) -> None:
        if self.over not in get_args(Grouping):
            raise ValueError(f"GroupLasso.over must be 'rows', 'columns' or 'channels'. Got {shown(self.over)}.")

    def __call__(self, weight: Tensor) -> Tensor:
        weight = summable(weight)
        if weight.dim() < 2:
            return weight.abs().sum()
        if self.over == "columns":
            groups = weight.flatten(1).T  # (in * kernel, out)
        else:
            groups = (weight if self.over == "rows" else weight.transpose(0, 1)).flatten(1)
        lengths: Tensor = torch.linalg.vector_norm(groups, dim=1)
        return lengths.sum()

    def prior(self, factor: float | Tensor = 1.0) -> GroupLassoPrior:
        """`priors.GroupLasso(factor, over)`: each length is Gamma(n, factor), each direction uniform."""
        check_members("factor", factor)
        return GroupLassoPrior(factor, self.over)

    def factor(self, variance: float, shape: tuple[int, ...]) -> float:
        positive("variance", variance)
        checked_shape(shape)
        like = torch.zeros(math.prod(shape), dtype=torch.float64, device="cpu")
        at_one = self.prior().bound(Layout.of({"weight": shape})).variance(like[:1].expand(like.shape))[0]
        return math.sqrt(float(at_one) / variance)

    @property
    def separates(self) -> bool:
        return False

    def each(self, mean: Tensor, scale: Tensor) -> Tensor:
        raise TypeError("GroupLasso is no sum over single weights. Use of(mean, scale) on the whole tensor.")

    @property
    def formula(self) -> str:
        return f"sum of ||w_g|| over {self.over}"
