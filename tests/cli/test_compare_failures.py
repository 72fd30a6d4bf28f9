"""`posterity compare`: methods that fail, interruptions, the verdict, and what is told of inputs far away."""

import json
import re
from dataclasses import replace
from html import escape

import pytest
import torch
from clitables import rows

from posterity.cli.frame import scores, tasks
from posterity.cli.frame.options import ReadingOptions, TableOptions
from posterity.cli.frame.outside import numeric_features
from posterity.errors import BadData, Diverged, NotPositiveDefinite
from posterity.posteriors import Point
from posterity.recipes.settings import Settings

pytestmark = pytest.mark.cpu
TINY = ("--hidden", "6", "--steps", "40", "--prior-scale", "1", "--device", "cpu")


def failing(monkeypatch, errors):
    """Let stages raise these errors, by name, and count those that run."""
    original, seen = tasks.run_stage, []

    def run_stage(name, *arguments, **options):
        seen.append(name)
        if name in errors:
            raise errors[name]
        return original(name, *arguments, **options)

    monkeypatch.setattr(tasks, "run_stage", run_stage)
    return seen


def diverged():
    error = Diverged("loss is not finite at step 4.", step=4, tensor="loss")
    error.add_note("try a smaller --step-size than 0.01.")
    return error


ERRORS = {
    "diverged": (diverged, 5, "diverged at step 4"),
    "expected": (lambda: NotPositiveDefinite("the matrix is not. Do that."), 1, "the matrix is not"),
    "memory": (MemoryError, 1, "out of memory"),
    "torch": (lambda: RuntimeError("mat1 and mat2\nshapes"), 1, "RuntimeError: mat1 and mat2 shapes"),
}


@pytest.mark.parametrize("kind", ERRORS)
def test_a_method_that_fails_is_named_and_the_others_are_kept(run, monkeypatch, kind):
    make, _, reason = ERRORS[kind]
    seen = failing(monkeypatch, {"swag": make()})
    words = ("compare", "line", *TINY, "--methods", "map,swag,laplace")
    result = run(*words)
    assert result.code == 0
    assert seen == ["map", "swag", "laplace"]
    table = rows(result.out)
    assert list(table) == ["mean", "linear", "MAP", f"SWAG ({reason})", "Laplace"]
    assert table[f"SWAG ({reason})"] == ["-"] * 5
    assert "SWAG starts from" not in result.out
    assert f"SWAG: {'' if kind in ('diverged', 'expected') else 'unexpected error: '}" in result.err
    document = json.loads(run(*words, "--json").out)
    by_map, by_swag, by_laplace = document["methods"]
    assert by_map["failed"] is None
    assert by_laplace["starts_from"] == "map"
    assert (by_swag["reason"], by_swag["test_nll"], by_swag["best"]) == (reason, None, [])
    assert document["verdict"]["take"] != "swag"


def test_what_depends_on_a_failed_stage_says_so(run, monkeypatch, tmp_path):
    seen = failing(monkeypatch, {"map": diverged()})
    page = tmp_path / "page.html"
    words = ("--methods", "laplace,ensemble,swag", "--report", page, "--figure", tmp_path / "a.png")
    result = run("compare", "sine", *TINY, *words, "--json")
    assert result.code == 0
    assert seen == ["map", "ensemble"]  # it is not tried again
    laplace, ensemble, swag = json.loads(result.out)["methods"]
    assert laplace["reason"] == swag["reason"] == "MAP failed"
    assert laplace["failed"] == "it starts from MAP, which failed: loss is not finite at step 4."
    assert ensemble["failed"] is None
    assert result.err.count("error: MAP: loss is not finite") == 1
    assert "hint: try a smaller --step-size" in result.err
    assert '<td class="failed" colspan="5">MAP failed</td>' in page.read_text(encoding="utf-8")
    assert (tmp_path / "a.png").exists()


@pytest.mark.parametrize("kind", ERRORS)
def test_where_all_fail_the_exit_code_is_that_of_the_first(run, monkeypatch, kind, tmp_path):
    make, code, _ = ERRORS[kind]
    failing(monkeypatch, {"map": make(), "ensemble": BadData("other")})
    result = run("compare", "line", *TINY, "--methods", "laplace,ensemble", "--report", tmp_path / "page.html")
    assert result.code == code
    assert list(rows(result.out)) == ["mean", "linear", "Laplace (MAP failed)", "Ensemble (other)"]
    assert "Take linear: NLL" in result.out.splitlines()[-1]
    assert not (tmp_path / "page.html").exists()


def test_debug_raises_what_a_method_raises(run, monkeypatch):
    failing(monkeypatch, {"laplace": ValueError("inside")})
    with pytest.raises(ValueError, match="inside"):
        run("compare", "line", *TINY, "--debug")


def test_scores_that_are_not_finite_are_a_failure(run, monkeypatch):
    original = tasks.run_stage

    def spoiled(name, *arguments, **options):
        stage = original(name, *arguments, **options)
        if name == "map":
            return stage
        far = Point(stage.posterior.joint, torch.full_like(stage.posterior.point(), 1e30))
        return replace(stage, posterior=far)

    monkeypatch.setattr(tasks, "run_stage", spoiled)
    result = run("compare", "line", *TINY, "--json")
    assert result.code == 0
    by_map, by_laplace = json.loads(result.out)["methods"]
    assert by_map["failed"] is None
    assert by_laplace["failed"].startswith("its test nll is inf")


def test_an_interruption_keeps_what_is_finished(run, monkeypatch, tmp_path):
    seen = failing(monkeypatch, {"swag": KeyboardInterrupt()})
    words = ("--methods", "map,swag,ensemble", "--report", tmp_path / "page.html")
    result = run("compare", "line", *TINY, *words)
    assert result.code == 130
    assert seen == ["map", "swag"]
    table = rows(result.out)
    assert list(table) == ["mean", "linear", "MAP", "SWAG (interrupted)", "Ensemble (not run)"]
    assert float(table["MAP"][0].rstrip("*")) > 0
    assert result.err.splitlines()[-1] == "interrupted"
    assert not (tmp_path / "page.html").exists()


def test_the_last_line_says_which_method_to_take(run):
    words = ("compare", "line", "--steps", "40", "--device", "cpu", "--methods", "map,conjugate")
    last = run(*words).out.splitlines()[-1]
    verdict = json.loads(run(*words, "--json").out)["verdict"]
    assert last == verdict["sentence"]
    assert verdict["rows"] == 500
    assert re.search(r"95 % interval -?\d+\.\d+ to -?\d+\.\d+, 500 test rows\)", last)
    # The truth is linear with known noise: nothing is surely better than the linear baseline.
    assert verdict["take"] == "linear"


def test_confidence_far_away_and_foreign_inputs_are_told(run):
    result = run("compare", "two-moons", "--hidden", "10", "--steps", "300", "--device", "cpu", "--json")
    by_map, by_laplace = (row["far"] for row in json.loads(result.out)["methods"])
    assert by_map["confidence"] > 0.98  # a point estimate is sure
    assert by_laplace["confidence"] < by_map["confidence"]
    assert by_laplace["auroc"] > by_map["auroc"]
    out = run("compare", "sine", *TINY).out
    assert re.search(r"Far from the data .*: MAP 1\.00, Laplace \d+\.\d\d\.", out)
    assert re.search(r"by their standard deviation, AUROC: MAP 0\.50, Laplace 0\.\d\d;", out)


def test_a_gap_between_the_training_rows_is_not_among_them():
    task = tasks.make_task("waves", ("map",), Settings(hidden=(4,)), TableOptions(), ReadingOptions(), "cpu")
    away, inside = task.data.test.inputs[:, 0].abs(), scores.among_training_rows(task.data)
    assert not bool(inside[(away < 0.5) | (away > 3.5)].any())
    assert bool(inside[(away > 1.5) & (away < 2.5)].all())


def test_the_verdict_names_who_tells_inputs_from_elsewhere():
    results = {"MAP": {"auroc": 0.1, "confidence": 1.0}, "Laplace": {"auroc": 0.75, "confidence": 0.9}}
    expected = " Where inputs may come from elsewhere, Laplace tells them better: AUROC 0.75 against 0.10."
    assert scores.elsewhere("MAP", results) == expected
    better = " It also tells inputs from elsewhere better than MAP: AUROC 0.75 against 0.10."
    assert scores.elsewhere("Laplace", results) == better
    assert scores.elsewhere("linear", results) == ""
    near = {"MAP": {"auroc": 0.7}, "Laplace": {"auroc": 0.75}}
    blind = {"MAP": {"auroc": 0.1}, "Laplace": {"auroc": 0.4}}  # worse than chance is no gain
    assert scores.elsewhere("MAP", near) == scores.elsewhere("MAP", blind) == ""
    assert scores.elsewhere("Laplace", near) == scores.elsewhere("Laplace", blind) == ""


def test_only_numbers_are_moved_far_away(tmp_path):
    file = tmp_path / "data.csv"
    lines = [f"{x},{'red' if x % 3 else 'blue'},{'yes' if x % 2 else 'no'},{x % 7}" for x in range(60)]
    file.write_text("\n".join(["a,colour,flag,y", *lines]))
    columns, reading = TableOptions(target="y", task="regression"), ReadingOptions()
    task = tasks.make_task(str(file), ("map",), Settings(hidden=(4,)), columns, reading, "cpu")
    numeric = numeric_features(task.source.preprocessing, task.data.train.inputs.shape[1])
    assert numeric.tolist() == [True, False, False, False]
    train, test = task.data.train.inputs, task.data.test.inputs
    foreign = scores._foreign(task.data, numeric)
    assert bool(((foreign[:, 0] < train[:, 0].min()) | (foreign[:, 0] > train[:, 0].max())).all())
    for moved in (scores._pushed_out(task.data, numeric), foreign):
        assert torch.equal(moved[:, 1:], test[:, 1:])
    away = (scores._pushed_out(task.data, numeric)[:, 0] - train[:, 0].mean()).abs()
    torch.testing.assert_close(away, (5 * (train[:, 0] - train[:, 0].mean()).abs().max()).expand_as(away))


def test_a_report_has_the_verdict_and_the_baselines(run, tmp_path):
    path = tmp_path / "report.html"
    document = json.loads(run("compare", "two-moons", *TINY, "--report", path, "--json", "--quiet").out)
    text = path.read_text(encoding="utf-8")
    assert f'<p class="verdict">{escape(document["verdict"]["sentence"])}</p>' in text
    assert text.count('<tr class="baseline">') == 2
    assert "Foreign inputs" in text
