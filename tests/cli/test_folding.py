"""Folds at the command line: fits to all rows, cross-validation, groups, time order and conformal prediction."""

import csv
import io
import json

import numpy as np
import pytest
import torch

from posterity.cli.frame.fitting import Fitter
from posterity.cli.frame.folding import fold_of, training_folds
from posterity.cli.frame.options import ReadingOptions, TableOptions
from posterity.cli.frame.sources import find_data
from posterity.metrics import negative_log_likelihood
from posterity.recipes.settings import Settings

pytestmark = pytest.mark.cpu

ROWS = 60
PLAIN = ("--method", "map", "--hidden", "none", "--device", "cpu", "--quiet")


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tables")
    draws = np.random.default_rng(3)
    inputs, groups = draws.normal(size=(ROWS, 2)), draws.permutation(np.arange(ROWS) % 10)
    targets = 100 + 30 * inputs[:, 0] - 10 * inputs[:, 1] + 5 * draws.normal(size=ROWS)
    days = draws.permutation(ROWS)
    for name, shown in (("number", [f"{y:.3f}" for y in targets]), ("class", np.where(targets > 100, "yes", "no"))):
        lines = [
            f"{a:.4f},{b:.4f},customer {group},2024-{1 + day // 28:02d}-{1 + day % 28:02d},{y}"
            for (a, b), group, day, y in zip(inputs, groups, days, shown, strict=True)
        ]
        (folder / f"{name}.csv").write_text("\n".join(["a,b,who,day,y", *lines]) + "\n")
    return folder


def table(output):
    return list(csv.DictReader(io.StringIO(output)))


def source(file, **columns):
    return find_data(str(file), TableOptions(target="y", **columns), ReadingOptions())


def test_a_fit_to_all_rows_keeps_none_to_test(run, files, tmp_path):
    done = run("fit", files / "number.csv", "--target", "y", "--test-fraction", "0", *PLAIN, "--out", tmp_path / "run")
    assert done.code == 0
    assert f"All {ROWS} rows are fitted: --cv 5 would score them" in done.out
    for verb in ("predict", "evaluate"):
        refused = run(verb, tmp_path / "run")
        assert refused.code == 3
        assert "fitted to all rows" in refused.err
        assert "--data" in refused.err
    assert len(table(run("predict", tmp_path / "run", "--data", files / "number.csv").out)) == ROWS
    evaluated = json.loads(run("evaluate", tmp_path / "run", "--data", files / "number.csv", "--json").out)
    assert evaluated["fitted_rows"] == ROWS


def test_cross_validation_scores_every_row_by_a_fit_without_it(run, files, tmp_path):
    words = ("fit", files / "number.csv", "--target", "y", "--drop", "who", "--drop", "day", "--cv", "3", *PLAIN)
    document = json.loads(run(*words, "--json", "--out", tmp_path / "run").out)
    assert (document["train_rows"], document["test_rows"], document["cv"]["rows"]) == (ROWS, 0, ROWS)
    whole, asked = (
        source(files / "number.csv", drop=("who", "day"), test_fraction=0.0),
        Fitter("map", Settings(hidden=()), 60.0, "cpu"),
    )
    nll = []
    for fold in training_folds(whole, 3, 0, stratified=True):
        own = fold_of(whole, fold)
        assert abs(float(own.data.train.inputs.mean())) < 1e-6  # standardised by its own training rows
        pred, y = own.final_units(asked.fit(own)[0].predict(own.data.test.inputs))
        nll.append(negative_log_likelihood.rows(pred, y))
    assert document["cv"]["scores"]["test_nll"] == pytest.approx(float(torch.cat(nll).mean()), rel=1e-6)
    lower, upper = document["cv"]["intervals"]["test_nll"]
    assert lower < document["cv"]["scores"]["test_nll"] < upper
    shown = run(*words, "--out", tmp_path / "run").out
    assert f"3-fold cross-validation, {ROWS} rows" in shown


def test_groups_and_times_divide_rows_everywhere(files):
    for name, column in (("group", "who"), ("time", "day")):
        whole = source(files / "number.csv", **{name: column})
        assert column not in whole.preprocessing.columns or column not in [c.name for c in whole.preprocessing.inputs]
        values = np.array([field for field in read_column(files / "number.csv", column)])
        train, test = values[list(whole.train)], values[list(whole.test)]
        folds = [
            (values[list(own.train)], values[list(own.test)])
            for own in (fold_of(whole, fold) for fold in training_folds(whole, 3, 0, stratified=True))
        ]
        for fitted, scored in ((train, test), *folds):
            assert len(scored)
            if name == "group":
                assert not set(fitted) & set(scored)
            else:
                assert max(fitted) < min(scored)
        assert len(whole.by[f"{name}s"]) == len(whole.data.train)
    kept = source(files / "number.csv", time="day", keep=True)
    assert "day" in {column.name for column in kept.preprocessing.inputs}


def read_column(file, name):
    return [row[name] for row in table(file.read_text())]


def test_auto_gets_the_groups(run, files, tmp_path, monkeypatch):
    seen = {}

    def stop(*_, **given):
        seen.update(given)
        raise KeyboardInterrupt

    monkeypatch.setattr("posterity.cli.frame.fitting.fit_automatic", stop)
    words = ("fit", files / "number.csv", "--target", "y", "--group", "who", "--out", tmp_path / "run", "--quiet")
    assert run(*words).code == 130
    assert len(set(seen["groups"])) == 8  # two of ten are held out


@pytest.mark.parametrize(("how", "least"), [("split", 0.9), ("cv+", 0.8)])
def test_conformal_intervals_cover_and_say_what_they_promise(run, tmp_path, how, least):
    draws = np.random.default_rng(5)
    inputs = draws.normal(size=(1200, 1))
    targets = inputs[:, 0] + 0.3 * draws.standard_t(2, size=1200)  # tails that the model does not know
    for name, rows in (("train", slice(0, 200)), ("new", slice(200, 1200))):
        lines = [f"{x:.5f},{y:.5f}" for x, y in zip(inputs[rows, 0], targets[rows], strict=True)]
        (tmp_path / f"{name}.csv").write_text("\n".join(["x,y", *lines]) + "\n")
    words = ("fit", tmp_path / "train.csv", "--target", "y", "--test-fraction", "0", "--conformal", how, *PLAIN)
    document = json.loads(run(*words, "--json", "--out", tmp_path / "run").out)
    assert document["train_rows"] == (160 if how == "split" else 200)
    assert document["conformal"]["guarantee"].startswith("At least ")
    predicted = run(
        "predict",
        tmp_path / "run",
        "--data",
        tmp_path / "new.csv",
        "--conformal",
        "--level",
        "0.9",
        "--quantiles",
        "0.5",
    )
    assert predicted.code == 0
    assert "Conformal prediction at 90 %: At least" in predicted.err
    rows = table(predicted.out)
    inside = [float(row["conformal_lower"]) <= float(row["y"]) <= float(row["conformal_upper"]) for row in rows]
    # five standard errors, of the test rows and of the calibration rows
    assert np.mean(inside) > least - 5 * np.sqrt(0.09 / 1000 + 0.09 / (40 if how == "split" else 200))
    assert all(float(row["lower"]) < float(row["q0.5"]) < float(row["upper"]) for row in rows)
    words = ("evaluate", tmp_path / "run", "--data", tmp_path / "new.csv", "--conformal", "--level", "0.9")
    scored = json.loads(run(*words, "--json").out)
    scores, ends = scored["conformal"]["scores"], scored["conformal"]["intervals"]
    assert scores["coverage"] == pytest.approx(np.mean(inside))
    widths = [float(row["conformal_upper"]) - float(row["conformal_lower"]) for row in rows]
    assert scores["width"] == pytest.approx(np.mean(widths), rel=1e-6)
    assert ends["coverage"][0] < scores["coverage"] < ends["coverage"][1]
    plain = [float(row["lower"]) <= float(row["y"]) <= float(row["upper"]) for row in rows]
    assert scored["scores"]["coverage"] == pytest.approx(np.mean(plain))  # the posterior's own intervals, at this level
    shown = run(*words).out
    assert "conformal coverage at 90 %" in shown
    assert "interval width at 90 %" in shown


def test_conformal_sets_and_groups(run, files, tmp_path):
    words = ("fit", files / "class.csv", "--target", "y", "--drop", "day", "--group", "who", "--conformal", "cv+")
    done = run(*words, *PLAIN, "--prior-scale", "1", "--out", tmp_path / "run")
    assert done.code == 0
    assert "of new groups are covered, if these are exchangeable" in done.out
    predicted = run("predict", tmp_path / "run", "--conformal", "--level", "0.8")
    rows = table(predicted.out)
    assert {row["conformal_set"] for row in rows} <= {"no", "yes", "no|yes"}
    assert np.mean([row["y"] in row["conformal_set"].split("|") for row in rows]) > 0.5
    scored = json.loads(run("evaluate", tmp_path / "run", "--conformal", "--level", "0.8", "--json").out)["conformal"]
    assert scored["scores"]["coverage"] == np.mean([row["y"] in row["conformal_set"].split("|") for row in rows])
    assert scored["scores"]["set_size"] == np.mean([len(row["conformal_set"].split("|")) for row in rows])
    assert run("predict", tmp_path / "run", "--level", "0.8").code == 2
    assert run("evaluate", tmp_path / "run", "--level", "0.8").code == 2
    assert run("predict", tmp_path / "run", "--quantiles", "0.8").code == 2


def test_folds_that_are_finished_are_not_fitted_again(run, files, tmp_path, monkeypatch, content):
    words = ("fit", files / "number.csv", "--target", "y", "--drop", "who", "--cv", "3", "--conformal", "cv+", *PLAIN)
    assert run(*words, "--out", tmp_path / "whole").code == 0
    real, calls = Fitter.fit, []

    def stopping(self, own):
        calls.append(own)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return real(self, own)

    with monkeypatch.context() as patch:
        patch.setattr(Fitter, "fit", stopping)
        assert run(*words, "--out", tmp_path / "run").code == 130
    monkeypatch.setattr(Fitter, "fit", lambda self, own: (calls.append(own), real(self, own))[1])
    assert run(*words, "--out", tmp_path / "run").code == 0
    assert len(calls) == 4  # two folds, one stopped, and that one again
    assert content(tmp_path / "run") == content(tmp_path / "whole")


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (("--group", "who", "--time", "day"), 2, "cannot be given together"),
        (("--group", "nobody"), 3, "Unknown column 'nobody'"),
        (("--group", "y"), 2, "both the target and"),
        (("--time", "who"), 3, "--time needs a column of numbers or dates"),
        (("--keep",), 2, "--keep is for the column of --group or --time"),
        (("--cv", "1"), 2, "--cv must be 2 or more"),
        (("--cv", "99"), 3, "99 folds need at least 99 rows"),
        (("--group", "who", "--cv", "11"), 3, "11 folds need at least 11 groups"),
        (("--conformal", "magic"), 2, "Unknown conformal 'magic'"),
        (("--test-fraction", "1"), 2, "from 0 up and below 1"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_written(run, files, tmp_path, words, code, said):
    done = run("fit", files / "number.csv", "--target", "y", *words, *PLAIN, "--out", tmp_path / "run")
    assert (done.code, done.out) == (code, "")
    assert said in done.err
    assert not (tmp_path / "run").exists()


def test_a_run_without_calibration_has_no_conformal_intervals(run, fitted):
    refused = run("predict", fitted, "--conformal")
    assert refused.code == 2
    assert "fit with --conformal split" in refused.err


def test_missing_groups_and_single_ones_are_refused(run, tmp_path):
    lines = [f"{row},{'' if row == 7 else 'g'},{row % 5}.5" for row in range(30)]
    (tmp_path / "table.csv").write_text("\n".join(["a,who,y", *lines]) + "\n")
    words = ("fit", tmp_path / "table.csv", "--target", "y", "--group", "who", *PLAIN, "--out", tmp_path / "run")
    refused = run(*words)
    assert refused.code == 3
    assert "line 9, column 'who': there is no value" in refused.err
    (tmp_path / "table.csv").write_text((tmp_path / "table.csv").read_text().replace(",,", ",g,"))
    refused = run(*words)
    assert refused.code == 3
    assert "2 different groups are wanted" in refused.err
