"""The study of images: resumable fits, the choice of eta on held-out images alone, means over seeds, figures."""

import json
import warnings
from dataclasses import replace

import pytest
import torch

from posterity.datasets import DataSet, LabelledData
from posterity.errors import BadFolder
from posterity.inference.sweep import Result
from posterity.methods import MAP, MeanField
from posterity_studies.grids import mean_and_spread
from posterity_studies.images import settings, study
from posterity_studies.images.figures import draw
from posterity_studies.images.settings import Settings
from posterity_studies.images.study import Cell, Study, run

pytestmark = pytest.mark.cpu
TINY = Settings(networks=("mlp",), etas=(1.0, 0.1), held_out=20, seeds=2, steps=3, batch_size=16, draws=2)


def squares(count, seed):
    """Images whose class is where the bright square is."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(10, (count,), generator=generator)
    inputs = 0.1 * torch.rand((count, 1, 28, 28), generator=generator)
    for image, label in zip(inputs, labels.tolist(), strict=True):
        image[0, 5 * (label // 5) + 6 : 5 * (label // 5) + 11, 5 * (label % 5) : 5 * (label % 5) + 5] += 1.0
    return LabelledData(inputs, labels)


@pytest.fixture(autouse=True)
def small(monkeypatch):
    data = DataSet("mnist", "classification", squares(120, 0), squares(40, 1), tuple("0123456789"))
    monkeypatch.setattr(study, "mnist", lambda name: data)
    return data


@pytest.fixture
def fitted(monkeypatch):
    """The cells that are fitted, in order."""
    cells, fit = [], study.fit
    monkeypatch.setattr(study, "fit", lambda cell, *words: cells.append(cell) or fit(cell, *words))
    return cells


def test_the_first_seed_has_the_grid_and_the_others_what_was_chosen(tmp_path, fitted):
    result = run(TINY, tmp_path)
    best = result.chosen["mlp"]
    assert fitted[:3] == [Cell("mlp", eta, 0) for eta in (None, 1.0, 0.1)]
    assert fitted[3:] == [Cell("mlp", eta, 1) for eta in dict.fromkeys((None, best, 1.0))]
    grid = result.grid("mlp")
    assert best == min((1.0, 0.1), key=lambda eta: grid[eta].scores["held_out_nll"])
    assert [(row.eta, row.seeds) for row in result.rows("mlp")] == [
        (eta, 2) for eta in dict.fromkeys((None, best, 1.0))
    ]
    document = result.document()
    assert json.loads(json.dumps(document, allow_nan=False)) == document
    assert document["settings"]["etas"] == [1.0, 0.1]
    assert len(document["fits"]) == len(fitted)
    assert all(item.scores["mean_scale"] > 0 for item in result.results if item.cell.eta)


def test_eta_is_chosen_without_the_test_images(tmp_path, monkeypatch):
    nll = {None: 0.1, 1.0: 0.3, 0.1: 0.2}

    def scored(cell, *words):
        scores = {f"{part}_{key}": 1.0 for part in ("held_out", "test") for key in ("error", "nll", "ece")}
        scores |= {"held_out_nll": nll[cell.eta], "test_nll": -nll[cell.eta], "mean_scale": 0.1}
        return Result(cell, scores, 1.0)

    monkeypatch.setattr(study, "fit", scored)
    monkeypatch.setattr(study, "start", lambda *words: None)
    result = run(TINY, tmp_path)
    assert result.chosen == {"mlp": 0.1}


def test_notes_say_what_is_worse():
    def result(eta, error, nll, ece):
        scores = {"test_error": error, "test_nll": nll, "test_ece": ece, "mean_scale": 0.1}
        return Result(Cell("lenet", eta, 0), scores, 1.0)

    alone = Settings(etas=(0.1,))
    good = Study(alone, (result(None, 1.0, 0.05, 0.01), result(0.1, 1.2, 0.05, 0.009)), {"lenet": 0.1})
    bad = Study(alone, (result(None, 1.0, 0.05, 0.01), result(0.1, 1.4, 0.051, 0.011)), {"lenet": 0.1})
    assert good.notes() == [
        "LeNet, eta 0.1: error 0.20 points above MAP's (within 0.3 points), NLL no worse, ECE no worse"
    ]
    assert bad.notes() == [
        "LeNet, eta 0.1: error 0.40 points above MAP's (not within 0.3 points), NLL worse, ECE worse"
    ]


def test_an_interrupted_study_goes_on_and_ends_as_a_whole_one(tmp_path, fitted):
    whole = run(TINY, tmp_path / "whole")
    count = len(fitted)

    def stop(line):
        if "eta 1," in line:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(TINY, tmp_path / "part", report=stop)
    lines = []
    resumed = run(TINY, tmp_path / "part", report=lines.append)
    assert len(fitted) == 2 * count
    assert [result.scores for result in resumed.results] == [result.scores for result in whole.results]
    assert sum("there already" in line for line in lines) == 2
    assert run(TINY, tmp_path / "part") == resumed


def test_results_of_other_settings_are_refused(tmp_path):
    run(TINY, tmp_path)
    with pytest.raises(BadFolder, match="steps differs: 3, now 4"):
        run(replace(TINY, steps=4), tmp_path)


def test_more_seeds_and_etas_go_on_in_the_same_folder(tmp_path, fitted):
    run(TINY, tmp_path)
    count = len(fitted)
    run(replace(TINY, seeds=3, etas=(1.0, 0.1, 0.01)), tmp_path)
    assert Cell("mlp", 0.01, 0) in fitted[count:]
    assert Cell("mlp", None, 2) in fitted[count:]
    assert Cell("mlp", 1.0, 0) not in fitted[count:]


def test_both_methods_take_as_many_steps_and_all_etas_share_a_start():
    (point,), first, second = TINY.stages("lenet", None), TINY.stages("lenet", 1.0), TINY.stages("lenet", 0.1)
    assert first == second
    assert [type(stage) for stage in (point, *first)] == [MAP, MAP, MeanField]
    assert point.steps == sum(stage.steps for stage in first) == 4
    assert [stage.steps for stage in Settings().stages("mlp", 1.0)] == [1000, settings.STEPS["mlp"]]


def test_the_start_of_a_seed_is_fitted_once(tmp_path, monkeypatch):
    seeds, start = [], study.start
    monkeypatch.setattr(
        study, "start", lambda network, seed, *words: seeds.append(seed) or start(network, seed, *words)
    )
    run(TINY, tmp_path)
    assert seeds == [0, 1]


def test_held_out_images_are_apart_and_follow_from_the_seed(small):
    data = study.read_images(TINY)
    assert (len(data.train), len(data.held_out), len(data.test)) == (100, 20, 40)
    both = torch.cat([data.train.inputs, data.held_out.inputs]).flatten(1)
    assert len(both.unique(dim=0)) == 120
    other = study.read_images(replace(TINY, seed=1))
    assert not torch.equal(other.held_out.inputs, data.held_out.inputs)
    assert data.flat().test.inputs.shape == (40, 784)


def test_the_start_follows_from_the_seed_and_eta_from_the_cell():
    joint = study.problem("mlp", 0.1, 0, 100, TINY)
    assert joint.tempering.eta == pytest.approx(0.1)
    assert torch.equal(joint.network.initial, study.problem("mlp", None, 0, 100, TINY).network.initial)
    assert not torch.equal(joint.network.initial, study.problem("mlp", 0.1, 1, 100, TINY).network.initial)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"data_set": "mnits"}, "Did you mean 'mnist'"),
        ({"etas": ()}, "--etas must name at least one"),
        ({"etas": (0.0,)}, "--etas"),
        ({"steps": 0}, "--steps"),
        ({"seeds": 0}, "--seeds"),
    ],
)
def test_settings_that_cannot_be_are_refused(change, said):
    with pytest.raises(ValueError, match=said):
        Settings(**change)


def test_networks_that_are_not_known_are_refused():
    with pytest.raises(ValueError, match="Did you mean 'lenet'"):
        Settings(networks=("lenett",))
    with pytest.raises(ValueError, match="--networks must name at least one"):
        Settings(networks=())


def test_a_spread_is_the_sample_standard_deviation():
    assert mean_and_spread([1.0, 3.0]) == (2.0, pytest.approx(2**0.5))
    assert mean_and_spread([1.0]) == (1.0, None)


@pytest.mark.parametrize("seeds", [1, 2])
def test_figures(tmp_path, seeds):
    result = run(replace(TINY, networks=("mlp", "lenet"), seeds=seeds, steps=2), tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        names = draw(result, tmp_path)
    assert names == ["eta.png", "scores.png"]
    assert all((tmp_path / name).read_bytes().startswith(b"\x89PNG") for name in names)
