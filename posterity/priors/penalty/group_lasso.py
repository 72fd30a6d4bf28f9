"""The sum of the lengths of groups of weights: the group lasso."""

import math
from dataclasses import dataclass
from typing import get_args

import torch
from torch import Tensor

from posterity.errors import positive, shown
from posterity.numerics.layout import Layout
from posterity.priors.group_lasso import Grouping
from posterity.priors.group_lasso import GroupLasso as GroupLassoPrior
from posterity.priors.members import check_members
from posterity.priors.penalty.matching import checked_shape
from posterity.priors.penalty.penalty import Penalty, summable


@dataclass(frozen=True)
class GroupLasso(Penalty):
    """The sum over groups g of ||w_g||; the groups are those of `priors.GroupLasso`.

    Of a weight (out, in, *kernel) a group is, by `over`, the incoming weights of a neuron or output channel ("rows"),
    the outgoing weights of an input at one kernel position ("columns") or at all of them ("channels"). Each entry of a
    tensor of one axis is a group of its own. Where a convolution has groups, so that `in` counts those of each, columns
    and channels run through inputs that stand at one place in all of them.

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
        """The sum over g of ||w_g||."""
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
        """sqrt((n + 1) / variance) for groups of n weights."""
        positive("variance", variance)
        checked_shape(shape)
        like = torch.zeros(math.prod(shape), dtype=torch.float64, device="cpu")
        at_one = self.prior().bound(Layout.of({"weight": shape})).variance(like[:1].expand(like.shape))[0]
        return math.sqrt(float(at_one) / variance)

    @property
    def separates(self) -> bool:
        """Not: the weights of a group count together."""
        return False

    def each(self, mean: Tensor, scale: Tensor) -> Tensor:
        """A TypeError."""
        raise TypeError("GroupLasso is no sum over single weights. Use of(mean, scale) on the whole tensor.")

    @property
    def formula(self) -> str:
        """In plain text."""
        return f"sum of ||w_g|| over {self.over}"
