"""Rows outside the training data, and the column to blame."""

import csv
import io

import numpy as np
import pytest
import torch

from posterity.cli.frame.outside import SHARE, outside, reach
from posterity.cli.frame.sources import Source
from posterity.datasets import DataSet, LabelledData
from posterity.storage import Part

pytestmark = pytest.mark.cpu


def flagged(train, test):
    """The share of rows that are called outside."""
    rows = LabelledData(torch.as_tensor(train), torch.zeros(len(train), 1))
    known = reach(Source(DataSet("rows", "regression", rows, rows)))
    tested = LabelledData(torch.as_tensor(test), torch.zeros(len(test), 1))
    named = outside(Part({}, known), Source(DataSet("rows", "regression", rows, tested)))
    return np.mean([bool(name) for name in named]), named


@pytest.mark.parametrize("shape", ["normal", "heavy", "uniform"])
@pytest.mark.parametrize("rows", [60, 400])
def test_about_one_row_in_a_hundred_is_a_false_alarm_whatever_the_columns(shape, rows):
    draws = np.random.default_rng(rows)
    make = {"normal": draws.standard_normal, "heavy": lambda s: draws.standard_t(2, s), "uniform": draws.random}[shape]
    rates = [flagged(make((rows, 15)), make((500, 15)))[0] for _ in range(40)]
    error = np.std(rates) / np.sqrt(len(rates))
    assert np.mean(rates) < max(SHARE, 1 / rows) + 5 * error
    moved = make((500, 15))
    moved[:, 3] += 200
    share, named = flagged(make((rows, 15)), moved)
    assert share > 0.95
    assert max(set(named), key=named.count) == "x4"


def test_the_margin_is_the_least_that_lets_one_percent_pass():
    column = np.append(np.linspace(0.0, 1.0, 200), 9.0)[:, None]  # 201 rows: one of them may be flagged
    rows = LabelledData(torch.as_tensor(column), torch.zeros(201, 1))
    step = 1 / 199
    without_the_least = float(rows.inputs[1:].std(correction=0))
    margin = float(reach(Source(DataSet("rows", "regression", rows, rows)))["margin"])
    assert margin == pytest.approx(step / without_the_least)
    few = LabelledData(rows.inputs[60:], rows.targets[60:])  # 141 rows: none of them
    spread = float(few.inputs[:-1].std(correction=0))
    margin = float(reach(Source(DataSet("rows", "regression", few, few)))["margin"])
    assert margin == pytest.approx(8.0 / spread)


def test_predict_names_the_column(run, tmp_path):
    draws = np.random.default_rng(0)
    lines = [
        f"{draws.random():.3f},{draws.choice(['red', 'blue'])},2024-03-{1 + row % 28:02d},"
        f"{draws.choice(['yes', 'no'])},{draws.random():.3f}"
        for row in range(150)
    ]
    head = "size,colour,day,old,y"
    (tmp_path / "table.csv").write_text("\n".join([head, *lines]) + "\n")
    words = ("fit", tmp_path / "table.csv", "--target", "y", "--method", "map", "--hidden", "none")
    assert run(*words, "--quiet", "--out", tmp_path / "run").code == 0
    new = [
        "0.5,red,2024-03-14,yes,",
        "1.9,red,2024-03-14,yes,size",
        "-0.9,red,2024-03-14,no,size",
        "0.5,green,2024-03-14,yes,colour",
        "0.5,red,2025-03-14,yes,day",
        ",red,2024-03-14,yes,size",
        "0.5,,2024-03-14,yes,colour",
        "0.5,red,2024-03-14,,old",
    ]
    (tmp_path / "new.csv").write_text("\n".join(["size,colour,day,old,blame", *new]))
    done = run("predict", tmp_path / "run", "--data", tmp_path / "new.csv")
    assert done.code == 0
    for row in csv.DictReader(io.StringIO(done.out)):
        assert row["outside"] == row["blame"]
    own = list(csv.DictReader(io.StringIO(run("predict", tmp_path / "run").out)))
    assert not any(row["outside"] for row in own)


def test_runs_of_earlier_releases_say_nothing(run, fitted):
    from posterity.storage import RunFolder

    assert run("predict", fitted).out.splitlines()[0].endswith(",outside")
    RunFolder(fitted).commit({}, drop=["reach"])
    done = run("predict", fitted)
    assert done.code == 0
    assert "outside" not in done.out.splitlines()[0]
