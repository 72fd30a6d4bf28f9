"""What estimators predict: against closed forms, in the units of the target, from every kind of table."""

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from scipy.stats import norm
from tablerows import ROWS, Linear, classifier, frame, numbers, regressor

import posterity as po
from posterity.estimators import BayesianClassifier, BayesianRegressor, Pool
from posterity.estimators.gaussian_process import Moments
from posterity.likelihoods import Gaussian, StudentT
from posterity.methods import MAP, Laplace
from posterity.options import table as options_table
from posterity.priors import Normal
from posterity.recipes import choice

pytestmark = pytest.mark.cpu
X, Y = numbers()
NEW = np.array([[0.1, 0.2, 0.3], [5.0, -5.0, 1.0]])


def exact(X, y, new, noise, scale):
    """Mean and standard deviation of a Bayesian linear model with an intercept, from standardised inputs."""
    mean, spread = X.mean(0), X.std(0)
    rows, there = (np.column_stack([(x - mean) / spread, np.ones(len(x))]) for x in (X, new))
    covariance = np.linalg.inv(rows.T @ rows / noise**2 + np.eye(rows.shape[1]) / scale**2)
    variance = np.einsum("nd,de,ne->n", there, covariance, there)
    return there @ covariance @ rows.T @ y / noise**2, np.sqrt(variance + noise**2), variance


@pytest.mark.parametrize("word", ["conjugate", "laplace"])
def test_a_linear_model_has_the_exact_posterior(word):
    mean, std, variance = exact(X, Y, NEW, noise=0.5, scale=1.0)
    model = regressor(word).fit(X, Y)
    for found, wanted in zip(model.predict(NEW, return_std=True), (mean, std), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-5)
    np.testing.assert_allclose(model.decompose(NEW).epistemic, variance, rtol=1e-5)
    np.testing.assert_allclose(model.decompose(NEW).aleatoric, 0.25, rtol=1e-6)
    lower, upper = model.predict_interval(NEW, level=0.8)
    np.testing.assert_allclose([lower, upper], [mean + norm.ppf(p) * std for p in (0.1, 0.9)], rtol=1e-5)
    np.testing.assert_allclose(
        model.predict_quantiles(NEW, [0.1, 0.5]), np.stack([mean + norm.ppf(p) * std for p in (0.1, 0.5)], 1), rtol=1e-5
    )
    pred = model.predict_distribution(NEW)
    np.testing.assert_allclose(pred.log_prob(torch.tensor([3.0, 4.0])), norm.logpdf([3, 4], mean, std), rtol=1e-4)
    drawn = model.sample(NEW, 4000)
    assert drawn.shape == (4000, 2)
    assert (np.abs(drawn.mean(0) - mean) < 5 * std / 4000**0.5).all()


def test_predictions_are_in_the_units_of_the_target():
    words = [regressor("map", prior=None, likelihood="gaussian").fit(X, y) for y in (Y, 100 * Y - 7)]
    mean, std = words[0].predict(NEW, return_std=True)
    scaled_mean, scaled_std = words[1].predict(NEW, return_std=True)
    np.testing.assert_allclose(scaled_mean, 100 * mean - 7, rtol=1e-6)
    np.testing.assert_allclose(scaled_std, 100 * std, rtol=1e-6)
    assert words[0].predict(NEW).dtype == np.float64


def test_several_targets_have_their_own_noise():
    rng = np.random.default_rng(0)
    rows = rng.normal(size=(300, 2))
    targets = np.column_stack([rows[:, 0], rows[:, 1]]) + rng.normal(size=(300, 2)) * [0.1, 2.0] + [0, 50]
    model = regressor("map", likelihood="gaussian").fit(rows, targets)
    mean, std = model.predict(rows, return_std=True)
    assert mean.shape == std.shape == (300, 2)
    np.testing.assert_allclose(std[0], [0.1, 2.0], rtol=0.2)
    assert model.predict_quantiles(rows[:5], [0.1, 0.5, 0.9]).shape == (5, 2, 3)
    assert model.sample(rows[:5], 7).shape == (7, 5, 2)
    column = regressor().fit(X, Y[:, None])
    np.testing.assert_array_equal(column.predict(X)[:, 0], regressor().fit(X, Y).predict(X))


def test_counts_have_a_poisson_likelihood():
    rng = np.random.default_rng(0)
    counts = rng.poisson(np.exp(0.5 * X[:, 0] + 4))
    model = regressor("map", likelihood="poisson").fit(X, counts)
    assert model.score(X, counts) > 0.8
    mean, std = model.predict(X, return_std=True)
    np.testing.assert_allclose(std, mean**0.5, rtol=1e-6)
    lower, upper = model.predict_interval(X)
    assert (lower == lower.round()).all()
    assert 0.8 < ((lower <= counts) & (counts <= upper)).mean() <= 1


@pytest.mark.parametrize("word", ["student-t", "heteroscedastic"])
def test_other_noise(word):
    model = regressor("map", likelihood=word).fit(X, Y)
    assert model.score(X, Y) > 0.8
    lower, upper = model.predict_interval(X, 0.9)
    assert 0.7 < ((lower < Y) & (upper > Y)).mean() <= 1
    noise = regressor("map", likelihood=StudentT(degrees=4.0, scale=0.3)).fit(X, Y)
    np.testing.assert_allclose(noise.predict(X, return_std=True)[1], 0.3 * 2**0.5, rtol=1e-6)


def test_class_probabilities_and_their_uncertainty():
    labels = np.where(Y > 3.5, "high", np.where(Y > 2.5, "mid", "low"))
    model = classifier().fit(X, labels)
    assert model.classes_.tolist() == ["high", "low", "mid"]
    probs = model.predict_proba(X)
    np.testing.assert_allclose(probs.sum(1), 1)
    np.testing.assert_allclose(np.exp(model.predict_log_proba(X)), probs)
    assert (model.predict(X) == model.classes_[probs.argmax(1)]).all()
    assert model.score(X, labels) > 0.7
    parts = model.decompose(X)
    np.testing.assert_allclose(parts.aleatoric + parts.epistemic, -(probs * np.log(probs)).sum(1), rtol=1e-5)
    drawn = model.sample(X, 3000)
    share = (drawn == "low").mean(0)
    assert (np.abs(share - probs[:, 1]) < 5 * 0.5 / 3000**0.5).all()


def test_frames_of_every_kind_of_column():
    table, target = frame()
    model = regressor().fit(table, target)
    assert model.score(table, target) > 0.8
    assert model.n_features_in_ == 6
    assert model.feature_names_in_.tolist() == table.columns.tolist()
    features = model.encoding_.features
    assert {"size", "size missing", "colour=red", "colour missing", "day days", "open", "code=7"} <= set(features)
    assert any("3 categories" in note for note in model.notes_)
    pl = pytest.importorskip("polars")
    copy = pl.from_pandas(table.astype({"code": "int64"})).with_columns(
        pl.col("code").cast(pl.String).cast(pl.Categorical)
    )
    peer = regressor().fit(copy, pl.Series(target.to_numpy()))
    np.testing.assert_allclose(peer.predict(copy), model.predict(table), rtol=1e-12)
    assert peer.feature_names_in_.tolist() == table.columns.tolist()


def test_arrays_lists_and_tensors_agree():
    wanted = regressor().fit(X, Y).predict(X)
    for rows in (X.tolist(), pd.DataFrame(X), np.asfortranarray(X), X.astype(object), torch.tensor(X)):
        np.testing.assert_array_equal(np.asarray(regressor().fit(rows, Y).predict(rows)), wanted)
    tensors = regressor().fit(torch.tensor(X), torch.tensor(Y))
    assert isinstance(tensors.predict(torch.tensor(X)), torch.Tensor)
    assert isinstance(tensors.predict(X), np.ndarray)
    labels = classifier().fit(X, Y > 3).predict(torch.tensor(X))
    assert isinstance(labels, torch.Tensor)
    assert labels.dtype == torch.bool


def test_columns_may_be_categories_or_left_out():
    codes = np.column_stack([X[:, 0], np.arange(ROWS) % 3])
    model = regressor(category=["x2"]).fit(codes, Y)
    assert model.encoding_.features == ("x1", "x2=0", "x2=1", "x2=2")
    without = regressor(drop=["x2"]).fit(X, Y)
    np.testing.assert_array_equal(without.predict(X), regressor().fit(X[:, [0, 2]], Y).predict(X[:, [0, 2]]))


def test_a_weight_of_two_is_a_row_twice_and_of_zero_none():
    weights = np.arange(ROWS) % 3
    for make, y in ((regressor, Y), (classifier, Y > 3)):
        weighted = make().fit(X, y, sample_weight=weights)
        repeated = make().fit(X.repeat(weights, 0), y.repeat(weights))
        ask = "predict" if make is regressor else "predict_proba"
        np.testing.assert_allclose(getattr(weighted, ask)(X), getattr(repeated, ask)(X), rtol=1e-6)


def test_balanced_classes_do_not_count_rows_of_weight_zero():
    labels, weights = Y > 3, np.ones(len(X))
    weights[np.flatnonzero(labels)[::2]] = 0.0
    kept = weights > 0
    whole = classifier(class_weight="balanced").fit(X, labels, sample_weight=weights).predict_proba(X)
    part = classifier(class_weight="balanced").fit(X[kept], labels[kept]).predict_proba(X)
    np.testing.assert_allclose(whole, part, rtol=1e-4, atol=1e-5)


def test_class_weights_multiply_the_weights_of_rows():
    labels = Y > 3.5
    weights = np.where(labels, 5.0, 1.0)
    by_class = classifier(class_weight={True: 5.0, False: 1.0}).fit(X, labels).predict_proba(X)
    np.testing.assert_array_equal(by_class, classifier().fit(X, labels, sample_weight=weights).predict_proba(X))
    plain, balanced = (
        classifier(class_weight=word).fit(X, labels).predict_proba(X)[:, 1] for word in (None, "balanced")
    )
    assert labels.mean() < 0.5
    assert (balanced > plain).all()


def test_the_same_random_state_gives_the_same_bits_and_another_fit_forgets():
    def net(inputs, outputs):
        return po.networks.MLP((inputs, 4, outputs), activation="tanh")

    def fit(seed):
        return regressor(MAP(steps=20), network=net, random_state=seed).fit(X, Y)

    first, again, other = fit(1), fit(1), fit(2)
    np.testing.assert_array_equal(first.predict(X), again.predict(X))
    assert np.abs(first.predict(X) - other.predict(X)).max() > 1e-4
    np.testing.assert_array_equal(
        other.fit(frame()[0], frame()[1]).set_params(random_state=1).fit(X, Y).predict(X), first.predict(X)
    )
    assert not hasattr(other, "feature_names_in_")
    with pytest.raises(ValueError, match="NaN"):
        other.fit(X, np.full(ROWS, np.nan))
    with pytest.raises(ValueError, match="not fitted yet"):  # nothing is left of two fits
        other.predict(X)
    np.testing.assert_array_equal(fit(np.random.RandomState(5)).predict(X), fit(np.random.RandomState(5)).predict(X))


def test_nothing_that_is_given_is_changed():
    table, target = frame()
    before, module = table.copy(deep=True), torch.nn.Linear(3, 1)
    start = [p.clone() for p in module.parameters()]
    weights = np.ones(ROWS)
    regressor().fit(table, target, sample_weight=weights).predict(table)
    pd.testing.assert_frame_equal(table, before)
    assert (weights == 1).all()
    state = torch.get_rng_state()
    model = BayesianRegressor("map", network=module, prior=Normal(1.0), likelihood=Gaussian(scale=0.5)).fit(X, Y)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(p, q) for p, q in zip(module.parameters(), start, strict=True))
    assert model.score(X, Y) > 0.8


def test_a_method_runs_the_stages_of_its_word():
    word, method = regressor("laplace").fit(X, Y), regressor(Laplace()).fit(X, Y)
    np.testing.assert_array_equal(word.predict(X, return_std=True), method.predict(X, return_std=True))


def test_without_a_network_hidden_units_come_where_they_predict_better(monkeypatch):
    monkeypatch.setattr(choice, "STEPS", 200)
    rng = np.random.default_rng(0)
    x = rng.normal(size=(60, 1))
    y = np.sin(3 * x[:, 0]) + 0.1 * rng.normal(size=60)
    bent = BayesianRegressor(MAP(steps=300), prior=Normal(1.0)).fit(x, y)
    assert ["50 hidden units predicts better than a linear model" in note for note in bent.notes_] == [True]
    assert bent.posterior_.joint.num_weights == 151
    assert bent.score(x, y) > 0.8  # a linear model has less than 0.1


def test_n_jobs_are_threads_for_the_time_of_the_fit():
    before = torch.get_num_threads()
    seen = []

    class Noting(torch.nn.Linear):
        def forward(self, inputs):
            seen.append(torch.get_num_threads())
            return super().forward(inputs)

    regressor("map", network=lambda i, o: Noting(i, o, dtype=torch.float64), n_jobs=2).fit(X, Y)
    assert set(seen) == {2}
    assert torch.get_num_threads() == before


@pytest.mark.parametrize("make", [BayesianRegressor, BayesianClassifier])
def test_auto_is_the_default_and_says_what_it_chose(make, tmp_path):
    table, target = (part[:24] for part in frame())
    y = target if make is BayesianRegressor else np.where(target > 1, "high", "low")
    model = make(seconds=0.1, device="cpu").fit(table, y, groups=np.arange(24) % 12)
    assert model.method == "auto"
    assert "held-out rows" in model.notes_[-1]
    assert model.score(table, y) > 0.7
    model.save(tmp_path / "run")
    copy = make.load(tmp_path / "run")
    np.testing.assert_array_equal(copy.predict(table), model.predict(table))


def test_the_default_network_is_float32_and_a_network_of_ones_own_decides():
    assert regressor("map").fit(X, Y).posterior_.joint.dtype == torch.float64
    assert regressor("conjugate", network=None).fit(X, Y).posterior_.joint.dtype == torch.float32
    assert Linear()(2, 1).weight.dtype == torch.float64


def test_the_page_has_the_parameters_as_they_are():
    page = (Path(__file__).parents[2] / "docs" / "tables.md").read_text(encoding="utf-8")
    for make in (BayesianRegressor, BayesianClassifier):
        for row in options_table(make, str).splitlines()[2:]:
            assert row.partition("` |")[2] in page


def test_means_without_error_can_be_pooled():
    targets = torch.tensor([[1.0], [2.0], [3.0]])
    exact_moments = Moments(targets.clone(), torch.ones(3, 1), torch.zeros(3, 1))
    pool = Pool.of({"first": exact_moments, "second": exact_moments}, targets, torch.ones(3))
    assert sum(pool.weights.values()) == pytest.approx(1.0)
