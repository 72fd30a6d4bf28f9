"""Prior precision and noise by maximum evidence: gradient search and MacKay's fixed point."""

import dataclasses
import logging
import math
from abc import ABC, abstractmethod
from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from posterity.errors import NotPositiveDefinite, positive, positive_whole
from posterity.evidence.marginal import (
    GIVEN,
    Groups,
    LeftOut,
    Marginal,
    PerLayer,
    Shared,
    grouped,
    left_out,
    parted,
    rescaled_prior,
)
from posterity.likelihoods import Gaussian as GaussianNoise
from posterity.model.joint import Joint
from posterity.model.scales import as_chosen
from posterity.posteriors.gaussian import Gaussian

logger = logging.getLogger("posterity")


@dataclass(frozen=True, eq=False)
class Tuned:
    """Hyper-parameters after a search: the optimum, or the previous values if the search failed.

    `before` and `after` are values of the objective: the log evidence in nats, or minus the validation loss. `reason`
    says why a search failed. `noise_scale` is None where there is no noise to tune.
    """

    groups: Groups
    names: tuple[str, ...]
    prior_precision: Tensor  # (G,)
    noise_scale: float | None
    before: float
    after: float
    evaluations: int
    reason: str = ""

    @property
    def succeeded(self) -> bool:
        """Whether the search found an optimum."""
        return not self.reason


class Tuning(ABC):
    """A way to choose hyper-parameters after a fit, from the evidence of the Gaussian at its mode."""

    groups: Groups
    noise: bool

    @abstractmethod
    def tune(self, marginal: Marginal) -> Tuned:
        """Search from the present hyper-parameters; return these and log a warning where the search fails."""


def automatic(joint: Joint) -> "Tuning | None":
    """Return the search for the scales that were left out, one for each layer and the noise; None where all are given.

    >>> from posterity.likelihoods import Categorical
    >>> from posterity.priors import Normal
    >>> automatic(Joint(torch.nn.Linear(2, 2), Categorical(), Normal(), num_data=9))
    Evidence(groups=PerLayer(), noise=False, tolerance=1e-06, limit=1000000000000.0, max_evaluations=200)
    >>> automatic(Joint(torch.nn.Linear(2, 2), Categorical(), Normal(scale=1.0), num_data=9)) is None
    True
    """
    prior, noise = left_out(joint)
    return Evidence(LeftOut.of(joint, PerLayer()), noise) if prior or noise else None


def unchanged(groups: Groups, marginal: Marginal, evaluations: int, reason: str, value: float) -> Tuned:
    """Return the present hyper-parameters after a failed search, and log the reason."""
    logger.warning("The hyper-parameters stay as they were: %s", reason)
    scale = None if marginal.noise is None else marginal.noise.scale
    return Tuned(groups, marginal.names, marginal.prior_precision, scale, value, value, evaluations, reason)


def tuned_joint(joint: Joint, tuned: Tuned, way: str = "evidence") -> Joint:
    """Return the joint with the tuned prior and noise; the joint itself if the search failed.

    Ratios of scales inside a group, and means, are kept: see `rescaled_prior`. Scales that were left out count as
    chosen in this `way`.
    """
    if not tuned.succeeded:
        return joint
    likelihood = joint.likelihood
    if tuned.noise_scale is not None:
        likelihood = GaussianNoise(scale=tuned.noise_scale, chosen=likelihood.chosen)
    prior = joint.prior
    if tuned.names:
        present = present_precision(joint, tuned.groups)
        prior = rescaled_prior(joint, tuned.groups, (present / tuned.prior_precision.to(present)).sqrt())
    return as_chosen(dataclasses.replace(joint, prior=prior, likelihood=likelihood), way)


def with_tuned(gaussian: Gaussian, marginal: Marginal, tuned: Tuned, way: str = "evidence") -> Gaussian:
    """Return the Gaussian under the tuned hyper-parameters; itself if the search failed."""
    if not tuned.succeeded:
        return gaussian
    assert isinstance(gaussian.joint, Joint)
    with torch.no_grad():
        noise = None if tuned.noise_scale is None else marginal.log_likelihood.new_tensor(tuned.noise_scale)
        precision = marginal.precision_at(tuned.prior_precision, noise)
        evidence = marginal.log_evidence(tuned.prior_precision, noise)
        terms = marginal.data_terms(noise)
    joint = tuned_joint(gaussian.joint, tuned, way)
    return Gaussian(joint, gaussian.mean, precision, gaussian.buffers, evidence, terms)


def present_precision(joint: Joint, groups: Groups) -> Tensor:
    """Prior precision of each group of random weights, (G,) in float64: geometric means under a normal prior."""
    names, index = grouped(joint, groups)
    precision = joint.bound_prior.precision(joint.network.initial.to(torch.float64))
    random = precision if joint.random_indices is None else precision[joint.random_indices]
    return parted(random, index, len(names))[0]


class Point(NamedTuple):
    """A point of a search: logs of prior precisions and noise precision, the evidence and its gradient there.

    gradient = (gained - lost) / 2. At the optimum a group's effective number of weights, `gained`, equals its alpha
    |theta - mean|^2, `lost`; and the observations less the effective weights equal the residuals' chi square.
    """

    logs: Tensor  # (K,)
    value: float
    gradient: Tensor  # (K,)
    lost: Tensor  # (K,)

    @property
    def gained(self) -> Tensor:
        """Effective numbers of weights (G,), and the observations less the fitted weights."""
        return 2.0 * self.gradient + self.lost

    @property
    def imbalance(self) -> Tensor:
        """|gained - lost| / (|gained| + lost), (K,): zero at the optimum, one if that is at infinity."""
        return 2.0 * self.gradient.abs() / (self.gained.abs() + self.lost).clamp(min=1e-300)


class Climb(Protocol):
    """A log evidence as a function of logs (K,), as `Evidence.climb` sees it.

    `names` names each log in messages, `size` is the number of random weights, `evaluations` counts calls of
    `at`, which returns None where the evidence has no finite value.
    """

    names: tuple[str, ...]
    evaluations: int

    @property
    def size(self) -> int:
        """The number of random weights."""
        ...

    def at(self, logs: Tensor) -> Point | None:
        """Evaluate the evidence and its gradient."""


class Search:
    """The evidence as a function of logs (K,): of the prior precision of each group, then of 1 / noise^2 if tuned."""

    def __init__(self, marginal: Marginal, noise: bool) -> None:
        self.marginal, self.noise, self.evaluations = marginal, noise, 0
        self.names = (*(f"the prior precision of {name}" for name in marginal.names), *["the noise"] * noise)
        self.start = marginal.prior_precision.log()
        self.given = torch.tensor(
            [name == GIVEN for name in marginal.names], dtype=torch.bool, device=self.start.device
        )
        if noise:
            assert marginal.noise is not None
            self.start = torch.cat([self.start, self.start.new_tensor([-2.0 * math.log(marginal.noise.scale)])])

    @property
    def size(self) -> int:
        """The number of random weights."""
        return self.marginal.pattern.numel()

    @classmethod
    def wanted(cls, marginal: Marginal, noise: bool) -> "Search":
        """Search over all that can be tuned, the noise only with `noise`; log what cannot be tuned."""
        if not marginal.names:
            logger.warning("The prior precision is not tuned: only normal priors have one to tune.")
        return cls(marginal, noise and marginal.noise is not None)

    def values(self, logs: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return prior precisions (G,), and the noise scale if it is tuned."""
        return (logs[:-1].exp(), (-0.5 * logs[-1]).exp()) if self.noise else (logs.exp(), None)

    def at(self, logs: Tensor) -> Point | None:
        """Evaluate the evidence and its gradient; None where they are not finite."""
        self.evaluations += 1
        leaf, marginal = logs.detach().clone().requires_grad_(), self.marginal
        try:
            with torch.enable_grad():
                alpha, scale = self.values(leaf)
                value = marginal.log_evidence(alpha, scale) + 0.0 * leaf.sum()  # there may be nothing to tune
            (gradient,) = torch.autograd.grad(value, leaf)
        except NotPositiveDefinite:
            return None
        gradient[: len(self.given)][self.given] = 0.0
        lost = marginal.prior_power * alpha.detach() * marginal.squares
        if scale is not None:
            assert marginal.noise is not None
            chi = marginal.likelihood_power * marginal.noise.squares * scale.detach() ** -2
            lost = torch.cat([lost, chi.reshape(1)])
        number = float(value.detach())
        if not math.isfinite(number) or not bool(torch.isfinite(gradient).all()):
            return None
        return Point(leaf.detach(), number, gradient, lost)

    def tuned(self, groups: Groups, start: Point, best: Point) -> Tuned:
        """The outcome of a successful search."""
        alpha, scale = self.values(best.logs)
        present = None if self.marginal.noise is None else self.marginal.noise.scale
        noise = present if scale is None else float(scale)
        return Tuned(groups, self.marginal.names, alpha, noise, start.value, best.value, self.evaluations)


_SMALLEST = 1e-8  # lower bound of an effective number, relative to the sum of its balance's sides
_NOT_FINITE = "the log evidence has no finite value at the present hyper-parameters."
_MEMORY = 20  # pairs of steps and changes of the gradient


@dataclass(frozen=True)
class Evidence(Tuning):
    """Search for the prior precision and noise that maximise the log evidence at the mode.

    **Math**: with u = log alpha of each group and b = -2 log noise scale, 2 d log Z / du = gamma - alpha |theta* - m|^2
    and 2 d log Z / db = N - gamma - RSS / scale^2; gamma is the effective number of weights. log Z is concave in
    (u, b), so that there is one optimum. Steps are by limited-memory BFGS, preconditioned by logarithmic means of
    the two sides of each balance, which alone would give (damped) steps of MacKay's fixed point.

    **Limit**: theta* stays fixed, so the optimum is that of the model only if fit and search alternate until nothing
    changes. A search that meets values that are not finite, or an optimum at infinity (weights all at the prior mean,
    no residuals), changes nothing and logs a warning.

    **Cost**: ten to thirty log determinants with their gradients.

    **References**: MacKay (1992), Bayesian interpolation, eq. 4.9-4.14; Immer et al. (2021), section 3.

    **Example**:

    >>> from posterity.likelihoods import Bernoulli
    >>> from posterity.model import Joint
    >>> from posterity.precisions import Diagonal
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
        search = Search.wanted(marginal, self.noise)
        start = search.at(search.start)
        if start is None:
            return unchanged(self.groups, marginal, search.evaluations, _NOT_FINITE, math.nan)
        point, reason = self.climb(search, start)
        if reason:
            return unchanged(self.groups, marginal, search.evaluations, reason, start.value)
        return search.tuned(self.groups, start, point)

    def climb(self, search: Climb, start: Point) -> tuple[Point, str]:
        """Return the optimum, or the last point and why the search failed."""
        point = start
        pairs: deque[tuple[Tensor, Tensor]] = deque(maxlen=_MEMORY)
        reach = math.log(self.limit)
        while bool((point.imbalance > self.tolerance).any()):
            far = (point.logs - start.logs).abs() >= 0.999 * reach
            if bool(far.any()):
                which = search.names[int(far.nonzero()[0])]
                return point, f"the evidence has no maximum within a factor of {self.limit:.0e} for {which}."
            moved, failure = self._along(search, start, point, _direction(point, pairs), reach)
            if moved is None:
                return point, failure
            step, change = moved.logs - point.logs, point.gradient - moved.gradient
            if float(step @ change) > 1e-14 * float(step.norm() * change.norm()):
                pairs.append((step, change))
            point = moved
        return point, ""

    def _along(
        self, search: Climb, start: Point, point: Point, direction: Tensor, reach: float
    ) -> tuple[Point | None, str]:
        """Backtracking line search: a point along the direction, or None and why there is none."""
        slope, length = float(point.gradient @ direction), 1.0
        while search.evaluations < self.max_evaluations:
            logs = torch.minimum(torch.maximum(point.logs + length * direction, start.logs - reach), start.logs + reach)
            candidate = search.at(logs)
            if candidate is not None:
                rounding = 1e-13 * (abs(point.value) + search.size)
                rises = candidate.value >= point.value + 1e-4 * length * slope
                # Near the optimum rounding hides the rise; a smaller slope shows it then.
                flatter = abs(float(candidate.gradient @ direction)) <= 0.5 * slope
                if rises or (flatter and candidate.value >= point.value - rounding):
                    return candidate, ""
            if length < 1e-10:
                return None, "no step increases the evidence; the curvature may not be positive semi-definite."
            length *= 0.5
        return None, f"no optimum after {self.max_evaluations} evaluations of the evidence."


def _direction(point: Point, pairs: "deque[tuple[Tensor, Tensor]]") -> Tensor:
    """The two-loop recursion of limited-memory BFGS for a concave function; pairs are (step, fall of the gradient)."""
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
    """Diagonal preconditioner: the step per unit of gradient that would balance each hyper-parameter by itself.

    The effective number falls as the precision rises, at most as fast as 1 / precision: so a step down is halved.
    """
    floor = _SMALLEST * (point.gained.abs() + point.lost).clamp(min=1e-300)
    gained, lost = torch.maximum(point.gained, floor), torch.maximum(point.lost, floor)
    ratio = (gained / lost).log()
    even = ratio.abs() < 1e-6
    mean = torch.where(even, 0.5 * (gained + lost), (gained - lost) / torch.where(even, 1.0, ratio))
    return torch.where(ratio < 0, 0.5, 1.0) * 2.0 / mean


class Update(NamedTuple):
    """One fixed-point step: effective numbers (G,) before it, hyper-parameters after it."""

    effective: Tensor
    prior_precision: Tensor  # (G,)
    noise_scale: Tensor | None  # ()


@dataclass(frozen=True)
class MacKay(Tuning):
    """Re-estimate prior precision and noise by MacKay's fixed point: effective numbers of weights over squared sizes.

    **Math**: gamma_g = n_g - alpha_g tr Sigma_gg (= sum of lambda / (lambda + alpha) with one group), alpha_g =
    gamma_g / |theta* - m|^2_g, 1 / scale^2 = (N - gamma) / RSS, all from the same Gaussian. Under tempering
    n_g, N and the two squares are multiplied by the powers of their terms.

    **Limit**: its fixed point is the maximum of the evidence at this mode, the optimum of `Evidence`. Steps alternate
    around it, and converge slowly where the data say little. A failed search changes nothing and logs a warning.

    **Cost**: one log determinant with its gradient for each step.

    **References**: MacKay (1992), Bayesian interpolation, eq. 4.9-4.14; Bishop (2006), eq. 3.91-3.95.

    **Example**:

    >>> MacKay(noise=False).groups
    Shared()
    """

    groups: Groups = field(default_factory=Shared)
    noise: bool = True
    tolerance: float = 1e-6
    max_steps: int = 1000

    def __post_init__(self) -> None:
        positive("MacKay.tolerance", self.tolerance)
        positive_whole("MacKay.max_steps", self.max_steps)

    def step(self, marginal: Marginal, prior_precision: Tensor, noise_scale: Tensor | float | None = None) -> Update:
        """Take one step from prior precisions (G,) and a noise scale; None leaves the noise as it is."""
        search = Search(marginal, noise_scale is not None)
        logs = prior_precision.log()
        if noise_scale is not None:
            noise = torch.as_tensor(noise_scale, dtype=logs.dtype, device=logs.device)
            logs = torch.cat([logs, -2.0 * noise.log().reshape(1)])
        point = search.at(logs)
        after = None if point is None else _after(point)
        if point is None or after is None:
            raise ValueError(
                "MacKay.step: there is no next step from here. Weights at the prior mean, or no residuals?"
            )
        return Update(point.gained[: len(marginal.names)], *search.values(after))

    def tune(self, marginal: Marginal) -> Tuned:
        search = Search.wanted(marginal, self.noise)
        start = point = search.at(search.start)
        while point is not None and bool((point.imbalance > self.tolerance).any()):
            after = _after(point)
            if after is None or search.evaluations > self.max_steps:
                break
            point = search.at(after)
        if start is None or point is None:
            return unchanged(self.groups, marginal, search.evaluations, "the log evidence is not finite.", math.nan)
        if bool((point.imbalance > self.tolerance).any()):
            which = search.names[int(point.imbalance.argmax())]
            reason = f"MacKay's fixed point was not reached in {search.evaluations - 1} steps for {which}."
            return unchanged(self.groups, marginal, search.evaluations, reason, start.value)
        return search.tuned(self.groups, start, point)


def _after(point: Point) -> Tensor | None:
    """Each precision times the ratio of its two sides; None where one is not positive."""
    gained, lost = point.gained, point.lost
    return point.logs + (gained / lost).log() if bool(((gained > 0) & (lost > 0)).all()) else None
