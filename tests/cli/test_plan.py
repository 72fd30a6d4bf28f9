"""`posterity plan`."""

import json

import pytest

import posterity as po

pytestmark = pytest.mark.cpu


def test_prints_a_table_for_each_stage(run, monkeypatch):
    monkeypatch.setattr("posterity.inference.run.Run.posterior", lambda self: pytest.fail("it was fitted"))
    result = run("plan", "two-moons", "--hidden", "200,200", "--device", "cpu")
    assert result.code == 0
    assert result.err == ""
    assert result.out.startswith("two-moons, network 2-200-200-2 tanh, 41202 weights\n")
    assert "\nMAP over 41,202 weights on cpu\n" in result.out
    assert "\nLaplace with GaussNewton() and Kronecker() over 41,202 weights on cpu\n" in result.out
    assert "  optimiser " in result.out
    assert "  structure=Full() " in result.out


def test_the_numbers_are_those_of_the_library(run):
    document = json.loads(run("plan", "two-moons", "--hidden", "6", "--device", "cpu", "--json").out)
    rows = po.datasets.load("two-moons").train.pair
    joint = po.Joint(po.networks.MLP((2, 6, 2)), po.likelihoods.Categorical(), po.priors.Normal(), num_data=500)
    found = [po.plan(method, joint, rows) for method in (po.methods.MAP(), po.methods.Laplace())]
    assert [stage["stage"] for stage in document["stages"]] == ["map", "laplace"]
    for stage, expected in zip(document["stages"], found, strict=True):
        assert stage["parts"] == expected.parts
        assert stage["total"] == expected.total
        assert stage["fits"] is True
        assert {row["setting"]: row["total"] for row in stage["alternatives"]} == expected.alternatives
    assert document["memory"] == found[0].memory
    assert document["device"] == "cpu"


def test_methods_structure_and_files_are_taken(run, tmp_path):
    file = tmp_path / "rows.csv"
    file.write_text("x,y\n" + "".join(f"{i},{2 * i}\n" for i in range(40)))
    words = ("plan", file, "--target", "y", "--methods", "laplace", "--structure", "diagonal", "--device", "cpu")
    result = run(*words, "--hidden", "50", "--json")
    document = json.loads(result.out)
    assert [stage["stage"] for stage in document["stages"]] == ["map", "laplace"]
    assert "Diagonal() over 151 weights" in document["stages"][1]["method"]
    conjugate = run("plan", "line", "--methods", "conjugate", "--device", "cpu")
    assert "Conjugate over 2 weights on cpu" in conjugate.out


def test_bad_options_are_usage_errors(run):
    assert run("plan", "two-moons", "--methods", "hmcc").code == 2
    assert run("plan", "two-moons", "--hidden", "x").code == 2
    assert run("plan", "nowhere.csv").code == 3


def test_devices_that_share_the_rows_are_counted(run):
    document = json.loads(run("plan", "two-moons", "--hidden", "6", "--world-size", "8", "--json").out)
    alone = json.loads(run("plan", "two-moons", "--hidden", "6", "--json").out)
    assert (document["world_size"], alone["world_size"]) == (8, 1)
    for shared, whole in zip(document["stages"], alone["stages"], strict=True):
        assert shared["total"] <= whole["total"]
        assert shared["parts"]["weights"] == whole["parts"]["weights"]
    assert document["stages"][0]["total"] < alone["stages"][0]["total"]  # Laplace takes most where it predicts
    result = run("plan", "two-moons", "--hidden", "6", "--world-size", "8")
    assert ", on each of 8 that share the rows\n" in result.out
    assert "\ntime: not modelled\n" in result.out  # the mode is searched by L-BFGS
    words = ("plan", "two-moons", "--hidden", "6", "--methods", "mean-field", "--device", "cpu", "--world-size")
    estimated = run(*words, "64").out
    assert "\ntime, an estimate at rates of " in estimated
    assert "\n  sums over the devices, a step: " in estimated
    assert "sums over" not in run(*words, "1").out
    (stage,) = (each for each in json.loads(run(*words, "64", "--json").out)["stages"] if each["time"])
    assert stage["time"]["total"] == pytest.approx(stage["time"]["units"] * stage["time"]["unit_seconds"])
    refused = run("plan", "two-moons", "--world-size", "0")
    assert refused.code == 2
    assert "--world-size must be a positive whole number. Got 0." in refused.err
