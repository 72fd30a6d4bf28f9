"""What estimators and mixtures do with input that is missing, wrong or changed: the table of docs/tables.md."""

import logging
import re
from collections.abc import Callable
from pathlib import Path
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


framed = pytest.mark.parametrize(
    ("make", "y"), [(regressor, TARGET), (classifier, LABELS)], ids=["regressor", "classifier"]
)
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


@framed
@pytest.mark.parametrize(("column", "value"), [("size", None), ("colour", pd.NA), ("day", pd.NaT), ("open", None)])
def test_every_kind_of_missing_value_is_an_input(make: Make, y: Any, column: str, value: Any) -> None:
    rows = TABLE.astype({column: object})
    rows.loc[[5, 9], column] = value
    fitted = make().fit(rows, y)
    assert f"{column} missing" in fitted.encoding_.features
    assert len(fitted.predict(rows)) == ROWS


@both
def test_strings_are_numbers_or_categories(make: Make, y: Any) -> None:
    words = np.where(X[:, 2] > 0, "wet", "dry")
    fitted = make().fit(pd.DataFrame({"a": X[:, 0].astype(str), "b": X[:, 1], "c": words}), y)
    assert fitted.encoding_.features == ("a", "b", "c=dry", "c=wet")
    numbers = make().fit(pd.DataFrame({"a": X[:, 0], "b": X[:, 1], "c": words}), y)
    assert fitted.encoding_ == numbers.encoding_


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
    with pytest.raises(ValueError, match=r"needs rows of at least 2 classes. Got 1 class"):
        classifier().fit(X[:1], ["a"])
    assert classifier().fit(X, Y > 3).predict(X[:1]).shape == (1,)
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
        (classifier, np.where(Y > 3, np.inf, 1.0), "Input y contains infinity"),
        (classifier, np.where(Y > 3, np.nan, 1.0), "y must have a label in every row"),
        (lambda: regressor(likelihood="poisson"), Y, "targets must be counts 0, 1, 2, ..."),
    ],
)
def test_targets_that_are_refused(make: Make, y: Any, words: str) -> None:
    with pytest.raises(ValueError, match=re.escape(words)):
        make().fit(X, y)


@framed
def test_other_columns_than_in_fit(make: Make, y: Any) -> None:
    fitted = make().fit(TABLE, y)
    for other, words in (
        (TABLE[TABLE.columns[::-1]], "must be in the same order as they were in fit"),
        (TABLE.rename(columns={"size": "SIZE"}), "Feature names unseen at fit time:\n- SIZE"),
        (TABLE.drop(columns="size"), "seen at fit time, yet now missing:\n- size"),
        (TABLE.assign(more=1), "Feature names unseen at fit time:\n- more"),
    ):
        with pytest.raises(ValueError, match=re.escape(words)):
            fitted.predict(other)
    with pytest.raises(ValueError, match=f"X has 2 features, but {type(fitted).__name__} is expecting 3 features"):
        make().fit(X, y).predict(X[:, :2])
    with pytest.warns(UserWarning, match="X does not have valid feature names"):
        np.testing.assert_array_equal(fitted.predict(TABLE.to_numpy()), fitted.predict(TABLE))


@framed
def test_categories_that_no_training_row_has(make: Make, y: Any, caplog: pytest.LogCaptureFixture) -> None:
    fitted = make().fit(TABLE, y)
    with caplog.at_level(logging.WARNING, logger="posterity"):
        unseen = fitted.predict_distribution(TABLE.assign(colour="mauve"))
    assert "40 of 40 values are categories that no training row has ('mauve')" in caplog.text
    assert bool(unseen.mean.isfinite().all())
    blank = fitted.encoding_.transform(TABLE.assign(colour="mauve"), [])
    slots = [index for index, name in enumerate(fitted.encoding_.features) if name.startswith("colour=")]
    assert not blank[:, slots].any()


@framed
def test_changed_dtypes(make: Make, y: Any) -> None:
    fitted = make().fit(TABLE, y)
    same = TABLE.assign(
        size=TABLE["size"].astype("Float64"),
        count=TABLE["count"].astype(str),
        colour=TABLE["colour"].astype("category"),
        day=TABLE["day"].dt.strftime("%Y-%m-%d"),
        open=TABLE["open"].astype(str),
        code=TABLE["code"].astype(float),
    )
    np.testing.assert_allclose(fitted.predict_distribution(same).mean, fitted.predict_distribution(TABLE).mean)
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
        ("a", "sample_weight must have one number for each row. Got 'a'."),
        (["a"] * ROWS, "sample_weight must have one number for each row. Got ['a'"),
    ],
)
@both
def test_weights_that_are_refused(make: Make, y: Any, weights: Any, words: str) -> None:
    with pytest.raises(ValueError, match=re.escape(words)):
        make().fit(X, y, sample_weight=weights)


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
        ({"method": "map", "category": "x1"}, TypeError, "category must be a list of columns, by name. Got 'x1'."),
        ({"method": "map", "category": None}, TypeError, "category must be a list of columns, by name. Got None."),
        ({"method": "map", "drop": [0]}, TypeError, "drop must be a list of columns, by name. Got [0]."),
        ({"method": "map", "drop": ["z"]}, ValueError, "Unknown column 'z'. Known: x1, x2, x3."),
        ({"method": "map", "category": ["y"]}, ValueError, "Unknown column 'y'. Known: x1, x2, x3."),
        ({"method": "map", "drop": ["x1", "x2", "x3"]}, ValueError, "all of its columns are dropped. Keep an input"),
    ],
)
def test_settings_that_are_refused(settings: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=re.escape(words)):
        BayesianRegressor(**settings).fit(X, Y)


@pytest.mark.parametrize("weight", [-1.0, 0.0, float("nan")])
def test_class_weights_that_would_delete_a_class_are_refused(weight: float) -> None:
    with pytest.raises(ValueError, match="class_weight must have positive numbers"):
        BayesianClassifier("map", class_weight={True: weight, False: 1.0}).fit(X, Y > 3)


@pytest.mark.parametrize(
    ("weights", "words"),
    [({"up": 2.0}, "names 'up', which is no class of y. Name some of [False, True]."), ({True: "a"}, "have numbers")],
)
def test_class_weights_that_say_nothing_are_refused(weights: dict[Any, Any], words: str) -> None:
    with pytest.raises(ValueError, match=re.escape(words)):
        BayesianClassifier("map", class_weight=weights).fit(X, Y > 3)


def test_class_weights_may_name_a_class_without_rows() -> None:
    """As in a fold that lacks a rare class."""
    three = classifier(class_weight={True: 2.0, False: 1.0, "rare": 5.0}).fit(X, Y > 3)
    two = classifier(class_weight={True: 2.0, False: 1.0}).fit(X, Y > 3)
    np.testing.assert_array_equal(three.predict_proba(X), two.predict_proba(X))


@pytest.mark.parametrize("quantiles", [[], 0.5, ["a"]])
def test_quantiles_that_are_refused(quantiles: Any) -> None:
    with pytest.raises(ValueError, match="quantiles must be a list of numbers"):
        regressor().fit(X, Y).predict_quantiles(X, quantiles)


def test_values_of_any_size() -> None:
    """Targets whose variance overflows have a standard deviation; inputs out of all range are refused by name."""
    model, large = (regressor(likelihood="gaussian").fit(X, Y * unit) for unit in (1.0, 1e200))
    np.testing.assert_allclose(large.predict(X, return_std=True)[1], 1e200 * model.predict(X, return_std=True)[1])
    fitted = regressor().fit(X, Y)
    with pytest.raises(ValueError, match=r"row 3, column 'x2': '1e\+35' is too far from the training rows"):
        fitted.predict(changed(1e35))
    assert np.isfinite(fitted.predict_interval(changed(1e10))).all()


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
def test_mixtures_refuse_what_is_no_table(mixture: Any) -> None:
    for rows in (X[:0], X[:, 0], X + 1j, csr_matrix(X)):
        with pytest.raises((ValueError, TypeError)):
            mixture.fit(rows)


@mixtures
@pytest.mark.parametrize("weights", [-np.ones(ROWS), np.zeros(ROWS), np.full(ROWS, np.inf)])
def test_mixtures_refuse_bad_weights(mixture: Any, weights: Any) -> None:
    with pytest.raises(ValueError, match="sample_weight must"):
        mixture.fit(X, sample_weight=weights)


@mixtures
def test_mixtures_take_columns_of_one_name(mixture: Any) -> None:
    twice = pd.DataFrame(X, columns=["a", "a", "b"])
    np.testing.assert_array_equal(mixture.fit(twice).predict(twice), mixture.fit(X).predict(X))


LINES = {
    "NaN, None, NaT, pd.NA in X": (test_missing_values_are_inputs, test_every_kind_of_missing_value_is_an_input),
    "infinities in X": (test_rows_that_are_refused, test_mixtures_take_finite_numbers_only),
    "numbers out of all range of the training rows": (test_values_of_any_size,),
    "strings in X": (test_strings_are_numbers_or_categories, test_columns_that_tell_nothing),
    "NaN or infinities in y": (test_targets_that_are_refused,),
    "strings in y": (test_targets_that_are_refused,),
    "one class, or one value of y": (test_one_class_one_row_and_one_value,),
    "one row": (test_one_class_one_row_and_one_value, test_mixtures_of_one_row_and_constant_columns),
    "a constant column": (test_columns_that_tell_nothing, test_mixtures_of_one_row_and_constant_columns),
    "an unseen category": (test_categories_that_no_training_row_has,),
    "other names, or another order of columns": (
        test_other_columns_than_in_fit,
        test_mixtures_and_other_columns_than_in_fit,
    ),
    "more or fewer columns": (test_other_columns_than_in_fit, test_mixtures_and_other_columns_than_in_fit),
    "an array after a frame": (test_other_columns_than_in_fit, test_mixtures_and_other_columns_than_in_fit),
    "changed dtypes": (test_changed_dtypes, test_mixtures_and_other_columns_than_in_fit),
    "sparse, complex or 1-D X, no rows": (test_rows_that_are_refused, test_mixtures_refuse_what_is_no_table),
    "two columns of one name": (test_rows_that_are_refused, test_mixtures_take_columns_of_one_name),
    "weights below 0, not finite, or all 0": (test_weights_that_are_refused, test_mixtures_refuse_bad_weights),
}


def test_every_line_of_the_table_has_its_tests() -> None:
    page = (Path(__file__).parents[2] / "docs" / "tables.md").read_text(encoding="utf-8")
    rows = page.split("| input | estimators | mixtures |")[1].splitlines()[2:]
    assert [row.split(" | ")[0].removeprefix("| ") for row in rows if row.startswith("|")] == list(LINES)
