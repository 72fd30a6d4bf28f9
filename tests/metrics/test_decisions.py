"""Confusion, costs, thresholds and abstention against brute force; permutation importance against closed forms."""

import math

import drawn
import pytest
import torch
from sklearn import metrics as reference
from torch import Tensor

from posterity.errors import BadData
from posterity.metrics import (
    accuracy,
    confusion_matrix,
    cost_threshold,
    decisions,
    mean_cost,
    permutation_importance,
    risk_coverage,
    root_mean_squared_error,
)
from posterity.numerics.random import Key
from posterity.predictive import ClassPredictive, GaussianPredictive, Predictive


def classes(rows: int = 60, count: int = 3, seed: int = 0) -> tuple[ClassPredictive, Tensor]:
    probs = drawn.normal(Key(seed), rows, count).softmax(1)
    labels = drawn.labels_of(probs, Key(seed).fold("y"))
    return ClassPredictive(probs), labels


def test_confusion_against_scikit_learn() -> None:
    pred, labels = classes()
    matrix = confusion_matrix(pred, labels)
    assert (matrix.cpu().numpy() == reference.confusion_matrix(labels.cpu(), pred.probs.argmax(1).cpu())).all()
    assert float(matrix.trace()) / 60 == pytest.approx(accuracy(pred, labels))


def test_decisions_have_the_least_expected_cost() -> None:
    pred, labels = classes(40, 3, 1)
    costs = [[0.0, 1.0, 4.0], [2.0, 0.0, 1.0], [9.0, 1.0, 0.0]]
    chosen = decisions(pred, costs)
    total = 0.0
    for row in range(40):
        expected = [sum(float(pred.probs[row, c]) * costs[c][a] for c in range(3)) for a in range(3)]
        assert int(chosen[row]) == expected.index(min(expected))
        total += costs[int(labels[row])][int(chosen[row])]
    assert mean_cost(pred, labels, costs) == pytest.approx(total / 40)
    counts = confusion_matrix(pred, labels, costs).double()
    assert float((counts * torch.tensor(costs, device=counts.device)).sum()) / 40 == pytest.approx(total / 40)
    assert mean_cost(pred, labels) == pytest.approx(1 - accuracy(pred, labels))


def test_no_other_threshold_costs_less() -> None:
    """Calibrated probabilities: decisions at the threshold of the costs are best on 20,000 rows."""
    p = drawn.uniform(Key(3), 20_000)
    labels = (drawn.uniform(Key(4), 20_000) < p).long()
    pred, costs = ClassPredictive(torch.stack([1 - p, p], 1)), [[0.0, 1.0], [3.0, 0.0]]
    threshold = cost_threshold(costs)
    assert threshold == pytest.approx(0.25)
    assert torch.equal(decisions(pred, costs), (p > threshold).long())
    own = mean_cost(pred, labels, costs)
    for other in (0.1, 0.2, 0.3, 0.5):
        cost = float(torch.where(p > other, 1.0 - labels, 3.0 * labels).mean())
        assert own <= cost + 1e-3
    assert cost_threshold([[1.0, 3.0], [7.0, 1.0]]) == pytest.approx(0.25)


def test_a_third_decision_is_to_abstain() -> None:
    """Chow: with errors at 1 and abstention at 0.2, answer where the largest probability is at least 0.8."""
    pred, _ = classes(100, 2, 5)
    chosen = decisions(pred, [[0.0, 1.0, 0.2], [1.0, 0.0, 0.2]])
    sure = pred.probs.amax(1) >= 0.8
    assert torch.equal(chosen == 2, ~sure)
    with pytest.raises(ValueError, match="2 columns"):
        confusion_matrix(pred, torch.zeros(100), [[0.0, 1.0, 0.2], [1.0, 0.0, 0.2]])


@pytest.mark.parametrize("costs", [[0.0, 1.0], [[0.0, 1.0]], [[0.0, 1.0], [math.nan, 0.0]], [[0.0], [1.0]]])
def test_costs_that_do_not_fit_are_refused(costs: object) -> None:
    with pytest.raises(ValueError, match="costs must be finite numbers"):
        decisions(classes(5, 2)[0], costs)


def test_a_threshold_needs_mistakes_that_cost() -> None:
    with pytest.raises(ValueError, match="mistakes cost more"):
        cost_threshold([[0.0, -1.0], [1.0, 0.0]])


def test_risk_coverage_against_brute_force() -> None:
    pred, labels = classes(50, 3, 7)
    curve = risk_coverage(pred, labels)
    sure, answer = pred.probs.max(1)
    for answered in (1, 10, 33, 50):
        kept = sure.argsort(descending=True)[:answered]
        assert float(curve.risk[answered - 1]) == pytest.approx(float((answer != labels)[kept].double().mean()))
        assert float(curve.coverage[answered - 1]) == pytest.approx(answered / 50)
    assert curve.at(1.0) == pytest.approx(1 - accuracy(pred, labels))
    assert curve.at(0.2) == float(curve.risk[9])
    assert curve.area == pytest.approx(float(curve.risk.mean()))


def test_abstention_of_numbers_goes_by_the_standard_deviation() -> None:
    scale = drawn.uniform(Key(1), 4000, 1) + 0.1
    y = scale * drawn.normal(Key(2), 4000, 1)
    pred = GaussianPredictive(torch.zeros_like(y), torch.zeros_like(y), scale.square())
    curve = risk_coverage(pred, y)
    assert curve.at(1.0) == pytest.approx(root_mean_squared_error(pred, y))
    assert curve.at(0.1) < curve.at(0.5) < curve.at(1.0)
    half = scale.flatten() <= scale.flatten().sort().values[1999]
    assert curve.at(0.5) == pytest.approx(float(y[half].square().mean().sqrt()))


def test_risk_coverage_of_labels_at_positions_and_by_another_uncertainty() -> None:
    draws = drawn.normal(Key(5), 6, 10, 3, 4).softmax(2)
    pred = ClassPredictive(draws.mean(0), draws)
    labels = drawn.normal(Key(6), 10, 3, 4).argmax(1)
    flat = ClassPredictive(pred.probs.movedim(1, -1).reshape(-1, 3))
    assert torch.equal(risk_coverage(pred, labels).risk, risk_coverage(flat, labels.flatten()).risk)
    curve = risk_coverage(pred, labels, lambda pred: pred.epistemic)
    wrong = (pred.probs.argmax(1) != labels).double().flatten().cpu()
    order = pred.epistemic.flatten().cpu().argsort()
    naive = [float(wrong[order[:kept]].mean()) for kept in range(1, 41)]
    assert curve.risk.tolist() == pytest.approx(naive)
    assert curve.area == pytest.approx(sum(naive) / 40)  # AURC
    by_row = risk_coverage(pred, labels, lambda pred: pred.epistemic.sum(1))  # all labels of a row are equally sure
    order = pred.epistemic.sum(1).cpu().argsort()
    assert by_row.at(0.5) == pytest.approx(float(wrong.reshape(10, 4)[order[:5]].mean()))
    with pytest.raises(BadData, match="for each of 10 rows"):
        risk_coverage(pred, labels, lambda pred: pred.probs)


def test_rows_that_are_equally_sure_do_not_depend_on_their_order() -> None:
    pred = ClassPredictive(torch.tensor([[0.9, 0.1], [0.6, 0.4], [0.4, 0.6], [0.6, 0.4]], dtype=torch.float64))
    labels = torch.tensor([0, 1, 1, 0])
    expected = [0.0, 1 / 6, 2 / 9, 1 / 4]  # the three rows at 0.6 have the mean loss 1/3
    for order in ([0, 1, 2, 3], [3, 2, 1, 0], [2, 0, 1, 3]):
        curve = risk_coverage(pred.rows(torch.tensor(order)), labels[order])
        assert curve.risk.tolist() == pytest.approx(expected)
    with pytest.raises(ValueError, match="at most 1"):
        curve.at(1.5)


def linear(weights: Tensor) -> object:
    def predict(x: Tensor) -> Predictive:
        mean = x @ weights[:, None]
        return GaussianPredictive(mean, torch.zeros_like(mean), torch.ones(1, dtype=torch.float64))

    return predict


def test_importance_of_a_linear_model() -> None:
    """y = w x + noise of variance 1: permuting input j raises the NLL by w_j^2 Var(x_j), on average."""
    x = drawn.normal(Key(1), 4000, 3) * torch.tensor([1.0, 2.0, 1.0])
    weights = torch.tensor([1.0, 0.5, 0.0], dtype=torch.float64)
    y = x @ weights + drawn.normal(Key(2), 4000)
    result = permutation_importance(linear(weights), x, y, repeats=3)  # type: ignore[arg-type]
    truth = (weights.square() * torch.tensor([1.0, 4.0, 1.0])).cpu()
    assert bool(((result.rise - truth).abs() <= 5 * result.error + 1e-12).all())
    assert float(result.error[2]) == 0.0
    assert 0.0 < float(result.error[0]) < 0.1
    again = permutation_importance(linear(weights), x, y, repeats=3, key=Key(0))  # type: ignore[arg-type]
    other = permutation_importance(linear(weights), x, y, repeats=3, key=Key(1))  # type: ignore[arg-type]
    assert torch.equal(result.rise, again.rise)
    assert not torch.equal(result.rise, other.rise)


def test_columns_of_one_feature_are_permuted_together() -> None:
    """Two columns that say the same and are averaged: each by itself seems to matter a quarter of both."""
    z = drawn.normal(Key(3), 3000, 1)
    x, weights = z.expand(-1, 2).clone(), torch.tensor([0.5, 0.5], dtype=torch.float64)
    y = z[:, 0] + drawn.normal(Key(4), 3000)
    single = permutation_importance(linear(weights), x, y)  # type: ignore[arg-type]
    both = permutation_importance(linear(weights), x, y, features=[[0, 1]])  # type: ignore[arg-type]
    assert float(both.rise) == pytest.approx(1.0, abs=5 * float(both.error))
    assert bool(((single.rise - 0.25).abs() < 5 * single.error).all())


def test_what_has_no_importance_is_refused() -> None:
    x, y = torch.zeros(3, 2), torch.zeros(3)
    predict = linear(torch.zeros(2))
    with pytest.raises(BadData, match="two rows"):
        permutation_importance(predict, x[:1], y[:1])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="columns from 0 to 1"):
        permutation_importance(predict, x, y, features=[[0, 2]])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="repeats"):
        permutation_importance(predict, x, y, repeats=0)  # type: ignore[arg-type]
