"""Mean-field inference from the command line: its start, the weight of its KL, its estimator, its run folder."""

import json
from itertools import pairwise

import pytest
import torch

from posterity.cli.frame.folders import open_run
from posterity.methods import MeanField
from posterity.methods.parts.gradients import Flipout, LocalReparameterisation, WeightSampling
from posterity.recipes.methods import RECIPES, estimator
from posterity.recipes.settings import ESTIMATORS

pytestmark = pytest.mark.cpu
TINY = ("--hidden", "5", "--steps", "30", "--prior-scale", "1", "--device", "cpu", "-q")
SINE = (*TINY, "--noise", "0.3")


def weights(sizes):
    return sum((a + 1) * b for a, b in pairwise(sizes))


def test_compare_shows_it_beside_the_map_that_it_starts_from(run, tmp_path):
    page = tmp_path / "page.html"
    words = ("compare", "two-moons", *TINY, "--methods", "map,mean-field")
    shown = run(*words, "--report", page)
    assert shown.code == 0
    assert "MeanField starts from the same MAP; its seconds come on top." in shown.out
    assert "MeanField" in page.read_text()
    point, factorised = json.loads(run(*words, "--json").out)["methods"]
    assert (factorised["method"], factorised["starts_from"]) == ("mean-field", "map")
    assert point["kl_weight"] is None
    assert point["test_nll"] != factorised["test_nll"]


def test_its_kl_weighs_rows_by_means_and_scales_and_never_more_than_one(run):
    def row(*words):
        return json.loads(run("compare", "two-moons", *TINY, "--methods", "mean-field", "--json", *words).out)

    few, many = row("--hidden", "2"), row("--hidden", "100")
    assert few["methods"][0]["kl_weight"] == 1.0
    assert many["methods"][0]["kl_weight"] == pytest.approx(500 / (2 * weights((2, 100, 2))))
    assert row("--kl-weight", "0.5")["methods"][0]["kl_weight"] == 0.5
    numbers = run("compare", "sine", *SINE, "--hidden", "100", "--methods", "mean-field", "--json").out
    assert json.loads(numbers)["methods"][0]["kl_weight"] == 1.0
    assert row("--eta", "0.5")["methods"][0]["kl_weight"] is None  # that of the whole problem


def test_the_weight_is_told_where_it_is_not_one(run, tmp_path):
    told = run("compare", "two-moons", *TINY, "--hidden", "100", "--methods", "mean-field").out
    assert "MeanField weighs its KL by 0.498 (500 rows / 1004 means and scales); --kl-weight 1 is" in told
    asked = run(
        "fit", "two-moons", *TINY, "--method", "mean-field", "--kl-weight", "0.3", "--out", tmp_path / "run"
    ).out
    assert "MeanField weighs its KL by 0.3 (--kl-weight); --kl-weight 1 is the posterior itself." in asked
    assert "weighs its KL" not in run("compare", "two-moons", *TINY, "--methods", "mean-field").out


def test_the_problem_of_the_others_stays_as_it_is(run, tmp_path):
    for name, words in (("free", ()), ("weighed", ("--kl-weight", "0.1"))):
        assert run("fit", "sine", *SINE, "--method", "mean-field", *words, "--out", tmp_path / name).code == 0
    assert open_run(tmp_path / "weighed")[1].joint.tempering.eta == pytest.approx(0.1)
    both = ("compare", "sine", *SINE, "--methods", "map,mean-field", "--json")
    plain, tempered = (json.loads(run(*both, *words).out)["methods"] for words in ((), ("--kl-weight", "0.1")))
    assert plain[0]["test_nll"] == tempered[0]["test_nll"]
    assert plain[1]["test_nll"] != tempered[1]["test_nll"]


def test_a_run_is_kept_predicted_scored_and_gone_on_with(run, tmp_path, monkeypatch):
    folder = tmp_path / "run"
    words = ("fit", "two-moons", *TINY, "--method", "mean-field", "--checkpoint-steps", "7", "--out", folder)
    step = MeanField.step
    monkeypatch.setattr(
        MeanField, "step", lambda self, joint, state, *rest: _interrupt(state) or step(self, joint, state, *rest)
    )
    assert run(*words).code == 130
    monkeypatch.setattr(MeanField, "step", step)
    assert run(*words).code == 0
    assert run("fit", "two-moons", *TINY, "--method", "mean-field", "--out", tmp_path / "whole").code == 0
    resumed, whole = (open_run(path)[1] for path in (folder, tmp_path / "whole"))
    assert torch.equal(resumed.mean, whole.mean)
    assert torch.equal(resumed.variance, whole.variance)
    assert not (folder / "stages").exists()
    assert json.loads(run(*words, "--json").out)["finished_already"]
    predicted = json.loads(run("predict", folder, "--json").out)
    assert (predicted["method"], len(predicted["rows"])) == ("mean-field", 2000)
    scored = run("evaluate", folder)
    assert scored.code == 0
    assert "MeanField" in scored.out
    assert json.loads(run("evaluate", folder, "--json").out)["scores"].keys() >= {"test_nll", "ece", "accuracy"}


def _interrupt(state):
    if state.step == 20:
        raise KeyboardInterrupt


def test_plan_has_a_stage_for_it(run):
    words = ("plan", "two-moons", "--methods", "mean-field", "--steps", "2000", "--json", "-q")
    stages = json.loads(run(*words).out)["stages"]
    assert [stage["stage"] for stage in stages] == ["map", "mean-field"]
    assert stages[1]["parts"]["optimiser"] > stages[0]["parts"]["optimiser"]


def test_every_word_is_an_estimator():
    kinds = {word: type(estimator(word)) for word in ESTIMATORS}
    assert kinds == {
        "antithetic": WeightSampling,
        "weights": WeightSampling,
        "local": LocalReparameterisation,
        "flipout": Flipout,
    }
    assert estimator("antithetic") == WeightSampling(antithetic=True)
    assert RECIPES["mean-field"].stages == ("map", "mean-field")
    assert RECIPES["mean-field"].label == "MeanField"


def test_estimators_differ_and_the_default_is_the_methods_own(run):
    def nll(*words):
        document = run("compare", "sine", *SINE, "--methods", "mean-field", "--json", *words).out
        return json.loads(document)["methods"][0]["test_nll"]

    found = {word: nll("--estimator", word) for word in ESTIMATORS}
    assert len(set(found.values())) == len(ESTIMATORS)
    assert nll() not in found.values()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--estimator", "locol", "--methods", "mean-field"), "Did you mean 'local'?"),
        (("--estimator", "local"), "--estimator is for mean-field, which was not asked for."),
        (("--kl-weight", "0.5"), "--kl-weight is for mean-field, which was not asked for."),
        (("--kl-weight", "0", "--methods", "mean-field"), "--kl-weight must be"),
        (("--kl-weight", "0.5", "--eta", "0.5", "--methods", "mean-field"), "--kl-weight and --eta cannot"),
        (("--kl-weight", "0.5", "--temperature", "0.5"), "--kl-weight and --temperature cannot"),
    ],
)
def test_options_that_cannot_be_are_refused(run, words, said):
    result = run("compare", "two-moons", *words)
    assert result.code == 2
    error, hint = result.err.splitlines()
    assert said in error
    assert hint.startswith("hint: ")


def test_on_two_moons_it_is_nearly_as_good_as_map(run):
    words = ("--methods", "map,mean-field", "--steps", "1500", "--prior-scale", "1", "--device", "cpu", "--json", "-q")
    point, factorised = json.loads(run("compare", "two-moons", *words).out)["methods"]
    assert factorised["accuracy"] > 0.955
    assert factorised["test_nll"] < point["test_nll"] + 0.03
    assert factorised["ece"] < 0.02
