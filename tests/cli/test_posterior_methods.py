"""Natural gradients, SWAG and samplers on mini-batches on the command line."""

import json

import pytest

import posterity as po

pytestmark = pytest.mark.cpu
TINY = ("--hidden", "6", "--steps", "40", "--prior-scale", "1", "--device", "cpu")


@pytest.mark.parametrize("method", ["natural-gradient", "swag"])
def test_fit_keeps_a_gaussian(run, tmp_path, method):
    result = run("fit", "sine", "--out", tmp_path / "run", "--method", method, *TINY, "--json")
    assert result.code == 0
    q = po.load(tmp_path / "run", po.networks.MLP((1, 6, 1), activation="tanh"))
    assert isinstance(q, po.posteriors.Gaussian)
    assert run("evaluate", tmp_path / "run", "--json").code == 0


def test_compare_takes_both_beside_map_which_swag_starts_from(run):
    result = run("compare", "two-moons", "--methods", "map,natural-gradient,swag", *TINY, "--json")
    assert result.code == 0
    rows = json.loads(result.out)["methods"]
    assert [row["method"] for row in rows] == ["map", "natural-gradient", "swag"]
    assert len({row["test_nll"] for row in rows}) == 3


@pytest.mark.parametrize(("steps", "draws"), [(40, 20), (1, 1)])
@pytest.mark.parametrize("method", ["sgld", "sghmc"])
def test_fit_keeps_the_draws_of_a_sampler(run, tmp_path, method, steps, draws):
    words = ("--hidden", "6", "--steps", str(steps), "--step-size", "0.02", "--device", "cpu", "--json")
    assert run("fit", "sine", "--out", tmp_path / "run", "--method", method, *words).code == 0
    q = po.load(tmp_path / "run", po.networks.MLP((1, 6, 1), activation="tanh"))
    assert isinstance(q, po.posteriors.Samples)
    assert q.theta.shape == (4, draws, 6 * 3 + 1)  # the evidence has chosen the noise
    assert run("evaluate", tmp_path / "run", "--json").code == 0


def test_compare_and_plan_take_the_samplers(run):
    result = run("compare", "two-moons", "--methods", "map,sgld,sghmc", *TINY, "--json")
    assert result.code == 0
    rows = json.loads(result.out)["methods"]
    assert [row["method"] for row in rows] == ["map", "sgld", "sghmc"]
    assert len({row["test_nll"] for row in rows}) == 3
    shown = run("plan", "two-moons", "--methods", "sghmc", "--steps", "1000", "--device", "cpu")
    assert shown.code == 0
    assert "SGHMC over 2,802 weights, 4 chains of 100 draws" in " ".join(shown.out.split())


def test_few_steps_collect_few_thetas(run):
    result = run("compare", "two-moons", "--methods", "swag", "--hidden", "6", "--steps", "5", "--device", "cpu")
    assert result.code == 0
