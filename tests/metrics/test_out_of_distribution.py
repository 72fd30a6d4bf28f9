"""Detection of foreign inputs, and closeness to reference predictions."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from posterity.errors import BadData
from posterity.metrics import agreement, out_of_distribution_auroc, total_variation
from posterity.numerics.random import Key
from posterity.predictive import ClassPredictive, GaussianPredictive

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
