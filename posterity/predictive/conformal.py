"""Conformal prediction on top of any predictive: intervals and sets of classes whose coverage is guaranteed."""

import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Sequence, Sized
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Literal, NamedTuple, final

import torch
from torch import Tensor

from posterity.errors import BadData, of_kinds, positive_whole, shown
from posterity.likelihoods.likelihood import IGNORED
from posterity.numerics.random import Key
from posterity.predictive.predictive import Predictive, between_zero_and_one, refuse_missing

logger = logging.getLogger("posterity")

Order = Literal["random", "group", "time"]
_ENTRIES = 4_000_000  # of ends of intervals at a time: bounds the memory
_ORDERS: dict[str, tuple[str, str]] = {  # covered targets, and why no bound is proved
    "group": (
        "of new groups are covered, if these are exchangeable with the groups of the fit, and the closer the more "
        "groups there are",
        "rows of a group are alike",
    ),
    "time": ("are covered as far as the future is like the past", "rows in time order are not exchangeable"),
}


class Spread(NamedTuple):
    """The centre of a predictive, and the unit of scores below and above it, (N, *event) each."""

    centre: Tensor
    below: Tensor
    above: Tensor


class ConformalScore(ABC):
    """The form of an interval before calibration: centre - s below .. centre + s above, for a score s >= 0."""

    @abstractmethod
    def spread(self, pred: Predictive) -> Spread:
        """The centre and units of each entry."""


@final
@dataclass(frozen=True)
class Studentised(ConformalScore):
    """|y - mean| / std: intervals are as wide as the predictive's own standard deviation says, times one factor."""

    def spread(self, pred: Predictive) -> Spread:
        return Spread(pred.mean, pred.std, pred.std)


@final
@dataclass(frozen=True)
class Residual(ConformalScore):
    """|y - mean|: intervals of one width in all rows, for a predictive whose standard deviation says nothing."""

    def spread(self, pred: Predictive) -> Spread:
        ones = torch.ones_like(pred.mean)
        return Spread(pred.mean, ones, ones)


@final
@dataclass(frozen=True)
class Quantiles(ConformalScore):
    """Distance from the median in units of the predictive's central interval of `level`, each side by itself.

    The score 1 is an end of that interval. For a normal predictive it is `Studentised` in other units; for a skewed one
    (a logarithm was modelled) the intervals are skewed too.
    """

    level: float = 0.9

    def __post_init__(self) -> None:
        between_zero_and_one("Quantiles.level", self.level)

    def spread(self, pred: Predictive) -> Spread:
        median, (lower, upper) = pred.quantile(0.5), pred.interval(self.level)
        return Spread(median, median - lower, upper - median)


@dataclass(frozen=True, eq=False)
class Conformal(ABC):
    """Scores of calibration rows, each by a model that was fitted without the row.

    `scores` (n, ...) has one for each row, and `fold` (n,) is the number of the model that scored each: 0 for all of
    them in split conformal prediction. `order` says how the rows were divided into folds.
    """

    scores: Tensor
    fold: Tensor
    order: Order = "random"

    def __post_init__(self) -> None:
        count = len(self.scores) if self.scores.dim() else 0
        if not count or not bool((self.scores >= 0).all()):
            raise ValueError(f"{type(self).__name__}.scores must be numbers from 0 up. Got {shown(self.scores)}.")
        used = sorted(set(self.fold.flatten().tolist()))
        if self.fold.shape != (count,) or self.fold.is_floating_point() or used != list(range(len(used))):
            raise ValueError(
                f"{type(self).__name__}.fold must number the model of each of {count} rows, from 0. "
                f"Got {shown(self.fold)}."
            )
        if self.order not in ("random", *_ORDERS):
            raise ValueError(f"{type(self).__name__}.order must be random, group or time. Got {shown(self.order)}.")

    @property
    def num_rows(self) -> int:
        """Number n of calibration rows."""
        return len(self.scores)

    @property
    def num_folds(self) -> int:
        """Number K of fold models; 1 is split conformal prediction, n the jackknife+."""
        return int(self.fold.max()) + 1

    def rank(self, level: float) -> int:
        """The rank ceil((n + 1) level), from 1, of the score that bounds the set; above n no score does.

        `level` counts as the decimal number that it prints as: (n + 1) 0.9 is exactly 9 for n = 9.
        """
        between_zero_and_one("level", level)
        return math.ceil((self.num_rows + 1) * Fraction(repr(float(level))))

    def least_coverage(self, level: float) -> float:
        """The guaranteed probability that a new target is covered, for exchangeable rows; 0 where none is proved.

        It is `level` for split conformal prediction. With alpha = 1 - level, K folds and n rows it is
        1 - 2 alpha - 2 (1 - 1/K) / (n/K + 1), and for folds of equal size the larger of this and
        1 - 2 alpha - (1 - K/n) / (K + 1): 1 - 2 alpha for the jackknife+. Rows in groups or in time order are not
        exchangeable, and have no bound.
        """
        between_zero_and_one("level", level)
        count, num_folds = self.num_rows, self.num_folds
        if self.order != "random":
            return 0.0
        if num_folds == 1:
            return level
        loss = 2 * (1 - 1 / num_folds) / (count / num_folds + 1)
        if len(set(torch.bincount(self.fold).tolist())) == 1:
            loss = min(loss, (1 - num_folds / count) / (num_folds + 1))
        return max(0.0, 1.0 - 2.0 * (1.0 - level) - loss)

    def guarantee(self, level: float) -> str:
        """Return the guarantee at this level in a sentence for users."""
        least, usual = (f"{100 * share:.4g} %" for share in (self.least_coverage(level), level))
        rows = f"{self.num_rows} calibration rows"
        if self.num_folds > 1:
            rows = f"{self.num_rows} rows in {self.num_folds} folds"
        average = "It is an average over calibration and new rows, not for each input by itself."
        if self.order != "random":
            covered, why = _ORDERS[self.order]
            if self.order == "time" and self.num_folds > 1:
                why += ", and no theorem is about folds whose models see the past alone"
            return f"About {usual} of new targets {covered} ({rows}). No bound is proved: {why}. {average}"
        stable = f", and about {usual} where a fold more or less hardly changes the fit" if self.num_folds > 1 else ""
        return (
            f"At least {least} of new targets are covered, whatever the model, if new rows are exchangeable with "
            f"these{stable} ({rows}). {average}"
        )

    def _models(self, predictives: Predictive | Sequence[Predictive]) -> list[Predictive]:
        """Return the predictives of new rows as a list, one for each fold model; raise a ValueError otherwise."""
        models = _listed(predictives)
        if len(models) != self.num_folds or len({tuple(pred.mean.shape) for pred in models}) > 1:
            raise ValueError(
                f"{type(self).__name__} needs a predictive of the same rows from each of its {self.num_folds} fold "
                f"models, in their order. Got {len(models)} with {[tuple(pred.mean.shape) for pred in models]}."
            )
        return models

    def _few(self, level: float) -> bool:
        """Return whether there are too few rows for the level, and log it."""
        if self.rank(level) <= self.num_rows:
            return False
        share = Fraction(repr(float(level)))
        logger.warning(
            "conformal prediction at level %g needs at least %d calibration rows, and there are %d: everything is "
            "covered, which says nothing",
            level,
            math.ceil(share / (1 - share)),
            self.num_rows,
        )
        return True


@final
@dataclass(frozen=True, eq=False)
class ConformalIntervals(Conformal):
    """Intervals for regression: split conformal prediction, CV+ and the jackknife+.

    **Math**: a row i has the score S_i = |y_i - centre(x_i)| / unit(x_i) under the model that was fitted without it; by
    default the centre is the predictive's mean and the unit its standard deviation, so that widths adapt to the input.
    With one model the interval at x is centre -+ Q unit, Q the ceil((n + 1) level)-th smallest score. With fold models
    k(i) it is, per Barber et al., from the floor(alpha (n + 1))-th smallest of centre_k(i)(x) - S_i unit_k(i)(x) to the
    ceil((1 - alpha)(n + 1))-th smallest of centre_k(i)(x) + S_i unit_k(i)(x). Several targets are calibrated each by
    itself, or `together`: by the largest score of a row, so that one box holds all of its targets.

    **Limit**: with exchangeable rows, whatever the model: P(y in interval) >= level with one model (and < level +
    1 / (n + 1) if scores do not tie), >= 1 - 2 alpha with n models, and somewhat less with K (`least_coverage`; Barber
    et al., theorems 1 and 4). The probability is over calibration and new rows, not for each input. Rows of groups and
    rows in time order have no such bound, and `guarantee` says what holds: exchangeable groups give about the level if
    they are many, and several folds in time order have no theorem. Infinite for n < level / (1 - level) rows, with a
    warning. With K models and a level below 1/2 an interval may be empty (lower > upper).

    **Cost**: O(n log n) to fit; O(n N) ends for N new rows of K models, O(N) of one.

    **References**: Vovk, Gammerman and Shafer (2005), Algorithmic learning in a random world; Papadopoulos et al.
    (2002), for normalised scores; Romano, Patterson and Candes (2019), Conformalized quantile regression; Barber et al.
    (2021), Predictive inference with the jackknife+; Gupta, Kuchibhotla and Ramdas (2022), Nested conformal prediction
    and quantile out-of-bag ensemble methods, for other scores than residuals; Dunn, Wasserman and Ramdas (2022),
    Distribution-free prediction sets for two-layer hierarchical models, for groups.

    **Example**:

    >>> from posterity.predictive import GaussianPredictive
    >>> pred = GaussianPredictive(torch.zeros(9, 1), torch.zeros(9, 1), torch.ones(1))
    >>> intervals = ConformalIntervals.fit(pred, torch.arange(1.0, 10.0))
    >>> lower, upper = intervals.interval(pred.rows(slice(0, 1)), 0.8)  # rank ceil(10 * 0.8) = 8
    >>> lower.item(), upper.item()
    (-8.0, 8.0)
    """

    score: ConformalScore = Studentised()
    together: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        of_kinds(self, score=ConformalScore)

    @classmethod
    def fit(
        cls,
        predictives: Predictive | Sequence[Predictive],
        targets: Tensor | Sequence[Tensor],
        *,
        score: ConformalScore | None = None,
        together: bool = False,
        order: Order = "random",
    ) -> "ConformalIntervals":
        """Score calibration rows: one predictive and its targets, or a predictive of each fold's left-out rows.

        Without a `score` it is `Studentised`, or `Residual` where a standard deviation is 0 or not finite, which is
        logged.
        """
        models, ys = _paired("ConformalIntervals.fit", predictives, targets, classifies=False)
        if score is None:
            known = all(bool((pred.std.isfinite() & (pred.std > 0)).all()) for pred in models)
            score = Studentised() if known else Residual()
            if not known:
                logger.info("conformal scores are plain residuals, as standard deviations are 0 or not finite")
        scores = torch.cat([_scores(score.spread(pred), pred.check(y)) for pred, y in zip(models, ys, strict=True)])
        if together:
            largest = scores.flatten(1).amax(1) if scores.dim() > 1 else scores
            scores = largest.reshape(-1, *(1,) * (scores.dim() - 1))
        return cls(scores, _numbers(models), order, score, together)

    def interval(self, predictives: Predictive | Sequence[Predictive], level: float = 0.9) -> tuple[Tensor, Tensor]:
        """Lower and upper ends, (N, *event) in float64, from the predictives of new rows by each fold model."""
        spreads = [_finite(self.score.spread(pred)) for pred in self._models(predictives)]
        centre, below, above = (torch.stack(parts) for parts in zip(*spreads, strict=True))  # (K, N, *event)
        if self._few(level):
            infinite = torch.full_like(centre[0], math.inf)
            return -infinite, infinite
        rank = self.rank(level)
        if self.num_folds == 1:
            factor = self.scores.kthvalue(rank, dim=0).values.to(centre)  # (*event)
            return centre[0] - _product(factor, below[0]), centre[0] + _product(factor, above[0])
        shape, count = centre.shape[1:], self.num_rows
        entries = math.prod(shape[1:])
        flat = [value.reshape(self.num_folds, -1).T.cpu() for value in (centre, below, above)]  # (N * entries, K)
        own = self.scores.expand(count, *shape[1:]).reshape(count, entries).T.to(torch.float64)  # (entries, n)
        together = max(1, _ENTRIES // count)
        ends = []
        for start in range(0, len(flat[0]), together):
            rows = torch.arange(start, min(start + together, len(flat[0])), device="cpu")
            middle, low, high = (value[rows][:, self.fold.cpu()] for value in flat)  # (rows, n)
            lower = _kth(middle - _product(own[rows % entries], low), count + 1 - rank)
            ends.append(torch.stack([lower, _kth(middle + _product(own[rows % entries], high), rank)]))
        lower, upper = torch.cat(ends, 1).to(centre.device)
        return lower.reshape(shape), upper.reshape(shape)


@final
@dataclass(frozen=True, eq=False)
class ConformalSets(Conformal):
    """Adaptive sets of classes (APS): the most probable classes, as many as it takes to cover the label.

    **Math**: the score of a label is the probability of all classes above it plus u times its own, u uniform: E(x, y,
    u) = sum_c p_c 1[c ranks before y] + u p_y, plus `penalty` for each rank after the first `free` ones (RAPS). A class
    is in the set at x where fewer than (n + 1) level of the calibration scores E_i are below E(x, y, u) by the model
    k(i): with one model, where E(x, y, u) <= Q, the ceil((n + 1) level)-th smallest score.

    **Limit**: coverage as for `ConformalIntervals`. By default u = 0 for new rows: sets then depend on nothing but the
    row, cover somewhat more, and are never empty with one model, nor with K equal folds at a level from 1 - 1 / K up.
    With a key u is drawn: coverage is below level + 1 / (n + 1), and sets of very sure rows may be empty; give each
    call its own key. Conditional coverage is not guaranteed. Labels at positions (pixels, tokens) are alike within a
    row: rows count as groups, so that no bound is proved (`order` becomes "group").

    **Cost**: O(N K C log n), and a sort of the classes.

    **References**: Romano, Sesia and Candes (2020), Classification with valid and adaptive coverage; Angelopoulos et
    al. (2021), Uncertainty sets for image classifiers, for the penalty.

    **Example**:

    >>> from posterity.predictive import ClassPredictive
    >>> pred = ClassPredictive(torch.tensor([[0.6, 0.3, 0.1]] * 20))
    >>> labels = torch.tensor([0] * 12 + [1] * 6 + [2] * 2)
    >>> sets = ConformalSets.fit(pred, labels)
    >>> sets.sets(pred.rows(slice(0, 1)), 0.8)
    tensor([[ True,  True, False]])
    """

    penalty: float = 0.0
    free: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_penalty(self.penalty, self.free)

    @classmethod
    def fit(
        cls,
        predictives: Predictive | Sequence[Predictive],
        labels: Tensor | Sequence[Tensor],
        *,
        key: Key | None = None,
        penalty: float = 0.0,
        free: int = 1,
        order: Order = "random",
    ) -> "ConformalSets":
        """Score calibration rows, u drawn by the key (`Key(0)` if None): one predictive, or one of each fold."""
        _check_penalty(penalty, free)
        models, ys = _paired("ConformalSets.fit", predictives, labels, classifies=True)
        if order == "random" and any(pred.probs.dim() > 2 for pred in models):
            order = "group"
        answers = [pred.check(y).cpu().reshape(-1) for pred, y in zip(models, ys, strict=True)]
        probs = [_by_label(pred.probs)[own != IGNORED] for pred, own in zip(models, answers, strict=True)]
        if not all(map(len, probs)):
            raise BadData("ConformalSets.fit needs at least one label in each fold. Got none. Hold out some rows.")
        uniform = (key or Key(0)).fold("calibration").uniform((sum(map(len, probs)),), torch.float64, "cpu")
        parts = zip(probs, answers, torch.split(uniform, [len(own) for own in probs]), strict=True)
        scores = [
            _class_scores(own, u, penalty, free).gather(1, y[y != IGNORED].unsqueeze(1)).squeeze(1)
            for own, y, u in parts
        ]
        return cls(torch.cat(scores), _numbers(probs), order, penalty, free)

    def sets(
        self, predictives: Predictive | Sequence[Predictive], level: float = 0.9, key: Key | None = None
    ) -> Tensor:
        """Return the sets of classes as booleans (N, C, *positions), from the predictives of fold models."""
        models = self._models(predictives)
        probs = models[0].probs
        if self._few(level):
            return torch.ones_like(probs, dtype=torch.bool)
        count, classes = probs[:, 0].numel(), probs.shape[1]
        uniform = torch.zeros(count, dtype=torch.float64, device="cpu")
        if key is not None:
            uniform = key.fold("sets").uniform((count,), torch.float64, "cpu")
        below = torch.zeros(count, classes, dtype=torch.int64, device="cpu")
        for number, pred in enumerate(models):
            own = self.scores[self.fold == number].cpu().sort().values
            below += torch.searchsorted(own, _class_scores(_by_label(pred.probs), uniform, self.penalty, self.free))
        inside = (below < self.rank(level)).to(probs.device)
        return inside.reshape(len(probs), *probs.shape[2:], classes).movedim(-1, 1)


def _listed(values: Any) -> list[Any]:
    return list(values) if isinstance(values, (list, tuple)) else [values]


def _paired(name: str, predictives: Any, targets: Any, *, classifies: bool) -> tuple[list[Predictive], list[Tensor]]:
    """Return predictives and targets of the folds as lists; raise an error if they do not fit each other."""
    models, ys = _listed(predictives), _listed(targets)
    if len(models) != len(ys):
        raise ValueError(f"{name} needs targets for each fold. Got {len(models)} predictives and {len(ys)} targets.")
    kind = "classification" if classifies else "regression"
    for pred, y in zip(models, ys, strict=True):
        if not isinstance(pred, Predictive) or pred.classifies != classifies:
            raise TypeError(f"{name} needs predictives of {kind}. Got {shown(pred)}.")
        if not len(pred):
            raise BadData(f"{name} needs at least one row in each fold. Got none. Hold out some rows.")
        if not classifies:
            refuse_missing(name, pred.check(y))
    return models, ys


def _by_label(probs: Tensor) -> Tensor:
    """Probabilities (N, C, *positions) as (R, C), a row for each label."""
    return probs.movedim(1, -1).reshape(-1, probs.shape[1])


def _numbers(models: Sequence[Sized]) -> Tensor:
    """The number of the model of each row, (n,)."""
    sizes = torch.tensor([len(pred) for pred in models], device="cpu")
    return torch.arange(len(models), device="cpu").repeat_interleave(sizes)


def _finite(spread: Spread) -> Spread:
    """The spread in float64; where a prediction is not finite, an infinite interval around 0, of score 0."""
    centre, below, above = (value.double() for value in spread)
    bad = ~centre.isfinite() | below.isnan() | above.isnan()
    return Spread(centre.masked_fill(bad, 0.0), below.masked_fill(bad, math.inf), above.masked_fill(bad, math.inf))


def _scores(spread: Spread, y: Tensor) -> Tensor:
    """Scores (N, *event) on the CPU; 0 / 0 is 0, as y is at the centre."""
    centre, below, above = _finite(spread)
    away = y.double() - centre
    return (away.abs() / torch.where(away < 0, below, above)).nan_to_num(0.0, posinf=math.inf).cpu()


def _product(score: Tensor, unit: Tensor) -> Tensor:
    """score * unit; 0 * inf is inf: all y have the score 0 in infinite units, and a score of inf allows all y."""
    return (score * unit).nan_to_num(math.inf, posinf=math.inf)


def _kth(values: Tensor, rank: int) -> Tensor:
    """The number of this rank, from 1, in each row; numpy selects several times as fast as torch."""
    array = values.numpy()
    array.partition(rank - 1, axis=1)
    return torch.from_numpy(array[:, rank - 1].copy())


def _class_scores(probs: Tensor, uniform: Tensor, penalty: float, free: int) -> Tensor:
    """E(x, y, u) of every class y, (N, C) in float64 on the CPU; the first of equal classes ranks first."""
    ordered, index = probs.double().cpu().sort(dim=1, descending=True, stable=True)
    before = ordered.cumsum(1) - ordered
    rank = torch.arange(1, ordered.shape[1] + 1, dtype=torch.float64, device="cpu")
    scores = before + uniform.unsqueeze(1) * ordered + penalty * (rank - free).clamp_min(0.0)
    return torch.empty_like(scores).scatter_(1, index, scores.clamp_min(0.0))


def _check_penalty(penalty: float, free: int) -> None:
    if isinstance(penalty, bool) or not isinstance(penalty, (int, float)) or not 0.0 <= penalty < math.inf:
        raise ValueError(f"ConformalSets.penalty must be a number from 0 up. Got {shown(penalty)}.")
    positive_whole("ConformalSets.free", free)
