"""What estimators and mixtures do with input that is missing, wrong or changed: the table of docs/tables.md."""

import logging
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from scipy.sparse import csr_matrix
from tablerows import ROWS, Linear, classifier, frame, numbers, regressor

import posterity as po
from posterity.estimators import BayesianClassifier, BayesianRegressor
from posterity.mixtures import BayesianGaussianMixture, GaussianMixture

pytestmark = pytest.mark.cpu
X, Y = numbers()
TABLE, TARGET = frame()
LABELS = np.where(TARGET > 1, "high", "low")
Make = Callable[..., Any]


def changed(value: Any) -> Any:
    rows = X.astype(object if isinstance(value, str) else float)
    rows[3, 1] = value
    return rows


both = pytest.mark.parametrize(("make", "y"), [(regressor, Y), (classifier, Y > 3)], ids=["regressor", "classifier"])
mixtures = pytest.mark.parametrize("mixture", [GaussianMixture(), BayesianGaussianMixture()])


@both
def test_missing_values_are_inputs(make: Make, y: Any, caplog: pytest.LogCaptureFixture) -> None:
    fitted = make().fit(changed(np.nan), y)
    assert fitted.encoding_.features == ("x1", "x2", "x2 missing", "x3")
    assert np.isfinite(np.asarray(fitted.predict(X), dtype=float)).all()
    without = make().fit(X, y)
    with caplog.at_level(logging.WARNING, logger="posterity"):
        median = without.predict(changed(np.nan))
    assert "Column 'x2': 1 of 40 values are missing, as none was in the training rows" in caplog.text
    np.testing.assert_array_equal(median, without.predict(changed(np.sort(X[:, 1])[(ROWS - 1) // 2])))


@both
@pytest.mark.parametrize(
    ("rows", "error", "words"),
    [
        (changed(np.inf), ValueError, "row 3, column 'x2': 'inf' is infinite"),
        (changed(-np.inf), ValueError, "row 3, column 'x2': '-inf' is infinite"),
        (changed("wet"), ValueError, "row 3, column 'x2': 'wet' is"),
        (X[:, 0], ValueError, "Reshape your data"),
        (pd.Series(X[:, 0]), ValueError, "Reshape your data: X.to_frame()"),
        (X[:0], ValueError, "0 sample(s)"),
        (TABLE[:0], ValueError, "0 sample(s)"),
        (X[:, :0], ValueError, "0 feature(s) (shape=(40, 0)) while a minimum of 1 is required"),
        (X + 1j, ValueError, "Complex data not supported"),
        (csr_matrix(X), TypeError, "dense"),
        (torch.tensor(X).to_sparse(), TypeError, "X must be dense"),
        (pd.DataFrame(X, columns=["a", "a", "b"]), ValueError, "two columns of the same name 'a'"),
        (pd.DataFrame(X, columns=["a", 1, "b"]), TypeError, "string names"),
    ],
)
def test_rows_that_are_refused(make: Make, y: Any, rows: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=re.escape(words)):
        make().fit(rows, y[: rows.shape[0]])
    fitted = make().fit(X, y)
    with pytest.raises(error, match=re.escape(words)):
        fitted.predict(rows)


@both
def test_columns_that_tell_nothing(make: Make, y: Any) -> None:
    fitted = make().fit(np.column_stack([X, np.ones(ROWS)]), y)
    assert fitted.encoding_.features == ("x1", "x2", "x3")
    assert fitted.notes_ == ("Column 'x4' is constant and was dropped.",)
    with pytest.raises(ValueError, match="No column of X is left as an input"):
        make().fit(np.ones((ROWS, 2)), y)
    words = np.array([[f"word {row}"] for row in range(ROWS)])
    with pytest.raises(ValueError, match=r"column 'x1' is text: 40 different values.*drop=\['x1'\]"):
        make().fit(words, y)


def test_one_class_one_row_and_one_value() -> None:
    with pytest.raises(ValueError, match=r"needs rows of at least 2 classes. Got 1 class, 'a'"):
        classifier().fit(X, ["a"] * ROWS)
    with pytest.raises(ValueError, match=r"needs at least 2 rows of positive weight. Got 1 sample"):
        regressor().fit(X[:1], Y[:1])
    with pytest.raises(ValueError, match=r"y has the value 5 in every row. There is nothing to learn."):
        regressor(likelihood="gaussian").fit(X, np.full(ROWS, 5.0))
    assert regressor().fit(X[:2], Y[:2]).predict(X[:1]).shape == (1,)


@pytest.mark.parametrize(
    ("make", "y", "words"),
    [
        (regressor, np.where(Y > 3, np.nan, Y), "Input y contains NaN"),
        (regressor, np.where(Y > 3, np.inf, Y), "Input y contains infinity"),
        (regressor, np.where(Y > 3, "a", "b"), "y must hold numbers. Got '"),
        (regressor, Y[:-1], "inconsistent numbers of samples: [40, 39]"),
        (regressor, None, "requires y to be passed"),
        (classifier, np.where(Y > 3, None, "b"), "y must have a label in every row. Got none in row"),
        (classifier, Y, "Unknown label type: continuous"),
        (classifier, np.where(Y > 3, np.nan, 1.0), "y must have a label in every row"),
        (lambda: regressor(likelihood="poisson"), Y, "targets must be counts 0, 1, 2, ..."),
    ],
)
def test_targets_that_are_refused(make: Make, y: Any, words: str) -> None:
    with pytest.raises(ValueError, match=re.escape(words)):
        make().fit(X, y)


def test_other_columns_than_in_fit(caplog: pytest.LogCaptureFixture) -> None:
    fitted = regressor().fit(TABLE, TARGET)
    wanted = fitted.predict(TABLE)
    for other, words in (
        (TABLE[TABLE.columns[::-1]], "must be in the same order as they were in fit"),
        (TABLE.rename(columns={"size": "SIZE"}), "Feature names unseen at fit time:\n- SIZE"),
        (TABLE.drop(columns="size"), "seen at fit time, yet now missing:\n- size"),
        (TABLE.assign(more=1), "Feature names unseen at fit time:\n- more"),
    ):
        with pytest.raises(ValueError, match=re.escape(words)):
            fitted.predict(other)
    with pytest.raises(ValueError, match="X has 2 features, but BayesianRegressor is expecting 3 features as input"):
        regressor().fit(X, Y).predict(X[:, :2])
    with pytest.warns(UserWarning, match="X does not have valid feature names"):
        np.testing.assert_array_equal(fitted.predict(TABLE.to_numpy()), wanted)
    with caplog.at_level(logging.WARNING, logger="posterity"):
        unseen = fitted.predict(TABLE.assign(colour="mauve"))
    assert "40 of 40 values are categories that no training row has ('mauve')" in caplog.text
    assert np.isfinite(unseen).all()


def test_changed_dtypes() -> None:
    fitted = regressor().fit(TABLE, TARGET)
    wanted = fitted.predict(TABLE)
    same = TABLE.assign(
        size=TABLE["size"].astype("Float64"),
        count=TABLE["count"].astype(str),
        colour=TABLE["colour"].astype("category"),
        day=TABLE["day"].dt.strftime("%Y-%m-%d"),
        open=TABLE["open"].astype(str),
        code=TABLE["code"].astype(float),
    )
    np.testing.assert_allclose(fitted.predict(same), wanted)
    with pytest.raises(ValueError, match=r"column 'size': 'big' is not a number"):
        fitted.predict(TABLE.assign(size="big"))
    with pytest.raises(ValueError, match=r"column 'open': .* is wanted"):
        fitted.predict(TABLE.assign(open="maybe"))
    with pytest.raises(ValueError, match=r"column 'day': '3' is no date"):
        fitted.predict(TABLE.assign(day=3))


@pytest.mark.parametrize(
    ("weights", "words"),
    [
        (-np.ones(ROWS), "at least 0. Got -1 in row 0"),
        (np.zeros(ROWS), "must have a number that is not zero"),
        (np.ones(ROWS - 1), "one number for each row, (40,). Got shape (39,)"),
        (np.full(ROWS, np.nan), "must be finite and at least 0. Got nan in row 0"),
    ],
)
def test_weights_that_are_refused(weights: Any, words: str) -> None:
    with pytest.raises(ValueError, match=re.escape(words)):
        regressor().fit(X, Y, sample_weight=weights)


@pytest.mark.parametrize(
    ("settings", "error", "words"),
    [
        ({"method": "laplac"}, ValueError, "Unknown method 'laplac'. Did you mean 'laplace'?"),
        ({"method": po.methods.MAP}, TypeError, "Call it: MAP()."),
        ({"method": "map", "network": 3}, TypeError, "network must be a module or a function of (inputs, outputs)"),
        ({"method": "map", "network": lambda i, o: 3}, TypeError, "must return a module. Got 3."),
        ({"method": "map", "network": torch.nn.Linear(2, 1)}, ValueError, "The model does not accept these inputs"),
        ({"method": "map", "prior": 1.0}, TypeError, "prior must be a Prior, such as Normal(1.0)"),
        ({"method": "map", "likelihood": "normal"}, ValueError, "Unknown likelihood 'normal'"),
        ({"method": "map", "likelihood": 3}, TypeError, "likelihood must be a word or a Likelihood"),
        ({"likelihood": "poisson"}, ValueError, "auto chooses its own noise"),
        ({"network": Linear()}, ValueError, "auto chooses its own networks"),
        ({"seconds": 0.0}, ValueError, "BayesianRegressor.seconds must be a positive number"),
        ({"method": "map", "n_jobs": 0}, ValueError, "n_jobs must be None, a positive whole number or -1"),
        ({"method": "map", "device": "gpu"}, ValueError, "Unknown device 'gpu'"),
        ({"method": "map", "random_state": -1}, ValueError, "random_state must be a whole number"),
        ({"method": "map", "category": "x1"}, TypeError, "category must be a list of columns. Got 'x1'."),
        ({"method": "map", "drop": ["z"]}, ValueError, "Unknown column 'z'"),
    ],
)
def test_settings_that_are_refused(settings: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=re.escape(words)):
        BayesianRegressor(**settings).fit(X, Y)


@pytest.mark.parametrize("weight", [-1.0, 0.0, float("nan")])
def test_class_weights_that_would_delete_a_class_are_refused(weight: float) -> None:
    with pytest.raises(ValueError, match="class_weight must have positive numbers"):
        BayesianClassifier("map", class_weight={True: weight, False: 1.0}).fit(X, Y > 3)


@pytest.mark.parametrize("count", [3, 500])
def test_groups_of_other_rows_are_refused(count: int) -> None:
    with pytest.raises(ValueError, match="groups must have a value for each of"):
        BayesianRegressor(conformal="cv+", method="map").fit(X, Y, groups=np.arange(count))


def test_settings_of_classes_and_folds_that_are_refused() -> None:
    with pytest.raises(ValueError, match="class_weight must be None, balanced or a dict"):
        BayesianClassifier("map", class_weight="bal").fit(X, Y > 3)
    with pytest.raises(ValueError, match="groups and times are for folds of auto or conformal"):
        regressor().fit(X, Y, groups=np.arange(ROWS))
    with pytest.raises(ValueError, match="level must be a number between 0 and 1"):
        regressor().fit(X, Y).predict_interval(X, level=1.5)


@mixtures
def test_mixtures_take_finite_numbers_only(mixture: Any) -> None:
    for value, words in ((np.nan, "in row 3"), (np.inf, "in row 3"), ("wet", "X must hold numbers")):
        with pytest.raises(ValueError, match=words):
            mixture.fit(changed(value))
    with pytest.raises(ValueError, match="X must hold numbers"):
        mixture.fit(pd.DataFrame({"a": X[:, 0], "b": "wet"}))


@mixtures
def test_mixtures_of_one_row_and_constant_columns(mixture: Any) -> None:
    assert mixture.fit(X[:1]).predict(X).shape == (ROWS,)
    with pytest.raises(ValueError, match="at least n_components = 2 rows"):
        type(mixture)(2).fit(X[:1])
    assert np.isfinite(mixture.fit(np.column_stack([X, np.ones(ROWS)])).score(np.column_stack([X, np.ones(ROWS)])))


@mixtures
def test_mixtures_and_other_columns_than_in_fit(mixture: Any) -> None:
    named = pd.DataFrame(X, columns=["a", "b", "c"])
    mixture.fit(named)
    np.testing.assert_array_equal(mixture.predict(named.astype(object)), mixture.predict(X))
    with pytest.raises(ValueError, match="X must have the columns of fit in their order"):
        mixture.predict(named[["c", "b", "a"]])
    with pytest.raises(ValueError, match=r"X has 2 features, but .* is expecting 3 features"):
        mixture.predict(X[:, :2])


@mixtures
def test_mixtures_take_columns_of_one_name(mixture: Any) -> None:
    twice = pd.DataFrame(X, columns=["a", "a", "b"])
    np.testing.assert_array_equal(mixture.fit(twice).predict(twice), mixture.fit(X).predict(X))
