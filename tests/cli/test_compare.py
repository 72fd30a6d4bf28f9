"""`posterity compare`: the table, the JSON document and the figure."""

import base64
import json
import re
from dataclasses import replace
from html import escape

import numpy as np
import pytest
import torch
from clitables import rows

from posterity.cli.frame import tasks
from posterity.cli.frame.columns import best
from posterity.datasets import load
from posterity.report import files
from posterity.report.numbers import with_ends

pytestmark = pytest.mark.cpu
TINY = ("--hidden", "6", "--steps", "40", "--prior-scale", "1", "--device", "cpu")


@pytest.fixture
def stages_run(monkeypatch):
    """The stages that are run, and what each gave."""
    seen = []
    original = tasks.run_stage

    def record(name, *arguments, **options):
        seen.append((name, original(name, *arguments, **options)))
        return seen[-1][1]

    monkeypatch.setattr(tasks, "run_stage", record)
    return seen


def test_the_table_has_a_row_for_each_method_and_marks_the_best(run):
    result = run("compare", "two-moons", *TINY)
    assert result.code == 0
    table = rows(result.out)
    assert list(table) == ["class frequencies", "logistic regression", "MAP", "Laplace"]
    for heading in ("method", "test NLL", "ECE", "accuracy", "seconds"):
        assert heading in result.out
    assert sum("*" in cells[0] for cells in table.values()) == 1
    better = min(table, key=lambda name: float(table[name][0].rstrip("*")))
    assert table[better][0].endswith("*")
    assert table["Laplace"][-1].startswith("+")
    assert not table["MAP"][-1].startswith("+")
    assert "500 training rows, 2,000 test rows, seed 0" in result.out
    assert "Laplace starts from the same MAP; its seconds come on top." in result.out
    assert "2-6-2 tanh, 32 weights" in result.out


def test_the_json_document_has_what_the_table_has(run):
    result = run("compare", "two-moons", *TINY, "--json", "--seed", "3")
    document = json.loads(result.out)
    first, second = document["methods"]
    assert (first["method"], second["method"]) == ("map", "laplace")
    assert (first["starts_from"], second["starts_from"]) == (None, "map")
    scores = {"test_nll", "ece", "accuracy", "auroc", "average_precision", "brier", "balanced_accuracy"}
    common = scores | {"intervals", "seconds", "best", "failed", "reason"}
    assert first["intervals"].keys() == scores
    for key in scores - {"ece"}:  # whose bootstrap would be biased
        lower, upper = first["intervals"][key]
        assert lower <= first[key] <= upper
    assert first["intervals"]["ece"] is None
    assert first.keys() == common | {
        "method",
        "far",
        "chosen",
        "evidence",
        "kl_weight",
        "chains",
        "negative_limits",
        "starts_from",
    }
    frequencies, logistic = document["baselines"]
    assert (frequencies["baseline"], logistic["baseline"]) == ("frequencies", "logistic")
    assert frequencies.keys() == logistic.keys() == common | {"baseline"}
    assert "test_nll" in first["best"] + second["best"] + logistic["best"]
    words = {"take", "against", "difference", "lower", "upper", "level", "rows", "sentence"}
    assert document["verdict"].keys() == words
    assert document["settings"]["seed"] == 3
    assert document["network"]["sizes"] == [2, 6, 2]
    assert (document["train_rows"], document["test_rows"]) == (500, 2000)
    assert document["figure"] is None
    assert "MAP, 40 steps, loss" in result.err


def test_quiet_is_quiet(run):
    assert run("compare", "line", "--steps", "5", "--device", "cpu", "--quiet").err == ""


def test_laplace_starts_from_the_map_of_the_comparison(run, stages_run):
    assert run("compare", "two-moons", *TINY).code == 0
    (first, map_stage), (second, laplace) = stages_run
    assert (first, second) == ("map", "laplace")
    assert torch.equal(map_stage.posterior.point(), laplace.posterior.point())


@pytest.mark.parametrize(
    ("methods", "seconds"),
    [("map,laplace", ["10.00", "+1.00"]), ("laplace,map", ["+1.00", "10.00"]), ("laplace", ["11.00"])],
)
def test_map_is_fitted_once_and_its_seconds_are_counted_once(run, monkeypatch, methods, seconds):
    original, seen = tasks.run_stage, []

    def timed(name, *arguments, **options):
        seen.append(name)
        return replace(original(name, *arguments, **options), seconds={"map": 10.0, "laplace": 1.0}[name])

    monkeypatch.setattr(tasks, "run_stage", timed)
    result = run("compare", "two-moons", *TINY, "--methods", methods)
    assert seen == ["map", "laplace"]
    assert [cells[-1] for cells in rows(result.out).values()][2:] == seconds  # after the baselines


def test_regression_has_its_own_columns(run):
    result = run("compare", "line", "--methods", "map,laplace,conjugate", "--steps", "3000", "--no-tune")
    table = rows(result.out)
    assert "RMSE" in result.out
    assert "accuracy" not in result.out
    # A linear model with Gaussian noise: Laplace at the mode is exact.
    nll = {name: float(cells[0].rstrip("*")) for name, cells in table.items()}
    assert nll["Laplace"] == pytest.approx(nll["Conjugate"], abs=2e-3)
    assert nll["MAP"] > nll["Conjugate"]


def test_expectation_propagation_is_exact_on_a_line_and_takes_two_classes(run):
    words = ("--noise", "0.5", "--prior-scale", "1", "--json")
    exact, propagated = json.loads(run("compare", "line", "--methods", "conjugate,ep", *words).out)["methods"][-2:]
    for name in ("test_nll", "rmse"):
        assert propagated[name] == pytest.approx(exact[name], rel=1e-5)
    (labels,) = json.loads(run("compare", "two-moons", "--methods", "ep", "--hidden", "none", "--json").out)["methods"][
        -1:
    ]
    assert labels["accuracy"] > 0.8
    assert labels["evidence"]["log_evidence"] < 0.0


def test_the_same_seed_gives_the_same_numbers_and_another_one_does_not(run):
    def values(seed):
        document = json.loads(run("compare", "blobs", *TINY, "--json", "--seed", seed).out)
        return [{key: row[key] for key in ("test_nll", "ece", "accuracy")} for row in document["methods"]]

    assert values(1) == values(1)
    assert values(1) != values(2)


def test_temperature_changes_laplace_and_leaves_the_mode(run):
    def nll(*options):
        document = json.loads(run("compare", "two-moons", *TINY, "--json", *options).out)
        return [row["test_nll"] for row in document["methods"]]

    warm, cold, tempered = nll(), nll("--temperature", "0.01"), nll("--eta", "0.01")
    assert cold[0] == pytest.approx(warm[0], abs=0.02)
    assert abs(cold[1] - cold[0]) < 0.5 * abs(warm[1] - warm[0])  # a hundredth of the variance
    assert tempered[1] != cold[1]


def test_the_generator_and_the_threads_of_the_caller_are_left_alone(run, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    threads, used = torch.get_num_threads(), []
    original = tasks.infer
    monkeypatch.setattr(tasks, "infer", lambda *a, **k: used.append(torch.get_num_threads()) or original(*a, **k))
    try:
        torch.set_num_threads(2)
        torch.manual_seed(5)
        expected = torch.rand(3)
        torch.manual_seed(5)
        assert run("compare", "line", *TINY).code == 0
        assert torch.equal(torch.rand(3), expected)
        assert torch.get_num_threads() == 2
        monkeypatch.setenv("OMP_NUM_THREADS", "2")
        assert run("compare", "line", *TINY, "--methods", "map").code == 0
    finally:
        torch.set_num_threads(threads)
    assert used == [1, 1, 2]  # a small network is faster on one, unless the user says otherwise


def test_the_seed_decides_the_starting_weights(run, monkeypatch):
    starts = []
    original = tasks.infer
    monkeypatch.setattr(tasks, "infer", lambda m, j, *a, **k: starts.append(j.initial()) or original(m, j, *a, **k))
    for seed in (0, 0, 1):
        assert run("compare", "line", *TINY, "--methods", "map", "--seed", seed).code == 0
    assert torch.equal(starts[0], starts[1])
    assert not torch.equal(starts[0], starts[2])


@pytest.mark.parametrize("data", ["two-moons", "sine", "blobs"])
def test_the_figure_is_drawn_and_its_path_printed(run, tmp_path, data):
    path = tmp_path / "new" / f"{data}.png"
    result = run("compare", data, *TINY, "--figure", path)
    assert result.code == 0
    assert path.read_bytes().startswith(b"\x89PNG")
    assert f"figure: {path}" in result.out.splitlines()
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]


def test_without_matplotlib_nothing_is_fitted(run, monkeypatch, stages_run, tmp_path):
    monkeypatch.setattr(files, "find_spec", lambda name: None)
    result = run("compare", "line", "--figure", tmp_path / "line.png")
    assert result.code == 1
    assert result.err == "error: Figures need matplotlib. Install it with: pip install 'posterity[report]'.\n"
    assert stages_run == []


def test_a_figure_that_cannot_be_written_is_one_line(run, tmp_path):
    (tmp_path / "file").write_text("")
    result = run(
        "compare", "line", "--steps", "5", "--quiet", "--device", "cpu", "--figure", tmp_path / "file" / "a.png"
    )
    assert result.code == 1
    assert result.err.startswith("error: Cannot write ")
    assert len(result.err.splitlines()) == 1


def test_the_defaults_do_well_on_two_moons(run):
    result = run("compare", "two-moons", "--device", "cpu", "--json")
    by_map, by_laplace = json.loads(result.out)["methods"]
    # A good fit has 0.08 to 0.1; the standard error over 2000 rows is about 0.005.
    assert by_map["test_nll"] < 0.11
    assert by_laplace["test_nll"] < 0.12
    assert min(by_map["accuracy"], by_laplace["accuracy"]) > 0.955


def test_best_looks_at_what_is_shown():
    data = load("two-moons")
    rows = {
        "a": {"test_nll": 0.10001, "ece": 0.3, "accuracy": 0.9, "auroc": 0.9},
        "b": {"test_nll": 0.10002, "ece": 0.2, "accuracy": 0.8, "auroc": None},
        "c": {"test_nll": 0.2, "ece": 0.2, "accuracy": 0.7, "auroc": 0.8},
    }
    assert best(rows, data) == {"test_nll": ("a", "b"), "ece": ("b", "c"), "accuracy": ("a",), "auroc": ("a",)}


def test_the_best_coverage_is_the_nearest_to_its_level():
    rows = {
        name: {"test_nll": 1.0, "rmse": 1.0, "r2": 0.5, "coverage": value}
        for name, value in {"mean": 0.95, "linear": 0.9, "map": 0.96, "laplace": 1.0}.items()
    }
    assert best(rows, load("line"))["coverage"] == ("map",)  # the mean is calibrated by what it is


def test_there_is_no_best_where_all_are_equal():
    row = {"test_nll": 1.0, "rmse": 2.0, "r2": 0.5, "coverage": 0.9}
    none = dict.fromkeys(row, ())
    assert best({"a": row, "b": row}, load("line")) == none
    assert best({"a": row}, load("line")) == none


def numbers_of(path):
    """The numbers in a page, with which its script draws."""
    return json.loads(re.search(r'id="numbers">(.*?)</script>', path.read_text(encoding="utf-8"))[1])


@pytest.mark.parametrize(
    ("data", "field"), [("two-moons", "map"), ("sine", "line"), ("blobs", "map"), ("line", "line")]
)
def test_the_report_holds_the_table_and_the_numbers_of_its_figures(run, tmp_path, data, field):
    path = tmp_path / "new" / "report.html"
    result = run("compare", data, *TINY, "--report", path)
    assert result.code == 0
    assert f"report: {path}" in result.out.splitlines()
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]
    text = path.read_text(encoding="utf-8")
    assert "<img" not in text
    assert len(text) < 1_500_000
    table, found = rows(result.out), numbers_of(path)
    assert text.count('<td class="best">') == sum(cell.endswith("*") for cells in table.values() for cell in cells)
    assert {method["label"] for method in found["methods"]} == set(table)
    assert "map" in found[field]["methods"]
    assert {"distance", "curve-map-map"} <= set(found["figures"])
    for name in found["figures"]:
        assert f'data-figure="{name}"' in text
    assert f"posterity compare {data} {' '.join(TINY)} --report {path}" in text


def test_the_report_of_a_file_is_in_its_units_and_escapes_its_names(run, tmp_path):
    file, path = tmp_path / "a&b <i>.csv", tmp_path / "report.html"
    lines = [f"{x},{x * x % 7},{'' if x == 3 else x % 5},{1000 * x}" for x in range(60)]
    file.write_text("\n".join(["a,b,<script>alert(1)</script>,$price$", *lines]))
    result = run("compare", file, "--target", "$price$", *TINY, "--report", path, "--json", "--quiet")
    assert result.code == 0
    document = json.loads(result.out)
    assert document["report"] == str(path)
    text = path.read_text(encoding="utf-8")
    assert text.count("<script") == 2  # the numbers and the script of the page
    assert "<i>" not in text
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in text
    assert "RMSE, in units of $price$, are better" in text
    found = numbers_of(path)
    assert "line" not in found  # three inputs
    assert found["unit"] == "$price$"
    assert found["rows"][0].startswith("line ")
    targets = np.frombuffer(base64.b64decode(found["targets"]))
    assert set(targets.round(2)) <= {1000.0 * x for x in range(60)}


def test_classes_with_dollars_are_drawn_as_they_are_written(run, tmp_path):
    file, path = tmp_path / "data.csv", tmp_path / "report.html"
    lines = [f"{x},{x * x % 7},{('$a_$', '$^$')[x % 2]}" for x in range(60)]
    file.write_text("\n".join(["a,b,c", *lines]))
    result = run("compare", file, "--target", "c", *TINY, "--report", path, "--quiet")
    assert (result.code, result.err) == (0, "")
    assert numbers_of(path)["classes"] == ["$^$", "$a_$"]


def test_a_report_needs_no_matplotlib(run, monkeypatch, tmp_path):
    monkeypatch.setattr(files, "find_spec", lambda name: None)
    result = run("compare", "line", *TINY, "--methods", "map", "--report", tmp_path / "line.html", "--quiet")
    assert (result.code, result.err) == (0, "")


@pytest.mark.parametrize(("name", "words"), [("a.pdf", "must be an .html file"), ("folder.html", "must be a file")])
def test_a_report_that_cannot_be_written_is_refused_before_any_fit(run, stages_run, tmp_path, name, words):
    (tmp_path / "folder.html").mkdir()
    result = run("compare", "line", "--report", tmp_path / name)
    assert result.code == 2
    assert words in result.err
    assert stages_run == []


def test_a_report_of_one_method_marks_the_best_of_it_and_the_baselines(run, tmp_path):
    path = tmp_path / "report.html"
    result = run("compare", "line", *TINY, "--methods", "map", "--report", path, "--quiet", "--json")
    assert result.code == 0
    text = path.read_text(encoding="utf-8")
    assert "<h1>MAP on line</h1>" in text
    linear = next(row for row in json.loads(result.out)["baselines"] if row["baseline"] == "linear")
    assert linear["best"] == ["test_nll", "rmse", "r2", "coverage"]
    assert f'<td class="best">{with_ends(linear["rmse"], linear["intervals"]["rmse"])[0]}<' in text
    assert escape(json.loads(result.out)["verdict"]["sentence"]) in text
