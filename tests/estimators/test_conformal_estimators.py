"""Intervals and sets of classes with a guarantee: coverage, rows that models have not seen, folders."""

import numpy as np
import pandas as pd
import pytest
import torch
from tablerows import Linear, classifier, regressor

from posterity.estimators import BayesianClassifier, BayesianRegressor, Encoding
from posterity.inference.folds import folds
from posterity.predictive import ConformalIntervals

pytestmark = pytest.mark.cpu
ROWS, NEW = 200, 2000


def heavy_tails(count, seed):
    """Rows with Student-t noise of scale 1, which a model of noise 0.5 underestimates."""
    rng = np.random.default_rng(seed)
    X = rng.normal(size=(count, 3))
    return X, X @ [1.0, 2.0, 3.0] + rng.standard_t(3, size=count)


X, Y = heavy_tails(ROWS, 0)
THERE, TRUTH = heavy_tails(NEW, 1)


@pytest.mark.parametrize("word", ["split", "cv+", "jackknife+"])
def test_intervals_cover_where_those_of_the_model_do_not(word, tmp_path):
    count = 30 if word == "jackknife+" else ROWS
    model = regressor("conjugate", conformal=word).fit(X[:count], Y[:count])
    lower, upper = model.predict_interval(THERE, level=0.9)
    calibration = {"split": ROWS // 5, "cv+": ROWS, "jackknife+": 30}[word]
    # Coverage given the calibration rows varies like a Beta(0.9 n, 0.1 n) variable.
    allowed = 5 * (0.09 / calibration + 0.09 / NEW) ** 0.5
    assert abs(((lower <= TRUTH) & (upper >= TRUTH)).mean() - 0.9) < allowed
    plain = model.predict_distribution(THERE).interval(0.9)
    inside = (plain[0].numpy()[:, 0] <= TRUTH) & (plain[1].numpy()[:, 0] >= TRUTH)
    assert inside.mean() < 0.65
    assert model.guarantee(0.9).startswith("At least " + {"split": "90 %", "cv+": "7", "jackknife+": "80 %"}[word])
    model.save(tmp_path / "run")
    copy = BayesianRegressor.load(tmp_path / "run", network=Linear())
    np.testing.assert_array_equal(copy.predict_interval(THERE), (lower, upper))
    assert copy.conformal_.num_rows == calibration


def test_calibration_rows_are_kept_out_of_every_fit():
    model = regressor("conjugate", conformal="split").fit(X, Y)
    part = folds(ROWS, 5, seed=0)[-1]
    alone = regressor("conjugate").fit(X[part.train], Y[part.train])
    np.testing.assert_allclose(model.predict(X), alone.predict(X), rtol=1e-12)
    bent = Y.copy()
    bent[part.test] += 100.0
    other = regressor("conjugate", conformal="split").fit(X, bent)
    np.testing.assert_array_equal(other.predict(X), model.predict(X))
    assert float(other.conformal_.scores.min()) > float(model.conformal_.scores.max())
    several = regressor("conjugate", conformal="cv+").fit(X, Y)
    assert len(several.fold_models_) == 5
    whole = regressor("conjugate").fit(X, Y)
    np.testing.assert_array_equal(several.predict(X), whole.predict(X))  # predictions are of the fit to all rows


def test_calibration_rows_do_not_decide_what_a_column_is():
    part = folds(ROWS, 5, seed=0)[-1]
    words = np.where(np.arange(ROWS) % 2, "1", "2")
    frame = pd.DataFrame({"a": X[:, 0], "b": words, "c": X[:, 1].round(2).astype(str)})
    frame.loc[part.test.numpy(), "b"] = "many"  # numbers in the rows of the fit, text in the others
    frame.loc[part.test.numpy(), "c"] = frame.loc[part.test.numpy(), "c"].str.replace(".", ",")
    seen = np.zeros(ROWS)
    seen[part.train] = 1.0
    model = regressor("conjugate").fit(frame, Y, sample_weight=seen)
    alone = regressor("conjugate").fit(frame.iloc[part.train.numpy()], Y[part.train])
    assert model.encoding_ == alone.encoding_
    assert [column.kind for column in model.encoding_.inputs] == ["number", "number", "number"]
    with pytest.raises(ValueError, match="column 'b': 'many' is not a number"):  # as of any new row
        regressor("conjugate", conformal="split").fit(frame, Y)


def test_models_predict_only_the_rows_they_have_not_seen(monkeypatch):
    counts = []
    transform = Encoding.transform

    def counted(self, X, notes, rows=None):
        inputs = transform(self, X, notes, rows)
        counts.append(len(inputs))
        return inputs

    monkeypatch.setattr(Encoding, "transform", counted)
    regressor("conjugate", conformal="jackknife+").fit(X[:12], Y[:12])
    assert sorted(counts) == [1] * 12 + [11] * 12 + [12]  # a fit to the others and a prediction of each, and a last fit


def test_groups_and_times_decide_the_folds():
    groups = np.repeat(np.arange(20), 10)
    grouped = regressor("conjugate", conformal="cv+").fit(X, Y, groups=groups)
    assert grouped.conformal_.order == "group"
    assert "new groups" in grouped.guarantee(0.9)
    timed = regressor("conjugate", conformal="split").fit(X, Y, times=torch.arange(float(ROWS), requires_grad=True))
    assert "time order" in timed.guarantee(0.9)
    last = regressor("conjugate").fit(X[: ROWS - timed.conformal_.num_rows], Y[: ROWS - timed.conformal_.num_rows])
    np.testing.assert_allclose(timed.predict(X), last.predict(X))  # the last rows calibrate, the others are fitted


@pytest.mark.parametrize("word", ["split", "cv+"])
def test_sets_of_classes_cover(word, tmp_path):
    labels, truth = (np.array(["low", "mid", "top"])[np.digitize(y, [-2, 2])] for y in (Y, TRUTH))
    model = classifier("map", conformal=word).fit(X, labels)
    sets = model.predict_set(THERE, level=0.8)
    assert sets.shape == (NEW, 3)
    assert sets.dtype == bool
    covered = sets[np.arange(NEW), np.searchsorted(model.classes_, truth)].mean()
    assert covered > 0.8 - 5 * (0.16 / (ROWS // 5 if word == "split" else ROWS) + 0.16 / NEW) ** 0.5
    assert sets.sum(1).min() >= 1
    model.save(tmp_path / "run")
    np.testing.assert_array_equal(
        BayesianClassifier.load(tmp_path / "run", network=Linear()).predict_set(THERE, level=0.8), sets
    )


def test_rows_that_calibrate_are_drawn_whatever_their_class():
    """Folds alike in classes would never hold a class of fewer rows than folds, and no theorem is about them."""
    labels = np.where(np.arange(ROWS) < 4, "rare", "usual")
    held = folds(ROWS, 5, seed=0)[-1].test.numpy()
    counts = [(labels[folds(ROWS, 5, seed=seed)[-1].test.numpy()] == "rare").sum() for seed in range(20)]
    assert sum(counts) > 0
    model = classifier(conformal="split", random_state=0).fit(X, labels)
    assert model.conformal_.num_rows == len(held)
    seed = model.seed_
    kept = folds(ROWS, 5, seed=seed)[-1].test.numpy()
    own = classifier(random_state=seed).fit(X, labels, sample_weight=~np.isin(np.arange(ROWS), kept))
    np.testing.assert_array_equal(own.predict_proba(THERE), model.predict_proba(THERE))


def test_several_targets_and_folders_that_are_written_again(tmp_path):
    targets = np.column_stack([Y, 10 * Y])
    model = regressor("map", conformal="split").fit(X, targets)
    lower, upper = model.predict_interval(THERE)
    assert lower.shape == upper.shape == (NEW, 2)
    assert isinstance(model.conformal_, ConformalIntervals)
    regressor("conjugate", conformal="cv+").fit(X, Y).save(tmp_path / "run")
    assert (tmp_path / "run" / "folds" / "4").is_dir()
    model.save(tmp_path / "run")
    assert not (tmp_path / "run" / "folds").exists()


def test_what_cannot_be_is_refused():
    with pytest.raises(ValueError, match=r"Unknown conformal 'cv'. Did you mean 'cv\+'"):
        regressor(conformal="cv").fit(X, Y)
    with pytest.raises(ValueError, match="was fitted without a guarantee"):
        classifier("map").fit(X, Y > 0).predict_set(X)
    with pytest.raises(ValueError, match="rows of every class outside each fold"):
        classifier("map", conformal="split").fit(
            X, np.digitize(np.arange(ROWS), [50, ROWS - 10]), times=np.arange(ROWS)
        )
