"""Targets above 0 and noise that changes: `--log-target` and `--noise inputs` from fit to report."""

import csv
import io
import json
import math

import pytest
import torch

import posterity as po
from posterity.datasets import prepare, read_table

pytestmark = pytest.mark.cpu
TINY = ("--hidden", "4", "--steps", "60", "--prior-scale", "1", "--device", "cpu")


def write(path, x, y):
    lines = [f"{a:.4f},{b:.4f},{c:.6f}" for (a, b), c in zip(x.tolist(), y.tolist(), strict=True)]
    path.write_text("\n".join(["a,b,y", *lines]))
    return path


@pytest.fixture
def skewed(tmp_path):
    """A target whose logarithm is linear in the inputs with constant noise."""
    generator = torch.Generator().manual_seed(0)
    x, noise = torch.randn(150, 2, generator=generator), torch.randn(150, generator=generator)
    return write(tmp_path / "skewed.csv", x, (1 + 0.8 * x[:, 0] - 0.5 * x[:, 1] + 0.5 * noise).exp())


@pytest.fixture
def fanned(tmp_path):
    """A target whose noise grows with the second input."""
    generator = torch.Generator().manual_seed(0)
    x, noise = torch.randn(300, 2, generator=generator), torch.randn(300, generator=generator)
    return write(tmp_path / "fanned.csv", x, x[:, 0] + (x[:, 1] - 1).exp() * noise)


def compared(run, file, *words):
    result = run("compare", file, "--target", "y", *TINY, *words, "--json", "--quiet")
    assert result.code == 0
    return json.loads(result.out)


def test_scores_of_a_log_target_are_those_of_the_target_itself(run, skewed):
    document = compared(run, skewed, "--log-target", "--methods", "map")
    prepared = prepare(read_table(skewed, "y"), 0.2, 0, log_target=True)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        net = po.networks.MLP((2, 4, 1), activation="tanh")
    joint = po.Joint(net, po.likelihoods.Gaussian(), po.priors.Normal(1.0), num_data=120)
    q, _ = po.infer(po.methods.MAP(60), joint, prepared.data.train.pair, progress=False)
    pred, target = q.predict(prepared.data.test.inputs), prepared.preprocessing.target
    y = torch.tensor(read_table(skewed, "y").column("y").numbers("."))[prepared.test]
    lognormal = torch.distributions.LogNormal(
        pred.mean[:, 0] * target.scale + target.mean, pred.std[:, 0] * target.scale
    )
    (by_map,) = document["methods"]
    assert by_map["test_nll"] == pytest.approx(float(-lognormal.log_prob(y).mean()), rel=1e-4)
    assert by_map["rmse"] == pytest.approx(float((y - lognormal.mean).square().mean().sqrt()), rel=1e-4)
    assert document["settings"]["log_target"] is True


def test_the_mean_baseline_of_a_log_target_is_a_lognormal(run, skewed):
    prepared = prepare(read_table(skewed, "y"), 0.2, 0)
    y = prepared.data.train.targets[:, 0] * prepared.preprocessing.target.scale + prepared.preprocessing.target.mean
    test = prepared.data.test.targets[:, 0] * prepared.preprocessing.target.scale + prepared.preprocessing.target.mean
    expected = torch.distributions.LogNormal(y.log().mean(), y.log().std(correction=0))
    by_mean = compared(run, skewed, "--log-target", "--methods", "map")["baselines"][0]
    assert by_mean["test_nll"] == pytest.approx(float(-expected.log_prob(test).mean()), rel=1e-4)


def test_a_skewed_target_is_predicted_better_by_its_logarithm(run, skewed):
    plain, logged = compared(run, skewed), compared(run, skewed, "--log-target")
    for word in range(2):
        assert logged["methods"][word]["test_nll"] < plain["methods"][word]["test_nll"] - 0.3
    assert logged["baselines"][1]["test_nll"] < plain["baselines"][1]["test_nll"] - 0.3


def test_fit_predict_and_evaluate_are_in_the_units_of_the_file(run, skewed, tmp_path):
    folder = tmp_path / "run"
    fitted = run("fit", skewed, "--target", "y", "--log-target", *TINY, "--out", folder, "--json", "--quiet")
    assert fitted.code == 0
    scores = json.loads(fitted.out)["scores"]
    table = list(csv.DictReader(io.StringIO(run("predict", folder).out)))
    observed = torch.tensor([float(row["y"]) for row in table])
    mean, lower, upper = (torch.tensor([float(row[name]) for row in table]) for name in ("mean", "lower", "upper"))
    assert bool((lower > 0).all())
    assert float(((lower < observed) & (observed < upper)).float().mean()) > 0.8
    assert scores["rmse"] == pytest.approx(float((mean - observed).square().mean().sqrt()), rel=1e-4)
    evaluated = json.loads(run("evaluate", folder, "--json").out)["scores"]
    again = json.loads(run("evaluate", folder, "--data", skewed, "--json").out)
    assert evaluated == pytest.approx(scores, rel=1e-5)
    assert again["rows"] == 150


def test_the_report_of_a_log_target_is_written(run, skewed, tmp_path):
    document = compared(run, skewed, "--log-target", "--noise", "0.5", "--report", tmp_path / "page.html")
    assert document["methods"][1]["failed"] is None
    assert (tmp_path / "page.html").read_text(encoding="utf-8").count('"log":true') == 1


def test_the_evidence_of_a_log_target_is_a_density_of_the_target(run, skewed):
    words = ("--log-target", "--methods", "conjugate", "--hidden", "none", "--noise", "0.5")
    (by_conjugate,) = compared(run, skewed, *words)["methods"]
    target = prepare(read_table(skewed, "y"), 0.2, 0, log_target=True)
    inputs, targets = (tensor.double() for tensor in target.data.train.pair)
    scale, shift = target.preprocessing.target.scale, target.preprocessing.target.mean
    design = torch.cat([inputs, torch.ones(120, 1)], 1)
    covariance = design @ design.T + (0.5 / scale) ** 2 * torch.eye(120)
    normal = torch.distributions.MultivariateNormal(torch.zeros(120, dtype=torch.float64), covariance)
    jacobian = (targets * scale + shift).sum() + 120 * math.log(scale)
    expected = float(normal.log_prob(targets[:, 0]) - jacobian)
    assert abs(float(jacobian)) > 100.0
    assert by_conjugate["evidence"]["log_evidence"] == pytest.approx(expected, abs=1e-2)
    assert by_conjugate["evidence"]["noise"] == pytest.approx(0.5)


@pytest.mark.parametrize("value", ["0", "-2.5"])
@pytest.mark.parametrize("line", [3, 60])
def test_a_target_without_a_logarithm_is_refused_with_its_line(run, skewed, value, line):
    lines = skewed.read_text().splitlines()
    lines[line - 1] = f"0.1,0.2,{value}"
    skewed.write_text("\n".join(lines))
    result = run("compare", skewed, "--target", "y", "--log-target", *TINY)
    assert result.code == 3
    assert f"line {line}" in result.err
    assert "--log-target needs targets above 0" in result.err


def test_a_log_target_is_for_numbers_in_files(run, tmp_path):
    result = run("compare", "sine", "--log-target")
    assert (result.code, "--log-target is for files" in result.err) == (2, True)
    file = tmp_path / "classes.csv"
    file.write_text("\n".join(["a,y", *(f"{x},{'ab'[x % 2]}" for x in range(40))]))
    result = run("compare", file, "--target", "y", "--log-target")
    assert (result.code, "--log-target is for regression" in result.err) == (2, True)


def test_limits_below_zero_of_a_positive_target_are_noted(run, skewed, fanned, tmp_path):
    words = ("--target", "y", *TINY, "--quiet")
    plain = run("compare", skewed, *words, "--noise", "3").out
    assert "All targets are above 0, but 95 % intervals begin below 0, in 30 test rows: MAP " in plain
    assert "--log-target models the logarithm." in plain
    for file, own in ((skewed, ("--log-target",)), (fanned, ())):  # some targets of the second are negative
        assert "begin below 0" not in run("compare", file, *words, "--noise", "1", *own).out
    fitted = run("fit", skewed, *words, "--noise", "3", "--out", tmp_path / "run").out
    assert "--log-target models the logarithm." in fitted


def test_noise_by_the_inputs_is_learnt_and_predicted(run, fanned, tmp_path):
    steps = ("--steps", "300", "--methods", "map,laplace")
    plain, by_inputs = compared(run, fanned, *steps), compared(run, fanned, *steps, "--noise", "inputs")
    assert by_inputs["network"]["sizes"] == [2, 4, 2]
    for word in range(2):
        assert by_inputs["methods"][word]["test_nll"] < plain["methods"][word]["test_nll"] - 0.2
    folder = tmp_path / "run"
    words = ("--method", "map", "--noise", "inputs", *TINY, "--steps", "300", "--quiet")
    assert run("fit", fanned, "--target", "y", *words, "--out", folder).code == 0
    rows = list(csv.DictReader(io.StringIO(run("predict", folder).out)))
    low = [float(row["std"]) for row in rows if float(row["b"]) < -0.5]
    high = [float(row["std"]) for row in rows if float(row["b"]) > 0.5]
    assert sum(high) / len(high) > 1.5 * sum(low) / len(low)


def test_noise_by_the_inputs_is_not_for_classes_or_conjugate(run):
    assert run("compare", "blobs", "--noise", "inputs").code == 2
    assert run("compare", "line", "--noise", "inputs", "--methods", "conjugate").code == 2
    result = run("compare", "line", "--noise", "input")
    assert result.code == 2
    assert "--noise must be a positive number, learn or inputs" in result.err
