"""Calibration errors by equal-mass bins and by class against loops."""

import pytest
import torch
from classtables import ClassTable, class_tables
from hypothesis import given, settings
from hypothesis import strategies as st

from posterity.metrics import adaptive_calibration_error, classwise_calibration_error, expected_calibration_error
from posterity.numerics.random import Key
from posterity.predictive import ClassPredictive


@settings(max_examples=60, deadline=None)
@given(class_tables(6))
def test_classwise_against_a_loop(table: ClassTable) -> None:
    rows, labels, bins = table
    pred, y = ClassPredictive(torch.tensor(rows, dtype=torch.float64)), torch.tensor(labels)
    total = 0.0
    for c in range(len(rows[0])):
        for m in range(bins):
            inside = [
                i for i, row in enumerate(rows) if m / bins < row[c] <= (m + 1) / bins or (m == 0 and row[c] == 0)
            ]
            if inside:
                frequency = sum(labels[i] == c for i in inside) / len(inside)
                gap = abs(frequency - sum(rows[i][c] for i in inside) / len(inside))
                total += len(inside) / len(rows) * gap
    assert classwise_calibration_error(pred, y, bins) == pytest.approx(total / len(rows[0]), abs=1e-12)


@settings(max_examples=60, deadline=None)
@given(class_tables(6), st.randoms(use_true_random=False))
def test_adaptive_bins_do_not_part_equals(table: ClassTable, random: object) -> None:
    rows, labels, bins = table
    pred, y = ClassPredictive(torch.tensor(rows, dtype=torch.float64)), torch.tensor(labels)
    value = adaptive_calibration_error(pred, y, bins)
    groups: dict[int, list[int]] = {}
    for i, row in enumerate(rows):
        rank = sum(max(other) < max(row) for other in rows)
        groups.setdefault(bins * rank // len(rows), []).append(i)
    total = 0.0
    for inside in groups.values():
        hits = sum(rows[i].index(max(rows[i])) == labels[i] for i in inside)
        total += abs(hits - sum(max(rows[i]) for i in inside)) / len(rows)
    assert value == pytest.approx(total, abs=1e-12)
    order = list(range(len(rows)))
    random.shuffle(order)  # type: ignore[attr-defined]
    assert adaptive_calibration_error(pred.rows(torch.tensor(order)), y[torch.tensor(order)], bins) == pytest.approx(
        value, abs=1e-12
    )


def test_adaptive_bins_hold_equal_numbers() -> None:
    confidence = torch.linspace(0.5, 1.0, 60, dtype=torch.float64)
    pred = ClassPredictive(torch.stack([confidence, 1 - confidence], dim=-1))
    y = torch.zeros(60, dtype=torch.long)  # always right: the error is 1 - confidence, whatever the bins
    for bins in (1, 7, 60, 100):
        assert adaptive_calibration_error(pred, y, bins) == pytest.approx(0.25, abs=1e-12)
    half = torch.tensor([1] * 30 + [0] * 30)  # wrong where less sure than 3/4
    two_bins = 0.5 * (confidence[:30].mean() + 1 - confidence[30:].mean())
    assert adaptive_calibration_error(pred, half, bins=2) == pytest.approx(float(two_bins))


def test_a_calibrated_model_scores_near_zero_by_every_measure() -> None:
    probs = (1.5 * Key(0).normal((20_000, 3), torch.float64, torch.get_default_device())).softmax(-1)
    labels = torch.multinomial(probs, 1, generator=Key(1).generator(probs.device)).squeeze(1)
    pred = ClassPredictive(probs)
    # In each of 15 bins |frequency - mean| is about 0.8 sqrt(1 / (4 n)) at most: below 0.012 in all by five times that.
    for metric in (expected_calibration_error, adaptive_calibration_error, classwise_calibration_error):
        assert metric(pred, labels) < 0.02
        assert metric(ClassPredictive(probs**3 / (probs**3).sum(-1, keepdim=True)), labels) > 0.05
