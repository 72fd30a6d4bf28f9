"""From the values of a penalty to a verdict on its prior."""

from collections.abc import Sequence

from torch import Tensor

from posterity.priors.penalty.inversion.expansion import Expansion
from posterity.priors.penalty.inversion.member import Member
from posterity.priors.penalty.verdict import Route, Verdict


def invert(mu: Tensor, values: Tensor, members: Sequence[Member], route: Route | None = None) -> Verdict:
    """The verdict on r given by its values (V, N) at mu (N,), equidistant, one row for each of the V members.

    Without `route` the exact ones are tried first (polynomial, then with cosines), then the spline.
    """
    raise NotImplementedError


def invert_expansions(expansions: Sequence[Expansion], members: Sequence[Member]) -> Verdict:
    """The verdict on r known exactly: one polynomial with cosines for each member."""
    raise NotImplementedError
