"""The evidence's maximum: preconditioned limited-memory BFGS in the logs of the hyper-parameters."""

import math
from collections import deque
from dataclasses import dataclass, field

import torch
from torch import Tensor

from posterity.errors import positive, positive_whole
from posterity.evidence.groups import Groups, Shared
from posterity.evidence.marginal import Marginal
from posterity.evidence.search import Point, Search
from posterity.evidence.tuned import Tuned, Tuning, unchanged

_SMALLEST = 1e-8  # of a group's size: what an effective number is taken for at least
_NOT_FINITE = "the log evidence has no finite value at the present hyper-parameters."
_MEMORY = 20  # pairs of steps and changes of the gradient


@dataclass(frozen=True)
class Evidence(Tuning):
    """Prior precision and noise that maximise the log evidence at the mode.

    **Math**: with u = log alpha of each group and b = -2 log noise scale, 2 d log Z / du = gamma - alpha |theta* - m|^2
    and 2 d log Z / db = N - gamma - RSS / scale^2; gamma is the effective number of weights. log Z is concave in
    (u, b), so that there is one optimum. Steps are those of limited-memory BFGS, preconditioned by logarithmic means of
    the two sides of each balance, which alone would give (damped) steps of MacKay's fixed point.

    **Limit**: theta* stays where it is, so the optimum is that of the model only if a new mode is found and tuned
    again until nothing changes. A search that meets numbers that are not finite, or an optimum at infinity (weights
    all at the prior mean, no residuals), changes nothing and says so.

    **Cost**: ten to thirty log determinants with their gradients.

    **References**: MacKay (1992), Bayesian interpolation, eq. 4.9-4.14; Immer et al. (2021), section 3.

    **Example**:

    >>> from posterity.likelihoods import Bernoulli
    >>> from posterity.model import Joint
    >>> from posterity.numerics import Diagonal
    >>> from posterity.priors import Normal
    >>> joint = Joint(torch.nn.Linear(2, 1, bias=False), Bernoulli(), Normal(), num_data=9)
    >>> curvature = Diagonal(torch.tensor([3.0, 3.0]))
    >>> marginal = Marginal.of(joint, torch.ones(2), curvature, torch.tensor(-5.0))
    >>> Evidence().tune(marginal).prior_precision  # alpha |theta|^2 = 2 alpha = gamma = 2 * 3 / (3 + alpha)
    tensor([0.7913], dtype=torch.float64)
    """

    groups: Groups = field(default_factory=Shared)
    noise: bool = True
    tolerance: float = 1e-6
    limit: float = 1e12
    max_evaluations: int = 200

    def __post_init__(self) -> None:
        positive("Evidence.tolerance", self.tolerance)
        positive("Evidence.limit", self.limit)
        positive_whole("Evidence.max_evaluations", self.max_evaluations)

    def tune(self, marginal: Marginal) -> Tuned:
        """See `Tuning`."""
        search = Search.wanted(marginal, self.noise)
        start = search.at(search.start)
        if start is None:
            return unchanged(self.groups, marginal, search.evaluations, _NOT_FINITE, math.nan)
        point, reason = self._climb(search, start)
        if reason:
            return unchanged(self.groups, marginal, search.evaluations, reason, start.value)
        return search.tuned(self.groups, start, point)

    def _climb(self, search: Search, start: Point) -> tuple[Point, str]:
        """The optimum, or the last point and why it is none."""
        point = start
        pairs: deque[tuple[Tensor, Tensor]] = deque(maxlen=_MEMORY)
        reach = math.log(self.limit)
        while bool((point.imbalance > self.tolerance).any()):
            far = (point.logs - start.logs).abs() >= 0.999 * reach
            if bool(far.any()):
                which = search.names[int(far.nonzero()[0])]
                return point, f"the evidence has no maximum within a factor of {self.limit:.0e} for {which}."
            direction = _direction(point, pairs)
            moved, given_up = self._along(search, start, point, direction, reach)
            if moved is None:
                return point, given_up
            step, change = moved.logs - point.logs, point.gradient - moved.gradient
            if float(step @ change) > 1e-14 * float(step.norm() * change.norm()):
                pairs.append((step, change))
            point = moved
        return point, ""

    def _along(
        self, search: Search, start: Point, point: Point, direction: Tensor, reach: float
    ) -> tuple[Point | None, str]:
        """A point along the direction that is good enough, by steps that are halved."""
        slope = float(point.gradient @ direction)
        length = 1.0
        while search.evaluations < self.max_evaluations:
            logs = torch.minimum(torch.maximum(point.logs + length * direction, start.logs - reach), start.logs + reach)
            there = search.at(logs)
            if there is not None:
                rounding = 1e-13 * (abs(point.value) + search.size)
                rises = there.value >= point.value + 1e-4 * length * slope
                # Near the optimum rounding hides the rise; a smaller slope shows it then.
                flatter = (
                    abs(float(there.gradient @ direction)) <= 0.5 * slope and there.value >= point.value - rounding
                )
                if rises or flatter:
                    return there, ""
            if length < 1e-10:
                return None, "no step increases the evidence; the curvature may not be positive semi-definite."
            length *= 0.5
        return None, f"no optimum after {self.max_evaluations} evaluations of the evidence."


def _direction(point: Point, pairs: "deque[tuple[Tensor, Tensor]]") -> Tensor:
    """The two loops of limited-memory BFGS for a concave function; pairs are (step, fall of the gradient)."""
    vector, parts = point.gradient.clone(), []
    for step, change in reversed(pairs):
        weight = (step @ vector) / (step @ change)
        parts.append(weight)
        vector = vector - weight * change
    vector = vector * _balance(point)
    for (step, change), weight in zip(pairs, reversed(parts), strict=True):
        vector = vector + step * (weight - (change @ vector) / (step @ change))
    return vector if float(vector @ point.gradient) > 0 else point.gradient * _balance(point)


def _balance(point: Point) -> Tensor:
    """Step for each unit of the gradient that would make both sides of each balance equal, if they were alone.

    The effective number falls as the precision rises, at most as fast as 1 / precision: so a step down is halved.
    """
    floor = _SMALLEST * (point.gained.abs() + point.lost).clamp(min=1e-300)
    gained, lost = torch.maximum(point.gained, floor), torch.maximum(point.lost, floor)
    ratio = (gained / lost).log()
    even = ratio.abs() < 1e-6
    mean = torch.where(even, 0.5 * (gained + lost), (gained - lost) / torch.where(even, 1.0, ratio))
    return torch.where(ratio < 0, 0.5, 1.0) * 2.0 / mean
