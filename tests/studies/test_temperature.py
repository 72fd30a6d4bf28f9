"""The study of temperature: fits together and alone, going on, what is chosen and compared, rows, figures."""

import json
import warnings
from dataclasses import replace

import pytest
import torch

from posterity.datasets import DataSet, LabelledData
from posterity.errors import BadData, BadFolder, Diverged
from posterity.inference import task
from posterity.inference.sweep import Result
from posterity.model.data import as_data
from posterity.posteriors import Gaussian
from posterity_studies.grids import log_grid
from posterity_studies.rows import own_orders
from posterity_studies.temperature import problem as module
from posterity_studies.temperature import study
from posterity_studies.temperature.figures import against_eta, against_tau, draw
from posterity_studies.temperature.problem import problem, read
from posterity_studies.temperature.settings import Settings
from posterity_studies.temperature.study import Cell, Study, Width, run

pytestmark = pytest.mark.cpu
TINY = Settings(
    "two-moons",
    "one-hidden",
    (3, 5),
    (0.1,),
    (0.01,),
    seeds=2,
    steps=6,
    batch_size=16,
    draws=4,
    dtype="float64",
    device="cpu",
)


def images(count, channels, side, seed=0):
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(count) % 10
    return LabelledData(torch.rand((count, channels, side, side), generator=generator), labels)


@pytest.fixture(autouse=True)
def small(monkeypatch):
    names = tuple("0123456789")
    grey = DataSet("mnist", "classification", images(48, 1, 28), images(20, 1, 28, 1), names)
    colour = DataSet("cifar-10", "classification", images(48, 3, 32), images(20, 3, 32, 1), names)
    monkeypatch.setattr(module, "mnist", lambda name: grey)
    monkeypatch.setattr(module, "mnist_test", lambda name: grey.test)
    monkeypatch.setattr(module, "cifar10", lambda: colour)
    monkeypatch.setattr(module, "cifar10_test", lambda: colour.test)


def at_most(monkeypatch, most):
    """Let memory have room for so many fits."""

    class Room:
        def __init__(self, method, joint, rows):
            self.fits = (joint.num_members or 1) <= most

    monkeypatch.setattr(study, "plan", Room)


def same(first, other, tolerance):
    assert [each.cell for each in first.results] == [each.cell for each in other.results]
    for left, right in zip(first.results, other.results, strict=True):
        assert left.scores == pytest.approx(right.scores, rel=tolerance, abs=tolerance)


@pytest.mark.parametrize("method", ["bayes-by-backprop", "ivon"])
@pytest.mark.parametrize("most", [1, 4])
def test_fits_are_what_they_would_be_alone_and_groups_are_told(tmp_path, monkeypatch, fitted, method, most):
    settings = replace(TINY, method=method, widths=(5,))
    together = run(settings, folder=tmp_path / "all")
    assert fitted == [6]  # 0.1, tau 0.01 and 1, of two seeds
    at_most(monkeypatch, most)
    lines = []
    parts = run(settings, folder=tmp_path / "parts", report=lines.append)
    assert fitted[1:] == ([1] * 6 if most == 1 else [3, 3])
    assert any("memory has no room" in line for line in lines)
    same(together, parts, 1e-9)


def test_members_with_batch_norm_are_what_they_would_be_alone(tmp_path, monkeypatch):
    settings = Settings(
        "cifar-10",
        "resnet-20",
        (1,),
        (0.1,),
        seeds=1,
        steps=2,
        batch_size=4,
        draws=2,
        dtype="float64",
        rows=8,
        device="cpu",
    )
    together = run(settings, folder=tmp_path / "all")
    at_most(monkeypatch, 1)
    same(together, run(settings, folder=tmp_path / "one"), 1e-8)
    assert {result.cell.eta for result in together.results} == {0.1, 1.0}


def test_seeds_differ_and_temperatures_of_a_seed_begin_alike(tmp_path):
    rows = read(TINY)
    own = problem(5, rows, TINY)
    key = study.Key(0)
    starts = own.start([0, 0, 1], key)
    assert torch.equal(starts[0], starts[1])
    assert not torch.equal(starts[0], starts[2])
    orders = own_orders(as_data(rows.train.pair), [0, 0, 1]).keys(key)
    assert orders[0].seed == orders[1].seed != orders[2].seed
    result = run(replace(TINY, widths=(3,), steps=1), tmp_path, rows=rows)
    assert len({item.scores["nll"] for item in result.results}) == len(result.results)


def test_a_seed_predicts_with_the_same_draws_at_all_temperatures(tmp_path, monkeypatch):
    seen, predict = [], Gaussian.predict

    def noted(self, inputs, **options):
        seen.append(options["seed"])
        return predict(self, inputs, **options)

    monkeypatch.setattr(Gaussian, "predict", noted)
    run(replace(TINY, widths=(3,)), folder=tmp_path)
    assert len(seen) == 3 * 6  # test, foreign and held-out rows
    assert len(set(seen[:9])) == len(set(seen[9:])) == 1
    assert seen[0] != seen[9]


def test_sghmc_samples_a_chain_for_each_fit(tmp_path, fitted):
    result = run(replace(TINY, widths=(3,), seeds=1, method="sghmc", steps=20), folder=tmp_path)
    assert fitted == [3]
    assert all("kl" not in item.scores and item.scores["mean_sigma"] > 0 for item in result.results)
    assert result.widths[0].start_sigma is None
    against_eta(result, tmp_path / "eta.png")  # without a KL
    assert (tmp_path / "eta.png").exists()


def test_scales_take_steps_of_their_own_and_their_start_is_told(tmp_path):
    moved = {}
    for step in (1.0, 20.0):
        settings = replace(TINY, widths=(3,), seeds=1, scale_step=step)
        result = run(settings, folder=tmp_path / str(step))
        assert ("scale_step=20.0" in result.document()["inference"]) == (step == 20.0)
        assert result.document()["widths"][0]["start_sigma"] == pytest.approx(0.05)
        moved[step] = result.row(result.widths[0], 1.0).scores["mean_sigma"][0] / 0.05
    assert 1.0 < moved[1.0] < 1.2  # six steps of at most 0.03
    assert moved[20.0] > 2.0
    assert Settings("cifar-10", "resnet-20").inference(100).scale_step == 10.0


def test_the_usual_size_is_small_and_that_of_the_paper_is_whole():
    quick, whole = Settings(), Settings(paper=True)
    assert (quick.all_seeds, quick.rows_of(55_000), quick.rows_of(458)) == (1, 4000, 458)
    assert (whole.all_seeds, whole.rows_of(55_000), whole.all_widths) == (3, None, (50, 200, 800, 3200, 6400))
    assert replace(quick, rows=7, seeds=2).rows_of(55_000) == 7
    assert replace(quick, net="resnet-20", data="cifar-10", paper=True).all_widths == (8, 16, 32)
    assert replace(quick, cold=(0.1,)).all_widths == (50,)
    small, named = quick.common(), replace(quick, draws=quick.all_draws, seeds=4, method="bayes-by-backprop").common()
    assert small == named != whole.common()


def test_an_interrupted_sweep_goes_on_and_ends_as_a_whole_one(tmp_path, fitted):
    whole = run(TINY, folder=tmp_path / "whole")

    def stop(line):
        if line.startswith("width 5, eta 1, seed 0"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(TINY, folder=tmp_path / "part", report=stop)
    assert len(list((tmp_path / "part" / "runs").rglob("*.json"))) == 9  # 6 of the first width
    lines = []
    resumed = run(TINY, folder=tmp_path / "part", report=lines.append)
    assert [result.scores for result in resumed.results] == [result.scores for result in whole.results]
    assert "width 3: 6 of 6 fits are there already" in lines
    assert "width 5: takes up 6 fits that were interrupted" in lines  # and they are at their end, by a checkpoint
    assert not (tmp_path / "part" / "checkpoints").exists()
    count = len(fitted)
    assert run(TINY, folder=tmp_path / "part").results == resumed.results
    assert len(fitted) == count


def test_a_fit_goes_on_from_its_checkpoint(tmp_path, monkeypatch):
    from posterity.inference.callbacks import Callback

    settings = replace(TINY, widths=(3,))
    whole = run(settings, folder=tmp_path / "whole")
    infer, steps = task.infer, []

    class Stop(Callback):
        def after_step(self, run):
            steps.append(run.step)
            if run.step == 4 and len(steps) == 4:
                raise KeyboardInterrupt

    def stopped(*words, checkpoint, **options):
        return infer(*words, **{**options, "checkpoint": replace(checkpoint, steps=1), "callbacks": [Stop()]})

    monkeypatch.setattr(task, "infer", stopped)
    with pytest.raises(KeyboardInterrupt):
        run(settings, folder=tmp_path / "part")
    resumed = run(settings, folder=tmp_path / "part")
    assert steps == [1, 2, 3, 4, 4, 5, 6]  # the third was stored
    assert [result.scores for result in resumed.results] == [result.scores for result in whole.results]


def test_more_of_the_grid_goes_on_in_the_same_folder_and_other_settings_do_not(tmp_path, fitted):
    run(TINY, folder=tmp_path)
    run(replace(TINY, seeds=3, etas=(0.1, 0.5), widths=(3,)), folder=tmp_path)
    assert fitted == [6, 6, 6]  # 12 less the 6 that were there
    with pytest.raises(BadFolder, match=r"prior_variance differs: 0\.2, now 0\.3"):
        run(replace(TINY, prior_variance=0.3), folder=tmp_path)


def test_a_fit_that_diverges_loses_no_other(tmp_path, monkeypatch):
    infer = task.infer

    def diverging(method, joint, *words, **options):
        if bool((torch.as_tensor(joint.tempering.eta) == 1.0).any()):
            raise Diverged("The loss is not finite at step 3.\nMore.", step=3, tensor="loss")
        return infer(method, joint, *words, **options)

    monkeypatch.setattr(task, "infer", diverging)
    lines = []
    settings = replace(TINY, widths=(3,), seeds=1)
    result = run(settings, folder=tmp_path, report=lines.append)
    assert result.failed == (Cell(3, 1.0, 0),)
    assert [item.cell.eta for item in result.results] == [0.1, pytest.approx(0.01 * result.num_data / 3)]
    assert "width 3, eta 1, seed 0: no result. The loss is not finite at step 3." in lines
    assert any("go in halves" in line for line in lines)
    document = result.document()
    assert document["diverged"] == [{"width": 3, "eta": 1.0, "seed": 0}]
    assert document["accuracy_at_eta_1"] == []


def test_temperatures_are_the_etas_those_of_taus_and_one():
    settings = replace(TINY, etas=(0.1, 10.0), taus=(0.01, 0.1))
    assert settings.temperatures(100, 10) == (0.1, 1.0, 10.0)  # eta = 10 tau, and none twice
    assert settings.temperatures(100, 7) == (0.1, 0.01 * 100 / 7, 1.0, 0.1 * 100 / 7, 10.0)
    for net, widths in (("one-hidden", (50,)), ("resnet-20", ())):
        usual = Settings(net=net, widths=widths, paper=True).temperatures(50_000, 270_000)
        assert len(usual) >= 6
        assert 1.0 in usual
        assert usual[-1] / usual[0] >= 0.99e4
    assert replace(TINY, etas=(2.0,), taus=()).temperatures(100, 7) == (1.0, 2.0)


def test_units_are_neurons_or_parameters():
    assert problem(5, read(TINY), TINY).units == 5
    other = replace(TINY, net="mlp")
    assert problem(5, read(other), other).units == 5 * 3 + 2 * 6
    assert problem(5, read(TINY), TINY).tau(2.0) == pytest.approx(2.0 * 5 / 458)


def made(scores, settings=TINY):
    """A study of given scores by width, eta and seed, with 100 rows."""
    etas = {width: tuple(sorted({eta for w, eta, _ in scores if w == width})) for width, _, _ in scores}
    widths = tuple(Width(width, width, own) for width, own in etas.items())
    usual = {"accuracy": 0.5, "nll": 0.4, "gibbs_nll": 0.5, "ece": 0.1, "confidence": 0.5, "ood_auroc": 0.6}
    results = tuple(
        Result(Cell(*cell), {**usual, "kl_per_unit": 1.0, "mean_sigma": 0.1, **own}, 1.0)
        for cell, own in scores.items()
    )
    return Study(settings, 100, 10, 2, widths, results)


def test_the_best_temperature_is_that_of_held_out_rows():
    nll = {0.1: (0.5, 0.1), 1.0: (0.4, 0.2), 10.0: (0.6, 0.05)}
    result = made(
        {
            (5, eta, seed): {"held_out_nll": held + 0.2 * seed, "nll": test}
            for eta, (held, test) in nll.items()
            for seed in (0, 1)
        }
    )
    best = result.best(result.widths[0])
    assert (best.eta, best.tau, best.seeds) == (1.0, pytest.approx(0.05), 2)
    assert best.scores["held_out_nll"] == (pytest.approx(0.5), pytest.approx(0.2 / 2**0.5))
    assert result.document()["best_by_held_out_nll"][0]["eta"] == 1.0
    nothing = made({(5, 1.0, 0): {}})
    assert nothing.best(nothing.widths[0]) is None
    assert nothing.document()["best_by_held_out_nll"] == []


def test_widths_are_compared_at_equal_tau():
    settings = replace(TINY, widths=(50, 200, 400), taus=(0.2, 2.0))
    accuracies = {
        (50, 0.4, 0): 0.1, (200, 0.1, 0): 0.9, (200, 0.1, 1): 0.8, (400, 0.05, 0): 0.83,
        (200, 1.0, 0): 0.5, (400, 0.5, 0): 0.7, (50, 4.0, 0): 0.5, (400, 1.0, 0): 0.3, (50, 1.0, 0): 0.9,
    }  # fmt: skip
    result = made(
        {cell: {"accuracy": value, "nll": 0.69 if cell[1] >= 0.5 else 0.3} for cell, value in accuracies.items()},
        settings,
    )
    spread = result.document()["accuracy_spread_at_equal_tau"]
    assert [(item["tau"], item["learnt"]) for item in spread["by_tau"]] == [(0.2, True), (2.0, False)]
    assert (spread["largest"], spread["largest_where_all_have_learnt"]) == (pytest.approx(0.2), pytest.approx(0.02))
    assert result.document()["accuracy_at_eta_1"] == [
        {"width": 50, "accuracy": 0.9}, {"width": 200, "accuracy": 0.5}, {"width": 400, "accuracy": 0.3}
    ]  # fmt: skip
    assert "differ by 20.00 points at most, and by 2.00 where all have learnt something" in result.notes()[-1]


def test_the_document_has_every_fit_and_figures_are_drawn(tmp_path):
    result = run(TINY, folder=tmp_path)
    document = result.document()
    assert json.loads(json.dumps(document, allow_nan=False)) == document
    assert len(document["fits"]) == 12
    assert len(document["rows"]) == 6
    for row in document["rows"]:
        assert row["tau"] == pytest.approx(row["eta"] * row["width"] / 458)
        assert row["scores"]["gibbs_nll"]["mean"] >= row["scores"]["nll"]["mean"]
        assert row["scores"]["kl"]["mean"] == pytest.approx(row["width"] * row["scores"]["kl_per_unit"]["mean"])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert draw(result, tmp_path) == ["eta.png", "tau.png"]
        against_tau(replace(result, widths=result.widths[:1]), tmp_path / "single.png")
    for name in ("eta.png", "tau.png", "single.png"):
        assert (tmp_path / name).read_bytes()[:4] == b"\x89PNG"


def test_rows_are_held_out_cut_and_scaled():
    rows = read(replace(TINY, rows=100, held_out=50, pixels="standard"))
    assert (len(rows.train), len(rows.held_out), rows.classes) == (100, 50, 2)
    assert rows.train.inputs.mean(0).tolist() == pytest.approx([0.0, 0.0], abs=1e-6)
    assert rows.train.inputs.std(0).tolist() == pytest.approx([1.0, 1.0], abs=1e-6)
    plain = read(replace(TINY, rows=100, held_out=50))
    assert not set(map(tuple, plain.train.inputs.tolist())) & set(map(tuple, plain.held_out.inputs.tolist()))
    assert read(replace(TINY, held_out=0)).held_out is None
    low, high = float(plain.train.inputs.min()), float(plain.train.inputs.max())
    assert float(plain.foreign.min()) < low
    assert float(plain.foreign.max()) > high


@pytest.mark.parametrize(
    ("name", "net", "ood", "shape"),
    [
        ("mnist", "one-hidden", None, (784,)),
        ("mnist", "lenet", "cifar-10", (1, 28, 28)),
        ("cifar-10", "resnet-20", None, (3, 32, 32)),
        ("cifar-10", "one-hidden", "uniform", (3072,)),
    ],
)
def test_foreign_rows_have_the_shape_of_the_others(name, net, ood, shape):
    widths = (5,) if net == "one-hidden" else ()
    settings = Settings(name, net, widths, ood=ood, device="cpu")
    rows = read(settings)
    assert rows.shape == tuple(rows.test.inputs.shape[1:]) == tuple(rows.foreign.shape[1:]) == shape
    assert (
        problem(settings.all_widths[0], rows, settings).joint.example_output(as_data(rows.train.pair).first()).shape[-1]
        == 10
    )
    if name == "cifar-10" and ood is None:  # a grey image in the middle, three times
        assert bool((rows.foreign[:, :, :2] == 0).all())
        assert torch.equal(rows.foreign[:, 0], rows.foreign[:, 2])
        assert "padded" in module.describe_foreign(name, settings.foreign)


def test_inputs_that_do_not_vary_cannot_be_scaled(monkeypatch):
    black = DataSet(
        "mnist",
        "classification",
        LabelledData(torch.zeros(24, 1, 28, 28), torch.arange(24) % 10),
        images(5, 1, 28),
        tuple("0123456789"),
    )
    monkeypatch.setattr(module, "mnist", lambda name: black)
    with pytest.raises(BadData, match="do not vary"):
        read(Settings("mnist", "lenet", pixels="standard", ood="uniform"))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"data": "mnits"}, "Did you mean 'mnist'"),
        ({"net": "resnet"}, "Did you mean 'resnet-20'"),
        ({"method": "sgmc"}, "Did you mean 'sghmc'"),
        ({"ood": "knist"}, "Did you mean 'kmnist'"),
        ({"pixels": "row"}, "Did you mean 'raw'"),
        ({"dtype": "float16"}, "dtype"),
        ({"etas": (0.0,)}, r"--etas must be a positive number. Got 0\.0"),
        ({"taus": (float("nan"),)}, "--taus"),
        ({"etas": (float("inf"),)}, "--etas"),
        ({"widths": (0,)}, "--widths"),
        ({"net": "lenet", "data": "mnist"}, "one size only"),
        ({"net": "resnet-20"}, "takes images"),
        ({"seeds": 0}, "--seeds"),
        ({"steps": 0}, "--steps"),
        ({"epochs": 2}, "steps or epochs, not both"),
        ({"cold": (0.1,)}, "they are temperatures of two densities"),
        ({"cold": (0.1,), "etas": (), "taus": (), "method": "ivon"}, "sampled by 'sghmc'. Got method 'ivon'"),
        ({"cold": (0.1,), "etas": (), "taus": ()}, "one width. Got 3, 5"),
        ({"scale_step": 0.0}, "--scale-step"),
        ({"held_out": -1}, "--held-out"),
        ({"prior_variance": 0.0}, "--prior-variance"),
        ({"step_size": -1.0}, "--step-size"),
    ],
)
def test_settings_that_cannot_be_are_refused(change, said):
    with pytest.raises(ValueError, match=said):
        replace(TINY, **change)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"held_out": 500}, "must leave some of the 500"),
        ({"rows": 459}, "at most the 458"),
        ({"ood": "mnist"}, "Use ood 'uniform'"),
    ],
)
def test_rows_that_are_not_there_are_refused(change, said):
    with pytest.raises(ValueError, match=said):
        read(replace(TINY, **change))


def test_the_length_of_a_fit():
    assert replace(TINY, steps=None).inference(458).steps == 400
    alone = replace(TINY, steps=None, paper=True)
    assert alone.inference(458).steps == 2000
    assert replace(alone, epochs=3).inference(458).steps == 3 * 28
    assert replace(alone, data="mnist").inference(60_000).steps == 12 * (60_000 // 16)
    assert replace(alone, batch_size=None).inference(100).batch_size == 100


def test_grids_of_logarithms():
    assert log_grid(1e-3, 1.0, 4) == (1e-3, 1e-2, 1e-1, 1.0)
    assert log_grid(2.0, 2.0, 1) == (2.0,)
    for bad in ((0.0, 1.0, 3), (1.0, 0.1, 3), (0.1, 1.0, 1), (0.1, float("inf"), 3), (0.1, 1.0, 0)):
        with pytest.raises(ValueError, match="log_grid"):
            log_grid(*bad)


def test_narrow_networks_draw_more_so_that_noise_is_that_of_wide_ones():
    settings = Settings("blobs", neuron_draws=1000, draws=32, widths=(5,))
    assert [settings.draws_of(units) for units in (1, 10, 30, 31, 5000)] == [1000, 100, 34, 33, 32]
    assert Settings("blobs", widths=(5,), draws=32).draws_of(1) == 32
    assert Settings("blobs", widths=(5,), paper=True).draws_of(1) == 100_000
    with pytest.raises(ValueError, match="does not average over neurons"):
        Settings("mnist", "lenet", neuron_draws=10)
