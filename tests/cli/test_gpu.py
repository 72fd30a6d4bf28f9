"""The command line on a CUDA device: fits, predictions and scores of files."""

import csv
import io
import json

import pytest
import torch

from posterity.numerics import Key

pytestmark = pytest.mark.cuda


@pytest.fixture(autouse=True)
def usual_device():
    """As in a process of its own."""
    before = torch.get_default_device()
    torch.set_default_device("cpu")
    yield
    torch.set_default_device(before)


def write(path, rows=80):
    x = Key(1).normal((rows, 2))
    noise = 0.1 * Key(2).normal((rows,))
    lines = [
        f"{a:.6f},{b:.6f},{'red' if a * b > 0 else 'blue'},{a - b + e:.6f},{'yes' if a > b else 'no'}"
        for (a, b), e in zip(x.tolist(), noise.tolist(), strict=True)
    ]
    path.write_text("\n".join(["a,b,colour,y,bought", *lines]) + "\n")
    return path


@pytest.mark.parametrize(("target", "other"), [("y", "bought"), ("bought", "y")])
@pytest.mark.parametrize(
    "words",
    [
        ("--seconds", "1"),
        ("--method", "laplace", "--hidden", "6", "--steps", "40"),
        ("--method", "map", "--hidden", "6", "--steps", "40", "--conformal", "cv+"),
        ("--method", "map", "--hidden", "6", "--steps", "40", "--cv", "3"),
    ],
    ids=["auto", "laplace", "conformal", "cv"],
)
def test_a_file_is_fitted_predicted_and_scored(run, tmp_path, target, other, words):
    file, out = write(tmp_path / "table.csv"), tmp_path / "run"
    done = run("fit", file, "--target", target, "--drop", other, *words, "--device", "cuda", "--quiet", "--out", out)
    assert (done.code, done.err) == (0, "")
    predicted = run("predict", out, "--data", file, *(("--conformal",) if "--conformal" in words else ()))
    assert predicted.code == 0, predicted.err
    rows = list(csv.DictReader(io.StringIO(predicted.out)))
    assert len(rows) == 80
    first = "mean" if target == "y" else "p_yes"
    assert all(abs(float(row[first])) < 10.0 for row in rows)
    scores = run("evaluate", out, "--data", file, "--json")
    assert scores.code == 0, scores.err
    json.loads(scores.out)
