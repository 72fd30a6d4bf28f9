"""Rounds of EM for a Gaussian mixture, its regularisation, and new means for empty components."""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor

from posterity.errors import positive
from posterity.mixtures.checks import not_negative
from posterity.mixtures.covariance import Covariance, non_negative
from posterity.mixtures.estimator import Steps
from posterity.mixtures.passes import log_densities, statistics
from posterity.mixtures.sweeps import Components, Rows, Statistics
from posterity.model.density import Density


class Regularisation(ABC):
    """Estimates covariances from second moments, with a penalty on the log-likelihood."""

    exact: ClassVar[bool]  # whether the M-step maximises the objective, so that the objective never falls

    @property
    @abstractmethod
    def positive(self) -> bool:
        """Whether covariances are positive definite for all second moments."""

    @abstractmethod
    def covariances(self, kind: Covariance, moments: Tensor, counts: Tensor, dimensions: int) -> Tensor:
        """Covariances (R, *shape) from second moments (R, *shape) about the means and counts (R, K)."""

    def estimated(self, kind: Covariance, moments: Tensor, counts: Tensor, dimensions: int) -> Tensor:
        """As `covariances`, for second moments that rounding may have made indefinite.

        They are differences of sums about the old means and about the new ones, which lose digits where these are far
        apart. Negative eigenvalues are raised where `positive` promises a positive definite result.
        """
        if not kind.matrices:
            return self.covariances(kind, moments.clamp_min(0.0), counts, dimensions)
        result = self.covariances(kind, moments, counts, dimensions)
        if self.positive:
            failed = torch.linalg.cholesky_ex(result).info > 0
            if bool(failed.any()):
                mended = self.covariances(kind, non_negative(moments), counts, dimensions)
                result = torch.where(failed[..., None, None], mended, result)
        return result

    @abstractmethod
    def penalty(self, kind: Covariance, factors: Tensor, dimensions: int) -> Tensor:
        """The penalty on the log-likelihood in nats (R,), from whitening factors (R, *shape)."""


@dataclass(frozen=True)
class Floor(Regularisation):
    """A number added to all variances after the M-step, as scikit-learn does.

    **Math**: S_k = S_k^ML + eps I, eps = `variance`; no penalty.

    **Limit**: not the maximum of any objective: the log-likelihood may fall by O(eps) in a round. 0 is plain EM, whose
    likelihood has no upper limit: a component on one point ends in an error, after rounds in which digits are lost.

    **Cost**: none.

    **References**: theory of the decks, item 000-07.

    **Example**:

    >>> from posterity.mixtures import Spherical
    >>> Floor(0.5).covariances(Spherical(), torch.tensor([[6.0]]), torch.tensor([[3.0]]), 2)
    tensor([[1.5000]])
    """

    variance: float = 1e-6
    exact: ClassVar[bool] = False  # at 0, too: a collapse loses any number of digits

    def __post_init__(self) -> None:
        not_negative("reg_covar", self.variance, ", or an InverseWishart")

    @property
    def positive(self) -> bool:
        return self.variance > 0

    def covariances(self, kind: Covariance, moments: Tensor, counts: Tensor, dimensions: int) -> Tensor:
        return moments / kind.divisors(counts, dimensions) + self.variance * kind.identity(dimensions, moments)

    def penalty(self, kind: Covariance, factors: Tensor, dimensions: int) -> Tensor:
        return torch.zeros_like(factors.flatten(1)[:, 0])


@dataclass(frozen=True)
class InverseWishart(Regularisation):
    """An inverse-Wishart prior on covariances, which are estimated by their mode: the objective never falls.

    **Math**: S_k = (N_k S_k^ML + eps I) / (N_k + nu) with eps = `scale` and nu = `degrees` maximises the log-likelihood
    less 1/2 sum_k [nu log det S_k + eps tr S_k^-1], which is the logarithm of an inverse-Wishart density with scale
    matrix eps I and nu - D - 1 degrees of freedom. A tied covariance has one such term, a diagonal or spherical one the
    term of its matrix (D, D).

    **Limit**: eps is in squared units of the data and adds to the scatter of all rows of a component, where a floor
    adds to a variance. An empty component has the covariance eps / nu I.

    **Cost**: none.

    **References**: Fraley and Raftery (2007), Bayesian regularization for normal mixture estimation, section 3.

    **Example**:

    >>> from posterity.mixtures import Diagonal
    >>> moments, counts = torch.tensor([[[3.0]]]), torch.tensor([[3.0]])
    >>> InverseWishart(scale=2.0, degrees=2.0).covariances(Diagonal(), moments, counts, 1)
    tensor([[[1.]]])
    """

    scale: float
    degrees: float
    exact: ClassVar[bool] = True

    def __post_init__(self) -> None:
        positive("InverseWishart.scale", self.scale)
        positive("InverseWishart.degrees", self.degrees)

    @property
    def positive(self) -> bool:
        return True

    def covariances(self, kind: Covariance, moments: Tensor, counts: Tensor, dimensions: int) -> Tensor:
        moments = moments + self.scale * kind.identity_moment(dimensions, moments)
        return moments / kind.divisors(counts, dimensions, self.degrees)

    def penalty(self, kind: Covariance, factors: Tensor, dimensions: int) -> Tensor:
        traces = kind.quadratic(factors, kind.identity_moment(dimensions, factors))
        return (self.degrees * kind.log_determinants(factors, dimensions) + self.scale * traces) / 2


SIZES = (1.0, 0.1)  # candidate covariances of re-seeded components, relative to the mean covariance


def worst_rows(rows: Rows, kind: Covariance, components: Components, count: int) -> Tensor | None:
    """The `count` rows of lowest density, relative to the centre, (R, count, D); None where too few have no label."""
    kept, lowest = list[Tensor](), list[Tensor]()  # of each piece: its rows (R, count, D) of lowest density, and that
    free = 0
    for _, points, weights, labels in rows.pieces():
        logs = log_densities(Rows(points, None, None, rows.centre), kind, components)  # (R, n)
        usable = torch.ones(len(points), dtype=torch.bool, device=logs.device)
        if labels is not None:
            usable &= labels < 0
        if weights is not None:
            usable &= weights > 0
        free += int(usable.sum())
        least = torch.where(usable, logs, torch.inf).topk(min(count, len(points)), largest=False)
        lowest, kept = [*lowest, least.values], [*kept, points[least.indices].to(torch.float64) - rows.centre]
        if len(kept) > 1:
            least = torch.cat(lowest, 1).topk(min(count, free), largest=False)
            every = torch.cat(kept, 1)
            kept = [every.gather(1, least.indices[..., None].expand(-1, -1, every.shape[2]))]
            lowest = [least.values]
    return None if free < count else kept[0]


def proposals(
    kind: Covariance, values: dict[str, Tensor], empty: Tensor, points: Tensor, num_data: int
) -> list[dict[str, Tensor]]:
    """Candidate values with empty components (R, K) moved to the points (R, E, D), in order.

    The weight of such a component is 1 / K or that of one row, its covariance the mean of the others or a tenth of it.
    """
    count = values["weights"].shape[-1]
    rank = (empty.cumsum(-1) - 1).clamp_min(0)  # (R, K): the first empty component takes the worst row
    means = torch.where(empty[..., None], points.gather(1, rank[..., None].expand_as(values["means"])), values["means"])
    shares = torch.where(empty, 0.0, values["weights"])
    shares = shares / shares.sum(-1, keepdim=True)
    choices = [values["covariances"]]
    if not kind.shared:
        mean = (kind.broadcast(shares) * choices[0]).sum(1, keepdim=True)
        if kind.matrices:  # rounding may make a sum of nearly singular matrices indefinite
            mean = non_negative(mean)
        choices = [torch.where(kind.marked(empty), size * mean, choices[0]) for size in SIZES]
    candidates = []
    for weight in (1 / count, min(1 / count, 1 / num_data)):
        left = 1 - weight * empty.sum(-1, keepdim=True).to(shares)
        weights = torch.where(empty, weight, shares * left)
        candidates += [{"weights": weights, "means": means, "covariances": covariances} for covariances in choices]
    return candidates


Values = Mapping[str, Tensor]  # weights, means and covariances
Tensors = dict[str, Tensor]

EMPTY = 1e-8  # the share of all rows below which a component is empty
# The mean squared distance of rows from the means before an M-step, in the covariances after it, at which rounding of
# the moments about the means after it changes the bound by 1e-12. Passes tolerate ten times as much about the centre.
FAR = 5000.0
NAMES = ("weights", "means", "covariances")


@dataclass(frozen=True, eq=False)
class Rounds(Steps):
    """Rounds of EM on given rows: values are weights (R, K), means (R, K, D) about `rows.centre`, and covariances.

    The objective is the log-likelihood less the penalty of the regularisation, for each unit of row weight. q is stored
    as its sums over the rows, with the values of its E-step.

    A component with less than 1e-8 of all rows is empty: it keeps mean and covariance, or moves to the row of lowest
    density, with the best of several weights and covariances, if that raises the objective. In such a round the bound
    after the M-step is the objective itself, as it is where rows are so far from the means that sums lose digits.
    """

    rows: Rows
    kind: Covariance
    regularisation: Regularisation

    @cached_property
    def total(self) -> float:
        """The sum of the row weights."""
        weights = self.rows.weights
        return float(len(self.rows.points)) if weights is None else float(weights.sum())

    def density(self, components: int) -> Density:
        """The density to maximise: the objective times the sum of the row weights, by the names of the values."""
        dimensions = self.rows.points.shape[1]
        shapes = {"weights": (components,), "means": (components, dimensions)}
        return Density(
            lambda **values: self.objective(values) * self.total,
            {**shapes, "covariances": self.kind.shape(components, dimensions)},
            batched=True,
            dtype=torch.float64,
            device=self.rows.points.device,
        )

    @property
    def exact(self) -> bool:
        return self.regularisation.exact

    def condition(self, values: Values) -> float:
        return self.kind.condition(values["covariances"])

    def components(self, values: Values) -> Components:
        """The components of a pass over the rows, from the values."""
        factors = self.kind.factors(values["covariances"])
        offsets = log_normalisers(self.kind, factors, *values["means"].shape[1:]) + values["weights"].log()
        return Components(offsets, values["means"], factors)

    def expectation(self, values: Values, latent: Values) -> Tensors:
        components = self.components(values)
        sums = statistics(self.rows, self.kind, components)
        return {**sums._asdict(), **{name: values[name] for name in NAMES}, "factors": components.factors}

    def maximisation(self, values: Values, latent: Values) -> Tensors:
        sums = Statistics(*(latent[name] for name in Statistics._fields))
        empty = self.empty(latent)  # (R, K)
        sums = sums._replace(shifts=torch.where(empty[..., None], 0.0, sums.shifts))
        moments = self.kind.second_moments(sums)
        estimated = self.regularisation.estimated(self.kind, moments, sums.counts, sums.shifts.shape[-1])
        moved = {
            "weights": sums.counts / sums.counts.sum(-1, keepdim=True),
            "means": values["means"] + sums.shifts,
            "covariances": torch.where(self.kind.marked(empty), values["covariances"], estimated),
        }
        return self._reseeded(moved, empty) if bool(empty.any()) else moved

    def bound(self, values: Values, latent: Values) -> Tensor:
        """The objective less KL(q || posterior), (R,); the KL is 0 where q is from an E-step at these values."""
        if all(torch.equal(values[name], latent[name]) for name in NAMES):
            return self._penalised(latent["log_likelihood"], latent["factors"], values)
        sums = Statistics(*(latent[name] for name in Statistics._fields))
        factors = self.kind.factors(values["covariances"])
        if bool((self.empty(latent).any(-1) | self._lost(sums, latent, factors)).any()):
            return self.objective(values)
        # About the means of `values`, which may differ from the means of the M-step.
        beside = sums._replace(
            shifts=values["means"] - latent["means"] - sums.shifts, scatters=torch.zeros_like(sums.scatters)
        )
        moments = self.kind.second_moments(sums) - self.kind.second_moments(beside)
        offsets = log_normalisers(self.kind, factors, *values["means"].shape[1:])
        weighted = sums.counts * offsets + torch.xlogy(sums.counts, values["weights"])
        expected = weighted.sum(-1) - self.kind.quadratic(factors, moments) / 2
        return self._penalised(expected + sums.entropy, factors, values)

    def objective(self, values: Values) -> Tensor:
        """The penalised log-likelihood (R,) for each unit of row weight, by a pass over the rows."""
        components = self.components(values)
        log_likelihood = statistics(self.rows, self.kind, components).log_likelihood
        return self._penalised(log_likelihood, components.factors, values)

    def empty(self, latent: Values) -> Tensor:
        """A mask of the components with almost no rows, (R, K)."""
        return latent["counts"] < EMPTY * latent["counts"].sum(-1, keepdim=True)

    def _lost(self, sums: Statistics, latent: Values, factors: Tensor) -> Tensor:
        """Whether moments about the means after the M-step, relative to these covariances, lose digits, (R,).

        They are differences of sums about the means before it, which are differences of sums about the centre, unless
        components were narrow relative to their distance from it.
        """
        placed = sums._replace(shifts=latent["means"], scatters=torch.zeros_like(sums.scatters))
        away = sums.scatters - self.kind.second_moments(placed)  # about the centre, all but exactly
        distances = self.kind.quadratic(factors, sums.scatters)
        now, before = self.kind.quadratic(factors, away), self.kind.quadratic(latent["factors"], away)
        return (distances > FAR * self.total) | ((now > 10 * FAR * self.total) & (before < 12 * FAR * self.total))

    def _penalised(self, log_likelihood: Tensor, factors: Tensor, values: Values) -> Tensor:
        penalty = self.regularisation.penalty(self.kind, factors, values["means"].shape[-1])
        return (log_likelihood - penalty) / self.total

    def _reseeded(self, moved: Tensors, empty: Tensor) -> Tensors:
        """Move empty components to the best of the proposals, in the restarts whose objective rises by it."""
        restarts = empty.any(-1).nonzero().squeeze(-1)
        held = {name: value[restarts] for name, value in moved.items()}
        points = worst_rows(self.rows, self.kind, self.components(held), int(empty.sum(-1).max()))
        if points is None:
            return moved
        candidates = [held, *proposals(self.kind, held, empty[restarts], points, len(self.rows.points))]
        gains = torch.stack([self.objective(candidate) for candidate in candidates])  # (candidates, R')
        best = gains.argmax(0)
        each = torch.arange(len(restarts), device=best.device)
        return {
            name: value.index_copy(0, restarts, torch.stack([candidate[name] for candidate in candidates])[best, each])
            for name, value in moved.items()
        }


def log_normalisers(kind: Covariance, factors: Tensor, components: int, dimensions: int) -> Tensor:
    """log N(mean_k; mean_k, S_k) = -D/2 log 2 pi - 1/2 log det S_k, (R, K)."""
    return kind.half_log_det(factors, components, dimensions) - dimensions / 2 * math.log(2 * math.pi)
