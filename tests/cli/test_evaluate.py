"""`posterity evaluate`: scores with intervals, training rows, decisions by cost, abstention and importance."""

import csv
import json
import math
import shutil

import pytest
import torch
from sklearn import metrics as reference

from posterity.cli.frame.columns import scores_and_intervals
from posterity.cli.frame.options import LEVEL
from posterity.cli.frame.sources import Source, row_hashes
from posterity.cli.frame.tasks import training_rows
from posterity.cli.main import main
from posterity.datasets import DataSet, LabelledData
from posterity.metrics import coverage, interval_width
from posterity.numerics.random import Key
from posterity.predictive import ClassPredictive, GaussianPredictive
from posterity.recipes.settings import Settings
from posterity.storage import RunFolder

pytestmark = pytest.mark.cpu

TINY = ("--hidden", "6", "--steps", "40", "--prior-scale", "1", "--device", "cpu")


def write(path, target, values):
    x = Key(1).normal((90, 2), device="cpu")
    with path.open("w", newline="") as file:
        lines = csv.writer(file)
        lines.writerow(["a", "b", "colour", target])
        for row in range(90):
            lines.writerow(
                [f"{x[row, 0]:.5f}", f"{x[row, 1]:.5f}", ("red", "blue", "green")[row % 3], values(x[row], row)]
            )
    return path


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Runs on a table of two classes and on one of numbers."""
    folder = tmp_path_factory.mktemp("evaluate")
    noise = Key(2).normal((90,), device="cpu").tolist()
    write(folder / "bought.csv", "bought", lambda x, row: "yes" if float(x[0]) + noise[row] > 0.8 else "no")
    write(folder / "price.csv", "price", lambda x, row: f"{1000 + 300 * float(x[0]) + 50 * noise[row]:.4f}")
    for name in ("bought", "price"):
        words = ("--target", name, "--method", "map", "--out", str(folder / name), *TINY, "--quiet")
        assert main(["fit", str(folder / f"{name}.csv"), *words]) == 0
    return folder


@pytest.fixture
def evaluated(run, folders):
    def call(name, *words):
        result = run("evaluate", folders / name, *words, "--json")
        assert result.code == 0, result.err
        return json.loads(result.out)

    return call


def predictions(run, folders, name, *words):
    return json.loads(run("predict", folders / name, *words, "--json").out)


def test_scores_of_classes_are_those_of_scikit_learn(run, folders, evaluated):
    document, told = evaluated("bought"), predictions(run, folders, "bought")
    columns = {name: [row[slot] for row in told["rows"]] for slot, name in enumerate(told["columns"])}
    labels = [word == "yes" for word in columns["bought"]]
    scores, probability = document["scores"], columns["p_yes"]
    answers = [word == "yes" for word in columns["prediction"]]
    assert scores["auroc"] == pytest.approx(reference.roc_auc_score(labels, probability))
    assert scores["average_precision"] == pytest.approx(reference.average_precision_score(labels, probability))
    assert scores["brier"] == pytest.approx(2 * reference.brier_score_loss(labels, probability), rel=1e-5)
    assert scores["test_nll"] == pytest.approx(reference.log_loss(labels, probability), rel=1e-5)
    assert scores["balanced_accuracy"] == pytest.approx(reference.balanced_accuracy_score(labels, answers))
    assert document["confusion"]["counts"] == reference.confusion_matrix(labels, answers).tolist()
    assert document["confusion"]["classes"] == ["no", "yes"]
    assert document["decisions"] is None
    assert document["importance"] is None


def test_scores_of_numbers_are_in_the_units_of_the_file(run, folders, evaluated):
    document, told = evaluated("price"), predictions(run, folders, "price")
    columns = {name: [row[slot] for row in told["rows"]] for slot, name in enumerate(told["columns"])}
    y, mean = [float(value) for value in columns["price"]], columns["mean"]
    inside = [low <= value <= high for low, value, high in zip(columns["lower"], y, columns["upper"], strict=True)]
    widths = [high - low for low, high in zip(columns["lower"], columns["upper"], strict=True)]
    scores = document["scores"]
    assert scores["mae"] == pytest.approx(reference.mean_absolute_error(y, mean), rel=1e-5)
    assert scores["r2"] == pytest.approx(reference.r2_score(y, mean), rel=1e-5)
    assert scores["coverage"] == pytest.approx(sum(inside) / len(inside))
    assert scores["width"] == pytest.approx(sum(widths) / len(widths), rel=1e-5)
    assert 0 < scores["crps"] < scores["mae"]
    for key, ends in document["intervals"].items():
        assert ends[0] <= scores[key] <= ends[1]
    assert document["abstention"]["risks"][0] == pytest.approx(scores["rmse"])
    assert document["confusion"] is None


def test_the_table_has_every_score_with_its_interval(run, folders):
    text = run("evaluate", folders / "price").out
    for heading in ("test NLL", "RMSE", "MAE", "R2", "CRPS", "coverage", "interval width", "95 % interval", "MAP"):
        assert heading in text
    text = run("evaluate", folders / "bought", "--costs", "1,4").out
    for words in ("PR-AUC (yes)", "true class, by costs", "yes from probability 0.2 on", "error rate where only"):
        assert words in text


def test_rows_that_were_fitted_are_recognised(run, folders, evaluated, tmp_path):
    assert evaluated("bought")["fitted_rows"] == 0
    assert evaluated("bought", "--data", folders / "bought.csv")["fitted_rows"] == 72
    lines = (folders / "bought.csv").read_text().splitlines()
    (tmp_path / "some.csv").write_text("\n".join([lines[0], *reversed(lines[1:31]), "9,9,red,yes"]))
    document = evaluated("bought", "--data", tmp_path / "some.csv")
    assert 15 <= document["fitted_rows"] <= 30
    assert document["rows"] == 31
    text = run("evaluate", folders / "bought", "--data", folders / "bought.csv").out
    assert "72 of these 90 rows were fitted" in text
    assert "were fitted" not in run("evaluate", folders / "bought").out


def test_hashes_of_rows():
    rows = LabelledData(torch.tensor([[1.0, 2.0], [1.0, 2.0], [2.0, 1.0]]), torch.tensor([0, 1, 0]))
    hashes = row_hashes(rows)
    assert len(hashes.unique()) == 3
    assert torch.equal(row_hashes(rows.rows(torch.tensor([2, 0]))), hashes[[2, 0]])


def test_a_folder_whose_hashes_are_damaged_is_refused(run, folders, tmp_path):
    folder = shutil.copytree(folders / "bought", tmp_path / "run")
    part = RunFolder(folder).read("rows")
    RunFolder(folder).commit({"rows": type(part)({}, {"hashes": torch.zeros(3)})})
    result = run("evaluate", folder)
    assert result.code == 4
    assert "part 'rows'" in result.err


def test_decisions_by_cost(evaluated, run, folders):
    document = evaluated("bought", "--costs", "1,4")
    decided = document["decisions"]
    told = predictions(run, folders, "bought")
    slot, label = told["columns"].index("p_yes"), told["columns"].index("bought")
    cost = sum(
        (1.0 if row[slot] > 0.2 else 0.0) if row[label] == "no" else (0.0 if row[slot] > 0.2 else 4.0)
        for row in told["rows"]
    )
    assert decided["threshold"] == pytest.approx(0.2)
    assert decided["mean_cost"] == pytest.approx(cost / len(told["rows"]))
    assert decided["interval"][0] <= decided["mean_cost"] <= decided["interval"][1]
    assert evaluated("bought", "--costs", "0,1,4,0")["decisions"] == decided
    wide = evaluated("bought", "--costs", "0,1,0.1,1,0,0.1")["decisions"]["confusion"]
    assert wide["decisions"] == ["no", "yes", "abstain"]
    assert sum(map(sum, wide["counts"])) == document["rows"]


@pytest.mark.parametrize(
    ("name", "costs", "words"),
    [
        ("price", "1,4", "--costs is for classes"),
        ("bought", "1,x", "numbers with commas"),
        ("bought", "1,2,3", "4 numbers for 2 classes, or 2. Got 3"),
        ("bought", "1,-4", "mistakes cost more"),
    ],
)
def test_costs_that_cannot_be_used(run, folders, name, costs, words):
    result = run("evaluate", folders / name, "--costs", costs)
    assert (result.code, result.out) == (2, "")
    assert words in result.err


def test_importance_is_by_column_of_the_file(evaluated, run, folders):
    rows = evaluated("price", "--importance", "--data", folders / "price.csv")["importance"]
    assert rows[0]["column"] == "a"
    assert {row["column"] for row in rows} == {"a", "b", "colour"}
    assert rows[0]["nll_rise"] > 5 * rows[0]["standard_error"] > 0
    assert [row["nll_rise"] for row in rows] == sorted((row["nll_rise"] for row in rows), reverse=True)
    assert "permuted column" in run("evaluate", folders / "price", "--importance").out


def test_rows_of_one_class_have_no_area(evaluated, folders, tmp_path, run):
    lines = (folders / "bought.csv").read_text().splitlines()
    (tmp_path / "no.csv").write_text("\n".join([lines[0], *(line for line in lines[1:] if line.endswith("no"))]))
    document = evaluated("bought", "--data", tmp_path / "no.csv")
    assert document["scores"]["auroc"] is None
    assert document["intervals"]["auroc"] is None
    assert document["scores"]["accuracy"] is not None
    assert run("evaluate", folders / "bought", "--data", tmp_path / "no.csv").code == 0
    (tmp_path / "one.csv").write_text("\n".join(lines[:2]))
    assert evaluated("bought", "--data", tmp_path / "one.csv")["intervals"]["test_nll"] is None


def test_balanced_class_weights_count_every_class_alike(run, folders, tmp_path):
    targets = torch.tensor([0] * 6 + [1] * 2 + [2] * 4)
    rows = LabelledData(torch.zeros(12, 1), targets)
    weights = training_rows(Settings(class_weight="balanced"), DataSet("made", "classification", rows, rows))[2]
    assert [float(weights[targets == label].sum()) for label in range(3)] == pytest.approx([4.0] * 3)
    assert len(training_rows(Settings(), DataSet("made", "classification", rows, rows))) == 2
    words = ("--target", "bought", "--method", "map", "--class-weight", "balanced", *TINY, "--quiet")
    assert run("fit", folders / "bought.csv", *words, "--out", tmp_path / "run").code == 0
    shares = []
    for folder in (folders / "bought", tmp_path / "run"):
        told = json.loads(run("predict", folder, "--json").out)
        slot = told["columns"].index("p_yes")
        shares.append(sum(row[slot] for row in told["rows"]) / len(told["rows"]))
    assert shares[1] > shares[0] + 0.05  # the rarer class is taken for as frequent as the other
    assert run("fit", folders / "bought.csv", *words, "--out", folders / "bought").code == 4  # another run
    result = run(
        "fit", folders / "price.csv", "--target", "price", "--class-weight", "balanced", "--out", tmp_path / "no"
    )
    assert result.code == 2
    assert "--class-weight is for classes" in result.err


def source(task, targets):
    rows = LabelledData(torch.zeros(len(targets), 1), targets)
    return Source(DataSet("made", task, rows, rows, ("a", "b") if task == "classification" else None))


def test_shared_intervals_are_those_of_the_metrics():
    y = Key(3).normal((50, 1), torch.float64, "cpu")
    for scale in (1.0, 2.0):  # another predictive is not taken for the one before
        pred = GaussianPredictive(torch.zeros_like(y), torch.zeros_like(y), torch.tensor([scale**2]).double())
        values, _ = scores_and_intervals(pred, source("regression", y))
        assert values["coverage"] == pytest.approx(coverage(pred, y, LEVEL))
        assert values["width"] == pytest.approx(interval_width(pred, y, LEVEL))


def test_infinite_scores_have_no_interval():
    pred = ClassPredictive(torch.tensor([[1.0, 0.0]] * 5))
    values, ends = scores_and_intervals(pred, source("classification", torch.tensor([0, 0, 0, 0, 1])))
    assert values["test_nll"] == math.inf
    assert ends["test_nll"] is None
