"""Scores of predictions (accuracy, Brier, errors, CRPS, NLL, agreement), and the checks all metrics share."""

import functools
import inspect
import math
from collections.abc import Callable
from typing import ParamSpec, Protocol, cast

import torch
from torch import Tensor

from posterity.errors import BadData, shown
from posterity.likelihoods.likelihood import IGNORED
from posterity.numerics.random import Key
from posterity.predictive.predictive import Predictive

Arguments = ParamSpec("Arguments")
Uncertainty = Callable[[Predictive], Tensor]
"""A number for each row or label of a predictive, larger where it is less certain: `lambda pred: pred.epistemic`."""


class RowMetric(Protocol[Arguments]):
    """A metric `metric(pred, y) -> float` that is the mean over rows of `metric.rows(pred, y)`, (N,).

    Or an increasing function of that mean, `metric.of_mean`.
    """

    rows: Callable[Arguments, Tensor]
    of_mean: Callable[[float], float]

    def __call__(self, *args: Arguments.args, **kwargs: Arguments.kwargs) -> float:
        """The mean of `rows`, or the function of it."""
        ...


def mean_over_rows(
    rows: Callable[Arguments, Tensor], of_mean: Callable[[float], float] = float
) -> RowMetric[Arguments]:
    """Turn `rows(pred, y)`, which returns scores (N,), into the metric that returns their mean, or a function of it.

    The scores remain available as `metric.rows(pred, y)`, for bootstrap intervals and paired comparisons.
    """

    @functools.wraps(rows)
    def metric(*args: Arguments.args, **kwargs: Arguments.kwargs) -> float:
        return of_mean(float(rows(*args, **kwargs).double().mean()))

    metric.__signature__ = inspect.signature(rows).replace(return_annotation=float)  # type: ignore[attr-defined]
    metric.rows = rows  # type: ignore[attr-defined]
    metric.of_mean = of_mean  # type: ignore[attr-defined]
    return cast(RowMetric[Arguments], metric)


class WeightedMetric(Protocol):
    """A metric `metric(pred, y) -> float` that is no mean over rows, but can weigh them.

    `metric.weighted(pred, y, weights)` has a value for each row of weights (B, N): counts of resampled rows, say.
    """

    weighted: Callable[[Predictive, Tensor, Tensor], Tensor]

    def __call__(self, pred: Predictive, y: Tensor) -> float:
        """The metric with equal weights."""
        ...


def with_row_weights(weighted: Callable[[Predictive, Tensor, Tensor], Tensor]) -> WeightedMetric:
    """Turn `weighted(pred, y, weights)`, which returns a value for each row of weights (B, N), into a metric."""

    @functools.wraps(weighted)
    def metric(pred: Predictive, y: Tensor) -> float:
        return float(weighted(pred, y, torch.ones(1, len(pred), dtype=torch.float64, device="cpu"))[0])

    arguments = list(inspect.signature(weighted).parameters.values())[:2]
    metric.__signature__ = inspect.Signature(arguments, return_annotation=float)  # type: ignore[attr-defined]
    metric.weighted = weighted  # type: ignore[attr-defined]
    return cast(WeightedMetric, metric)


def scored(metric: str, pred: Predictive, y: Tensor) -> tuple[Tensor, Tensor]:
    """Return the targets checked and shaped by `pred.check`, and which are not missing; raise BadData without any."""
    targets = pred.check(y)
    some_rows(metric, pred)
    seen = ~targets.isnan() if targets.is_floating_point() else targets != IGNORED
    if not bool(seen.any()):
        raise BadData(f"{metric} needs at least one target. Got {targets.numel()} that are all missing.")
    return targets, seen


def some_rows(metric: str, pred: Predictive) -> None:
    """Raise BadData for a predictive without rows."""
    if not len(pred):
        raise BadData(f"{metric} needs at least one row. Got none. Check how the data were split or filtered.")


def labelled(
    metric: str, pred: Predictive, y: Tensor, instead: str = "negative_log_likelihood"
) -> tuple[Tensor, Tensor, Tensor]:
    """Return probabilities (R, C) in float64 and labels (R,) of all rows and positions; refuse regression.

    Missing labels are left out; the third tensor (N, *positions) is true where there is a label.
    """
    classification(metric, pred, instead)
    labels, seen = scored(metric, pred, y)
    return by_label(pred.probs)[seen.reshape(-1)], labels[seen], seen


def by_label(probs: Tensor) -> Tensor:
    """Reshape probabilities (N, C, *positions) to (R, C) in float64, one row per label."""
    return probs.double().movedim(1, -1).reshape(-1, probs.shape[1])


def per_row(scores: Tensor, pred: Predictive, seen: Tensor | None = None) -> Tensor:
    """Average the scores of all labels or outputs of a row, (N,).

    Scores (R,) of the targets that were `seen` (N, *event), where others are missing, are summed in their rows and
    divided by the mean number of targets of a row: the mean over rows is that over targets. Rows without any target
    are left out.
    """
    if seen is None or bool(seen.all()):
        return scores.reshape(len(pred), -1).double().mean(-1)
    counts = seen.reshape(len(pred), -1).sum(-1)
    totals = scores.new_zeros(len(pred), dtype=torch.float64)
    totals = totals.index_add(0, row_of(seen), scores.reshape(-1).double())[counts > 0]
    return totals * (len(totals) / counts.sum().double())


def row_of(seen: Tensor) -> Tensor:
    """The row of each true entry of a mask (N, *event), in order."""
    return seen.reshape(len(seen), -1).nonzero()[:, 0]


def classification(metric: str, pred: Predictive, instead: str) -> None:
    """Raise a TypeError unless the predictive has class probabilities."""
    if not pred.classifies:
        raise TypeError(f"{metric} needs a classification predictive. Got {type(pred).__name__}. Use {instead}.")


def regression(metric: str, pred: Predictive, y: Tensor, instead: str) -> tuple[Tensor, Tensor]:
    """Return targets and mask of `scored`; raise a TypeError unless the predictive is one of regression."""
    if pred.classifies:
        raise TypeError(f"{metric} needs a regression predictive. Got {type(pred).__name__}. Use {instead}.")
    return scored(metric, pred, y)


def ranked(metric: str, pred: Predictive, uncertainty: Uncertainty) -> Tensor:
    """Return the uncertainty of each row or label in one vector, float64 on the CPU; raise BadData where it is none."""
    values = torch.as_tensor(uncertainty(pred)).double().cpu()
    labels = pred.probs[:, 0].numel() if pred.classifies else len(pred)
    if values.numel() not in (labels, len(pred)) or not len(values.shape) or bool(values.isnan().any()):
        raise BadData(
            f"{metric}: uncertainty must give a number for each of {len(pred)} rows, or for each label. "
            f"Got {shown(values)}."
        )
    return values.reshape(-1)


def whole_number(name: str, value: object, least: int = 1) -> None:
    """Raise a ValueError unless the value is an integer from `least` up."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        wanted = "a positive integer" if least == 1 else f"an integer from {least} up"
        raise ValueError(f"{name} must be {wanted}. Got {shown(value)}.")


@mean_over_rows
def accuracy(pred: Predictive, y: Tensor) -> Tensor:
    """Fraction of labels that are the most probable class, 0 to 1; the first class wins a tie.

    >>> from posterity.predictive import ClassPredictive
    >>> accuracy(ClassPredictive(torch.tensor([[0.9, 0.1], [0.2, 0.8]])), torch.tensor([0, 0]))
    0.5
    """
    probs, labels, seen = labelled("accuracy", pred, y, "root_mean_squared_error")
    return per_row(probs.max(-1).indices == labels, pred, seen)


@mean_over_rows
def brier_score(pred: Predictive, y: Tensor) -> Tensor:
    """Mean over labels of the SUM over classes of (p_c - 1[y = c])^2, 0 to 2; lower is better.

    Some authors sum over the second class of a binary problem only, which gives half of this.

    >>> from posterity.predictive import ClassPredictive
    >>> brier_score(ClassPredictive(torch.tensor([[0.5, 0.5], [0.0, 1.0]])), torch.tensor([0, 1]))
    0.25
    """
    probs, labels, seen = labelled("brier_score", pred, y)
    return per_row((probs - torch.nn.functional.one_hot(labels, probs.shape[1])).square().sum(-1), pred, seen)


@functools.partial(mean_over_rows, of_mean=math.sqrt)
def root_mean_squared_error(pred: Predictive, y: Tensor) -> Tensor:
    """Square root of the mean, over rows and outputs, of (y - predictive mean)^2; in the units of y.

    >>> from posterity.predictive import GaussianPredictive
    >>> pred = GaussianPredictive(torch.zeros(2, 1), torch.ones(2, 1), torch.ones(1))
    >>> root_mean_squared_error(pred, torch.tensor([1.0, 7.0]))
    5.0
    """
    targets, seen = regression("root_mean_squared_error", pred, y, "accuracy")
    return per_row((targets - pred.mean).double().square()[seen], pred, seen)


@mean_over_rows
def mean_absolute_error(pred: Predictive, y: Tensor) -> Tensor:
    """Mean, over rows and outputs, of |y - predictive mean|; in the units of y.

    >>> from posterity.predictive import GaussianPredictive
    >>> pred = GaussianPredictive(torch.zeros(2, 1), torch.ones(2, 1), torch.ones(1))
    >>> mean_absolute_error(pred, torch.tensor([1.0, -7.0]))
    4.0
    """
    targets, seen = regression("mean_absolute_error", pred, y, "accuracy")
    return per_row((targets - pred.mean).double().abs()[seen], pred, seen)


@with_row_weights
def r_squared(pred: Predictive, y: Tensor, weights: Tensor) -> Tensor:
    """Mean over outputs of 1 - sum (y - predictive mean)^2 / sum (y - mean of y)^2; 1 is perfect, 0 the mean of y.

    NaN where an output has one value only.

    >>> from posterity.predictive import GaussianPredictive
    >>> pred = GaussianPredictive(torch.tensor([[1.0], [2.0], [3.0]]), torch.ones(3, 1), torch.ones(1))
    >>> r_squared(pred, torch.tensor([1.0, 2.0, 4.0]))
    0.7857142857142857
    """
    given, observed = regression("r_squared", pred, y, "accuracy")
    targets, seen = (value.double().reshape(len(pred), -1).cpu() for value in (given, observed))  # (N, outputs)
    errors = torch.where(seen > 0, targets - pred.mean.double().reshape(targets.shape).cpu(), 0.0).square()
    away, weights = torch.where(seen > 0, targets - targets.nanmean(0), 0.0), weights.cpu()
    total = weights @ seen
    scatter = weights @ away.square() - (weights @ away).square() / total  # (B, outputs)
    scatter = torch.where(scatter > 1e-12 * (weights @ away.square()), scatter, torch.nan)
    return (1.0 - weights @ errors / scatter).mean(1)


_PAIRS = 1_000_000  # of mixture components at a time: bounds the memory


@mean_over_rows
def crps(pred: Predictive, y: Tensor, draws: int = 1000, seed: int = 0, most_normals: int = 1000) -> Tensor:
    """Mean, over rows and outputs, of the continuous ranked probability score, in the units of y; lower is better.

    **Math**: integral of (F(x) - 1[x >= y])^2 dx with F the predictive distribution function of the output,
    = E|X - y| - E|X - X'| / 2 for independent X, X' ~ F. In closed form where the predictive is Gaussian or an equal
    mixture of S normals, of at most `most_normals`. Otherwise from `draws` samples x_i, fair (unbiased): the mean of
    |x_i - y| less half the mean of |x_i - x_j| over pairs i != j.

    **Limit**: scores each output by its marginal. The estimate from samples has noise, and may fall below 0.

    **Cost**: O(S^2 N D) for a mixture of S normals; O(draws N D) by samples.

    **References**: Gneiting and Raftery (2007), Strictly proper scoring rules, section 4.2; Grimit et al. (2006), for
    mixtures; Ferro (2014), Fair scores for ensemble forecasts.

    >>> from posterity.predictive import GaussianPredictive
    >>> pred = GaussianPredictive(torch.zeros(1, 1), torch.zeros(1, 1), torch.ones(1))
    >>> round(crps(pred, torch.tensor([0.0])), 4)  # (sqrt 2 - 1) / sqrt(pi)
    0.2337
    """
    given, seen = regression("crps", pred, y, "brier_score")
    observed = seen.reshape(-1)
    targets = given.double().reshape(-1)[observed]  # (R,)
    whole_number("crps: draws", draws, least=2)
    if pred.normals is None or len(pred.normals[0]) > most_normals:
        sample = pred.sample(draws, Key(seed)).double().reshape(draws, -1)[:, observed]  # (draws, R)
        return per_row(_crps_of_samples(sample, targets), pred, seen)
    means, scales = (value.double().reshape(len(value), -1)[:, observed] for value in pred.normals)  # (S, R)
    together = max(1, _PAIRS // len(means) ** 2)
    parts = [
        _crps_of_normals(means[:, low : low + together], scales[:, low : low + together], targets[low : low + together])
        for low in range(0, len(targets), together)
    ]
    return per_row(torch.cat(parts), pred, seen)


def _crps_of_samples(sample: Tensor, targets: Tensor) -> Tensor:
    """Fair CRPS (R,) of samples (S, R)."""
    count = len(sample)
    # In order, the sum of x_j - x_i over pairs i < j has x_i with the weight 2 i - (count - 1).
    weight = 2.0 * torch.arange(count, dtype=sample.dtype, device=sample.device) - (count - 1)
    pairs = weight @ sample.sort(0).values  # (R,)
    return (sample - targets).abs().mean(0) - pairs / (count * (count - 1))


def _crps_of_normals(means: Tensor, scales: Tensor, targets: Tensor) -> Tensor:
    """CRPS (R,) of the equal mixture of normals (S, R)."""
    pairs = _absolute(means - means.unsqueeze(1), torch.hypot(scales, scales.unsqueeze(1))).mean((0, 1))
    return _absolute(targets - means, scales).mean(0) - 0.5 * pairs


def _absolute(mean: Tensor, scale: Tensor) -> Tensor:
    """E|X| for X ~ N(mean, scale^2)."""
    standard = mean / scale.clamp_min(torch.finfo(scale.dtype).tiny)
    density = torch.exp(-0.5 * standard.square()) * math.sqrt(2.0 / math.pi)
    return mean * torch.erf(standard / math.sqrt(2.0)) + scale * density


@mean_over_rows
def negative_log_likelihood(pred: Predictive, y: Tensor) -> Tensor:
    """Mean over rows of -log p(y_n) under the averaged predictive, in nats; lower is better.

    **Math**: -(1/N) sum_n log E p(y_n | w): the log of the average over the posterior. The average of the log
    (`gibbs_negative_log_likelihood`) is never smaller, by Jensen, and scores one posterior draw instead of the
    prediction. Log densities of all outputs or positions of a row are summed; missing targets are left out, and so are
    rows without any.

    >>> from posterity.predictive import ClassPredictive
    >>> pred = ClassPredictive(torch.tensor([[0.5, 0.5], [0.25, 0.75]]))
    >>> round(negative_log_likelihood(pred, torch.tensor([0, 1])), 4)
    0.4904
    """
    targets, seen = scored("negative_log_likelihood", pred, y)
    return -_with_target(pred.log_prob(targets), seen)


@mean_over_rows
def gibbs_negative_log_likelihood(pred: Predictive, y: Tensor) -> Tensor:
    """Mean over rows of -E log p(y_n | w) over the posterior, in nats: the loss of one posterior draw.

    **Math**: -(1/N) sum_n (1/S) sum_s log p(y_n | w_s); in closed form for Gaussian outputs and noise. Never below
    `negative_log_likelihood`, which averages before it takes the log. It needs the posterior draws, not their
    averaged probabilities.

    >>> from posterity.predictive import ClassPredictive
    >>> draws = torch.tensor([[[0.5, 0.5]], [[0.25, 0.75]]])
    >>> pred = ClassPredictive(draws.mean(0), draws)
    >>> round(gibbs_negative_log_likelihood(pred, torch.tensor([0])), 4)  # (log 2 + log 4) / 2
    1.0397
    """
    targets, seen = scored("gibbs_negative_log_likelihood", pred, y)
    return -_with_target(pred.expected_log_prob(targets), seen)


def _with_target(values: Tensor, seen: Tensor) -> Tensor:
    """Return the values (N,) of rows with at least one target."""
    observed = seen.reshape(len(seen), -1).any(1)
    return values if bool(observed.all()) else values[observed]


@mean_over_rows
def agreement(pred: Predictive, reference: Tensor) -> Tensor:
    """Fraction of labels whose most probable class agrees with the reference probabilities (N, C), 0 to 1.

    **References**: Izmailov et al. (2021), What are Bayesian neural network posteriors really like?

    >>> from posterity.predictive import ClassPredictive
    >>> agreement(ClassPredictive(torch.tensor([[0.9, 0.1], [0.2, 0.8]])), torch.tensor([[0.6, 0.4], [0.6, 0.4]]))
    0.5
    """
    probs, wanted = _both("agreement", pred, reference)
    return per_row(probs.max(-1).indices == wanted.max(-1).indices, pred)


@mean_over_rows
def total_variation(pred: Predictive, reference: Tensor) -> Tensor:
    """Mean over labels of sum_c |p_c - reference_c| / 2 against reference probabilities (N, C), 0 to 1; 0 is equal.

    **References**: Izmailov et al. (2021), What are Bayesian neural network posteriors really like?

    >>> from posterity.predictive import ClassPredictive
    >>> total_variation(ClassPredictive(torch.tensor([[0.75, 0.25]])), torch.tensor([[0.5, 0.5]]))
    0.25
    """
    probs, wanted = _both("total_variation", pred, reference)
    return per_row(0.5 * (probs - wanted).abs().sum(-1), pred)


def _both(metric: str, pred: Predictive, reference: Tensor) -> tuple[Tensor, Tensor]:
    """Return predicted and reference probabilities, (R, C) each; raise BadData where the reference does not fit."""
    classification(metric, pred, "root_mean_squared_error")
    reference = torch.as_tensor(reference).to(pred.probs)
    if reference.shape != pred.probs.shape:
        raise BadData(
            f"{metric}: the reference must have the shape {tuple(pred.probs.shape)} of the probabilities. "
            f"Got {tuple(reference.shape)}. Give class probabilities of the same rows."
        )
    if not bool(((reference >= 0) & ((reference.sum(1, keepdim=True) - 1).abs() < 1e-3)).all()):
        raise BadData(
            f"{metric}: the reference must hold probabilities that sum to 1. Got {shown(reference)}. "
            "Give probabilities, not logits or labels."
        )
    some_rows(metric, pred)
    return by_label(pred.probs), by_label(reference)
