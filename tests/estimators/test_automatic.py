"""The automatic default: its pieces against closed forms, and the whole on tables whose truth is known."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import drawn
import pytest
import torch
from torch import Tensor

from posterity.errors import BadData, BadFolder
from posterity.estimators import Calibration, Pool, Scale, Shape, Stacked, automatic, fit_automatic
from posterity.estimators.candidates import Networks, TableRows, Warp, make_plan, warp_of
from posterity.estimators.densities import rounding
from posterity.estimators.gaussian_process import GaussianProcess, Moments, principal_directions, selected_columns
from posterity.inference import folds
from posterity.numerics.random import Key

SMALL = 3.0  # seconds: a plan without networks


def normal(label: str, *shape: int) -> Tensor:
    return drawn.normal(Key(5).fold(label), *shape)


def uneven(rows: int, label: str = "") -> tuple[Tensor, Tensor, Tensor]:
    """Inputs, targets sin(2 x) + noise of scale exp(0.7 x - 1.5), and the log density of the truth."""
    x = normal(f"x{label}", rows, 2)
    scale, z = (0.7 * x[:, :1].clamp(-2, 2) - 1.5).exp(), normal(f"z{label}", rows, 1)
    log_density = -0.5 * z.square() - scale.log() - 0.5 * math.log(2 * math.pi)
    return x.float(), ((2.0 * x[:, :1]).sin() + scale * z).float(), log_density.squeeze(1)


def alike(first: Tensor, second: Tensor) -> None:
    """The same bits on a CPU; elsewhere sums of many numbers are in any order."""
    torch.testing.assert_close(first, second, rtol=0.0, atol=1e-4 if first.is_cuda else 0.0)


@pytest.fixture(scope="module")
def regression() -> Stacked:
    x, y, _ = uneven(300)
    return fit_automatic(x, y, "regression", seconds=SMALL)


@pytest.fixture(scope="module")
def classifier() -> Stacked:
    x, _, _ = uneven(150)
    return fit_automatic(x, (x[:, 0] * x[:, 1] > 0).long(), "classification", classes=2, seconds=SMALL)


def test_noise_that_depends_on_the_inputs_is_found(regression: Stacked) -> None:
    x, y, truth = uneven(500, "test")
    pred = regression.predict(x)
    gaps = truth - pred.log_prob(y)
    assert 0.0 < float(gaps.mean()) < 0.15  # nats per row; with a constant scale it is 0.4 and more
    shares = sum(w for name, w in regression.weights.items() if "fitted scale" in name)
    assert shares > 0.5
    lower, upper = pred.interval(0.9)
    inside = ((lower <= y) & (y <= upper)).float().mean()
    assert abs(float(inside) - 0.9) < 5 * (0.09 / 500) ** 0.5


def test_mean_is_no_worse_than_the_best_candidate(regression: Stacked) -> None:
    x, y, _ = uneven(500, "test")
    errors = {name: float((fit.moments(x).mean - y).square().mean()) for name, fit in regression.fits.items()}
    assert float((regression.predict(x).mean - y).square().mean()) <= 1.02 * min(errors.values())


def test_whole_numbers_are_not_known_better_than_they_are_rounded() -> None:
    x, y, _ = uneven(300)
    whole = y.round()  # most of them could be told exactly
    highest = fit_automatic(x, whole, "regression", seconds=SMALL).predict(x).log_prob(whole).max()
    assert float(highest) <= 0.5 * math.log(12 / (2 * math.pi)) + 1e-5


def test_same_seed_same_bits_and_another_seed_other_folds() -> None:
    x, y, _ = uneven(60)
    first, again, other = (fit_automatic(x, y, "regression", seconds=SMALL, seed=seed) for seed in (1, 1, 2))
    alike(first.predict(x).log_prob(y), again.predict(x).log_prob(y))
    assert [score.name for score in first.scores] == [score.name for score in again.scores]
    alike(*(torch.tensor([score[1:3] for score in model.scores]) for model in (first, again)))
    assert first.scores[0].log_density != other.scores[0].log_density


def test_sentence_names_what_has_weight(regression: Stacked, classifier: Stacked) -> None:
    for model in (regression, classifier):
        assert all(name in model.sentence for name in model.weights)
        assert math.isclose(sum(model.weights.values()), 1.0, abs_tol=1e-9)
        best = max(model.scores, key=lambda score: score.log_density)
        assert best.name in model.sentence


def test_stored_and_loaded_predict_the_same(regression: Stacked, classifier: Stacked, tmp_path: Path) -> None:
    x, y, _ = uneven(50, "test")
    regression.save(tmp_path / "a")
    loaded = Stacked.load(tmp_path / "a", x.device)
    assert torch.equal(loaded.predict(x).log_prob(y), regression.predict(x).log_prob(y))
    classifier.save(tmp_path / "a")  # in its place
    loaded = Stacked.load(tmp_path / "a", x.device)
    assert torch.equal(loaded.predict(x).probs, classifier.predict(x).probs)
    assert loaded.sentence == classifier.sentence
    assert loaded.weights == classifier.weights
    part = next(path for path in (tmp_path / "a").glob("fit-*/config.json"))
    part.write_text("{}")
    with pytest.raises(BadFolder):
        Stacked.load(tmp_path / "a")


def test_networks_are_members_of_the_folds(tmp_path: Path) -> None:
    x, y, _ = uneven(60)
    plan = replace(make_plan(60, 2, 1, SMALL), steps=20, folds=3, hidden=(4,))
    rows, _ = automatic._rows(x, y, "regression", 0, None, None)
    networks, *others = [c for c in automatic._candidates(rows, plan, (), ()) if c.name == "networks"]
    assert not others
    folds = automatic.folds_of(60, 3)
    fits, final = networks.fits(rows, folds, plan, Key(0))
    together = torch.stack([fit.moments(x).mean for fit in fits]).mean(0)
    torch.testing.assert_close(final().moments(x).mean, together, rtol=1e-5, atol=1e-6)


def test_interactions_are_learnt_that_a_linear_model_cannot(classifier: Stacked) -> None:
    x, _, _ = uneven(300, "test")
    pred = classifier.predict(x)
    labels = (x[:, 0] * x[:, 1] > 0).long()
    assert float((pred.probs.argmax(1) == labels).float().mean()) > 0.85
    assert -float(pred.log_prob(labels).mean()) < 0.4 < math.log(2.0)
    torch.testing.assert_close(pred.aleatoric + pred.epistemic, pred.entropy)


def test_no_candidate_of_classes_has_weight_zero(classifier: Stacked) -> None:
    """One that fails where the others are sure bounds what they can lose."""
    assert classifier.weights.keys() == {score.name for score in classifier.scores}
    assert min(classifier.weights.values()) > 0.5 / 150


def test_many_rows_or_classes_have_no_likelihood_in_processes() -> None:
    x, plan = normal("rows", 1300, 2).float(), make_plan(1300, 2, 2, 60.0)
    for rows, classes, odds in ((1200, 2, True), (1300, 2, False), (1200, 3, False), (800, 3, True), (100, 6, False)):
        labels = torch.arange(rows) % classes
        table, _ = automatic._rows(x[:rows], labels, "classification", classes, None, None)
        names = {candidate.name for candidate in automatic._candidates(table, plan, (), ())}
        assert ("rough Gaussian process of log odds" in names) == odds
        assert "smooth Gaussian process" in names


def test_a_scale_that_fails_is_left_out_with_a_word(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: Scale, *_: object) -> Scale:
        if self.process is not None:
            raise RuntimeError("not positive-definite")
        return self

    monkeypatch.setattr(Scale, "settled", broken)
    x, y, _ = uneven(40)
    model = fit_automatic(x, y, "regression", seconds=SMALL)
    assert "the pooled means with a fitted scale failed (not positive-definite)" in model.sentence
    assert not any("fitted scale" in name for name in model.weights)


def test_small_positive_targets_keep_their_digits() -> None:
    """Standardised in float32 they would all be equal."""
    original = torch.cat([10.0 ** normal("small", 50, 1) * 1e-6, 10.0 ** normal("large", 50, 1) * 1e3])
    mean, scale = float(original.mean()), float(original.std())
    table, _ = automatic._rows(normal("x", 100, 1), (original - mean) / scale, "regression", 0, None, None)
    warp = warp_of(table.targets, (mean,), (scale,))
    assert warp is not None
    assert warp.positive
    logs = warp.mean + warp.spread * warp.of(table.targets)
    torch.testing.assert_close(logs, (original / scale).log(), rtol=0, atol=1e-2)


def test_rows_of_weight_zero_do_not_count() -> None:
    x, y, _ = uneven(60)
    weights = torch.ones(80)
    weights[60:] = 0.0
    padded = [torch.cat([part, torch.full((20, part.shape[1]), 9.0)]) for part in (x, y)]
    plain = fit_automatic(x, y, "regression", seconds=SMALL)
    weighted = fit_automatic(padded[0], padded[1], "regression", weights=weights, seconds=SMALL)
    alike(plain.predict(x).mean, weighted.predict(x).mean)


def test_folds_by_group_score_new_groups() -> None:
    x, effect = normal("group", 20, 1).float(), normal("effect", 20, 1).float()
    x, y = x.repeat_interleave(4, 0), effect.repeat_interleave(4, 0) + 0.05 * normal("noise", 80, 1).float()
    groups = [str(k) for k in range(20) for _ in range(4)]
    by_rows, by_group = (fit_automatic(x, y, "regression", groups=given, seconds=SMALL) for given in (None, groups))
    best = [max(score.log_density for score in model.scores) for model in (by_rows, by_group)]
    assert best[1] < best[0] - 0.3  # a new group is harder
    ordered = fit_automatic(x[:66], y[:66], "regression", times=torch.arange(66.0, requires_grad=True), seconds=SMALL)
    assert "60 held-out rows" in ordered.sentence  # the first block is never scored


def test_in_time_order_the_final_networks_have_seen_the_last_rows() -> None:
    x = normal("time", 60, 1).float()
    plan, rows = replace(make_plan(60, 1, 1, 60.0), steps=5, members=2), TableRows(x, x, torch.ones(60), 0)
    for order, seen in (({}, 48), ({"times": range(60)}, 60)):
        _, final = Networks().fits(rows, folds(60, 5, **order), plan, Key(0))
        assert {member.joint.num_data for member in final().posterior.posteriors} == {seen}


def test_far_from_the_rows_less_is_known() -> None:
    """Also where a constant scale is chosen."""
    x = normal("known", 200, 2).float()
    model = fit_automatic(x, 3.0 * x[:, :1] + 0.3 * normal("noise", 200, 1).float(), "regression", seconds=SMALL)
    pred = model.predict(torch.tensor([[0.0, 0.0], [50.0, 0.0], [500.0, 0.0]]))
    near, far, further = pred.std.flatten().tolist()
    assert near < 1.1 * 0.3
    assert 1.5 * near < far < further
    assert float(pred.aleatoric.min()) > 0.5 * 0.3**2


def test_two_targets_and_few_rows() -> None:
    x, y, _ = uneven(40)
    both = torch.cat([y, -2.0 * x[:, :1]], 1)
    model = fit_automatic(x, both, "regression", seconds=SMALL)
    assert model.predict(x).log_prob(both).shape == (40,)
    assert float((model.predict(x).mean[:, 1:] + 2.0 * x[:, :1]).abs().max()) < 0.5
    few = fit_automatic(x[:5], y[:5], "regression")
    assert list(few.weights) == ["linear model"]
    assert "too few" in few.sentence
    assert torch.isfinite(few.predict(x).log_prob(y)).all()
    labels = fit_automatic(x[:6], torch.tensor([0, 1, 2, 0, 1, 2]), "classification")
    assert labels.predict(x).probs.shape == (40, 3)


def test_clock_stops_a_runaway_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(automatic, "RUNAWAY", 0.0)
    x, y, _ = uneven(40)
    model = fit_automatic(x, y, "regression", seconds=60.0)
    assert {score.name.split(" with")[0] for score in model.scores} == {"linear model", "pooled means"}
    assert "the clock left no time for the rough Gaussian process" in model.sentence


def test_plan_follows_from_sizes_and_budget() -> None:
    plan = make_plan(200, 10, 1, 60.0)
    assert (plan.folds, plan.settled_by_fold) == (10, True)
    assert plan == make_plan(200, 10, 1, 60.0)
    assert make_plan(10_000, 10, 1, 60.0).folds == 5
    assert make_plan(500, 10, 1, SMALL).steps == 0
    assert 300 <= make_plan(10_000, 10, 1, 60.0).steps <= make_plan(10_000, 10, 1, 120.0).steps
    assert make_plan(200, 1000, 1, 60.0).steps < plan.steps  # wider steps cost more


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"task": "ranking"}, "task must be"),
        ({"seconds": 0.0}, "seconds"),
        ({"weights": torch.zeros(40)}, "weight above 0"),
        ({"weights": torch.ones(3)}, "a weight for each row"),
    ],
)
def test_what_cannot_be_used_is_refused(change: dict[str, object], words: str) -> None:
    x, y, _ = uneven(40)
    with pytest.raises(ValueError, match=words):
        fit_automatic(x, y, **{"task": "regression", "seconds": SMALL, **change})  # type: ignore[arg-type]


def test_other_columns_are_refused(regression: Stacked) -> None:
    with pytest.raises(BadData, match=r"\(N, 2\)"):
        regression.predict(torch.zeros(3, 4))


def test_pool_has_the_least_squared_error() -> None:
    y, weights = normal("y", 200, 1), normal("w", 200).exp()
    noisy = {str(k): Moments(y + scale * normal(f"e{k}", 200, 1), y, y) for k, scale in enumerate((0.3, 0.4, 2.0))}
    pool = Pool.of(noisy, y, weights)

    def error(shares: list[float]) -> float:
        mean = sum(share * noisy[str(k)].mean for k, share in enumerate(shares))
        assert isinstance(mean, Tensor)
        return float((weights @ (y - mean).square()) / weights.sum())

    best = error([pool.weights.get(str(k), 0.0) for k in range(3)])
    grid = [[a / 20, b / 20, (20 - a - b) / 20] for a in range(21) for b in range(21 - a)]
    assert best <= min(map(error, grid)) * (1.0 + 2e-3)  # components that gain less than a thousandth are left out
    assert math.isclose(sum(pool.weights.values()), 1.0)


def test_shape_has_mean_zero_and_finds_heavy_tails() -> None:
    z = torch.where(normal("coin", 4000) > 1.2, 4.0, 0.7) * normal("z", 4000) + 0.2
    shape = Shape.of(z, torch.ones(4000))
    assert abs(float(shape.weights @ shape.means)) < 1e-9
    plain = -0.5 * (z / z.std()).square() - z.std().log() - 0.5 * math.log(2 * math.pi)
    assert float((shape.log_prob(z) - plain).mean()) > 0.1
    points = torch.linspace(-60, 60, 60_001, dtype=torch.float64)
    assert math.isclose(float(torch.trapezoid(shape.log_prob(points).exp(), points)), 1.0, abs_tol=1e-6)


def test_calibration_finds_slope_and_offsets() -> None:
    logits = normal("logits", 20_000, 3)
    offsets = torch.tensor([0.5, -0.5, 0.0], dtype=torch.float64)
    noise = -torch.log(-torch.log(Key(1).uniform((20_000, 3), torch.float64)))
    labels = (2.0 * logits + offsets + noise).argmax(1)
    found = Calibration.of(logits.unsqueeze(0), labels, torch.ones(20_000, dtype=torch.float64))
    assert abs(found.slope - 2.0) < 0.1
    torch.testing.assert_close(found.offsets - found.offsets.mean(), offsets - offsets.mean(), rtol=0, atol=0.1)


def test_calibration_draws_in_what_is_spread_too_widely() -> None:
    mean = 2.0 * normal("logits", 5000, 2)
    noise = -torch.log(-torch.log(Key(1).uniform((5000, 2), torch.float64)))
    labels, draws = (mean + noise).argmax(1), mean + 4.0 * normal("spread", 16, 5000, 2)
    draws = draws - draws.mean(0) + mean
    found = Calibration.of(draws, labels, torch.ones(5000, dtype=torch.float64))
    assert found.spread < 0.2
    plain = Calibration.none(2, draws.device)
    gains = found.predictive(draws).log_prob(labels) - plain.predictive(draws).log_prob(labels)
    assert float(gains.mean()) > 0.05


def test_warps_are_for_skewed_targets() -> None:
    z = normal("warp", 500, 1)
    assert warp_of((z - z.mean()) / z.std(), (0.0,), (1.0,)) is None
    original = (0.8 * z).exp()
    mean, scale = float(original.mean()), float(original.std())
    warp = warp_of((original - mean) / scale, (mean,), (scale,))
    assert warp is not None
    assert warp.positive
    y = (original - mean) / scale
    known = Moments(warp.of(y), torch.full_like(y, 1e-12), torch.zeros_like(y))
    torch.testing.assert_close(warp.moments(known).mean, y)
    heavy = warp_of(z**3 / (z**3).std(), (0.0,), (1.0,))
    assert heavy is not None
    assert not heavy.positive


@pytest.mark.parametrize("positive", [True, False])
@pytest.mark.parametrize("variance", [0.6, 36.0])
def test_moments_of_a_warped_target(positive: bool, variance: float) -> None:
    """Against a fine grid over the warped target, whose standard deviation is as large as 3."""
    warp = Warp(positive, 2.0, 0.7, 0.3, 0.5)
    mean, own = torch.tensor([[0.4]], dtype=torch.float64), torch.tensor([[variance]], dtype=torch.float64)
    moments = warp.moments(Moments(mean, own, 0.25 * own))
    z = torch.linspace(-15, 15, 200_001, dtype=torch.float64)
    mass = (-0.5 * z.square()).softmax(0)
    logs = 0.3 + 0.5 * (0.4 + variance**0.5 * z)
    values = logs.exp() - 2.0 if positive else 2.0 + 0.7 * logs.sinh()
    centre = mass @ values
    assert math.isclose(float(moments.mean), float(centre), rel_tol=1e-9)
    assert math.isclose(float(moments.variance), float(mass @ (values - centre).square()), rel_tol=1e-9)
    assert math.isclose(float(moments.epistemic), 0.25 * float(moments.variance))


@pytest.mark.parametrize("positive", [True, False])
def test_moments_far_from_all_rows_are_finite(positive: bool) -> None:
    far = torch.tensor([[1e6, -1e6]], dtype=torch.float64)
    moments = Warp(positive, 2.0, 1.0, 0.3, 0.5).moments(Moments(far, far.square(), 0.5 * far.square()))
    assert all(bool(torch.isfinite(moment).all()) for moment in moments)


def test_rounding_is_that_of_usual_targets() -> None:
    whole = torch.arange(200, dtype=torch.float64) % 10
    odd = torch.cat([whole, torch.tensor([3.5, 7.25, 7.25])])
    halves = torch.cat([whole, whole[:50] + 0.5])
    for column, step in ((whole, 1.0), (odd, 1.0), (halves, 0.5), (normal("real", 50), 0.0), (torch.ones(9), 0.0)):
        assert float(rounding(column.unsqueeze(1))) == pytest.approx(step / math.sqrt(12.0))


def test_scores_are_of_targets_in_their_own_units() -> None:
    x, y, _ = uneven(60)
    standard = fit_automatic(x, y, "regression", seconds=SMALL)
    in_units = fit_automatic(x, y, "regression", seconds=SMALL, mean=(30.0,), scale=(5.0,))
    gaps = [a.log_density - b.log_density for a, b in zip(standard.scores, in_units.scores, strict=True)]
    assert gaps == pytest.approx([math.log(5.0)] * len(gaps))
    assert f"{in_units.scores[0].log_density:.3f}" in in_units.sentence


@pytest.mark.parametrize("by", ["groups", "times"])
def test_rows_that_depend_on_each_other_choose_hyper_parameters_by_fold(
    by: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No row of a scored group has a say in the process that scores it, however many rows there are."""
    x, y, _ = uneven(90)
    settled = list[Tensor]()
    settle = GaussianProcess.settled

    def watched(self: GaussianProcess, *effort: Any) -> GaussianProcess:
        settled.append(self.inputs)
        return settle(self, *effort)

    monkeypatch.setattr("posterity.estimators.candidates.FEW", 0)
    monkeypatch.setattr(GaussianProcess, "settled", watched)
    numbers = torch.arange(90) // 30
    fit_automatic(x, y, "regression", seconds=SMALL, **{by: numbers.tolist()})
    apart = [rows for rows in settled if rows.shape[1] == 2 and len(rows) < 90]
    assert len(apart) == (3 if by == "groups" else 2)
    assert {len(rows) for rows in apart} == ({60} if by == "groups" else {30, 60})


def test_few_columns_are_selected_of_many() -> None:
    """Five that matter, one of them by its square, among 200; copies and constants are no second column."""
    x = normal("many", 120, 200)
    y = x[:, :4].sum(1, keepdim=True) + x[:, 4:5].square() + 0.5 * normal("noise", 120, 1)
    x[:, 5], x[:, 6] = x[:, 0], 3.0
    basis = selected_columns(x, y, torch.ones(120))
    chosen = set(basis.argmax(0).tolist())
    assert {1, 2, 3, 4} <= chosen
    assert len(chosen & {0, 5}) == 1
    assert 6 not in chosen
    assert len(chosen) <= 7
    torch.testing.assert_close(basis.sum(0), torch.ones(len(chosen), dtype=torch.float64))
    twice = torch.cat([torch.arange(120), torch.arange(30)])
    heavier = torch.ones(120).index_fill(0, torch.arange(30), 2.0)
    assert torch.equal(selected_columns(x[twice], y[twice], torch.ones(150)), selected_columns(x, y, heavier))
    assert selected_columns(x, torch.ones(120, 1), torch.ones(120)).shape == (200, 1)


def test_wide_tables_have_a_process_of_few_columns() -> None:
    x = normal("wide x", 150, 100)
    y = x[:, :3].sum(1, keepdim=True) + 0.3 * normal("wide noise", 150, 1)
    model = fit_automatic(x[:100], y[:100], "regression", seconds=SMALL)
    name = "smooth Gaussian process by few columns"
    best = max(model.scores, key=lambda score: score.log_density if score.name in model.fits else -math.inf)
    assert best.name == name
    assert float((model.predict(x[100:]).mean - y[100:]).square().mean()) < 0.2  # noise alone: 0.09


def test_wide_tables_go_by_principal_components() -> None:
    x = normal("wide", 50, 3) @ normal("map", 3, 200) + 0.01 * normal("rest", 50, 200)
    y = (x[:, :1] / x[:, :1].std()).float()
    basis = principal_directions(x)
    assert basis is not None
    columns = x @ basis
    assert basis.shape == (200, 50)
    assert math.isclose(float(columns.square().mean()), 1.0, rel_tol=1e-9)
    off = columns.T @ columns
    torch.testing.assert_close(off - off.diagonal().diag(), torch.zeros_like(off), rtol=0, atol=1e-8)
    model = fit_automatic(x.float(), y, "regression", seconds=SMALL)
    assert float((model.predict(x.float()).mean - y).square().mean()) < 0.01
