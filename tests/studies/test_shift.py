"""The study of shift: changes of images, rows that share fits and resume, scores and figures."""

import json
import math
import warnings
from dataclasses import replace

import pytest
import torch
from noiseimages import noise_images
from torch.nn import functional as F

from posterity import metrics
from posterity.cli.frame.output import console
from posterity.datasets import LabelledData
from posterity.errors import BadFolder
from posterity.inference.sweep import Result
from posterity.networks import LeNet, ResNet
from posterity.numerics.random import Key
from posterity.posteriors import Point
from posterity.predictive import TemperatureScaling
from posterity_studies.shift import figures, recipes, study
from posterity_studies.shift.changes import CHANGES, blurred, faded, noisy, occluded, rotated
from posterity_studies.shift.figures import LINES, draw
from posterity_studies.shift.recipes import RECIPES, ROWS, Length, augmentation, fits_of
from posterity_studies.shift.settings import METHODS, NETWORKS, Settings
from posterity_studies.shift.study import FOREIGN, Cell, Study, problem, read, run

pytestmark = pytest.mark.cpu
TINY = Settings(networks=("lenet",), methods=("map", "ensemble"), held_out=20, shifted=8, epochs=1e-9)


@pytest.fixture
def images(monkeypatch):
    """A few images of noise, two members, two strengths of two changes."""
    monkeypatch.setattr(study, "data_set", lambda name, seed: noise_images(name, (1, 28, 28), 84, 24))
    foreign = {name: Key(1).fold(name).uniform((24, 1, 28, 28), torch.float32) for name in FOREIGN["mnist"]}
    monkeypatch.setattr(study, "foreign_inputs", lambda name, like, count, seed: foreign[name])
    recipe = replace(RECIPES["lenet"], members=2, batch=16)
    monkeypatch.setattr(study, "RECIPES", {**RECIPES, "lenet": recipe})
    few = {name: replace(CHANGES[name], strengths=CHANGES[name].strengths[:2]) for name in ("rotation", "noise")}
    for module in (study, figures):
        monkeypatch.setattr(module, "CHANGES", few)
    return read(TINY)


def test_a_quarter_turn_is_exact_and_anticlockwise():
    x = Key(0).uniform((3, 2, 7, 7), torch.float32)
    torch.testing.assert_close(rotated(x, 90.0, Key(0)), x.rot90(1, (2, 3)), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(rotated(x, 180.0, Key(0)), x.flip(2, 3), atol=1e-5, rtol=1e-5)


def test_noise_has_its_scale_and_stays_in_range():
    x = torch.full((50, 1, 20, 20), 0.5)
    changed = noisy(x, 0.1, Key(2))
    count = x.numel()
    assert abs(float(changed.std()) - 0.1) < 5 * 0.1 / math.sqrt(2 * count)
    assert abs(float(changed.mean()) - 0.5) < 5 * 0.1 / math.sqrt(count)
    loud = noisy(x, 5.0, Key(2))
    assert float(loud.min()) == 0.0
    assert float(loud.max()) == 1.0


def test_a_blurred_point_is_a_normal_density():
    x = torch.zeros(1, 1, 15, 15, dtype=torch.float64)
    x[0, 0, 7, 7] = 1.0
    places = torch.arange(-6, 7, dtype=torch.float64)
    density = (-0.5 * (places / 2.0) ** 2).exp()
    expected = F.pad(torch.outer(density, density) / density.sum() ** 2, (1, 1, 1, 1))
    torch.testing.assert_close(blurred(x, 2.0, Key(0))[0, 0], expected)


def test_lost_contrast_keeps_the_mean_of_each_image():
    x = Key(0).uniform((3, 2, 5, 5), torch.float64)
    changed = faded(x, 0.8, Key(0))
    torch.testing.assert_close(changed.mean((1, 2, 3)), x.mean((1, 2, 3)))
    torch.testing.assert_close(changed.std((1, 2, 3)), 0.2 * x.std((1, 2, 3)))


def test_an_occluded_image_has_one_grey_square_anywhere():
    changed = occluded(torch.zeros(400, 2, 6, 8), 0.5, Key(0))
    grey = changed == 0.5
    assert torch.equal(changed, 0.5 * grey)
    assert bool((grey.sum((2, 3)) == 9).all())
    assert bool((grey.any(2).sum(-1) == 3).all())
    corners = {(int(image[0].any(1).int().argmax()), int(image[0].any(0).int().argmax())) for image in grey}
    assert corners == {(row, column) for row in range(4) for column in range(6)}


@pytest.mark.parametrize("name", list(CHANGES))
def test_changes_follow_from_the_key_and_leave_the_images(name):
    change, x = CHANGES[name], Key(0).uniform((4, 3, 12, 12), torch.float32)
    before = x.clone()
    results = [change.apply(x, change.strengths[-1], Key(seed)) for seed in (0, 0, 1)]
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2]) == (name not in ("noise", "occlusion"))
    assert torch.equal(x, before)
    assert not torch.equal(results[0], x)
    assert results[0].shape == x.shape
    assert list(change.strengths) == sorted(change.strengths)
    assert change.strengths[0] > 0.0


def test_rows_share_fits_resume_and_are_drawn(tmp_path, images):
    lines, settings = [], replace(TINY, methods=METHODS)
    whole = run(settings, tmp_path, lines.append, images)
    assert sum(", fit " in line for line in lines) == len(fits_of(RECIPES["lenet"]))
    assert [result.cell.method for result in whole.results] == list(METHODS)
    single, ensemble = whole.results[:2]
    assert single.seconds == pytest.approx(ensemble.seconds / 2)
    mean_field = whole.results[METHODS.index("mean-field")]
    assert single.seconds < mean_field.seconds < single.seconds + 60.0  # the fit of one member, and its own
    assert not any("test" in line for line in lines)
    again = run(settings, tmp_path, lines.append, images)
    assert again.results == whole.results
    with pytest.raises(BadFolder, match="shifted differs: 8, now 7"):
        run(replace(settings, shifted=7), tmp_path, lines.append, images)
    document = whole.document()
    assert json.loads(json.dumps(document, allow_nan=False)) == document
    assert document["best_by_held_out_nll"]["lenet"] in METHODS
    study.show(console(), whole)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        names = draw(whole, tmp_path)
    assert names == ["lenet.png", "lenet-shift.png"]
    assert all((tmp_path / name).read_bytes().startswith(b"\x89PNG") for name in names)


def test_scores_are_those_of_the_predictive_with_a_temperature_from_held_out_images(images):
    posterior = Point(problem("lenet", False, images, TINY), problem("lenet", False, images, TINY).initial())
    right = posterior.predict(images.held_out.inputs).probs.argmax(
        1
    )  # a low temperature is best, on test rows a high one
    images = replace(images, held_out=LabelledData(images.held_out.inputs, right))
    numbers, curves = study.scores(posterior, 4, images, seed=3)
    test, held_out = posterior.predict(images.test.inputs), posterior.predict(images.held_out.inputs)
    calibrated = TemperatureScaling.fit(held_out, images.held_out.targets).apply(test)
    assert numbers["nll"] == pytest.approx(metrics.negative_log_likelihood(test, images.test.targets))
    assert numbers["brier"] == pytest.approx(metrics.brier_score(test, images.test.targets))
    expected = metrics.negative_log_likelihood(calibrated, images.test.targets)
    assert numbers["calibrated_nll"] == pytest.approx(expected)
    foreign = posterior.predict(images.foreign["kmnist"])
    assert numbers["auroc_kmnist"] == pytest.approx(metrics.out_of_distribution_auroc(test, foreign))
    strengths = CHANGES["rotation"].strengths[:2]
    assert [strength for strength, _ in curves["rotation/nll"]] == [0.0, *strengths]
    turned = posterior.predict(rotated(images.test.inputs[:8], strengths[1], Key(0)))
    values = [posterior.predict(images.test.inputs[:8]), turned]
    expected = [metrics.negative_log_likelihood(pred, images.test.targets[:8]) for pred in values]
    assert [curves["rotation/nll"][index][1] for index in (0, 2)] == pytest.approx(expected)


def test_held_out_images_choose_the_best_row():
    def result(method, held_out, test):
        numbers = {"accuracy": 0.9, "nll": test, "ece": 0.1, "calibrated_nll": test, "calibrated_ece": 0.1}
        return Result(Cell("lenet", method), {**numbers, "held_out_nll": held_out}, 1.0)

    chosen = Study(TINY, (result("map", 0.2, 0.1), result("ensemble", 0.1, 0.2)), ("LeNet, SWAG",))
    assert chosen.best("lenet").cell.method == "ensemble"
    assert chosen.notes() == [
        "LeNet, Ensemble has the least NLL on held-out images: test error 10.00 %, NLL 0.2000 and ECE 0.1000, "
        "calibrated 0.2000 and 0.1000.",
        "LeNet, SWAG: not complete; the same command continues it.",
    ]


def test_a_method_whose_minutes_are_over_goes_on_in_the_next_call(tmp_path, images):
    brief = replace(TINY, methods=("map",), minutes=1e-9)
    assert run(brief, tmp_path, images=images).waiting == ("LeNet, MAP",)
    assert run(replace(brief, minutes=None), tmp_path, images=images).results


def test_every_method_has_a_row_and_every_fit_a_length():
    assert set(ROWS) == set(METHODS) == set(LINES)
    for recipe in RECIPES.values():
        fits = fits_of(recipe)
        assert {row.fit for row in ROWS.values()} == set(fits)
        length = Length(recipe, 1000, 0.1)
        assert all(fit.method(length, 1.0) for fit in fits.values())
    assert set(NETWORKS) == set(FOREIGN)


@pytest.mark.parametrize("network", list(RECIPES))
def test_dropout_comes_before_linear_layers_and_only_where_it_is_wanted(network):
    recipe, shape = RECIPES[network], (3, 32, 32) if network == "resnet-20" else (1, 28, 28)
    plain, dropping = (recipe.make(shape, 10, rate) for rate in (0.0, recipes.RATE))
    count = {"lenet": 3, "mlp": 1, "resnet-20": 1}[network]
    assert sum(isinstance(module, torch.nn.Dropout) for module in dropping.modules()) == count
    assert not any(isinstance(module, torch.nn.Dropout) for module in plain.modules())
    assert {"lenet": LeNet, "resnet-20": ResNet}.get(network, torch.nn.Sequential) is type(plain)
    sizes = [sum(parameter.numel() for parameter in module.parameters()) for module in (plain, dropping)]
    assert sizes[0] == sizes[1]


@pytest.mark.parametrize("data", list(NETWORKS))
def test_augmented_images_keep_their_shape(data):
    x = Key(0).uniform((4, 1, 28, 28), torch.float32)
    assert augmentation(data)(x, Key(0)).shape == x.shape
