"""Tuned hyper-parameters and the structure of the curvature, as the command line tells and takes them."""

import json
import math

import pytest

import posterity as po
from posterity.cli.frame.folders import open_run
from posterity.recipes.methods import structure
from posterity.recipes.settings import STRUCTURES

pytestmark = pytest.mark.cpu
FREE = ("--hidden", "5", "--device", "cpu", "-q")  # scales that are left out are chosen by the evidence
TINY = (*FREE, "--steps", "60", "--prior-scale", "1")


def test_compare_tells_what_was_chosen(run, tmp_path):
    page = tmp_path / "page.html"
    before, after = json.loads(run("compare", "sine", *FREE, "--report", page, "--json").out)["methods"]
    assert before["evidence"] is None
    chosen = after["evidence"]
    assert chosen.keys() == {"log_evidence", "prior_scale", "noise"}
    line = f"Laplace: prior scale {chosen['prior_scale']:.4g}, noise {chosen['noise']:.4g}, log evidence "
    assert f"{line}{chosen['log_evidence']:,.2f} nats." in page.read_text()
    shown = run("compare", "sine", *FREE, "--prior-scale", "1", "--noise", "1").out
    (given,) = [line for line in shown.splitlines() if line.startswith("Laplace: ")]
    words, _, evidence = given.removesuffix(" nats.").rpartition(" ")
    assert words == "Laplace: prior scale 1, noise 1, log evidence"
    assert float(evidence.replace(",", "")) < chosen["log_evidence"]


def test_fit_tells_what_was_chosen_again_when_it_is_finished(run, tmp_path):
    words = ("fit", "two-moons", *FREE, "--steps", "60", "--out", tmp_path / "run")
    first, again = run(*words), run(*words)
    assert "Laplace: prior scale " in first.out
    assert first.out == again.out
    document = json.loads(run(*words, "--json").out)
    _, posterior = open_run(tmp_path / "run")
    scales = po.model.scales.chosen_scales(posterior.joint)["prior_scale"]
    assert len({f"{scale:.12g}" for scale in scales.tolist()}) == 2  # one for each layer
    assert document["evidence"]["prior_scale"] == pytest.approx(float(scales.log().mean().exp()))
    assert document["evidence"]["log_evidence"] == float(posterior.log_evidence)
    assert "noise" not in document["evidence"]
    assert "evidence" in json.loads(
        run("fit", "two-moons", "--method", "map", *TINY, "--out", tmp_path / "m", "--json").out
    )


def test_a_noise_that_was_given_is_kept(run):
    found = json.loads(run("compare", "sine", *FREE, "--noise", "0.2", "--json").out)["methods"][1]["evidence"]
    assert found["noise"] == pytest.approx(0.2)
    assert found["prior_scale"] != 1.0


def test_noise_and_evidence_are_in_the_units_of_the_file(run, tmp_path):
    rows = [(0.1 * i, math.sin(0.3 * i) + 0.1 * (i % 3)) for i in range(60)]

    def evidence(factor):
        file = tmp_path / "rows.csv"
        file.write_text("x,y\n" + "".join(f"{x},{factor * y}\n" for x, y in rows))
        result = run("compare", file, "--target", "y", *FREE, "--steps", "60", "--json")
        return json.loads(result.out)["methods"][1]["evidence"]

    small, large = evidence(1.0), evidence(1000.0)
    assert large["noise"] == pytest.approx(1000.0 * small["noise"], rel=1e-3)
    assert large["prior_scale"] == pytest.approx(small["prior_scale"], rel=1e-3)
    assert large["log_evidence"] == pytest.approx(small["log_evidence"] - 48 * math.log(1000.0), rel=1e-4)


def test_every_word_is_a_structure():
    assert all(isinstance(structure(word), po.curvature.Structure) for word in STRUCTURES)


def test_the_structure_is_that_of_the_library(run, tmp_path):
    kinds = {}
    for word in ("full", "kronecker", "diagonal"):
        result = run("fit", "two-moons", *TINY, "--structure", word, "--out", tmp_path / word)
        assert result.code == 0
        kinds[word] = type(open_run(tmp_path / word)[1].gaussian.precision).__name__
    assert kinds == {"full": "Dense", "kronecker": "BlockDiagonal", "diagonal": "Diagonal"}
    other = run("fit", "two-moons", *TINY, "--structure", "full", "--out", tmp_path / "diagonal")
    assert other.code == 4
    assert "its structure is 'diagonal' and 'full' was asked for" in other.err


@pytest.mark.parametrize("verb", ["compare", "plan"])
def test_structures_that_cannot_be_are_refused(run, verb):
    result = run(verb, "two-moons", "--structure", "kroneker")
    assert result.code == 2
    assert "Did you mean 'kronecker'" in result.err
    result = run(verb, "two-moons", "--structure", "full", "--methods", "map")
    assert result.code == 2
    assert "--structure is for laplace" in result.err


def test_what_does_not_fit_is_refused_before_anything_runs(run, monkeypatch, tmp_path):
    monkeypatch.setattr("posterity.inference.memory.device_memory", lambda device: 20_000_000)
    wide = ("two-moons", "--hidden", "100,100", "--device", "cpu")
    result = run("fit", *wide, "--structure", "full", "--out", tmp_path / "run")
    assert result.code == 2
    assert "Full() over 10,602 weights needs about 225 MB, and cpu has 20 MB." in result.err
    assert "hint: --structure corrected-kronecker fits." in result.err
    assert not (tmp_path / "run").exists()
    assert run("plan", *wide, "--structure", "full").code == 0
    monkeypatch.setattr("posterity.inference.memory.device_memory", lambda device: 1000)
    result = run("compare", *wide)
    assert "hint: use a smaller network" in result.err
