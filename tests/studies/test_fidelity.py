"""The study of fidelity: distances against closed forms, truths against a conjugate posterior, rows that resume."""

import json
import math
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from posterity.cli.frame.output import console
from posterity.datasets import LabelledData, cifar10_test
from posterity.errors import BadData, BadFolder
from posterity.inference import infer
from posterity.inference.run import Trace
from posterity.inference.sweep import Result
from posterity.likelihoods import Gaussian
from posterity.methods import SGHMC, Conjugate
from posterity.model import Joint
from posterity.optim.schedules import Cycles
from posterity.predictive import ClassPredictive, DrawsPredictive, GaussianPredictive
from posterity.priors import Normal
from posterity_studies import shared_fits
from posterity_studies.fidelity import figures, image_recipes, images, small, study
from posterity_studies.fidelity.image_recipes import FITS, ROWS, Length
from posterity_studies.fidelity.images import Cell, Images, Pictures, compared, equilibrium, temperatures
from posterity_studies.fidelity.network import CUT, Convolution, FilterResponseNorm, FilterResponseResNet
from posterity_studies.fidelity.problems import PROBLEMS, Problem, problem
from posterity_studies.fidelity.settings import CIFAR, CIFAR_METHODS, SMALL, SMALL_METHODS, Settings
from posterity_studies.fidelity.small_recipes import RECIPES
from posterity_studies.fidelity.truth import Mixing, exact
from posterity_studies.shared_fits import Fitted, names_up_to

pytestmark = pytest.mark.cpu
TINY = Settings(problems=(CIFAR,), methods=("map", "ensemble", "sghmc"), width=2, depth=8, epochs=0.05)


def normals(*means):
    return torch.tensor([means], dtype=torch.float64)


def test_distances_of_gaussians_are_those_of_the_closed_forms():
    known = exact(normals(0.0, 3.0), noise=0.5)
    shift = torch.tensor([0.4, -1.1], dtype=torch.float64)
    other = GaussianPredictive(normals(0.0, 3.0).T + shift.unsqueeze(-1), torch.zeros(2, 1), torch.full((2, 1), 0.25))
    apart = known.distances(other)
    expected = torch.erf(shift.abs() / (2 * 0.5 * math.sqrt(2.0))).mean()
    assert apart["total_variation"] == pytest.approx(float(expected), abs=2e-4)
    assert apart["wasserstein"] == pytest.approx(float(shift.abs().mean()), rel=2e-3)


def test_what_lies_beyond_the_grid_is_a_part_of_the_distance():
    known = exact(normals(0.0), noise=0.1)
    far = GaussianPredictive(torch.tensor([[50.0]]), torch.zeros(1, 1), torch.full((1, 1), 0.01))
    assert known.distances(far)["total_variation"] == pytest.approx(1.0, abs=1e-6)
    half = exact(torch.tensor([[0.0], [50.0]], dtype=torch.float64), noise=0.1, grid=known.grid)
    assert known.between(half.density)["total_variation"] == pytest.approx(0.5, abs=1e-6)


def test_draws_and_their_predictive_are_at_one_distance():
    draws = torch.randn(50, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    known = exact(draws[:20], noise=0.3)
    predictive = DrawsPredictive(Gaussian(scale=0.3), draws.unsqueeze(-1))
    own = known.between(exact(draws, 0.3, known.grid).density)
    assert known.distances(predictive) == pytest.approx(own, rel=1e-5)
    shares = draws.sigmoid()
    classes = exact(shares[:20], None)
    table = torch.stack([1 - shares.mean(0), shares.mean(0)], -1)
    expected = (shares[:20].mean(0) - shares.mean(0)).abs().mean()
    assert classes.distances(ClassPredictive(table)) == {"total_variation": pytest.approx(float(expected))}


@pytest.fixture
def linear():
    """A line with noise, whose posterior is Gaussian."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(12, 1, generator=generator)
    targets = inputs - 0.5 + 0.3 * torch.randn(12, 1, generator=generator)
    joint = Joint(nn.Linear(1, 1), Gaussian(scale=PROBLEMS["sine"].noise), Normal(1.0), 12)
    return Problem("sine", joint, LabelledData(inputs, targets), torch.tensor([[-1.0], [0.5], [3.0]]))


@pytest.fixture
def short(monkeypatch):
    monkeypatch.setattr(Settings, "draws", property(lambda self: 100))
    monkeypatch.setattr(small, "LENGTHS", (10,))


def test_problems_are_fixed_and_scaled():
    for name in ("moons", "sine"):
        first, again = problem(name, 0), problem(name, 0)
        assert torch.equal(first.train.inputs, again.train.inputs)
        assert torch.equal(first.joint.initial(), again.joint.initial())
        torch.testing.assert_close(
            first.train.inputs.mean(0), torch.zeros(first.train.inputs.shape[1]), atol=1e-5, rtol=0
        )
        torch.testing.assert_close(first.train.inputs.std(0), torch.ones(first.train.inputs.shape[1]))
        assert first.joint.num_data == len(first.train)
        assert not first.joint.likelihood.num_free
        assert [part.shape for part in first.dropping().network.layout] == [
            part.shape for part in first.joint.network.layout
        ]
    assert not torch.equal(problem("moons", 1).train.inputs, problem("moons", 0).train.inputs)


def test_a_linear_problem_has_its_conjugate_posterior_for_truth(tmp_path, monkeypatch, linear, short):
    """The whole study of a problem whose posterior is Gaussian; a second call computes nothing."""
    settings = Settings(problems=("sine",), methods=("map", "laplace", "mclmc"))
    monkeypatch.setattr(study, "problem", lambda name, seed: linear)
    quick = replace(RECIPES["mclmc"], stages=(replace(RECIPES["mclmc"].stages[0], warmup=30, draws=30, chains=4),))
    monkeypatch.setattr(small, "RECIPES", {**RECIPES, "mclmc": quick})
    fitted, fit = [], small.fitted
    monkeypatch.setattr(small, "fitted", lambda *words: fitted.append(words[0].label) or fit(*words))
    result = study.run(settings, tmp_path)
    q, _ = infer(Conjugate(), linear.joint, linear.train.pair, progress=False)
    known = result.compared[0].truth
    assert known.exact.distances(q.predict(linear.test))["total_variation"] < 0.03
    assert 0.0 < known.floor["total_variation"] < 0.04
    assert known.mixing.rhat < 1.03
    assert fitted == ["NUTS, 10 + 10", "MAP", "Laplace", "MCLMC"]
    document = result.document()
    assert json.loads(json.dumps(document, allow_nan=False)) == document
    (part,) = document["problems"]
    rows = {row["method"]: row for row in part["methods"]}
    assert rows["laplace"]["total_variation"] < 0.03 < rows["map"]["total_variation"]  # exact for a linear network
    assert rows["laplace"]["pareto_k"] < 0.7
    assert part["nuts_seconds"] == rows["nuts-10"]["seconds"]
    assert study.run(settings, tmp_path).document() == document
    assert len(fitted) == 4
    with pytest.raises(BadFolder, match="truth of other settings"):
        small.truth(linear, tmp_path, Settings(seed=1), print)
    assert figures.draw(result, tmp_path) == ["distances.png"]
    study.show(console(), result)


def test_the_time_of_nuts_is_that_of_the_first_run_that_has_converged(monkeypatch):
    def scored(length, good):
        scores = {"total_variation": 0.01, "rhat": 1.005 if good else 1.1, "ess": 500.0}
        return Result(small.Cell("moons", f"nuts-{length}"), scores, float(length))

    quick = Result(small.Cell("moons", "map"), {"total_variation": 0.019}, 19.0)
    slow = Result(small.Cell("moons", "laplace"), {"total_variation": 0.001}, 21.0)
    far = Result(small.Cell("moons", "mclmc"), {"total_variation": 0.021}, 1.0)
    given = {f"nuts-{length}": scored(length, length >= 200) for length in small.LENGTHS}
    given |= {result.cell.method: result for result in (quick, slow, far)}
    monkeypatch.setattr(small, "_result", lambda cell, *words: given[cell.method])
    settings = Settings(problems=("moons",), methods=("map", "laplace", "mclmc"))
    results = tuple(small.results(problem("moons", 0), None, None, settings, print))
    part = study.Compared("moons", None, results)
    assert [result.cell.method for result in part.nuts] == ["nuts-100", "nuts-200"]
    assert part.seconds == 200.0
    assert part.quick == [quick]
    assert "MAP is within 0.019" in part.note()
    assert Mixing(1.01, 400.0).good
    assert not Mixing(1.0, 399.0).good


def test_every_method_has_a_recipe():
    assert set(SMALL_METHODS) == set(RECIPES)
    assert set(CIFAR_METHODS) == set(ROWS)
    assert {row.fit for row in ROWS.values()} <= set(FITS)
    assert names_up_to(ROWS["sghmc-mixture"].fit, FITS) == ("map", "mean-field", "sghmc")
    families = {recipe.family for recipe in (*RECIPES.values(), *ROWS.values())}
    assert families == set(figures.FAMILIES)


def test_the_budget_of_the_table_is_that_of_the_fits():
    """The longest row stays within twelve minutes at the speed that was measured."""
    seconds = {name: image_recipes.EPOCHS[name] * FITS[name].members * 0.82 for name in image_recipes.EPOCHS}
    assert sum(seconds.get(name, 0.0) for name in names_up_to(ROWS["sghmc-mixture"].fit, FITS)) < 720.0
    length = Length(40_960, 1.0)
    method = FITS["sghmc"].method(length, 1.0)
    assert method.steps == 40 * 160
    assert method.step_size**2 * 40_960 == pytest.approx(image_recipes.SGHMC_RATE)
    assert FITS["sgld"].method(length, 2.0).step_size == pytest.approx(2.0 * FITS["sgld"].method(length, 1.0).step_size)


def test_filter_response_norm_is_its_formula():
    norm = FilterResponseNorm(2)
    with torch.no_grad():
        norm.gamma.copy_(torch.tensor([2.0, -1.0]).reshape(2, 1, 1))
        norm.beta.fill_(0.5)
        norm.tau.fill_(-0.25)
    x = torch.randn(3, 2, 4, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    result = norm.double()(x)
    for image in range(3):
        for channel, gamma in enumerate((2.0, -1.0)):
            values = x[image, channel]
            expected = gamma * values / math.sqrt(float((values**2).sum()) / 20 + 1e-6) + 0.5
            torch.testing.assert_close(result[image, channel], expected.clamp_min(-0.25))


def test_convolutions_are_padded_as_the_reference_pads_them():
    x = torch.arange(64.0).reshape(1, 1, 8, 8)
    strided = Convolution(1, 1, stride=2)
    with torch.no_grad():
        strided.weight.zero_()
        strided.weight[..., 0, 0] = 1.0
    torch.testing.assert_close(strided(x), x[:, :, ::2, ::2])  # nothing before the image, one row of zeros after it
    plain = Convolution(1, 1)
    torch.testing.assert_close(plain(x), F.conv2d(x, plain.weight, plain.bias, padding=1))
    torch.manual_seed(0)
    wide = Convolution(64, 256)
    assert float(wide.weight.detach().std()) == pytest.approx(math.sqrt(2.0 / (64 * 9)), rel=0.01)
    assert float(wide.weight.detach().abs().max()) <= 2.0 * math.sqrt(2.0 / (64 * 9)) / CUT
    assert sum(parameter.numel() for parameter in FilterResponseResNet().parameters()) == 274_042


@pytest.fixture
def pictures(monkeypatch):
    """Small images and a reference of their shape; few rows in a step."""
    generator = torch.Generator().manual_seed(0)

    def part(count):
        labels = torch.randint(10, (count,), generator=generator)
        return LabelledData(torch.randn(count, 3, 8, 8, generator=generator), labels)

    monkeypatch.setattr(image_recipes, "BATCH", 32)
    return Pictures(
        part(64), part(20), part(30), torch.rand(30, 10, generator=generator, dtype=torch.float64).softmax(-1)
    )


def test_agreement_and_total_variation_are_those_of_the_competition():
    first = torch.tensor([[0.5, 0.3, 0.2], [0.1, 0.8, 0.1]], dtype=torch.float64)
    second = torch.tensor([[0.2, 0.6, 0.2], [0.0, 1.0, 0.0]], dtype=torch.float64)
    assert compared(first, second) == pytest.approx({"agreement": 0.5, "total_variation": (0.3 + 0.2) / 2})


def test_chains_off_their_temperature_are_not_in_equilibrium():
    def scored(**scores):
        return Result(Cell("sghmc"), scores, 1.0)

    assert equilibrium(scored(kinetic_temperature=1.09, configurational_temperature=0.91)) is True
    assert equilibrium(scored(kinetic_temperature=1.0, configurational_temperature=0.89)) is False
    assert equilibrium(scored(kinetic_temperature=1.11, configurational_temperature=1.0)) is False
    assert equilibrium(scored(nll=0.3)) is None


def test_temperatures_are_those_of_the_steps_that_sample():
    trace = Trace()
    for step in range(8):
        trace.record(step + 1, {"configurational_temperature": torch.tensor([float(step), 2.0 * step])})
    plain = SGHMC(draws=4, warmup=4, chains=2, step_size=0.1, thin=1)
    cyclical = replace(plain, warmup=0, draws=4, schedule=Cycles(4, explore=0.5))
    for method, steps in ((plain, (4, 5, 6, 7)), (cyclical, (2, 3, 6, 7))):
        assert temperatures(Fitted(None, trace, method)) == {
            "configurational_temperature": pytest.approx(1.5 * sum(steps) / 4)
        }


def test_rows_of_images_share_fits_and_are_drawn(tmp_path, pictures):
    lines = []
    whole = images.run(TINY, tmp_path / "whole", lines.append, pictures)
    rows = {result.cell.method: result for result in whole.results}
    assert next(line for line in lines if "fit" in line).startswith("CIFAR-10, fit map")
    assert sum("fit " in line for line in lines) == 3  # map, mean field, SGHMC
    assert rows["map"].seconds == pytest.approx(rows["ensemble"].seconds / image_recipes.MEMBERS)
    assert {"kinetic_temperature", "configurational_temperature"} <= set(rows["sghmc"].scores)
    assert whole.waiting == ()

    result = study.Study(TINY, (), whole)
    document = result.document()
    assert json.loads(json.dumps(document, allow_nan=False)) == document
    assert document["cifar-10"]["rows"][0]["total_variation"] <= document["cifar-10"]["rows"][-1]["total_variation"]
    assert figures.draw(result, tmp_path) == ["cifar-10.png"]
    study.show(console(), result)


def test_rows_resume_and_are_not_chosen_by_the_reference(tmp_path, monkeypatch, pictures):
    """A row whose minutes are over goes on in the next call; a call shows validation scores alone."""
    lines, settings = [], replace(TINY, methods=("dropout",))
    first = images.run(settings, tmp_path / "first", lines.append, pictures)
    monkeypatch.setattr(shared_fits, "STORED", 1e-9)  # after every step
    brief, steps = replace(settings, minutes=1e-9), FITS["dropout"].method(Length(64, 0.05), 1.0).steps
    for _ in range(steps - 2):
        assert images.run(brief, tmp_path / "parts", lines.append, pictures).waiting
    resumed = images.run(brief, tmp_path / "parts", lines.append, pictures)
    assert not resumed.waiting
    assert resumed.results[0].scores == first.results[0].scores
    assert not any("agreement" in line or "variation" in line for line in lines)
    other = replace(pictures, reference=pictures.reference.flip(0))
    second = images.run(settings, tmp_path / "second", lines.append, other)
    assert first.results[0].scores["validation_nll"] == second.results[0].scores["validation_nll"]
    with pytest.raises(BadFolder):
        images.run(settings, tmp_path / "first", lines.append, other)


def test_each_factor_on_the_rate_of_chains_is_a_row():
    settings = replace(TINY, rates=(0.5, 1.0))
    assert list(images.cells(settings)) == [*(Cell("map"), Cell("ensemble")), *(Cell("sghmc", 0.5), Cell("sghmc", 1.0))]
    assert str(Cell("sghmc", 0.5)) == "CIFAR-10, SGHMC, one chain, rate x 0.5"


def test_incomplete_rows_are_named():
    lines = Images((), ("CIFAR-10, MAP",), TINY).notes()
    assert lines == ["CIFAR-10, MAP: not complete; the same command continues it."]


def test_the_reference_is_the_published_file():
    try:
        reference, test = images.read_reference(), cifar10_test()
    except BadData as error:
        pytest.skip(str(error))
    assert reference.shape == (images.COMPARED, 10)
    assert float((reference.argmax(-1) == test.targets[: images.COMPARED]).double().mean()) > 0.9
    torch.testing.assert_close(reference.sum(-1), torch.ones(5000, dtype=torch.float64), atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"problems": ("moon",)}, "moon"),
        ({"problems": SMALL, "methods": ("sghmc-cycles",)}, "moons has no 'sghmc-cycles'"),
        ({"problems": (CIFAR,), "methods": ("chees",)}, "cifar-10 has no 'chees'"),
        ({"depth": 9}, "--depth must be 6 n \\+ 2"),
        ({"rates": (0.0,)}, "--rates"),
    ],
)
def test_options_that_cannot_be_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        Settings(**options)
