"""Detection of foreign inputs, and closeness to reference predictions."""

import drawn
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from posterity.errors import BadData
from posterity.metrics import (
    agreement,
    out_of_distribution_auroc,
    out_of_distribution_average_precision,
    out_of_distribution_fpr,
    total_variation,
)
from posterity.numerics.random import Key
from posterity.predictive import ClassPredictive, GaussianPredictive, Predictive

shares = st.lists(st.integers(1, 4), min_size=3, max_size=3)


def predictive(rows: list[list[int]]) -> ClassPredictive:
    weights = torch.tensor(rows, dtype=torch.float64)
    return ClassPredictive(weights / weights.sum(-1, keepdim=True))


@settings(max_examples=60, deadline=None)
@given(st.lists(shares, min_size=1, max_size=8), st.lists(shares, min_size=1, max_size=8))
def test_auroc_against_all_pairs(inside: list[list[int]], outside: list[list[int]]) -> None:
    def entropy(row: list[int]) -> float:  # in the order of the numbers, so that equals are equal
        return sum(-p * torch.tensor(p).log().item() for p in (w / sum(row) for w in sorted(row)))

    pairs = [
        0.5 if abs(entropy(b) - entropy(a)) < 1e-6 else float(entropy(b) > entropy(a)) for a in inside for b in outside
    ]
    value = out_of_distribution_auroc(predictive(inside), predictive(outside))
    assert value == pytest.approx(sum(pairs) / len(pairs), abs=1e-12)
    other = out_of_distribution_auroc(predictive(outside), predictive(inside))
    assert value + other == pytest.approx(1.0)


def test_auroc_of_nothing_to_tell_and_of_everything() -> None:
    flat, sure = predictive([[1, 1, 1]] * 3), predictive([[100, 1, 1], [1, 90, 1]])
    assert out_of_distribution_auroc(flat, flat) == 0.5
    assert out_of_distribution_auroc(sure, flat) == 1.0
    assert out_of_distribution_auroc(flat, sure) == 0.0


def test_auroc_of_numbers_goes_by_their_standard_deviation() -> None:
    def numbers(*variances: float) -> GaussianPredictive:
        zeros = torch.zeros(len(variances), 1)
        return GaussianPredictive(zeros, torch.tensor(variances).unsqueeze(1), torch.ones(1))

    assert out_of_distribution_auroc(numbers(1.0, 3.0), numbers(2.0, 4.0)) == 0.75
    assert out_of_distribution_auroc(numbers(0.0, 0.0), numbers(0.0)) == 0.5  # a point estimate tells nothing


@pytest.mark.parametrize("digits", [1, 9])  # many ties, and none
@pytest.mark.parametrize("accepted", [0.5, 0.9, 0.95, 1.0])
def test_detection_against_scikit_learn(digits: int, accepted: float) -> None:
    from sklearn.metrics import average_precision_score, roc_auc_score, roc_curve

    inside, outside = drawn.normal(Key(1), 70, 3), 0.5 * drawn.normal(Key(2), 90, 3)
    known, foreign = (ClassPredictive(logits.softmax(-1)) for logits in (inside, outside))

    def rounded(pred: Predictive) -> Tensor:
        return (pred.entropy * 10**digits).round()

    scores = torch.cat([rounded(known), rounded(foreign)]).cpu().numpy()
    is_foreign = [0] * 70 + [1] * 90
    assert out_of_distribution_auroc(known, foreign, rounded) == pytest.approx(roc_auc_score(is_foreign, scores))
    precision = average_precision_score(is_foreign, scores)
    assert out_of_distribution_average_precision(known, foreign, rounded) == pytest.approx(precision, abs=1e-12)
    fpr, tpr, _ = roc_curve([1 - label for label in is_foreign], -scores, drop_intermediate=False)
    expected = fpr[(tpr >= accepted - 1e-9).argmax()]
    assert out_of_distribution_fpr(known, foreign, accepted, rounded) == pytest.approx(expected, abs=1e-12)


def test_the_detector_is_the_entropy_unless_another_is_given() -> None:
    draws = drawn.normal(Key(3), 5, 40, 3).softmax(-1)
    pred = ClassPredictive(draws.mean(0), draws)
    inside, outside = pred.rows(slice(0, 20)), pred.rows(slice(20, 40))
    for metric in (out_of_distribution_auroc, out_of_distribution_average_precision, out_of_distribution_fpr):
        usual, entropy, information = (
            metric(inside, outside, **given)
            for given in ({}, {"uncertainty": lambda p: p.entropy}, {"uncertainty": lambda p: p.epistemic})
        )
        assert usual == pytest.approx(entropy)
        assert usual != information


def test_detection_of_labels_at_positions_and_bad_settings() -> None:
    probs = drawn.normal(Key(4), 4, 3, 5).softmax(1)
    pred, flat = ClassPredictive(probs), ClassPredictive(probs.movedim(1, -1).reshape(-1, 3))
    assert out_of_distribution_fpr(pred, pred, 0.5) == out_of_distribution_fpr(flat, flat, 0.5) == 0.5
    for accepted in (0.0, 1.1, True, "0.95"):
        with pytest.raises(ValueError, match="must be a share above 0"):
            out_of_distribution_fpr(pred, pred, accepted)  # type: ignore[arg-type]
    with pytest.raises(BadData, match="uncertainty must give a number for each of 4 rows"):
        out_of_distribution_fpr(pred, pred, uncertainty=lambda pred: pred.probs)


def test_auroc_needs_one_kind_of_target_and_rows() -> None:
    classes, empty = predictive([[1, 2, 3]]), ClassPredictive(torch.zeros(0, 3))
    numbers = GaussianPredictive(torch.zeros(1, 1), torch.ones(1, 1), torch.ones(1))
    for pair in ((classes, numbers), (numbers, classes)):
        with pytest.raises(TypeError, match="needs labels on both sides, or numbers on both"):
            out_of_distribution_auroc(*pair)
    for pair in ((classes, empty), (empty, classes)):
        with pytest.raises(BadData, match="at least one row"):
            out_of_distribution_auroc(*pair)


def test_agreement_and_total_variation_against_loops() -> None:
    ours, theirs = (Key(seed).normal((30, 4), torch.float64, torch.get_default_device()).softmax(-1) for seed in (0, 1))
    pred = ClassPredictive(ours)
    same = [row.argmax() == other.argmax() for row, other in zip(ours, theirs, strict=True)]
    assert agreement(pred, theirs) == pytest.approx(sum(map(bool, same)) / 30)
    distance = [
        0.5 * sum(abs(float(p - q)) for p, q in zip(*pair, strict=True)) for pair in zip(ours, theirs, strict=True)
    ]
    assert total_variation(pred, theirs) == pytest.approx(sum(distance) / 30)
    assert agreement(pred, ours) == 1.0
    assert total_variation(pred, ours) == 0.0


def test_total_variation_of_opposites_is_one() -> None:
    assert total_variation(ClassPredictive(torch.tensor([[1.0, 0.0]])), torch.tensor([[0.0, 1.0]])) == 1.0


@pytest.mark.parametrize(
    ("reference", "message"),
    [
        (torch.tensor([0, 1]), r"shape \(2, 3\).*Got \(2,\)"),
        (torch.full((3, 3), 1 / 3), r"Got \(3, 3\)"),
        (torch.zeros(2, 3), "sum to 1"),
        (torch.tensor([[2.0, -0.5, -0.5]] * 2), "not logits"),
    ],
)
def test_references_that_do_not_fit_are_refused(reference: Tensor, message: str) -> None:
    for metric in (agreement, total_variation):
        with pytest.raises(BadData, match=rf"{metric.__name__}: the reference must.*{message}"):
            metric(predictive([[1, 2, 3], [3, 2, 1]]), reference)


def test_references_may_be_float32() -> None:
    probs = Key(0).normal((5, 3), torch.float64, torch.get_default_device()).softmax(-1)
    assert total_variation(ClassPredictive(probs), probs.float()) < 1e-7
