"""The pages of fit and evaluate: what they compare with, and where they have less to show."""

import json
import re

import pytest
import torch

import posterity as po
from posterity.cli.frame.outside import distances, outside, reach
from posterity.cli.frame.sources import Source
from posterity.datasets import DataSet, LabelledData
from posterity.storage import Part

pytestmark = pytest.mark.cpu
TINY = ("--hidden", "4", "--steps", "30", "--device", "cpu", "--quiet")


@pytest.fixture
def table(tmp_path):
    """A function that writes a table of so many rows, shifted by so much."""

    def write(name, rows, shift=0.0, seed=0):
        x = po.Key(seed).normal((rows, 2)) + shift
        y = 500.0 + 40.0 * x.sum(1) + po.Key(seed + 1).normal((rows,))
        lines = [f"{a:.4f},{b:.4f},{c:.4f}" for (a, b), c in zip(x.tolist(), y.tolist(), strict=True)]
        (tmp_path / name).write_text("\n".join(["one,two,price", *lines]) + "\n")
        return tmp_path / name

    return write


def numbers_of(text):
    return json.loads(re.search(r'id="numbers">(.*?)</script>', text)[1])


def test_pages_of_a_run_and_of_later_rows(run, table, tmp_path):
    file, page = table("rows.csv", 80), tmp_path / "page.html"
    words = ("--target", "price", "--method", "laplace", "--out", tmp_path / "run", *TINY, "--report", page)
    result = run("fit", file, *words)
    assert result.code == 0
    assert f"report: {page}" in result.out.splitlines()
    text = page.read_text(encoding="utf-8")
    assert '<p class="verdict">' in text
    assert [method["word"] for method in numbers_of(text)["methods"]] == ["laplace", "mean", "linear"]
    assert {"curve-laplace-map", "importance", "distance", "targets"} <= set(numbers_of(text)["figures"])
    assert json.loads(run("fit", file, *words, "--json").out)["report"] == str(page)  # of a finished run, too

    later = table("later.csv", 40, shift=4.0, seed=5)
    again = ("evaluate", tmp_path / "run", "--data", later, "--report", page, "--level", "0.66")
    assert run(*again).code == 0
    text = page.read_text(encoding="utf-8")
    assert 0.66 in numbers_of(text)["levels"]
    assert "better than" in re.search(r'<p class="verdict">(.*?)</p>', text)[1] or "No method" in text
    assert len(numbers_of(text)["methods"]) == 3

    file.unlink()
    assert run(*again, "--json").code == 0
    text = page.read_text(encoding="utf-8")
    assert "no baseline to compare with" in text
    assert len(numbers_of(text)["methods"]) == 1


def test_a_run_without_test_rows_shows_its_folds(run, table, tmp_path):
    page = tmp_path / "page.html"
    words = ("--target", "price", "--method", "map", "--cv", "2", "--out", tmp_path / "run", *TINY, "--report", page)
    result = run("fit", table("rows.csv", 40), *words)
    assert (result.code, result.err) == (0, "")
    text = page.read_text(encoding="utf-8")
    assert "2-fold cross-validation" in text
    assert numbers_of(text)["methods"] == []
    assert '<p class="verdict">' not in text


def test_a_page_that_cannot_be_written_is_refused_before_the_fit(run, tmp_path):
    result = run("fit", "line", "--out", tmp_path / "run", "--report", tmp_path / "page.pdf")
    assert result.code == 2
    assert "must be an .html file" in result.err
    assert not (tmp_path / "run").exists()


def test_a_distance_is_beyond_1_where_a_row_is_outside():
    train, rows = po.Key(0).normal((300, 3)), 2.0 * po.Key(1).normal((200, 3))
    data = DataSet("data", "regression", LabelledData(train, train[:, :1]), LabelledData(rows, rows[:, :1]), None)
    part = Part({}, reach(Source(data)))
    away, names = distances(part, Source(data)), outside(part, Source(data))
    assert [bool(name) for name in names] == (away > 1.0).tolist()
    assert 20 < sum(map(bool, names)) < 180
    one = data.train.rows(torch.tensor([0]))
    assert float(distances(part, Source(DataSet("d", "regression", data.train, one, None))).max()) <= 1.0
