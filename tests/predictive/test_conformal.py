"""Conformal prediction: hand-computed and brute-force intervals and sets, and the coverage that is promised."""

import json
import math

import drawn
import numpy as np
import pytest
import torch
from torch import Tensor

from posterity.errors import BadData
from posterity.inference import folds
from posterity.likelihoods import StudentT
from posterity.numerics.random import Key
from posterity.predictive import (
    ClassPredictive,
    ConformalIntervals,
    ConformalSets,
    ExponentialPredictive,
    GaussianPredictive,
    Quantiles,
    Residual,
    Studentised,
    from_outputs,
)
from posterity.storage import decode, encode


def normal(label: str, *shape: int) -> Tensor:
    return drawn.normal(Key(3).fold(label), *shape)


def gaussian(mean: Tensor, std: Tensor) -> GaussianPredictive:
    return GaussianPredictive(mean, torch.zeros_like(mean), std.square().expand(mean.shape))


# --- exact small cases -------------------------------------------------------------------------------------------


def test_split_by_hand() -> None:
    """Scores 1, 4, 2, 3 of four rows: at level 0.6 the rank is ceil(5 * 0.6) = 3, and the third smallest is 3."""
    calibration = gaussian(torch.zeros(4, 1), torch.tensor([[1.0], [1.0], [2.0], [0.5]]))
    intervals = ConformalIntervals.fit(calibration, torch.tensor([1.0, -4.0, 4.0, 1.5]))
    assert intervals.scores.flatten().tolist() == [1.0, 4.0, 2.0, 3.0]
    new = gaussian(torch.tensor([[10.0], [20.0]]), torch.tensor([[1.0], [2.0]]))
    lower, upper = intervals.interval(new, 0.6)
    assert lower.flatten().tolist() == [7.0, 14.0]
    assert upper.flatten().tolist() == [13.0, 26.0]


@pytest.mark.parametrize(
    ("rows", "level", "rank"),
    [(9, 0.9, 9), (8, 0.9, 9), (19, 0.95, 19), (18, 0.95, 19), (99, 0.99, 99), (29, 0.7, 21), (999, 0.999, 999)]
    + [(10 * n - 1, 0.3, 3 * n) for n in range(1, 40)],
)
def test_the_rank_is_exact_for_decimal_levels(rows: int, level: float, rank: int) -> None:
    """0.3 * 10 n is not 3 n in floats for many n, and a rank one too high would be infinite or too wide."""
    intervals = ConformalIntervals(torch.ones(rows, 1), torch.zeros(rows, dtype=torch.int64))
    assert intervals.rank(level) == rank


def test_too_few_rows_give_infinite_intervals_and_say_how_many_are_needed(caplog: pytest.LogCaptureFixture) -> None:
    pred = gaussian(torch.zeros(18, 1), torch.ones(1))
    intervals = ConformalIntervals.fit(pred, normal("few", 18))
    lower, upper = intervals.interval(pred, 0.95)
    assert bool((lower == -math.inf).all() and (upper == math.inf).all())
    assert "at least 19 calibration rows, and there are 18" in caplog.text
    pred = gaussian(torch.zeros(19, 1), torch.ones(1))
    caplog.clear()
    lower, upper = ConformalIntervals.fit(pred, normal("few", 19)).interval(pred, 0.95)
    assert bool(upper.isfinite().all())
    assert not caplog.records
    labels = torch.tensor([0, 1, 0])
    classes = ClassPredictive(torch.full((3, 2), 0.5))
    assert bool(ConformalSets.fit(classes, labels).sets(classes, 0.9).all())


@pytest.mark.parametrize(("rows", "num_folds"), [(12, 12), (12, 3), (25, 5), (25, 25)])
@pytest.mark.parametrize("score", [Studentised(), Residual(), Quantiles(0.8)])
def test_folds_against_brute_force(rows: int, num_folds: int, score: object) -> None:
    """Barber et al. (2021), eq. 5 and section 3.1, row by row; two targets."""
    level, alpha = 0.85, 0.15
    parts = folds(rows, num_folds, seed=1)
    y = normal("y", rows, 2)
    mean, std = normal("mean", num_folds, rows + 6, 2), normal("std", num_folds, rows + 6, 2).abs() + 0.2
    models = [gaussian(m, s) for m, s in zip(mean, std, strict=True)]
    held = [model.rows(part.test) for model, part in zip(models, parts, strict=True)]
    intervals = ConformalIntervals.fit(held, [y[part.test] for part in parts], score=score)  # type: ignore[arg-type]
    assert intervals.num_folds == num_folds
    new = [model.rows(torch.arange(rows, rows + 6)) for model in models]
    lower, upper = intervals.interval(new, level)
    unit = {"Studentised": std, "Residual": torch.ones_like(std), "Quantiles": std * 1.2815515655446004}
    unit = unit[type(score).__name__]
    for row in range(6):
        for target in range(2):
            low, high = [], []
            for k, part in enumerate(parts):
                for i in part.test.tolist():
                    residual = abs(float(y[i, target] - mean[k, i, target])) / float(unit[k, i, target])
                    reach = residual * float(unit[k, rows + row, target])
                    low.append(float(mean[k, rows + row, target]) - reach)
                    high.append(float(mean[k, rows + row, target]) + reach)
            assert float(lower[row, target]) == pytest.approx(sorted(low)[math.floor(alpha * (rows + 1)) - 1], abs=1e-9)
            assert float(upper[row, target]) == pytest.approx(
                sorted(high)[math.ceil((1 - alpha) * (rows + 1)) - 1], abs=1e-9
            )


def test_rows_in_pieces_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    models = [gaussian(normal(f"m{k}", 30, 1), torch.ones(1)) for k in range(2)]
    intervals = ConformalIntervals.fit(models, [normal("a", 30), normal("b", 30)])
    whole = intervals.interval(models, 0.9)
    monkeypatch.setattr("posterity.predictive.conformal._ENTRIES", 200)
    assert all(map(torch.equal, whole, intervals.interval(models, 0.9)))


def brute_sets(scores: Tensor, fold: Tensor, probs: list[Tensor], u: Tensor, level: float, penalty: float) -> Tensor:
    """Romano et al. (2020), with the sums written out."""
    rows, classes = probs[0].shape
    sets = torch.zeros(rows, classes, dtype=torch.bool)
    for n in range(rows):
        for c in range(classes):
            below = 0
            for i in range(len(scores)):
                p = probs[int(fold[i])][n]
                before = [j for j in range(classes) if p[j] > p[c]]
                e = sum(float(p[j]) for j in before) + float(u[n] * p[c]) + penalty * max(0, len(before) + 1 - 1)
                below += float(scores[i]) < e
            sets[n, c] = below < (len(scores) + 1) * level
    return sets


@pytest.mark.parametrize("num_folds", [1, 3])
@pytest.mark.parametrize("keyed", [False, True])
@pytest.mark.parametrize("penalty", [0.0, 0.05])
def test_sets_against_brute_force(num_folds: int, keyed: bool, penalty: float) -> None:
    probs = [(2.0 * normal(f"logits{k}", 30, 4)).softmax(-1) for k in range(num_folds)]
    labels = [drawn.uniform(Key(k), 30, dtype=torch.float32).mul(4).long() for k in range(num_folds)]
    models = [ClassPredictive(p) for p in probs]
    sets = ConformalSets.fit(models, labels, penalty=penalty)
    uniform = drawn.uniform(Key(0).fold("calibration"), 30 * num_folds)
    row = 30 * (num_folds - 1) + 7
    p, label = probs[-1][7], labels[-1][7]
    above = p > p[label]
    expected = float(p[above].sum() + uniform[row] * p[label]) + penalty * int(above.sum())
    assert float(sets.scores[row]) == pytest.approx(expected, abs=1e-12)
    key = Key(9) if keyed else None
    u = drawn.uniform(Key(9).fold("sets"), 30) if keyed else torch.zeros(30)
    wanted = brute_sets(sets.scores, sets.fold, probs, u, 0.8, penalty)
    assert torch.equal(sets.sets(models, 0.8, key), wanted)
    if not keyed:
        assert bool(sets.sets(models, 0.8).any(1).all()), "never empty"


# --- what is promised --------------------------------------------------------------------------------------------


def covered(lower: Tensor, upper: Tensor, y: Tensor) -> Tensor:
    return (lower <= y) & (y <= upper)


@pytest.mark.parametrize("score", [Studentised(), Residual(), Quantiles()])
@pytest.mark.parametrize("wrong", [False, True])
def test_split_covers_at_any_model(score: object, wrong: bool) -> None:
    """600 problems of 20 calibration rows and 5 new ones; the noise grows with x, and the model may be absurd."""
    problems, rows, level = 600, 25, 0.8
    x = normal("x", problems, rows)
    y = 2.0 * x + (0.2 + x.abs()) * normal("noise", problems, rows).pow(3 if wrong else 1)
    mean, std = (x.cos(), x.sin().square() + 0.01) if wrong else (2.0 * x, 0.2 + x.abs())
    hits = []
    for problem in range(problems):
        pred = gaussian(mean[problem, :, None], std[problem, :, None])
        intervals = ConformalIntervals.fit(pred.rows(slice(0, 20)), y[problem, :20], score=score)  # type: ignore[arg-type]
        lower, upper = intervals.interval(pred.rows(slice(20, 25)), level)
        hits.append(covered(lower, upper, y[problem, 20:, None]).double().mean())
    share, error = float(torch.stack(hits).mean()), float(torch.stack(hits).std()) / problems**0.5
    exact = 17 / 21  # ceil(21 * 0.8) / 21
    assert abs(share - exact) < 5 * error
    assert exact >= level


def ridge(x: Tensor, y: Tensor, penalty: float = 1.0) -> Tensor:
    return torch.linalg.solve(x.T @ x + penalty * torch.eye(x.shape[1], dtype=x.dtype), x.T @ y)


@pytest.mark.parametrize("num_folds", [4, 20])
def test_cross_conformal_covers(num_folds: int) -> None:
    """150 problems of 20 rows and 6 inputs; CV+ and jackknife+ around ridge regression with a wrong noise."""
    problems, level = 150, 0.8
    hits = []
    for problem in range(problems):
        key = Key(17).fold(problem)
        x = drawn.normal(key.fold("x"), 30, 6)
        y = x.sum(1) + 0.5 * x[:, 0] ** 2 + drawn.normal(key.fold("y"), 30)
        parts = folds(20, num_folds, seed=problem)
        fits = [ridge(x[part.train], y[part.train]) for part in parts]
        models = [gaussian((x @ w)[:, None], 0.1 + x[:, 1:2].abs()) for w in fits]
        held = [model.rows(part.test) for model, part in zip(models, parts, strict=True)]
        intervals = ConformalIntervals.fit(held, [y[part.test] for part in parts])
        lower, upper = intervals.interval([model.rows(slice(20, 30)) for model in models], level)
        hits.append(covered(lower, upper, y[20:, None]).double().mean())
    share, error = float(torch.stack(hits).mean()), float(torch.stack(hits).std()) / problems**0.5
    assert share > intervals.least_coverage(level)
    assert share > level - 5 * error, "in practice near 1 - alpha"


@pytest.mark.parametrize("wrong", [False, True])
def test_sets_cover(wrong: bool) -> None:
    problems, level = 500, 0.75
    logits = 1.5 * normal("logits", problems, 30, 4)
    truth = logits.softmax(-1)
    labels = drawn.labels_of(truth, Key(2))
    probs = (-2.0 * logits).softmax(-1) if wrong else truth
    hits, plain = [], []
    for problem in range(problems):
        pred = ClassPredictive(probs[problem])
        new, answers = pred.rows(slice(19, 30)), labels[problem, 19:, None]
        sets = ConformalSets.fit(pred.rows(slice(0, 19)), labels[problem, :19], key=Key(problem))
        hits.append(sets.sets(new, level, Key(problem)).gather(1, answers).double().mean())
        plain.append(sets.sets(new, level).gather(1, answers).double().mean())
    share, error = float(torch.stack(hits).mean()), float(torch.stack(hits).std()) / problems**0.5
    assert abs(share - 15 / 20) < 5 * error  # ceil(20 * 0.75) / 20: exact with random u
    assert float(torch.stack(plain).mean()) > share


def test_labels_at_positions_are_sets_of_their_own_and_rows_are_groups() -> None:
    probs = (2.0 * drawn.normal(Key(3), 30, 3, 2, 4)).softmax(1)
    labels = drawn.labels_of(probs.movedim(1, -1), Key(4))
    pred, flat = ClassPredictive(probs), ClassPredictive(probs.movedim(1, -1).reshape(-1, 3))
    sets, alike = ConformalSets.fit(pred, labels), ConformalSets.fit(flat, labels.flatten())
    assert torch.equal(sets.scores, alike.scores)
    for key in (None, Key(5)):
        members = sets.sets(pred, 0.8, key)
        assert members.shape == probs.shape
        assert torch.equal(members.movedim(1, -1).reshape(-1, 3), alike.sets(flat, 0.8, key))
    assert (sets.order, alike.order) == ("group", "random")
    assert sets.least_coverage(0.9) == 0.0
    assert "of new groups" in sets.guarantee(0.9)
    halves = [pred.rows(slice(0, 15)), pred.rows(slice(15, 30))]
    folds_of_two = ConformalSets.fit(halves, [labels[:15], labels[15:]])
    assert folds_of_two.fold.tolist() == [0] * 120 + [1] * 120
    inside = folds_of_two.sets([pred, pred], 0.8).gather(1, labels.unsqueeze(1))
    assert float(inside.double().mean()) >= 0.8


def test_one_box_for_several_targets() -> None:
    """Together, all three targets of a row are covered at the level; each by itself, only each."""
    problems, level = 400, 0.8
    y, each, both = normal("box", problems, 30, 3), [], []
    for problem in range(problems):
        pred = gaussian(torch.zeros(30, 3), torch.ones(3))
        for together, hits in ((False, each), (True, both)):
            intervals = ConformalIntervals.fit(pred.rows(slice(0, 20)), y[problem, :20], together=together)
            inside = covered(*intervals.interval(pred.rows(slice(20, 30)), level), y[problem, 20:])
            hits.append(inside.all(1).double().mean())
    whole, error = float(torch.stack(both).mean()), float(torch.stack(both).std()) / problems**0.5
    assert abs(whole - 17 / 21) < 5 * error
    assert float(torch.stack(each).mean()) < 0.7


# --- the guarantee in words --------------------------------------------------------------------------------------


def made(rows: int, num_folds: int, order: str = "random") -> ConformalIntervals:
    return ConformalIntervals(torch.ones(rows, 1), torch.arange(rows) % num_folds, order)  # type: ignore[arg-type]


def test_what_is_guaranteed() -> None:
    assert made(50, 1).least_coverage(0.9) == 0.9
    assert made(50, 50).least_coverage(0.9) == pytest.approx(0.8)
    n, k = 1000, 10  # Barber et al. (2021), Theorem 4
    loss = min(2 * (1 - 1 / k) / (n / k + 1), (1 - k / n) / (k + 1))
    assert made(n, k).least_coverage(0.9) == pytest.approx(0.8 - loss)
    uneven = made(43, 5)  # the second term is proved for folds of equal size
    assert uneven.least_coverage(0.9) == pytest.approx(0.8 - 2 * (1 - 1 / 5) / (43 / 5 + 1))
    assert made(45, 5).least_coverage(0.9) == pytest.approx(0.8 - (1 - 5 / 45) / 6)
    assert made(10, 2).least_coverage(0.5) == 0.0
    assert "At least 90 % of new targets" in made(50, 1).guarantee(0.9)
    assert "At least 80 %" in made(50, 50).guarantee(0.9)
    assert "about 90 %" in made(50, 50).guarantee(0.9)
    assert "not for each input" in made(50, 1).guarantee(0.9)
    assert "if new rows are exchangeable" in made(50, 1).guarantee(0.9)


@pytest.mark.parametrize(("order", "words"), [("group", "of new groups"), ("time", "as far as the future is like the")])
@pytest.mark.parametrize("num_folds", [1, 5])
def test_rows_that_are_not_exchangeable_have_no_bound(order: str, words: str, num_folds: int) -> None:
    conformal = made(50, num_folds, order)
    sentence = conformal.guarantee(0.9)
    assert conformal.least_coverage(0.9) == 0.0
    assert sentence.startswith(f"About 90 % of new targets {'' if order == 'group' else 'are covered '}{words}")
    assert "No bound is proved" in sentence
    assert "whatever the model" not in sentence
    assert ("no theorem" in sentence) == (order == "time" and num_folds > 1)


def test_they_are_stored_as_values() -> None:
    pred = gaussian(normal("stored", 12, 1), torch.ones(1))
    classes = ClassPredictive(normal("logits", 12, 3).softmax(-1))
    labels = torch.arange(12) % 3
    intervals = ConformalIntervals.fit([pred, pred], [normal("a", 12), normal("b", 12)], score=Quantiles(0.7))
    sets = ConformalSets.fit(classes, labels, penalty=0.01, free=2, order="group")
    for value in (intervals, sets):
        tensors: dict[str, Tensor] = {}
        text = json.dumps(encode(value, tensors))
        again = decode(json.loads(text), tensors)
        assert type(again) is type(value)
        assert (again.order, again.num_folds) == (value.order, value.num_folds)  # type: ignore[attr-defined]
        if isinstance(again, ConformalIntervals):
            assert again.score == Quantiles(0.7)
            assert all(map(torch.equal, again.interval([pred, pred], 0.8), intervals.interval([pred, pred], 0.8)))
        else:
            assert isinstance(again, ConformalSets)
            assert torch.equal(again.sets(classes, 0.8), sets.sets(classes, 0.8))


# --- doors -------------------------------------------------------------------------------------------------------


def test_without_a_standard_deviation_residuals_are_used_and_said(caplog: pytest.LogCaptureFixture) -> None:
    pred = from_outputs(StudentT(2.0, scale=1.0), normal("outputs", 5, 40, 1))  # infinite variance
    with caplog.at_level("INFO", logger="posterity"):
        intervals = ConformalIntervals.fit(pred, normal("t", 40))
    assert intervals.score == Residual()
    assert "plain residuals" in caplog.text
    assert bool(intervals.interval(pred, 0.9)[1].isfinite().all())


def test_standard_deviations_of_0_and_infinity_keep_the_set_that_the_scores_mean() -> None:
    calibration = gaussian(torch.zeros(4, 1), torch.tensor([[0.0], [0.0], [1.0], [1.0]]))
    intervals = ConformalIntervals.fit(calibration, torch.tensor([0.0, 1.0, 2.0, 3.0]), score=Studentised())
    assert intervals.scores.flatten().tolist() == [0.0, math.inf, 2.0, 3.0]
    new = gaussian(torch.zeros(2, 1), torch.tensor([[0.0], [math.inf]]))
    lower, upper = intervals.interval(new, 0.2)  # Q = 0
    assert (lower.flatten().tolist(), upper.flatten().tolist()) == ([0.0, -math.inf], [0.0, math.inf])
    assert bool(intervals.interval(new, 0.8)[1].isinf().all())  # Q = inf


def test_skewed_predictives_have_skewed_intervals() -> None:
    base = gaussian(torch.zeros(200, 1), torch.ones(1))
    pred = ExponentialPredictive(base)
    y = normal("log", 200).exp()
    lower, upper = ConformalIntervals.fit(pred, y, score=Quantiles(0.9)).interval(pred, 0.9)
    assert float(lower.min()) > 0.0
    assert float(upper[0] - 1.0) > 2.0 * float(1.0 - lower[0])
    assert float(ConformalIntervals.fit(pred, y).interval(pred, 0.9)[0].max()) < 0.0  # mean - Q std


@pytest.mark.parametrize("event", [(), (1,), (2,), (2, 3)])
def test_targets_of_any_shape(event: tuple[int, ...]) -> None:
    pred = gaussian(normal("mean", 30, *event), torch.ones(()).double())
    for together in (False, True):
        intervals = ConformalIntervals.fit(pred, normal("y", 30, *event), together=together)
        lower, upper = intervals.interval(pred, 0.9)
        assert lower.shape == upper.shape == (30, *event)


def test_bad_input_is_refused() -> None:
    pred, classes = gaussian(torch.zeros(5, 1), torch.ones(1)), ClassPredictive(torch.full((5, 2), 0.5))
    y = torch.zeros(5)
    with pytest.raises(TypeError, match="regression"):
        ConformalIntervals.fit(classes, y)
    with pytest.raises(TypeError, match="classification"):
        ConformalSets.fit(pred, y)
    with pytest.raises(ValueError, match="2 predictives and 1 targets"):
        ConformalIntervals.fit([pred, pred], y)
    with pytest.raises(BadData, match="at least one row"):
        ConformalIntervals.fit(pred.rows(slice(0, 0)), y[:0])
    with pytest.raises(BadData, match="Got 5 that are missing"):
        ConformalIntervals.fit(pred, torch.full((5,), np.nan))
    with pytest.raises(BadData, match="at least one label in each fold"):
        ConformalSets.fit(classes, torch.full((5,), -100))
    with pytest.raises(ValueError, match="each of its 2 fold models"):
        ConformalIntervals.fit([pred, pred], [y, y]).interval(pred, 0.9)
    with pytest.raises(ValueError, match="level"):
        ConformalIntervals.fit(pred, y).interval(pred, 1.0)
    with pytest.raises(ValueError, match="penalty"):
        ConformalSets.fit(classes, y, penalty=-1.0)
    with pytest.raises(ValueError, match="order"):
        made(5, 1, "sideways")
    with pytest.raises(ValueError, match="fold must number"):
        ConformalIntervals(torch.ones(3, 1), torch.tensor([0, 2, 2]))
