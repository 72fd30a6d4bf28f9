"""The study of penalties: groups, lambdas, choices, and what is left of networks."""

import json
import pickle
import time
import warnings
from dataclasses import replace

import pytest
import torch

from posterity.datasets import DataSet, LabelledData
from posterity.errors import BadFolder, Diverged
from posterity.inference import Callback, Processes, task
from posterity.inference.sweep import Result
from posterity.numerics.random import Key
from posterity.penalties import layer_factors, penalty_term, usual_factors
from posterity_studies.penalties import figures, runs
from posterity_studies.penalties import problem as module
from posterity_studies.penalties.figures import draw
from posterity_studies.penalties.problem import PENALTIES, Cell, problem, read
from posterity_studies.penalties.settings import Settings
from posterity_studies.penalties.study import Part, Study, run

pytestmark = pytest.mark.cpu
TINY = Settings(
    penalties=("l2", "rows"),
    ratios=(0.1,),
    seeds=2,
    epochs=1,
    rows=24,
    width=1,
    batch_size=8,
    held_out=10,
    device="cpu",
)


def cell(penalty, setup, ratio, seed, step_size=0.1, epochs=1):
    return Cell(penalty, setup, ratio, step_size, epochs, seed)


def images(count, channels=1, side=28):
    drawn = Key(count).normal((count, channels, side, side), torch.float32)
    targets = torch.arange(count) % 10
    return LabelledData(drawn + targets.view(-1, 1, 1, 1), targets)


@pytest.fixture(autouse=True)
def few_images(monkeypatch):
    def made(name="mnist", channels=1, side=28):
        return DataSet(
            name, "classification", images(40, channels, side), images(20, channels, side), tuple("0123456789")
        )

    monkeypatch.setattr(module, "mnist", made)
    monkeypatch.setattr(module, "cifar10", lambda: made("cifar-10", 3, 32))


def at_most(monkeypatch, most):
    """Let memory have room for so many fits."""

    class Room:
        total = 1

        def __init__(self, method, joint, rows):
            self.members = joint.num_members or 1

        def has_room(self, needed):
            return needed * self.members <= most

    monkeypatch.setattr(runs, "plan", Room)


@pytest.mark.parametrize(("augment", "penalty"), [(False, "rows"), (True, "l1"), (True, "l2")])
def test_fits_are_what_they_would_be_alone_and_groups_are_told(tmp_path, monkeypatch, fitted, augment, penalty):
    settings = replace(TINY, penalties=(penalty,), augment=augment)
    together = run(settings, folder=tmp_path / "all")
    assert fitted == [8]  # two lambdas, setups and seeds
    at_most(monkeypatch, 1)
    lines = []
    alone = run(settings, folder=tmp_path / "alone", report=lines.append)
    assert fitted[1:] == [1] * 8
    assert f"{penalty}, step size 0.1, 1 epoch: 8 fits run in groups of 1: memory has no room for more at once" in lines
    assert [result.cell for result in together.results] == [result.cell for result in alone.results]
    for left, right in zip(together.results, alone.results, strict=True):
        assert left.scores == pytest.approx(right.scores, rel=1e-3, abs=1e-4)


def test_members_have_the_rates_of_their_setups():
    rows = read(TINY)
    own = problem("rows", rows, TINY)
    cells = [cell("rows", "usual", 0.5, 0), cell("rows", "bayesian", 2.0, 1)]
    prior = own.joint(cells).prior
    expected = (usual_factors(own.module, PENALTIES["rows"]), layer_factors(own.module, PENALTIES["rows"]))
    for name in expected[0]:
        assert prior.rules[name].rate.tolist() == pytest.approx([0.5 * expected[0][name], 2.0 * expected[1][name]])
    plain = replace(TINY, batch_norm=False)
    bare = problem("rows", rows, plain)
    layout = bare.joint(cells[:1]).network.layout
    for part, view in zip(layout, layout.views(bare.start([0], plain)), strict=True):
        assert bool((view == 0).all()) == part.name.endswith("bias")
    assert float(bare.start([0], plain).std()) < 1.0
    starts = own.start([0, 0, 1], TINY)
    assert torch.equal(starts[0], starts[1])
    assert not torch.equal(starts[0], starts[2])


@pytest.mark.parametrize("penalty", ["l2", "columns"])
def test_usual_lambdas_give_the_first_weights_about_the_same_penalty(penalty):
    settings = replace(TINY, ratios=())
    own = problem(penalty, read(settings), settings)
    module = own.joint([cell(penalty, "bayesian", 1.0, 0)]).network
    names = {
        part.name: view for part, view in zip(module.layout, module.layout.views(own.start([0], settings)), strict=True)
    }
    with torch.no_grad():
        for name, parameter in own.module.named_parameters():
            parameter.copy_(names[name])
    kind = PENALTIES[penalty]
    bayesian, usual = (
        float(penalty_term(own.module, kind, own.factors[setup]).detach()) for setup in ("bayesian", "usual")
    )
    assert own.exchange == pytest.approx(bayesian / usual, rel=1e-5)
    ratios = own.ratios("usual", settings)
    assert len(ratios) == len(settings.all_ratios) == 8
    assert 1.0 in settings.all_ratios
    for usual_ratio, ratio in zip(ratios, settings.all_ratios, strict=True):
        exponent = 2 * torch.log10(torch.tensor(usual_ratio / own.num_data, dtype=torch.float64))
        assert float(exponent) == pytest.approx(round(float(exponent)), abs=1e-6)
        assert 10**-0.251 < own.relative(cell(penalty, "usual", usual_ratio, 0)) / ratio < 10**0.251
    given = replace(settings, lambdas=(0.5, 0.25))
    assert own.ratios("usual", given) == (0.25 * 24, 0.5 * 24)
    assert own.ratios("bayesian", given) == settings.all_ratios


def test_an_interrupted_study_goes_on_and_ends_as_a_whole_one(tmp_path, fitted):
    whole = run(TINY, folder=tmp_path / "whole")

    def stop(line):
        if line.startswith("rows, bayesian, lambda = 0.1 lambda_Th, step size 0.1, 1 epoch, seed 0"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(TINY, folder=tmp_path / "part", report=stop)
    assert len(list((tmp_path / "part" / "runs").rglob("*.json"))) == 8 + 3
    lines = []
    resumed = run(TINY, folder=tmp_path / "part", report=lines.append)
    assert [result.scores for result in resumed.results] == [result.scores for result in whole.results]
    assert "l2, step size 0.1, 1 epoch: 8 of 8 fits are there already" in lines
    assert "rows, step size 0.1, 1 epoch: takes up 8 fits that were interrupted" in lines
    assert not (tmp_path / "part" / "checkpoints").exists()
    count = len(fitted)
    assert run(TINY, folder=tmp_path / "part").results == resumed.results
    assert len(fitted) == count
    more = run(replace(TINY, ratios=(0.1, 3.0), penalties=("l2",)), folder=tmp_path / "part")
    assert fitted[count:] == [4]
    assert len(more.results) == 12
    with pytest.raises(BadFolder, match=r"batch_size differs: 8, now 4"):
        run(replace(TINY, batch_size=4), folder=tmp_path / "part")
    with pytest.raises(BadFolder, match="precision"):
        run(replace(TINY, precision="bf16"), folder=tmp_path / "part")


def test_seconds_are_those_of_all_steps_also_of_a_group_that_was_interrupted(tmp_path, monkeypatch):
    settings = replace(TINY, penalties=("l2",), setups=("bayesian",), seeds=1)

    class Slow(Callback):
        def after_step(self, run):
            time.sleep(0.1)

    infer, calls = task.infer, []

    def interrupted(*words, **options):
        calls.append(infer(*words, **{**options, "callbacks": [*options["callbacks"], Slow()]}))
        if len(calls) == 1:
            raise KeyboardInterrupt
        return calls[-1]

    monkeypatch.setattr(task, "infer", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(settings, folder=tmp_path)
    result = run(settings, folder=tmp_path)
    assert len(calls) == 2
    steps = settings.inference("l2", 24, 0.1, 1).steps  # all of them before the interruption
    assert sum(item.seconds for item in result.results) >= 0.1 * steps


def test_processes_have_a_group_each_and_give_the_same(tmp_path, monkeypatch, fitted):
    names = []

    def one_after_the_other(self, work):
        assert self == Processes(3, threads=1)
        names.extend(work)
        for item in work.values():
            yield pickle.loads(pickle.dumps(item))()

    whole = run(TINY, folder=tmp_path / "whole")
    monkeypatch.setattr(Processes, "results", one_after_the_other)
    lines = []
    result = run(replace(TINY, jobs=3), folder=tmp_path / "parts", report=lines.append)
    assert len(names) == 4  # two penalties of eight fits, at most six in a group
    assert fitted[2:] == [6, 2, 6, 2]
    assert [item.cell for item in result.results] == [item.cell for item in whole.results]
    for left, right in zip(result.results, whole.results, strict=True):
        assert left.scores == pytest.approx(right.scores, rel=1e-3, abs=1e-4)
    assert sum(" % of filters left" in line for line in lines) == 16


def test_a_fit_that_diverges_loses_no_other(tmp_path, monkeypatch):
    infer = task.infer

    def diverging(method, joint, *words, start, **options):
        if bool((torch.as_tensor(joint.prior.rules["0.weight"].scale) < 0.3).any()):
            raise Diverged("The loss is not finite at step 3.\nMore.", step=3, tensor="loss")
        return infer(method, joint, *words, start=start, **options)

    monkeypatch.setattr(task, "infer", diverging)
    settings = replace(TINY, penalties=("l2",), setups=("bayesian",), seeds=1, ratios=(0.1, 10.0))
    lines = []
    result = run(settings, folder=tmp_path, report=lines.append)
    assert result.failed == (cell("l2", "bayesian", 10.0, 0),)
    assert [item.cell.ratio for item in result.results] == [0.1, 1.0]
    assert any("go in halves" in line for line in lines)
    assert "l2, bayesian, lambda = 10 lambda_Th, step size 0.1, 1 epoch, seed 0: diverged, no result" in result.notes()
    assert len(result.document()["diverged"]) == 1


def test_a_fit_whose_outputs_overflow_after_its_last_step_has_no_result(tmp_path):
    settings = replace(TINY, penalties=("l2",), setups=("bayesian",), seeds=1, ratios=(1e12,), batch_size=24)
    lines = []
    result = run(settings, folder=tmp_path, report=lines.append)
    assert [item.cell.ratio for item in result.results] == [1.0]
    assert [cell.ratio for cell in result.failed] == [1e12]
    assert (
        "l2, bayesian, lambda = 1e+12 lambda_Th, step size 0.1, 1 epoch, seed 0: no result. Its outputs are not finite."
        in lines
    )
    draw(result, tmp_path)


def test_a_fit_with_an_infinite_score_has_no_result(tmp_path, monkeypatch):
    settings = replace(TINY, penalties=("l2",), setups=("bayesian",), seeds=1)
    monkeypatch.setattr(runs, "scores", lambda *words: {"accuracy": 0.1, "nll": float("inf")})
    lines = []
    result = run(settings, folder=tmp_path, report=lines.append)
    assert not result.results
    assert "l2, bayesian, lambda = 0.1 lambda_Th, step size 0.1, 1 epoch, seed 0: no result. Its nll is inf." in lines


def test_the_usual_setup_stands_alone(tmp_path):
    result = run(replace(TINY, penalties=("l1",), setups=("usual",), seeds=1), folder=tmp_path)
    assert result.at_theory("l1", "bayesian") is None
    assert result.document()["table"][0]["setup"] == "usual"
    draw(result, tmp_path)
    assert (tmp_path / "accuracy.png").exists()


def test_bf16_trains_weights_of_float32(tmp_path):
    settings = replace(TINY, penalties=("rows",), setups=("bayesian",), seeds=1)
    plain = run(settings, folder=tmp_path / "float32")
    rough = run(replace(settings, precision="bf16"), folder=tmp_path / "bf16")
    for result, other in zip(plain.results, rough.results, strict=True):
        assert result.scores["nll"] != other.scores["nll"]
        assert result.scores["nll"] == pytest.approx(other.scores["nll"], abs=0.05)


def test_kernels_of_convolutions_are_tried_out_while_fits_run_and_no_longer(tmp_path, monkeypatch):
    seen, infer = [], task.infer

    def watched(*words, **options):
        seen.append(torch.backends.cudnn.benchmark)
        return infer(*words, **options)

    monkeypatch.setattr(task, "infer", watched)
    before = torch.backends.cudnn.benchmark
    run(replace(TINY, penalties=("l2",), setups=("bayesian",), seeds=1), folder=tmp_path)
    assert seen == [True]
    assert torch.backends.cudnn.benchmark is before is False


def made(scores, settings=TINY):
    """A study of given scores by penalty, setup, ratio and seed, with 100 rows."""
    names = tuple(dict.fromkeys(penalty for penalty, *_ in scores))
    parts = tuple(Part(name, {setup: {"0.weight": 1.0} for setup in settings.setups}, 4.0) for name in names)
    usual = {"nll": 0.4, "held_out_nll": 0.4, "filters_left": 1.0, "weights_left": 1.0, "zeros": 0.0}
    differences = {"pruned_difference": 1e-6, "exact_difference": 1e-15, "vanished 0": 3.0}
    results = tuple(
        Result(cell(*own), {**usual, **differences, "accuracy": 0.5, "held_out_accuracy": 0.5, **values}, 1.0)
        for own, values in scores.items()
    )
    return Study(settings, 100, 10, parts, results)


def test_lambda_is_chosen_on_held_out_rows_and_compared_with_theory():
    held = {1.0: (0.80, 0.3, 0.85), 0.1: (0.90, 0.3, 0.86), 0.01: (0.90, 0.2, 0.87), 0.001: (0.7, 0.1, 0.99)}
    scores = {
        ("rows", setup, ratio, seed): {
            "held_out_accuracy": accuracy + 0.01 * seed, "held_out_nll": nll, "accuracy": test + 0.02 * seed
        }
        for setup in ("usual", "bayesian") for ratio, (accuracy, nll, test) in held.items() for seed in (0, 1)
    }  # fmt: skip
    result = made(scores, replace(TINY, data="cifar-10"))
    best = result.best("rows", "bayesian")
    assert (best.ratio, best.strength, best.seeds) == (0.01, pytest.approx(1e-4), 2)
    assert best.scores["accuracy"] == (pytest.approx(0.88), pytest.approx(0.02 / 2**0.5))
    usual, bayesian = result.table()
    assert bayesian["accuracy_at_theory"]["mean"] == pytest.approx(0.86)
    assert (bayesian["theory_over_best"], bayesian["log10_theory_over_best"]) == (100.0, pytest.approx(2.0))
    assert bayesian["published"] == {"best": 88.67, "at_theory": 87.45, "log_ratio": 2.0}
    assert (usual["accuracy_at_theory"], usual["theory_over_best"], usual["published"]["best"]) == (None, None, 88.43)
    assert not bayesian["lambda_best_at_the_end_of_the_grid"]
    assert result.best("rows", "usual").relative == pytest.approx(0.01 / 4)
    assert "88.00 at lambda*, 86.00 at lambda_Th, lambda_Th / lambda* = 100" in result.notes()[0]
    assert made(scores).table()[0]["published"] is None


def test_the_sparsest_fit_of_about_the_best_accuracy():
    scores = {
        ("rows", "bayesian", 0.1, 0): {"held_out_accuracy": 0.990, "filters_left": 0.9},
        ("rows", "bayesian", 1.0, 0): {"held_out_accuracy": 0.9871, "filters_left": 0.3, "accuracy": 0.98},
        ("rows", "bayesian", 3.0, 0): {"held_out_accuracy": 0.9869, "filters_left": 0.1},
        ("rows", "usual", 3.0, 0): {"held_out_accuracy": 0.9875, "filters_left": 0.4, "pruned_difference": 1.0},
    }
    result = made(scores)
    assert (result.sparsest("rows").setup, result.sparsest("rows").ratio) == ("bayesian", 1.0)
    (kept,) = result.document()["pruning_at_equal_accuracy"]
    assert kept["filters_vanished"] == pytest.approx(0.7)
    assert kept["vanished_by_layer"] == {"0": 3.0}
    assert kept["largest_pruned_difference"] == 1e-6
    assert "rows: 70 % of filters vanish (bayesian, lambda = 0.01)" in result.notes()[-1]
    assert any("at the end of the grid" in line for line in result.notes())


def test_filters_vanish_and_the_smaller_network_agrees(tmp_path):
    settings = replace(
        TINY, penalties=("rows", "l1"), ratios=(1.0, 30.0), width=2, epochs=8, setups=("bayesian",), seeds=1
    )
    result = run(settings, folder=tmp_path)
    strong = next(member for member in result.results if (member.cell.penalty, member.cell.ratio) == ("rows", 30.0))
    assert strong.scores["filters_left"] < 0.5
    assert strong.scores["weights_left"] < 0.5 < strong.scores["zeros"]
    total = sum(value for key, value in strong.scores.items() if key.startswith("vanished"))
    assert total == pytest.approx((1 - strong.scores["filters_left"]) * (2 + 4 + 4 + 8 + 8 + 16))
    for item in result.results:
        assert item.scores["pruned_difference"] < 1e-4
        assert item.scores["exact_difference"] < 1e-10


def test_the_document_has_every_fit_and_figures_are_drawn(tmp_path):
    result = run(replace(TINY, data="cifar-10", seeds=1), folder=tmp_path)
    document = result.document()
    assert json.loads(json.dumps(document, allow_nan=False))["table"] == document["table"]
    assert len(document["fits"]) == len(document["rows"]) == 8
    assert document["lambda_theory"] == 1 / 24
    assert document["augmentation"].startswith("Compose")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        names = draw(result, tmp_path)
        draw(replace(result, settings=replace(result.settings, setups=("usual",)), parts=result.parts[:1]), tmp_path)
    for name in names:
        assert (tmp_path / name).read_bytes()[:4] == b"\x89PNG"


@pytest.mark.parametrize("beyond", [False, True])
def test_an_accuracy_at_lambda_th_far_below_the_others_is_a_number_beside_the_line(tmp_path, monkeypatch, beyond):
    levels = {0.01: 0.9, 0.1: 0.9, 0.3: 0.9, 1.0: 0.4} | ({3.0: 0.3} if beyond else {})
    settings = replace(TINY, setups=("bayesian",), batch_norm=False, step_size=(0.3,))
    result = made({("l1", "bayesian", ratio, 0): {"accuracy": level} for ratio, level in levels.items()}, settings)
    drawn = []
    monkeypatch.setattr(figures, "save", lambda figure, path: drawn.append(figure))
    figures.accuracy(result, tmp_path / "accuracy.png")
    (axis,) = drawn[0].axes
    (note,) = axis.texts
    assert note.get_text() == "40.0 ↓"
    assert note.get_horizontalalignment() == ("left" if beyond else "right")  # where there is room
    assert "usual" not in axis.get_xlabel()
    assert "without batch norm, n = 100, step size 0.3" in drawn[0].get_suptitle()


def test_a_study_in_which_nothing_came_of_it_is_drawn_and_written(tmp_path):
    nothing = replace(made({("rows", "bayesian", 1.0, 0): {}}), results=(), failed=(cell("rows", "bayesian", 1.0, 0),))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        draw(nothing, tmp_path)
    assert nothing.table() == nothing.document()["pruning_at_equal_accuracy"] == []
    assert nothing.notes() == [
        "rows, bayesian, lambda = 1 lambda_Th, step size 0.1, 1 epoch, seed 0: diverged, no result"
    ]


def test_rows_are_scaled_held_out_and_padded_for_deep_networks():
    rows = read(TINY)
    assert (len(rows.train), len(rows.held_out), len(rows.test), rows.classes) == (24, 10, 20, 10)
    assert float(rows.train.inputs.mean()) == pytest.approx(0.0, abs=1e-5)
    assert float(rows.train.inputs.std()) == pytest.approx(1.0, abs=1e-4)
    assert read(replace(TINY, net="vgg19")).test.inputs.shape[1:] == (1, 32, 32)
    assert len(read(replace(TINY, held_out=None)).held_out) == 4


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"data": "mnits"}, "Did you mean 'mnist'"),
        ({"net": "vgg16"}, "Did you mean 'vgg19'"),
        ({"penalties": ("row",)}, "Did you mean 'rows'"),
        ({"penalties": ()}, "--penalties must name at least one"),
        ({"setups": ("bayes",)}, "setup"),
        ({"precision": "float16"}, "precision"),
        ({"ratios": (0.0,)}, "--ratios must be a positive number"),
        ({"lambdas": (float("nan"),)}, "--lambdas"),
        ({"lambdas": (1.0,), "setups": ("bayesian",)}, "setup 'usual'"),
        ({"seeds": 0}, "--seeds"),
        ({"held_out": 0}, "--held-out"),
        ({"width": 0}, "--width"),
        ({"step_size": (0.0,)}, "--step-size"),
        ({"extend": -1}, "--extend"),
        ({"search_epochs": 1}, "must be fewer than the 1 of --epochs"),
    ],
)
def test_settings_that_cannot_be_are_refused(change, said):
    with pytest.raises(ValueError, match=said):
        replace(TINY, **change)


def test_what_is_usual():
    grey, colour = Settings(), Settings(data="cifar-10")
    assert (grey.augmentation, grey.actual_width) == (None, 8)
    assert (colour.augmentation.numbers, colour.actual_width) == (3, 32)
    assert replace(colour, augment=False).augmentation is None
    assert (colour.actual_epochs, colour.actual_step_sizes) == (20, (0.1,))
    assert colour.inference("l2", 45_000, 0.1, 20).steps == 20 * (45_000 // 128)
    assert not colour.inference("l2", 45_000, 0.1, 20).proximal
    assert colour.inference("columns", 45_000, 0.1, 20).proximal
