"""`posterity predict`: tables of predictions, and folders that cannot give any."""

import csv
import io
import json
import os
import subprocess
import sys

import pytest
import torch

import posterity as po
from posterity.storage import Part, RunFolder

pytestmark = pytest.mark.cpu
TINY = ("--hidden", "6", "--steps", "40", "--prior-scale", "1", "--device", "cpu")


def table(text):
    return list(csv.DictReader(io.StringIO(text)))


def column(rows, name):
    return torch.tensor([float(row[name]) for row in rows], dtype=torch.float64)


def test_classification_prints_probabilities_prediction_and_entropy(run, fitted):
    result = run("predict", fitted)
    assert (result.code, result.err) == (0, "")
    rows = table(result.out)
    names = ["x1", "x2", "p_upper", "p_lower", "prediction", "entropy", "aleatoric", "epistemic", "outside"]
    assert list(rows[0]) == names
    data = po.datasets.load("two-moons")
    pred = po.load(fitted, po.networks.MLP((2, 6, 2), activation="tanh")).predict(data.test.inputs)
    assert torch.allclose(column(rows, "x2"), data.test.inputs[:, 1].double(), rtol=1e-8)
    assert torch.allclose(column(rows, "p_lower"), pred.probs[:, 1], rtol=1e-8)
    assert torch.allclose(column(rows, "entropy"), pred.entropy, rtol=1e-8)
    assert torch.allclose(column(rows, "aleatoric") + column(rows, "epistemic"), pred.entropy, rtol=1e-6)
    assert [row["prediction"] for row in rows] == [("upper", "lower")[i] for i in pred.probs.argmax(-1)]


def test_regression_prints_mean_spread_and_interval(run, tmp_path):
    assert run("fit", "line", "--out", tmp_path / "run", "--method", "conjugate", "--device", "cpu").code == 0
    rows = table(run("predict", tmp_path / "run").out)
    assert list(rows[0]) == ["x1", "mean", "std", "lower", "upper", "aleatoric_std", "epistemic_std", "outside"]
    mean, std, lower, upper = (column(rows, name) for name in ("mean", "std", "lower", "upper"))
    assert torch.allclose(upper - mean, 1.959964 * std, rtol=1e-4)
    assert torch.allclose(mean - lower, 1.959964 * std, rtol=1e-4)
    aleatoric, epistemic = column(rows, "aleatoric_std"), column(rows, "epistemic_std")
    assert torch.allclose(aleatoric, torch.full_like(std, 0.5))  # the noise of line
    assert torch.allclose(aleatoric.square() + epistemic.square(), std.square(), rtol=1e-6)
    other = table(run("predict", tmp_path / "run", "--level", "0.5", "--quantiles", "0.25,0.9").out)
    assert torch.allclose(column(other, "upper") - mean, 0.6744898 * std, rtol=1e-4)
    assert torch.allclose(column(other, "q0.25"), column(other, "lower"))
    assert torch.allclose(column(other, "q0.9") - mean, 1.2815516 * std, rtol=1e-4)
    targets = po.datasets.load("line").test.targets[:, 0]
    inside = ((targets > lower) & (targets < upper)).double().mean()
    assert abs(float(inside) - 0.95) < 5 * (0.95 * 0.05 / 500) ** 0.5


def test_json_has_the_same_numbers(run, fitted):
    document = json.loads(run("predict", fitted, "--json").out)
    rows = table(run("predict", fitted).out)
    assert document["columns"] == list(rows[0])
    assert len(document["rows"]) == len(rows) == 2000
    assert document["rows"][7][3] == pytest.approx(float(rows[7]["p_lower"]), rel=1e-8)
    assert (document["data"], document["method"], document["file"]) == ("two-moons", "laplace", None)


def test_the_table_can_go_to_a_file(run, fitted, tmp_path):
    path = tmp_path / "new" / "table.csv"
    result = run("predict", fitted, "--out", path)
    assert (result.code, result.out) == (0, "")
    assert path.read_text() == run("predict", fitted).out
    assert os.listdir(path.parent) == ["table.csv"]
    document = json.loads(run("predict", fitted, "--out", path, "--json").out)
    assert document["file"] == str(path)


def test_the_file_to_predict_is_not_overwritten(run, fitted, tmp_path):
    path = tmp_path / "rows.csv"
    path.write_text("x1,x2\n0,1\n")
    result = run("predict", fitted, "--data", path, "--out", tmp_path / "." / "rows.csv")
    assert (result.code, path.read_text()) == (2, "x1,x2\n0,1\n")
    assert "would be lost" in result.err


def test_a_file_that_cannot_be_written_is_one_line(run, fitted, tmp_path):
    result = run("predict", fitted, "--out", tmp_path)
    assert result.code == 1
    assert result.out == ""
    assert result.err.startswith(f"error: Cannot write '{tmp_path}'")
    assert len(result.err.splitlines()) == 1


def test_other_data_of_the_same_kind(run, fitted):
    rows = table(run("predict", fitted, "--data", "blobs").out)
    assert column(rows, "x1")[:5].tolist() == pytest.approx(po.datasets.load("blobs").test.inputs[:5, 0].tolist())
    assert list(rows[0])[2:4] == ["p_upper", "p_lower"]


def test_data_of_another_kind_are_bad_data(run, fitted):
    result = run("predict", fitted, "--data", "sine")
    assert result.code == 3
    assert result.out == ""
    error, hint = result.err.splitlines()
    assert "2 inputs" in error
    assert "--data" in hint


def test_unknown_data_suggest_the_nearest(run, fitted):
    result = run("predict", fitted, "--data", "sin")
    assert result.code == 2
    assert "Did you mean 'sine'?" in result.err


def flip(folder):
    (path,) = folder.glob("posterior-*/tensors.safetensors")
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def truncate(folder):
    (path,) = folder.glob("posterior-*/tensors.safetensors")
    path.write_bytes(path.read_bytes()[:-10])


def lose_a_file(folder):
    (path,) = folder.glob("task-*/config.json")
    path.unlink()


def cut_the_manifest(folder):
    path = folder / "manifest.json"
    path.write_bytes(path.read_bytes()[:50])


def change_the_manifest(folder):
    (folder / "manifest.json").write_text('{"name": "a package of another program"}')


def make_unfinished(folder):
    (folder / "manifest.json").unlink()


@pytest.mark.parametrize(
    "damage", [flip, truncate, lose_a_file, cut_the_manifest, change_the_manifest, make_unfinished]
)
def test_a_damaged_run_folder_is_refused(run, fitted, damage):
    damage(fitted)
    result = run("predict", fitted)
    assert result.code == 4
    assert result.out == ""
    error, hint = result.err.splitlines()
    assert error.startswith("error: ")
    assert "posterity fit" in hint
    assert run("fit", "two-moons", "--out", fitted, *TINY).code == 4


def test_a_folder_that_is_not_there(run, tmp_path):
    result = run("predict", tmp_path / "nowhere")
    assert result.code == 4
    assert "There is no run folder" in result.err


def test_a_posterior_that_was_saved_without_a_task(run, fitted, tmp_path):
    q = po.load(fitted, po.networks.MLP((2, 6, 2), activation="tanh"))
    q.save(tmp_path / "saved")
    result = run("predict", tmp_path / "saved")
    assert result.code == 4
    assert "no part 'task'" in result.err


def test_a_task_that_describes_no_network(run, fitted):
    folder = RunFolder(fitted)
    task = folder.read("task")
    folder.commit({"task": Part({**task.config, "network": {"layers": 3}})})
    result = run("predict", fitted)
    assert result.code == 4
    assert "does not describe a network" in result.err


def test_a_reader_who_has_seen_enough_meets_no_traceback(fitted):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    with subprocess.Popen(
        [sys.executable, "-m", "posterity", "predict", str(fitted)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment,
    ) as process:
        assert process.stdout.readline().startswith(b"x1,")
        process.stdout.close()
        assert process.stderr.read() == b""
