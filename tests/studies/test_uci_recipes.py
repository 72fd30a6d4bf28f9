"""MC dropout, deep ensembles and PBP on the UCI splits: their problems, their choices and their predictives."""

import math
from dataclasses import replace

import pytest
import torch
from ucitable import write_energy

from posterity.datasets import LabelledData
from posterity.likelihoods import Gaussian, Heteroscedastic
from posterity.methods import ProbabilisticBackpropagation
from posterity.posteriors import Dropout, Mixture, Point
from posterity.predictive import DrawsPredictive
from posterity_studies.uci import recipes, runs, study
from posterity_studies.uci.protocol import held_out, standard_split
from posterity_studies.uci.recipes import (
    LEAST,
    MEMBERS,
    RECIPES,
    LeastNoise,
    chosen_dropout,
    chosen_ensemble,
    dropout_problem,
    ensemble_problem,
    mask_average,
    moments,
)
from posterity_studies.uci.settings import Settings
from posterity_studies.uci.study import Mean, Row, reached, run

pytestmark = pytest.mark.cpu
TINY = Settings(("energy",), steps=100, batch_size=16, jobs=1)


@pytest.fixture(autouse=True)
def energy(tmp_path, monkeypatch):
    write_energy(tmp_path / "data", monkeypatch)


def test_held_out_rows_are_a_fifth_of_the_training_rows_and_no_test_rows():
    split = standard_split("energy", 0)
    part = held_out(split, TINY)
    assert (len(part.train), len(part.test)) == (29, 7)
    rows = {tuple(row) for half in (part.train, part.test) for row in half.inputs.tolist()}
    assert rows == {tuple(row) for row in split.train.inputs.tolist()}
    assert not torch.equal(held_out(split, Settings(seed=1)).test.inputs, part.test.inputs)


@pytest.mark.parametrize(("name", "choose"), [("dropout", chosen_dropout), ("ensemble", chosen_ensemble)])
def test_a_choice_does_not_depend_on_test_rows(name, choose):
    split = standard_split("energy", 0)
    other = replace(split, test=LabelledData(split.test.inputs + 3.0, split.test.targets - 5.0))
    method = RECIPES[name].stages(TINY)[-1]
    assert choose(other, TINY, method) == choose(split, TINY, method)


def test_dropout_comes_before_both_layers_and_the_chosen_noise_is_known():
    joint = dropout_problem(standard_split("energy", 0), TINY, {"rate": 0.05, "noise": 0.3})
    kinds = [type(layer).__name__ for layer in joint.network.module]
    assert kinds == ["Dropout", "Linear", "ReLU", "Dropout", "Linear"]
    assert {layer.p for layer in joint.network.module if hasattr(layer, "p")} == {0.05}
    assert joint.likelihood.num_free == 0
    assert float(joint.likelihood.scale) == pytest.approx(0.3)
    assert dropout_problem(standard_split("energy", 0), TINY).likelihood.num_free == 1


def test_the_chosen_noise_has_the_best_held_out_density(monkeypatch):
    """Of one rate, by hand."""
    monkeypatch.setattr(recipes, "RATES", (0.05,))
    split, method, fitted = standard_split("energy", 0), RECIPES["dropout"].stages(TINY)[-1], []
    average = mask_average

    def remembered(posterior, inputs):
        fitted.append(average(posterior, inputs))
        return fitted[-1]

    monkeypatch.setattr(recipes, "mask_average", remembered)
    choice = chosen_dropout(split, TINY, method)
    outputs, targets = fitted[0].outputs.double(), held_out(split, TINY).test.targets.double()
    densities = {
        noise: float((torch.distributions.Normal(outputs, noise).log_prob(targets).logsumexp(0)).mean())
        for noise in recipes.NOISES
    }
    assert choice == {"rate": 0.05, "noise": max(densities, key=densities.__getitem__)}


def test_dropout_averages_over_masks():
    joint = dropout_problem(standard_split("energy", 0), TINY, {"rate": 0.1, "noise": 0.3})
    result = mask_average(Dropout(joint, joint.network.initial), standard_split("energy", 0).test.inputs)
    assert isinstance(result, DrawsPredictive)
    assert len(result.outputs) == recipes.DRAWS
    assert isinstance(result.likelihood, Gaussian)
    assert bool((result.epistemic > 0).all())


def test_noise_never_falls_below_the_least():
    outputs = LeastNoise(0.3)(torch.tensor([[1.5, -40.0], [2.0, 0.4]], dtype=torch.float64))
    assert outputs[:, 0].tolist() == [1.5, 2.0]
    expected = [0.3, math.sqrt(math.exp(0.8) + 0.09)]
    assert outputs[:, 1].exp().tolist() == pytest.approx(expected)


def test_the_ensemble_predicts_by_the_moments_of_its_mixture():
    split = standard_split("energy", 0)
    joint = ensemble_problem(split, TINY, {"least_noise": 0.2})
    assert isinstance(joint.likelihood, Heteroscedastic)
    start = joint.network.initial
    q = Mixture([Point(joint, start), Point(joint, start.flip(0))])
    result, parts = moments(q, split.test.inputs), [posterior.predict(split.test.inputs) for posterior in q.posteriors]
    means, variances = (torch.stack([getattr(part, name) for part in parts]) for name in ("mean", "variance"))
    torch.testing.assert_close(result.mean, means.mean(0))
    torch.testing.assert_close(result.variance, variances.mean(0) + means.var(0, correction=0))
    normal = torch.distributions.Normal(result.mean, result.variance.sqrt())
    torch.testing.assert_close(result.log_prob(split.test.targets), normal.log_prob(split.test.targets)[:, 0])


def test_both_run_and_tell_what_they_chose(tmp_path):
    results = run(replace(TINY, methods=("dropout", "ensemble"), splits=1), tmp_path / "study")
    dropped, ensemble = (result.scores for result in results.results)
    assert dropped["rate"] in recipes.RATES
    assert dropped["noise"] in recipes.NOISES
    assert ensemble["least_noise"] in LEAST
    assert [row.method for row in results.rows if not row.published] == ["MC dropout", f"Ensemble of {MEMBERS}"]
    assert (
        sum("within one standard error of" in line for line in results.notes()) == 3
    )  # one published RMSE is not there
    again = run(replace(TINY, methods=("dropout", "ensemble"), splits=1), tmp_path / "study")
    assert again == results


def test_reached_allows_one_standard_error():
    def row(name, method, mean, error, splits=None):
        return Row(name, method, {"test_nll": Mean(mean, error)}, splits)

    rows = [row("a", "own", 1.1, 0.5, 20), row("b", "own", 1.11, 0.5, 20), row("c", "own", 1.2, 0.3, 20)]
    rows += [row("a", "goal", 1.0, 0.1), row("b", "goal", 1.0, 0.1), row("c", "goal", 1.0, None)]
    assert reached(rows, "own", "goal", "test_nll") == (["a", "c"], ["a", "b", "c"])


def test_splits_of_pbp_run_together_and_each_as_it_would_alone(tmp_path, monkeypatch):
    short = replace(RECIPES["pbp"], stages=lambda settings: (ProbabilisticBackpropagation(passes=2),))
    for module in (runs, study):
        monkeypatch.setattr(module, "RECIPES", {**RECIPES, "pbp": short})
    lines = []
    result = run(replace(TINY, methods=("map", "pbp"), steps=5), tmp_path / "study", lines.append)
    assert sorted(line.partition("/4 ")[2].partition(":")[0] for line in lines) == [
        "energy 3 splits",
        *(f"energy split {split}" for split in range(3)),
    ]
    alone, _ = runs.fitted(standard_split("energy", 1), short, TINY, {})
    by_split = {r.cell.split: r.scores for r in result.results if r.cell.method == "pbp"}
    assert by_split[1] == pytest.approx(alone, rel=1e-6)
    assert len({scores["test_nll"] for scores in by_split.values()}) == 3
    again = []
    assert run(replace(TINY, methods=("pbp",), steps=5), tmp_path / "study", again.append).results == tuple(
        r for r in result.results if r.cell.method == "pbp"
    )
    assert again == ["3 of 3 results are there already"]
