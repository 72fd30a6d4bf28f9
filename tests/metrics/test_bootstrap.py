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


def test_metrics_that_are_no_mean_take_the_long_way() -> None:
    pred, y = standard(300)
    rmse = bootstrap(root_mean_squared_error, pred, y, resamples=400)
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
