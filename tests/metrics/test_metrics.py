"""Every metric against gold numbers and a naive loop."""

import inspect
import math
from collections.abc import Callable

import pytest
import torch
from classtables import ClassTable, class_tables
from goldcases import load
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from posterity.errors import BadData
from posterity.likelihoods import Categorical, Gaussian
from posterity.metrics import (
    accuracy,
    adaptive_calibration_error,
    agreement,
    brier_score,
    classwise_calibration_error,
    confidence,
    coverage,
    crps,
    expected_calibration_error,
    gibbs_confidence,
    gibbs_negative_log_likelihood,
    interval_width,
    maximum_calibration_error,
    mean_absolute_error,
    negative_log_likelihood,
    reliability,
    root_mean_squared_error,
    total_variation,
)
from posterity.numerics.random import Key
from posterity.predictive import ClassPredictive, DrawsPredictive, GaussianPredictive, Predictive, from_outputs

BINNED = [
    expected_calibration_error,
    maximum_calibration_error,
    adaptive_calibration_error,
    classwise_calibration_error,
]
CLASS_FLOATS = [accuracy, brier_score, confidence, *BINNED]
CLASS_METRICS = [*CLASS_FLOATS, gibbs_confidence, reliability]
REGRESSION_METRICS = [root_mean_squared_error, mean_absolute_error, crps, coverage, interval_width]
BOTH = [negative_log_likelihood, gibbs_negative_log_likelihood]
REFERENCE = [agreement, total_variation]


def test_gold_metrics_table() -> None:
    case = load("metrics_table")
    draws, labels, bins = case.inputs["probs"], case.inputs["labels"].long(), case.inputs["n_bins"]
    pred = ClassPredictive(draws.mean(0), draws)
    case.check("accuracy", accuracy(pred, labels))
    case.check("n_correct", accuracy(pred, labels) * len(labels))
    case.check("nll_bma_mean", negative_log_likelihood(pred, labels))
    case.check("ece", expected_calibration_error(pred, labels, bins))
    case.check("ece", expected_calibration_error(pred, labels))  # 15 is the default
    case.check("ece_sample0", expected_calibration_error(ClassPredictive(draws[0]), labels))
    table = reliability(pred, labels, bins)
    used = table.count.nonzero().squeeze(1)
    columns = [used, table.count[used], table.confidence[used], table.accuracy[used]]
    case.check("ece_bins", torch.stack([column.double() for column in columns], dim=-1))
    case.check("mce", (table.accuracy - table.confidence)[used].abs().max())
    case.check("mce", maximum_calibration_error(pred, labels, bins))
    case.check("ece_classwise", classwise_calibration_error(pred, labels, bins))
    case.check("nll_gibbs_mean", gibbs_negative_log_likelihood(pred, labels))
    case.check("nll_gibbs_sum", gibbs_negative_log_likelihood.rows(pred, labels).sum())
    case.check("mean_confidence", confidence(pred, labels))
    case.check("mean_confidence_gibbs", gibbs_confidence(pred, labels))
    case.check("brier", brier_score(pred, labels))
    case.check("predictive_entropy_mean", pred.entropy.mean())
    case.check("mutual_information_mean", pred.epistemic.mean())


def test_gold_nll_averages_before_the_log() -> None:
    case = load("metrics_table")
    draws, labels = case.inputs["probs"], case.inputs["labels"].long()
    gibbs = sum(negative_log_likelihood(ClassPredictive(probs), labels) for probs in draws) / len(draws)
    case.check("nll_gibbs_mean", gibbs)
    pred = ClassPredictive(draws.mean(0), draws)
    assert negative_log_likelihood(pred, labels) < gibbs_negative_log_likelihood(pred, labels)
    assert confidence(pred, labels) < gibbs_confidence(pred, labels)


@settings(max_examples=100, deadline=None)
@given(class_tables(15))
def test_class_metrics_against_loops(table: ClassTable) -> None:
    rows, labels, bins = table
    pred, y = ClassPredictive(torch.tensor(rows, dtype=torch.float64)), torch.tensor(labels)

    hits = [row.index(max(row)) == label for row, label in zip(rows, labels, strict=True)]
    assert accuracy(pred, y) == pytest.approx(sum(hits) / len(hits), abs=1e-12)

    chosen = [row[label] for row, label in zip(rows, labels, strict=True)]
    loss = sum(-math.log(p) for p in chosen) / len(chosen) if min(chosen) > 0 else math.inf
    assert negative_log_likelihood(pred, y) == pytest.approx(loss, abs=1e-12)

    assert confidence(pred, y) == pytest.approx(sum(max(row) for row in rows) / len(rows), abs=1e-12)
    squares = [sum((p - (c == label)) ** 2 for c, p in enumerate(row)) for row, label in zip(rows, labels, strict=True)]
    assert brier_score(pred, y) == pytest.approx(sum(squares) / len(rows), abs=1e-12)
    assert 0.0 <= brier_score(pred, y) <= 2.0

    error, worst, counts = 0.0, 0.0, []
    for m in range(bins):
        inside = [i for i, row in enumerate(rows) if m / bins < max(row) <= (m + 1) / bins]
        counts.append(len(inside))
        if inside:
            mean = sum(max(rows[i]) for i in inside) / len(inside)
            gap = abs(sum(hits[i] for i in inside) / len(inside) - mean)
            error, worst = error + len(inside) / len(rows) * gap, max(worst, gap)
    assert maximum_calibration_error(pred, y, bins) == pytest.approx(worst, abs=1e-12)
    assert reliability(pred, y, bins).count.tolist() == counts
    assert expected_calibration_error(pred, y, bins) == pytest.approx(error, abs=1e-12)


numbers = st.floats(-100, 100)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(numbers, numbers, st.floats(0.0, 50.0)), min_size=1, max_size=10), st.floats(0.1, 10.0))
def test_regression_metrics_against_loops(rows: list[tuple[float, float, float]], noise: float) -> None:
    mean, y, spread = (torch.tensor(column, dtype=torch.float64) for column in zip(*rows, strict=True))
    pred = GaussianPredictive(mean.unsqueeze(1), spread.unsqueeze(1), torch.tensor(noise, dtype=torch.float64))
    squares = [(target - centre) ** 2 for centre, target, _ in rows]
    assert root_mean_squared_error(pred, y) == pytest.approx(math.sqrt(sum(squares) / len(rows)), abs=1e-9)
    distances = [abs(target - centre) for centre, target, _ in rows]
    assert mean_absolute_error(pred, y) == pytest.approx(sum(distances) / len(rows), abs=1e-9)
    losses = [
        0.5 * (target - centre) ** 2 / (variance + noise) + 0.5 * math.log(2 * math.pi * (variance + noise))
        for centre, target, variance in rows
    ]
    assert negative_log_likelihood(pred, y) == pytest.approx(sum(losses) / len(rows), rel=1e-9)


def test_regression_errors_average_over_outputs_too() -> None:
    pred = DrawsPredictive(Gaussian(), torch.zeros(3, 2, 2))
    y = torch.tensor([[3.0, 0.0], [0.0, -5.0]])
    assert mean_absolute_error(pred, y) == pytest.approx(2.0)
    assert root_mean_squared_error(pred, y) == pytest.approx(math.sqrt(34 / 4))


def test_a_vector_of_targets_is_not_broadcast_against_a_column() -> None:
    mean = torch.arange(4.0).unsqueeze(1)
    pred = GaussianPredictive(mean, torch.ones(4, 1), torch.ones(1))
    assert root_mean_squared_error(pred, torch.arange(4.0)) == 0.0
    assert mean_absolute_error(pred, torch.arange(4.0) + 1) == 1.0


def test_a_calibrated_table_has_no_calibration_error() -> None:
    pred = ClassPredictive(torch.tensor([[0.75, 0.25]]).double().repeat(4, 1))
    assert expected_calibration_error(pred, torch.tensor([0, 0, 0, 1])) == pytest.approx(0.0, abs=1e-12)
    assert expected_calibration_error(pred, torch.tensor([1, 1, 1, 0])) == pytest.approx(0.5)


def test_an_impossible_label_costs_infinity() -> None:
    pred = ClassPredictive(torch.tensor([[1.0, 0.0], [0.5, 0.5]]))
    assert negative_log_likelihood(pred, torch.tensor([1, 0])) == math.inf


def test_metrics_are_plain_floats() -> None:
    classes, numbers_ = ClassPredictive(torch.tensor([[0.5, 0.5]])), DrawsPredictive(Gaussian(), torch.zeros(1, 1, 1))
    for metric in (*CLASS_FLOATS, negative_log_likelihood):
        assert type(metric(classes, torch.tensor([0]))) is float
    for metric in (*REGRESSION_METRICS, *BOTH):
        assert type(metric(numbers_, torch.tensor([0.0]))) is float
    for metric in REFERENCE:
        assert type(metric(classes, torch.tensor([[0.5, 0.5]]))) is float


@pytest.mark.parametrize("metric", CLASS_METRICS)
def test_class_metrics_refuse_a_regression(metric: Callable[[Predictive, Tensor], object]) -> None:
    pred = GaussianPredictive(torch.zeros(1, 1), torch.ones(1, 1), torch.ones(1))
    instead = "root_mean_squared_error|negative_log_likelihood|interval_width"
    with pytest.raises(TypeError, match=rf"{metric.__name__} needs .* Use ({instead})"):
        metric(pred, torch.zeros(1))


@pytest.mark.parametrize("metric", REGRESSION_METRICS)
def test_regression_metrics_refuse_classes(metric: Callable[[Predictive, Tensor], object]) -> None:
    instead = "accuracy|brier_score|expected_calibration_error|confidence"
    with pytest.raises(TypeError, match=rf"{metric.__name__} needs .* Use ({instead})"):
        metric(ClassPredictive(torch.tensor([[0.5, 0.5]])), torch.tensor([0]))


def empty(metric: object) -> tuple[Predictive, Tensor]:
    if metric in REGRESSION_METRICS:
        return GaussianPredictive(torch.zeros(0, 1), torch.zeros(0, 1), torch.ones(1)), torch.zeros(0)
    if metric in REFERENCE:
        return ClassPredictive(torch.zeros(0, 3)), torch.zeros(0, 3)
    return ClassPredictive(torch.zeros(0, 3)), torch.zeros(0, dtype=torch.long)


@pytest.mark.parametrize("metric", [*CLASS_METRICS, *REGRESSION_METRICS, *BOTH, *REFERENCE])
def test_no_rows_is_an_error(metric: Callable[[Predictive, Tensor], object]) -> None:
    with pytest.raises(BadData, match="needs at least one row"):
        metric(*empty(metric))


@pytest.mark.parametrize("metric", [*CLASS_METRICS, *BOTH])
@pytest.mark.parametrize("y", [torch.tensor([0]), torch.tensor([0, 1, 1]), torch.tensor([0, 2]), torch.eye(2)])
def test_labels_that_do_not_fit_are_refused(metric: Callable[[Predictive, Tensor], object], y: Tensor) -> None:
    with pytest.raises(BadData, match="y must"):
        metric(ClassPredictive(torch.full((2, 2), 0.5)), y)


@pytest.mark.parametrize("metric", [*REGRESSION_METRICS, *BOTH])
def test_targets_that_do_not_fit_are_refused(metric: Callable[[Predictive, Tensor], object]) -> None:
    pred = GaussianPredictive(torch.zeros(2, 1), torch.ones(2, 1), torch.ones(1))
    for y in (torch.zeros(3), torch.zeros(1, 2), torch.zeros(2, 2)):
        with pytest.raises(BadData, match="y must"):
            metric(pred, y)


@pytest.mark.parametrize("metric", BINNED)
@pytest.mark.parametrize("bins", [0, -3, 2.5, True])
def test_bins_must_be_a_positive_integer(metric: Callable[..., float], bins: int) -> None:
    with pytest.raises(ValueError, match="bins must be a positive integer"):
        metric(ClassPredictive(torch.full((2, 2), 0.5)), torch.tensor([0, 1]), bins)


@pytest.mark.parametrize("metric", [accuracy, brier_score, confidence, gibbs_confidence, *BOTH, *BINNED])
def test_labels_at_positions_count_one_by_one(metric: Callable[[Predictive, Tensor], float]) -> None:
    outputs = Key(0).normal((3, 6, 4, 2), torch.float64, torch.get_default_device())  # (S, N, C, positions)
    y = torch.arange(12).reshape(6, 2) % 4
    dense = from_outputs(Categorical(positions=1), outputs)
    flat = from_outputs(Categorical(), outputs.movedim(-1, 2).reshape(3, 12, 4))
    per_row = 2.0 if metric in BOTH else 1.0  # the log-likelihood of a row is of all its labels
    assert metric(dense, y) == pytest.approx(per_row * metric(flat, y.reshape(-1)), rel=1e-12)


@pytest.mark.parametrize("metric", [accuracy, brier_score, confidence, gibbs_confidence, *BOTH])
def test_scores_of_rows_and_their_mean(metric: Callable[..., float]) -> None:
    outputs, y = Key(0).normal((3, 6, 4), torch.float64, torch.get_default_device()), torch.arange(6) % 4
    pred = from_outputs(Categorical(), outputs)
    scores = metric.rows(pred, y)
    assert scores.shape == (6,)
    for row in range(6):
        assert float(scores[row]) == pytest.approx(metric(pred.rows(slice(row, row + 1)), y[row : row + 1]), abs=1e-12)
    assert metric(pred, y) == pytest.approx(float(scores.mean()), abs=1e-12)


@pytest.mark.parametrize("metric", [mean_absolute_error, crps, coverage, interval_width, *BOTH])
def test_scores_of_rows_of_a_regression(metric: Callable[..., float]) -> None:
    pred, y = (
        DrawsPredictive(Gaussian(), Key(0).normal((3, 6, 2), torch.float64, torch.get_default_device())),
        Key(1).normal((6, 2), torch.float64, torch.get_default_device()),
    )
    scores = metric.rows(pred, y)
    assert scores.shape == (6,)
    for row in range(6):
        assert float(scores[row]) == pytest.approx(metric(pred.rows(slice(row, row + 1)), y[row : row + 1]), abs=1e-9)


@pytest.mark.parametrize("metric", [gibbs_negative_log_likelihood, gibbs_confidence])
def test_a_random_draw_needs_draws(metric: Callable[[Predictive, Tensor], float]) -> None:
    with pytest.raises(ValueError, match="averaged probabilities only"):
        metric(ClassPredictive(torch.full((2, 2), 0.5)), torch.tensor([0, 1]))


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10_000), draws=st.integers(1, 5), scale=st.floats(0.1, 5.0))
def test_the_gibbs_loss_is_never_smaller(seed: int, draws: int, scale: float) -> None:
    outputs = scale * Key(seed).normal((draws, 7, 3), torch.float64, torch.get_default_device())
    labels = Key(seed).fold(1).permutation(7, outputs.device) % 3
    classes, numbers_ = from_outputs(Categorical(), outputs), from_outputs(Gaussian(0.5), outputs)
    for pred, y in ((classes, labels), (numbers_, outputs[0] + 0.1)):
        assert gibbs_negative_log_likelihood(pred, y) >= negative_log_likelihood(pred, y) - 1e-12


def test_metrics_take_their_arguments_by_name() -> None:
    pred, y = ClassPredictive(torch.full((2, 2), 0.5)), torch.tensor([0, 1])
    assert negative_log_likelihood(pred=pred, y=y) == pytest.approx(math.log(2.0))
    assert total_variation(pred, reference=pred.probs) == 0.0
    assert "level: float = 0.95) -> float" in str(inspect.signature(coverage)).replace("posterity.predictive.", "")
