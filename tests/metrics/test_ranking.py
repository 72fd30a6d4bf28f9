"""AUROC, average precision, balanced accuracy and R2 against scikit-learn, with weights, ties and intervals."""

import math

import drawn
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn import metrics as reference
from torch import Tensor

from posterity.metrics import Bootstrap, auroc, average_precision, balanced_accuracy, bootstrap, r_squared
from posterity.numerics.random import Key
from posterity.predictive import ClassPredictive, GaussianPredictive


def case(rows: int, classes: int, seed: int, ties: bool) -> tuple[ClassPredictive, Tensor, Tensor]:
    """A predictive that knows something, labels of all classes, and whole weights."""
    key = Key(seed).fold("ranking")
    logits = 1.5 * drawn.normal(key, rows, classes)
    labels = torch.cat(
        [torch.arange(classes), drawn.uniform(key.fold("y"), rows - classes, dtype=torch.float32).mul(classes).long()]
    )
    logits[torch.arange(rows), labels] += 1.0
    probs = logits.softmax(1)
    if ties:
        probs = (10 * probs).round() + 1e-3
        probs = probs / probs.sum(1, keepdim=True)
    weights = drawn.uniform(key.fold("w"), rows).mul(3).floor() + 1.0
    return ClassPredictive(probs), labels, weights


@settings(max_examples=60, deadline=None)
@given(rows=st.integers(8, 60), classes=st.integers(2, 5), seed=st.integers(0, 10**6), ties=st.booleans())
def test_against_scikit_learn(rows: int, classes: int, seed: int, ties: bool) -> None:
    pred, labels, weights = case(rows, classes, seed, ties)
    probs, y = pred.probs.cpu().numpy(), labels.cpu().numpy()
    for given_weights in (None, weights):
        own = torch.ones(1, rows, dtype=torch.float64) if given_weights is None else weights[None]
        named = {} if given_weights is None else {"sample_weight": weights.cpu().numpy()}
        if classes == 2:
            area = reference.roc_auc_score(y, probs[:, 1], **named)
            precision = reference.average_precision_score(y, probs[:, 1], **named)
        else:
            area = np.mean([reference.roc_auc_score(y == c, probs[:, c], **named) for c in range(classes)])
            one_hot = np.eye(classes)[y]
            precision = reference.average_precision_score(one_hot, probs, **named)
        recall = reference.balanced_accuracy_score(y, probs.argmax(1), **named)
        assert float(auroc.weighted(pred, labels, own)) == pytest.approx(area, abs=1e-12)
        assert float(average_precision.weighted(pred, labels, own)) == pytest.approx(precision, abs=1e-12)
        assert float(balanced_accuracy.weighted(pred, labels, own)) == pytest.approx(recall, abs=1e-12)
    assert auroc(pred, labels) == float(auroc.weighted(pred, labels, torch.ones(1, rows, dtype=torch.float64)))


@pytest.mark.parametrize("outputs", [1, 3])
def test_r_squared_against_scikit_learn(outputs: int) -> None:
    y = 5.0 + drawn.normal(Key(1), 40, outputs)
    mean = y + drawn.normal(Key(2), 40, outputs)
    pred = GaussianPredictive(mean, torch.zeros_like(mean), torch.ones(1).double())
    weights = torch.arange(40).double() % 4
    assert r_squared(pred, y) == pytest.approx(reference.r2_score(y.cpu(), mean.cpu()), abs=1e-12)
    weighted = reference.r2_score(y.cpu(), mean.cpu(), sample_weight=weights.cpu())
    assert float(r_squared.weighted(pred, y, weights[None])) == pytest.approx(weighted, abs=1e-12)
    assert math.isnan(r_squared(pred, torch.ones(40, outputs)))


@pytest.mark.parametrize("metric", [auroc, average_precision, balanced_accuracy])
def test_weights_count_rows(metric: object) -> None:
    """The quick bootstrap by weights is the slow one by rows, number for number."""
    pred, labels, _ = case(40, 3, 5, ties=True)
    quick = bootstrap(metric, pred, labels, resamples=200, seed=3)  # type: ignore[arg-type]
    slow = bootstrap(lambda p, y: metric(p, y), pred, labels, resamples=200, seed=3)  # type: ignore[operator]
    assert quick == pytest.approx(slow, abs=1e-12)
    assert quick.lower < quick.value < quick.upper


def test_the_interval_of_an_area_holds_the_truth() -> None:
    """Scores N(1, 1) against N(0, 1): the area is Phi(1 / sqrt 2); 95 % of 300 intervals hold it, within 5 errors."""
    truth = 0.5 * (1 + math.erf(0.5))
    hits = 0
    for seed in range(300):
        labels = torch.arange(80) % 2
        score = drawn.normal(Key(seed), 80) + labels
        pred = ClassPredictive(torch.stack([-score, score], 1).softmax(1))
        _, lower, upper = bootstrap(auroc, pred, labels, resamples=200, seed=seed)
        hits += lower <= truth <= upper
    assert abs(hits / 300 - 0.95) <= 5 * (0.95 * 0.05 / 300) ** 0.5


def test_one_class_has_no_area_and_resamples_of_one_class_are_left_out() -> None:
    pred = ClassPredictive(torch.tensor([[0.9, 0.1], [0.4, 0.6], [0.8, 0.2]], dtype=torch.float64))
    for metric in (auroc, average_precision):
        assert math.isnan(metric(pred, torch.zeros(3)))
        assert all(math.isnan(end) for end in bootstrap(metric, pred, torch.zeros(3), resamples=10))
        assert bootstrap(metric, pred, torch.tensor([0, 1, 0]), resamples=50) == Bootstrap(1.0, 1.0, 1.0)


def test_order_of_rows_and_monotone_maps_do_not_matter() -> None:
    pred, labels, _ = case(50, 2, 9, ties=True)
    order = Key(0).permutation(50, "cpu")
    assert auroc(pred.rows(order), labels[order]) == pytest.approx(auroc(pred, labels), abs=1e-14)
    squared = pred.probs.square() / pred.probs.square().sum(1, keepdim=True)
    assert auroc(ClassPredictive(squared), labels) == pytest.approx(auroc(pred, labels), abs=1e-14)
    flipped = ClassPredictive(pred.probs.flip(1))
    assert auroc(flipped, 1 - labels) == pytest.approx(auroc(pred, labels), abs=1e-14)


def test_labels_at_positions_count_each() -> None:
    probs = drawn.normal(Key(4), 6, 3, 5).softmax(1)
    labels = drawn.uniform(Key(5), 6, 5, dtype=torch.float32).mul(3).long()
    flat = ClassPredictive(probs.movedim(1, -1).reshape(-1, 3))
    for metric in (auroc, average_precision, balanced_accuracy):
        assert metric(ClassPredictive(probs), labels) == pytest.approx(metric(flat, labels.reshape(-1)), abs=1e-14)


def test_regression_is_refused() -> None:
    pred = GaussianPredictive(torch.zeros(3, 1), torch.ones(3, 1), torch.ones(1))
    with pytest.raises(TypeError, match="auroc needs a classification predictive"):
        auroc(pred, torch.zeros(3))
    with pytest.raises(TypeError, match="r_squared needs a regression predictive"):
        r_squared(ClassPredictive(torch.full((3, 2), 0.5)), torch.zeros(3))
