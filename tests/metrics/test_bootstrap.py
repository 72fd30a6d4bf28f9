"""Bootstrap intervals: their width, and the two routes to them."""

import functools
import math

import pytest
import torch

from posterity.errors import BadData
from posterity.likelihoods import Categorical
from posterity.metrics import (
    accuracy,
    agreement,
    bootstrap,
    coverage,
    expected_calibration_error,
    mean_absolute_error,
    negative_log_likelihood,
    root_mean_squared_error,
)
from posterity.metrics.scores import mean_over_rows
from posterity.numerics.random import Key
from posterity.predictive import ClassPredictive, GaussianPredictive, from_outputs


def standard(rows: int) -> tuple[GaussianPredictive, torch.Tensor]:
    mean = torch.zeros(rows, 1, dtype=torch.float64)
    pred = GaussianPredictive(mean, mean, torch.tensor(1.0, dtype=torch.float64))
    return pred, Key(0).normal((rows, 1), torch.float64, torch.get_default_device())


def test_width_is_that_of_the_standard_error() -> None:
    pred, y = standard(2000)
    value, lower, upper = bootstrap(mean_absolute_error, pred, y, level=0.95, resamples=4000)
    assert value == mean_absolute_error(pred, y)
    error = float(y.abs().std()) / 2000**0.5
    assert lower < value < upper
    assert upper - lower == pytest.approx(2 * 1.96 * error, rel=0.1)
    narrow = bootstrap(mean_absolute_error, pred, y, level=0.5, resamples=4000)
    assert narrow.upper - narrow.lower == pytest.approx(2 * 0.674 * error, rel=0.1)


def test_it_holds_the_truth_as_often_as_it_says() -> None:
    hits = 0
    for seed in range(300):
        y = Key(seed).normal((60, 1), torch.float64, torch.get_default_device())
        pred, _ = standard(60)
        interval = bootstrap(mean_absolute_error, pred, y, level=0.9, resamples=200, seed=seed)
        hits += interval.lower <= math.sqrt(2 / math.pi) <= interval.upper
    assert 0.9 - 5.0 * (0.09 / 300) ** 0.5 < hits / 300 <= 1.0


@pytest.mark.parametrize("degrees", [math.inf, 20.0])
def test_intervals_of_sixty_rows_hold_the_truth(degrees: float) -> None:
    """Losses are skewed, and more so where residuals have longer tails: percentile intervals cover .88 to .92."""
    sets, rows = 400, 60
    normal = Key(5).normal((sets, rows, 1), torch.float64, "cpu")
    if degrees < math.inf:
        chi = Key(6).normal((sets, rows, 1, int(degrees)), torch.float64, "cpu").square().sum(-1)
        normal = normal / (chi / degrees).sqrt()
    variance = 1.0 if degrees == math.inf else degrees / (degrees - 2.0)
    zeros = torch.zeros(rows, 1, dtype=torch.float64)
    pred = GaussianPredictive(zeros, zeros, torch.tensor(1.0, dtype=torch.float64))
    truths = {
        negative_log_likelihood: 0.5 * (math.log(2.0 * math.pi) + variance),
        root_mean_squared_error: math.sqrt(variance),
    }
    for metric, truth in truths.items():
        ends = [bootstrap(metric, pred, y, resamples=400, seed=seed)[1:] for seed, y in enumerate(normal)]
        share = sum(lower <= truth <= upper for lower, upper in ends) / sets
        assert abs(share - 0.95) <= 2.0 * (0.95 * 0.05 / sets) ** 0.5


def scored(scores: torch.Tensor, seed: int, resamples: int) -> tuple[float, float, float]:
    """The interval of the mean of scores as they are."""
    pred = GaussianPredictive(torch.zeros(len(scores), 1), torch.zeros(len(scores), 1), torch.tensor(1.0))
    return bootstrap(mean_over_rows(lambda p, y: scores), pred, torch.zeros(len(scores), 1), 0.95, resamples, seed)


@pytest.mark.parametrize(
    ("rows", "share"), [(50, None), (200, None), (500, 0.02), (200, 0.1)], ids=["lognormal", "more", "sure", "errors"]
)
def test_intervals_of_skewed_scores_hold_the_truth(rows: int, share: float | None) -> None:
    """Lognormal scores, and squared errors of classifiers that are wrong in a small share of the rows.

    The threshold is .92: 50 lognormal scores are too few for .95, whatever the bootstrap.
    """
    sets = 200
    if share is None:
        scores, truth = Key(7).normal((sets, rows), torch.float64, "cpu").exp(), math.exp(0.5)
    else:
        wrong, size = Key(8).uniform((2, sets, rows), torch.float64, "cpu")
        scores = torch.where(wrong < share, (0.6 + 0.4 * size).square(), (0.1 * size).square())
        truth = share * (1.0 - 0.6**3) / 1.2 + (1.0 - share) * 0.01 / 3.0
    ends = [scored(values, seed, 300)[1:] for seed, values in enumerate(scores)]
    covered = sum(lower <= truth <= upper for lower, upper in ends) / sets
    assert covered > 0.92 - 5.0 * (0.92 * 0.08 / sets) ** 0.5


def test_few_errors_of_a_sure_classifier_do_not_make_an_endless_interval() -> None:
    """One error in 200 rows: up to 5.6 are expected where at most one comes with probability .025 (Poisson)."""
    scores = torch.full((200,), 1e-4, dtype=torch.float64) * torch.linspace(0.5, 1.5, 200, dtype=torch.float64)
    scores[0] = 0.9
    value, lower, upper = scored(scores, 0, 1000)
    assert value == pytest.approx(0.0046, abs=1e-4)
    assert lower < value < upper < 0.9 * 5.6 / 200


def test_proportions_and_other_metrics_hold_the_truth() -> None:
    """BCa: accuracy, whose rows have two values, and a metric that is no mean."""
    hits, median = 0, 0
    for seed in range(200):
        right = Key(seed).uniform((60,), torch.float64, "cpu") < 0.9
        probs = torch.tensor([[0.9, 0.1]], dtype=torch.float64).expand(60, 2)
        value, lower, upper = bootstrap(accuracy, ClassPredictive(probs), (~right).long(), resamples=300, seed=seed)
        assert 0.0 <= lower <= value <= upper <= 1.0
        hits += lower <= 0.9 <= upper
    assert abs(hits / 200 - 0.95) <= 3.0 * (0.95 * 0.05 / 200) ** 0.5
    pred, _ = standard(60)
    for seed in range(40):
        y = Key(seed).normal((60, 1), torch.float64, "cpu")
        interval = bootstrap(lambda _, t: float(t.abs().square().mean() ** 2), pred, y, resamples=100, seed=seed)
        median += interval.lower <= 1.0 <= interval.upper
    assert median / 40 > 0.85


def test_metrics_that_are_no_mean_take_the_long_way() -> None:
    pred, y = standard(300)
    rmse = bootstrap(lambda p, t: root_mean_squared_error(p, t), pred, y, resamples=400)
    error = float(y.square().std()) / (2 * rmse.value * 300**0.5)  # delta method
    assert rmse.lower < rmse.value < rmse.upper
    assert rmse.upper - rmse.lower == pytest.approx(2 * 1.96 * error, rel=0.25)
    outputs, labels = Key(0).normal((5, 100, 3), torch.float64, torch.get_default_device()), torch.arange(100) % 3
    classes = from_outputs(Categorical(), outputs)
    calibration = bootstrap(expected_calibration_error, classes, labels, resamples=50)
    assert 0.0 <= calibration.lower <= calibration.upper <= 1.0


def test_both_ways_agree() -> None:
    pred, y = standard(400)
    short = bootstrap(mean_absolute_error, pred, y, resamples=1000)
    long = bootstrap(lambda p, t: mean_absolute_error(p, t), pred, y, resamples=1000)
    assert short.value == long.value
    width = short.upper - short.lower
    assert short.lower == pytest.approx(long.lower, abs=0.15 * width)
    assert short.upper == pytest.approx(long.upper, abs=0.15 * width)
    partly = bootstrap(functools.partial(coverage, level=0.5), pred, y, resamples=50)
    assert partly.lower < 0.5 < partly.upper


def test_same_seed_same_interval_and_memory_in_parts() -> None:
    pred, y = standard(50)
    assert bootstrap(mean_absolute_error, pred, y, seed=3) == bootstrap(mean_absolute_error, pred, y, seed=3)
    assert bootstrap(mean_absolute_error, pred, y, seed=3) != bootstrap(mean_absolute_error, pred, y, seed=4)


def test_reference_predictions_are_resampled_with_their_rows() -> None:
    probs = torch.tensor([[0.9, 0.1], [0.2, 0.8], [0.6, 0.4]])
    assert bootstrap(agreement, ClassPredictive(probs), probs) == (1.0, 1.0, 1.0)


def test_an_impossible_label_keeps_the_upper_end_at_infinity() -> None:
    pred = ClassPredictive(torch.tensor([[1.0, 0.0]] * 20))
    value, lower, upper = bootstrap(negative_log_likelihood, pred, torch.tensor([1] + [0] * 19))
    assert value == upper == math.inf
    assert lower == 0.0


def test_what_cannot_be_resampled_is_refused() -> None:
    pred, y = standard(5)
    with pytest.raises(ValueError, match="bootstrap: level must be a number between 0 and 1"):
        bootstrap(mean_absolute_error, pred, y, level=1.0)
    with pytest.raises(ValueError, match="bootstrap: resamples must be an integer from 2 up"):
        bootstrap(mean_absolute_error, pred, y, resamples=1)
    with pytest.raises(BadData, match="y must have one row"):
        bootstrap(mean_absolute_error, pred, y[:4])
    with pytest.raises(BadData, match="needs at least one row"):
        bootstrap(accuracy, ClassPredictive(torch.zeros(0, 2)), torch.zeros(0, dtype=torch.long))
