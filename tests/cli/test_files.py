"""Files with a target column: `compare`, `fit`, `predict` and `evaluate` from the bytes to the units of the file."""

import csv
import io
import json
import math

import pandas as pd
import pytest
import torch

import posterity as po
from posterity.cli.frame import tasks
from posterity.datasets import Preprocessing, prepare, read_table
from posterity.storage import RunFolder, decode

pytestmark = pytest.mark.cpu
TINY = ("--hidden", "4", "--steps", "60", "--prior-scale", "1", "--device", "cpu")

PREDICTED = ["mean", "std", "lower", "upper", "aleatoric_std", "epistemic_std", "outside"]


def write(path, header, rows):
    path.write_text("\n".join(",".join(map(str, row)) for row in [header, *rows]) + "\n")
    return path


@pytest.fixture
def prices(tmp_path):
    """A regression in large units: price is about 1000 + 200 size."""
    noise = torch.randn(60, generator=torch.Generator().manual_seed(0)).tolist()
    rows = [(i, f"{i / 10:.1f}", ("red", "blue")[i % 2], f"{1000 + 20 * i + 30 * n:.2f}") for i, n in enumerate(noise)]
    return write(tmp_path / "prices.csv", ("id", "size", "colour", "price"), rows)


@pytest.fixture
def fruit(tmp_path):
    rows = [(f"{i % 7}.5", f"{i % 5}.25", "apple" if i % 7 > 3 else "pear tree") for i in range(70)]
    return write(tmp_path / "fruit.csv", ("weight", "length", "kind"), rows)


@pytest.fixture
def fitted_prices(run, prices, tmp_path):
    words = ("--target", "price", "--drop", "id", "--noise", "30", "--out", tmp_path / "prices-run")
    result = run("fit", prices, *words, *TINY)
    assert result.code == 0
    return tmp_path / "prices-run"


def table(text):
    return list(csv.DictReader(io.StringIO(text)))


def test_scores_are_in_the_units_of_the_file(run, prices):
    result = run("compare", prices, "--target", "price", "--drop", "id", *TINY, "--json")
    assert result.code == 0
    document = json.loads(result.out)
    prepared = prepare(read_table(prices, "price", drop=["id"]), 0.2, 0)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        net = po.networks.MLP((3, 4, 1), activation="tanh")
    joint = po.Joint(net, po.likelihoods.Gaussian(), po.priors.Normal(1.0), num_data=48)
    q, _ = po.infer(po.methods.MAP(60), joint, prepared.data.train.pair, progress=False)
    pred, scale = q.predict(prepared.data.test.inputs), prepared.preprocessing.target.scale
    assert scale > 100
    by_map = document["methods"][0]
    rmse = po.metrics.root_mean_squared_error(pred, prepared.data.test.targets)
    nll = po.metrics.negative_log_likelihood(pred, prepared.data.test.targets)
    assert by_map["rmse"] == pytest.approx(rmse * scale, rel=1e-4)
    assert by_map["test_nll"] == pytest.approx(nll + math.log(scale), rel=1e-4)
    best = min(row["test_nll"] for row in document["methods"] + document["baselines"])
    assert f"{best:.3f}" in document["verdict"]["sentence"]
    assert (document["train_rows"], document["test_rows"]) == (48, 12)
    assert document["settings"]["target"] == "price"
    assert any("'colour' is taken as 2 categories" in note for note in document["notes"])
    assert "'colour' is taken as 2 categories" in result.err


def test_the_noise_is_in_the_units_of_the_file(run, prices, tmp_path):
    words = ("--target", "price", "--drop", "id", "--method", "conjugate", "--hidden", "none", "--noise", "30")
    assert run("fit", prices, *words, "--out", tmp_path / "run", "--device", "cpu").code == 0
    rows = table(run("predict", tmp_path / "run").out)
    assert all(30 < float(row["std"]) < 40 for row in rows)
    assert all(abs(float(row["mean"]) - float(row["price"])) < 150 for row in rows)


def test_a_table_says_the_units(run, prices):
    out = run("compare", prices, "--target", "price", *TINY, "--methods", "map").out
    assert "RMSE, in units of price, are better" in out
    assert "(test rows, starting weights and order of rows)" in out


def test_the_target_must_be_named(run, prices):
    result = run("compare", prices)
    assert (result.code, result.out) == (2, "")
    assert "--target" in result.err
    assert "id, size, colour, price" in result.err


@pytest.mark.parametrize(("name", "said"), [("pric", "'price'"), ("zzz", "colour, id, price, size")])
def test_a_target_that_is_not_there(run, prices, name, said):
    result = run("fit", prices, "--target", name, "--out", "never")
    assert (result.code, result.out) == (3, "")
    assert said in result.err.splitlines()[0]
    assert "size" in result.err


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (("nowhere.csv", "--target", "y"), 3, "nowhere.csv: cannot be read"),
        (("line", "--target", "y"), 2, "--target is for files"),
        (("line", "--test-fraction", "0.3"), 2, "--test-fraction is for files"),
        (("FILE", "--target", "price", "--test-fraction", "1"), 2, "--test-fraction"),
        (("FILE", "--target", "price", "--task", "regresion"), 2, "task must be"),
        (("FILE", "--target", "price", "--separator", "coma"), 2, "'comma'"),
        (("FILE", "--target", "price", "--drop", "price"), 2, "'price'"),
        (("FILE", "--target", "price", "--drop", "colr"), 3, "'colour'"),
        (("FILE", "--target", "colour", "--task", "regression"), 3, "must be numbers"),
        (("FILE", "--target", "price", "--figure", "a.png"), 2, "--figure draws regression with 1 input."),
    ],
)
def test_what_cannot_be_used_is_said_in_one_line(run, prices, words, code, said):
    result = run("compare", *(str(prices) if word == "FILE" else word for word in words))
    assert (result.code, result.out) == (code, "")
    assert said in result.err.splitlines()[0]
    assert len(result.err.splitlines()) <= 2


def test_a_file_called_like_a_data_set_is_a_file(run, prices, monkeypatch):
    named = prices.rename(prices.parent / "line.csv")
    document = json.loads(run("compare", named, "--target", "price", *TINY, "--methods", "map", "--json").out)
    assert document["train_rows"] == 48
    assert document["settings"]["noise"] == "learn"
    monkeypatch.chdir(named.parent)
    assert json.loads(run("compare", "line", "--steps", "5", "--device", "cpu", "--json").out)["train_rows"] == 50


def test_a_run_keeps_the_preprocessing_and_the_sum_of_the_file(fitted_prices, prices):
    folder = RunFolder(fitted_prices)
    part = folder.read("preprocessing")
    kept = decode(part.config["value"], part.tensors)
    assert kept == prepare(read_table(prices, "price", drop=["id"]), 0.2, 0).preprocessing
    assert isinstance(kept, Preprocessing)
    assert len(folder.read("task").config["sha256"]) == 64


def test_a_repeated_fit_is_finished_and_one_on_a_changed_file_is_refused(run, fitted_prices, prices, content):
    words = ("fit", prices, "--target", "price", "--drop", "id", "--noise", "30", "--out", fitted_prices, *TINY)
    assert "is finished already" in run(*words).err.replace("\n", "")
    assert "its drop is ['id'] and [] was asked for" in run(*words[:4], *words[6:]).err
    before = content(fitted_prices)
    prices.write_text(prices.read_text() + "60,6.0,green,2200\n")
    result = run(*words)
    assert result.code == 4
    assert "The file has changed" in result.err
    assert "--force" in result.err
    assert content(fitted_prices) == before


def test_an_unfinished_fit_goes_on_only_with_the_same_file(run, prices, tmp_path, monkeypatch):
    infer, stages = tasks.infer, iter(["map"])

    def interrupted(*arguments, **options):
        if next(stages, None):
            return infer(*arguments, **options)
        raise KeyboardInterrupt

    words = ("fit", prices, "--target", "price", "--out", tmp_path / "run", *TINY)
    with monkeypatch.context() as patch:
        patch.setattr(tasks, "infer", interrupted)
        assert run(*words).code == 130
    written = prices.read_text()
    prices.write_text(written.replace("red", "blue", 1))
    result = run(*words)
    assert result.code == 4
    assert "another run, unfinished" in result.err
    assert "The file has changed" in result.err
    prices.write_text(written)
    assert run(*words).code == 0


def test_predictions_of_the_own_test_rows_have_all_columns_as_written(run, fitted_prices, prices):
    result = run("predict", fitted_prices)
    assert result.code == 0
    rows, written = table(result.out), table(prices.read_text())
    assert list(rows[0]) == ["id", "size", "colour", "price", *PREDICTED]
    assert len(rows) == 12
    for row in rows:
        own = written[int(row["id"])]
        assert {name: row[name] for name in own} == own
        assert float(row["lower"]) < float(row["mean"]) < float(row["upper"])
        assert abs(float(row["mean"]) - float(row["price"])) < 800
    assert [int(row["id"]) for row in rows] == sorted(int(row["id"]) for row in rows)


def test_predictions_are_those_of_the_library_in_units_of_the_file(run, fitted_prices, prices):
    prepared = prepare(read_table(prices, "price", drop=["id"]), 0.2, 0)
    pred = po.load(fitted_prices, po.networks.MLP((3, 4, 1), activation="tanh")).predict(prepared.data.test.inputs)
    target, rows = prepared.preprocessing.target, table(run("predict", fitted_prices).out)
    mean = pred.mean[:, 0].double() * target.scale + target.mean
    assert [float(row["mean"]) for row in rows] == pytest.approx(mean.tolist(), rel=1e-6)
    std = pred.std[:, 0].double() * target.scale
    assert [float(row["std"]) for row in rows] == pytest.approx(std.tolist(), rel=1e-6)


def test_other_rows_without_a_target_are_predicted_in_order(run, fitted_prices, tmp_path):
    new = write(
        tmp_path / "new.csv", ("colour", "mean", "size"), [("red", "a", 3), ("green", "b", ""), ("blue", "c", 1)]
    )
    result = run("predict", fitted_prices, "--data", new)
    assert result.code == 0
    rows = table(result.out)
    assert list(rows[0]) == ["colour", "mean", "size", "predicted_mean", *PREDICTED[1:]]
    assert [row["mean"] for row in rows] == ["a", "b", "c"]
    assert rows[1]["size"] == ""
    assert "categories that no training row has ('green')" in result.err
    assert "values are missing" in result.err
    document = json.loads(run("predict", fitted_prices, "--data", new, "--json").out)
    assert document["rows"][0][3] == pytest.approx(float(rows[0]["predicted_mean"]))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("colour,price\nred,3\n", "column 'size' is missing"),
        ("size,colour\nlarge,red\n", "line 2"),
        ("size,colour\n1,red,2\n", "line 2"),
        ("", "new.csv"),
    ],
)
def test_rows_that_cannot_be_read_are_bad_data(run, fitted_prices, tmp_path, text, said):
    (tmp_path / "new.csv").write_text(text)
    result = run("predict", fitted_prices, "--data", tmp_path / "new.csv")
    assert (result.code, result.out) == (3, "")
    assert said in result.err


def test_classes_keep_their_names(run, fruit, tmp_path):
    words = ("--target", "kind", "--out", tmp_path / "run", *TINY, "--steps", "200")
    assert run("fit", fruit, *words).code == 0
    rows = table(run("predict", tmp_path / "run", "--data", fruit).out)
    parts = ["entropy", "aleatoric", "epistemic", "outside"]
    assert list(rows[0])[3:] == ["p_apple", "p_pear tree", "prediction", *parts]
    assert len(rows) == 70
    right = sum(row["prediction"] == row["kind"] for row in rows) / 70
    assert right > 0.9
    scores = json.loads(run("evaluate", tmp_path / "run", "--data", fruit, "--json").out)["scores"]
    assert scores["accuracy"] == pytest.approx(right)
    strange = write(tmp_path / "strange.csv", ("weight", "length", "kind"), [(1.5, 2.25, "plum")])
    result = run("evaluate", tmp_path / "run", "--data", strange)
    assert result.code == 3
    assert "'plum' is not a class" in result.err


def test_evaluate_gives_the_scores_of_the_fit(run, fitted_prices):
    document = json.loads(run("evaluate", fitted_prices, "--json").out)
    stored = RunFolder(fitted_prices).read("scores").config
    assert document["scores"] == pytest.approx(stored)
    assert (document["rows"], document["method"]) == (12, "laplace")
    text = run("evaluate", fitted_prices).out
    assert stored["rmse"] >= 1
    assert f" {stored['rmse']:.5g} " in text
    assert "test NLL" in text


def test_evaluate_scores_other_rows_in_their_own_units(run, fitted_prices, tmp_path):
    path = write(
        tmp_path / "new.csv", ("size", "colour", "price"), [(1, "red", 1200), (2, "blue", ""), (3, "red", 1700)]
    )
    result = run("evaluate", fitted_prices, "--data", path, "--json")
    document = json.loads(result.out)
    assert document["rows"] == 2
    assert "without a value in the target" in result.err
    rows = table(run("predict", fitted_prices, "--data", path).out)
    assert len(rows) == 3
    errors = [float(row["mean"]) - float(row["price"]) for row in rows if row["price"]]
    assert document["scores"]["rmse"] == pytest.approx(math.sqrt(sum(e * e for e in errors) / 2), rel=1e-5)


def test_evaluate_without_the_target_column_names_it(run, fitted_prices, tmp_path):
    path = write(tmp_path / "new.csv", ("size", "colour"), [(1, "red")])
    result = run("evaluate", fitted_prices, "--data", path)
    assert result.code == 3
    assert "'price'" in result.err


def test_the_own_file_must_be_there_and_unchanged(run, fitted_prices, prices):
    prices.write_text(prices.read_text().replace("red", "blue", 1))
    for verb in ("predict", "evaluate"):
        result = run(verb, fitted_prices)
        assert result.code == 3
        assert "has changed" in result.err
        assert "--data" in result.err
    prices.unlink()
    assert "cannot be read" in run("predict", fitted_prices).err


def test_made_data_and_files_do_not_mix(run, fitted, fitted_prices, prices):
    assert run("predict", fitted, "--data", prices).code == 3
    assert run("evaluate", fitted_prices, "--data", "line").code == 3
    assert run("predict", fitted_prices, "--separator", "comma").code == 2


def test_evaluate_made_data(run, fitted):
    stored = RunFolder(fitted).read("scores").config
    assert json.loads(run("evaluate", fitted, "--json").out)["scores"] == pytest.approx(stored)
    result = run("evaluate", fitted, "--data", "blobs")  # three classes
    assert result.code == 3
    assert "classes" in result.err


def test_the_way_a_file_was_read_is_kept_for_the_next(run, tmp_path):
    path = tmp_path / "rows.txt"
    path.write_text("\n".join(f"{i},5;{i * 3 % 7};{i},25" for i in range(30)))
    words = ("--target", "x3", "--noise", "1", "--no-header", "--separator", "semicolon", "--decimal", ",")
    assert run("fit", path, *words, "--out", tmp_path / "run", *TINY).code == 0
    (tmp_path / "new.txt").write_text("1;2\n3;4\n")
    result = run("predict", tmp_path / "run", "--data", tmp_path / "new.txt")
    assert result.code == 0
    assert len(table(result.out)) == 2


def test_labels_come_back_as_the_file_writes_them(run, tmp_path):
    rows = "".join(f"{row},{row % 7},{('No', 'Yes')[row % 2]}\n" for row in range(40))
    (tmp_path / "table.csv").write_text(f"a,b,bought\n{rows}")
    folder, asked = tmp_path / "run", ("--target", "bought", "--method", "map", *TINY)
    assert run("fit", tmp_path / "table.csv", *asked, "--out", folder).code == 0
    for words in ((), ("--data", tmp_path / "table.csv")):
        document = json.loads(run("predict", folder, *words, "--json").out)
        assert {"p_No", "p_Yes", "prediction"} <= set(document["columns"])
        slot = document["columns"].index("prediction")
        assert {row[slot] for row in document["rows"]} <= {"No", "Yes"}
        result = run("evaluate", folder, *words)
        assert result.code == 0
        assert "written otherwise" not in result.err


def test_files_in_other_forms_are_read_alike(run, prices, tmp_path):
    words = ("--target", "price", "--drop", "id", "--method", "map", "--noise", "30", *TINY)
    frame = pd.read_csv(prices)
    frame.to_parquet(tmp_path / "prices.parquet", index=False)
    frame.to_csv(tmp_path / "prices.csv.gz", index=False)
    assert run("fit", tmp_path / "prices.parquet", *words, "--out", tmp_path / "run").code == 0
    plain, packed = (
        run("predict", tmp_path / "run", "--data", tmp_path / name) for name in ("prices.csv", "prices.csv.gz")
    )
    assert (plain.code, packed.code) == (0, 0)
    assert [row["mean"] for row in table(plain.out)] == [row["mean"] for row in table(packed.out)]
    own = table(run("predict", tmp_path / "run").out)
    assert len(own) == 12
    assert {float(row["price"]) for row in own} <= set(frame["price"])
    assert run("evaluate", tmp_path / "run", "--data", tmp_path / "prices.parquet").code == 0


def test_marks_of_numbers_and_dates_are_kept_for_the_next_file(run, tmp_path):
    rows = [f"{1 + i % 12}/{1 + i % 9}/2020;1.{i:03d},5;{i * 7 % 5}.000" for i in range(40)]
    (tmp_path / "rows.csv").write_text("\n".join(["day;a;y", *rows]) + "\n")
    words = ("--target", "y", "--task", "regression", "--noise", "1", *TINY, "--out", tmp_path / "run")
    result = run("fit", tmp_path / "rows.csv", *words)
    assert result.code == 3
    assert "2 columns cannot be used" in result.err
    assert "--dates" in result.err
    result = run("fit", tmp_path / "rows.csv", *words, "--thousands", ".", "--dates", "month-first")
    assert result.code == 0
    assert "'day' has dates: inputs are its month, weekday, days" in result.err
    (tmp_path / "new.csv").write_text("day;a\n1/2/2020;1.234,5\n")
    assert run("predict", tmp_path / "run", "--data", tmp_path / "new.csv").code == 0
    assert run("fit", tmp_path / "rows.csv", *words, "--thousands", ";").code == 2
    assert run("fit", tmp_path / "rows.csv", *words, "--dates", "years").code == 2
