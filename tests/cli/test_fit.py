"""`posterity fit`: run folders that survive kills, and what is refused."""

import json
import os
import signal
import textwrap

import pytest
import torch

import posterity as po
from posterity.errors import BadFolder
from posterity.inference import Trace
from posterity.methods import MAP
from posterity.storage import RunFolder, disk

pytestmark = pytest.mark.cpu
TINY = ("--hidden", "6", "--steps", "40", "--checkpoint-steps", "7", "--prior-scale", "1", "--device", "cpu")


def fit_words(folder, *options):
    return ("fit", "two-moons", "--out", folder, *TINY, *options)


def test_a_run_folder_has_the_posterior_the_trace_and_the_task(fitted):
    folder = RunFolder(fitted)
    assert folder.parts() == ("posterior", "reach", "rows", "scores", "task", "trace")
    task = folder.read("task").config
    assert {name: task[name] for name in ("data", "method", "seed", "steps")} == {
        "data": "two-moons",
        "method": "laplace",
        "seed": 0,
        "steps": 40,
    }
    assert task["network"] == {"sizes": [2, 6, 2], "activation": "tanh", "bias": True, "dropout": 0.0}
    trace = Trace.from_tensors(folder.read("trace").tensors)
    assert trace["map.loss"].shape == (40,)
    assert not (fitted / "stages").exists()


def test_another_posterior_is_not_saved_among_the_parts_of_a_run(fitted, content):
    before, q = content(fitted), po.load(fitted, po.networks.MLP((2, 6, 2), activation="tanh"))
    with pytest.raises(BadFolder, match=r"holds a fitted run, .* Save into another folder, or delete this one first"):
        po.posteriors.Point(q.joint, q.point()).save(fitted)
    assert content(fitted) == before


def test_the_posterior_is_that_of_the_library(fitted):
    data = po.datasets.load("two-moons")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        net = po.networks.MLP((2, 6, 2), activation="tanh")
    joint = po.Joint(net, po.likelihoods.Categorical(), po.priors.Normal(1.0), num_data=500)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as the command line does for a small network
    try:
        q, _ = po.infer(MAP(40), joint, data.train.pair)
        q, _ = po.infer(po.methods.Laplace(), joint, data.train.pair, start=q)
    finally:
        torch.set_num_threads(threads)
    stored = po.load(fitted, po.networks.MLP((2, 6, 2), activation="tanh"))
    assert torch.equal(stored.point(), q.point())
    assert torch.equal(stored.predict(data.test.inputs).probs, q.predict(data.test.inputs).probs)
    scores = RunFolder(fitted).read("scores").config
    expected = po.metrics.negative_log_likelihood(q.predict(data.test.inputs), data.test.targets)
    assert scores["test_nll"] == pytest.approx(expected, rel=1e-6)


def test_an_ensemble_is_a_mixture_of_fits(run, tmp_path):
    folder = tmp_path / "run"
    result = run("fit", "two-moons", "--method", "ensemble", "--out", folder, *TINY)
    assert result.code == 0
    stored = po.load(folder, po.networks.MLP((2, 6, 2), activation="tanh"))
    assert [type(one).__name__ for one in stored.posteriors] == ["Point"] * 5
    assert Trace.from_tensors(RunFolder(folder).read("trace").tensors)["ensemble.loss"].shape == (40, 5)
    assert run("evaluate", folder).code == 0


def test_options_reach_the_joint(run, tmp_path):
    options = ("--prior-scale", "0.5", "--temperature", "0.25", "--noise", "0.2", "--batch-size", "all")
    assert run("fit", "sine", "--out", tmp_path / "a", *TINY, *options, "--method", "map").code == 0
    joint = po.load(tmp_path / "a", po.networks.MLP((1, 6, 1), activation="tanh")).joint
    assert joint.prior == po.priors.Normal(0.5)
    assert joint.tempering == po.Tempering.cold(0.25)
    assert joint.likelihood == po.likelihoods.Gaussian(0.2)
    assert run("fit", "sine", "--out", tmp_path / "b", *TINY, "--eta", "0.5", "--method", "map").code == 0
    joint = po.load(tmp_path / "b", po.networks.MLP((1, 6, 1), activation="tanh")).joint
    assert joint.tempering == po.Tempering.tempered(0.5)
    assert joint.likelihood.scale != 1.0  # learnt from there


def test_the_summary_says_how_good_it_is_and_where(run, tmp_path):
    result = run(*fit_words(tmp_path / "run"))
    first, second, third, last = result.out.splitlines()
    assert first == "two-moons, Laplace, network 2-6-2 tanh, 32 weights"
    assert all(name in second for name in ("2,000 test rows", "test NLL", "ECE", "accuracy"))
    assert third.startswith("Laplace: prior scale 1, log evidence -")
    assert last == f"run folder: {tmp_path / 'run'}"
    assert "MAP, 40 steps" in result.err


def test_a_finished_run_is_not_run_again(run, fitted, content, monkeypatch):
    before = content(fitted)
    summary = run(*fit_words(fitted))
    monkeypatch.setattr(MAP, "step", None)  # would fail
    again = run(*fit_words(fitted))
    assert again.code == 0
    assert again.out == summary.out
    assert f"{fitted} is finished already." in again.err.replace("\n", "")
    assert content(fitted) == before
    document = json.loads(run(*fit_words(fitted, "--json")).out)
    assert document["finished_already"] is True
    assert document["scores"].keys() == {
        "test_nll",
        "ece",
        "accuracy",
        "auroc",
        "average_precision",
        "brier",
        "balanced_accuracy",
    }


@pytest.mark.parametrize(
    ("options", "difference"),
    [
        (("--steps", "41"), "its steps is 40 and 41 was asked for"),
        (("--hidden", "5"), "its hidden is [6] and [5] was asked for"),
        (("--method", "map"), "its method is 'laplace' and 'map' was asked for"),
        (("--seed", "1", "--prior-scale", "2"), "its prior_scale is 1.0 and 2.0 was asked for"),
    ],
)
def test_another_run_in_the_folder_is_refused_by_its_first_difference(run, fitted, content, options, difference):
    before = content(fitted)
    result = run(*fit_words(fitted, *options))
    assert result.code == 4
    error, hint = result.err.splitlines()
    assert difference in error
    assert "--out" in hint
    assert "--force" in hint
    assert content(fitted) == before


def test_force_replaces_the_run_when_the_new_one_is_complete(run, fitted, content, tmp_path, monkeypatch):
    before = content(fitted)
    original = po.methods.Laplace.step

    def fail(*arguments):
        raise RuntimeError("broken")

    monkeypatch.setattr(po.methods.Laplace, "step", fail)
    assert run(*fit_words(fitted, "--seed", "1", "--force")).code == 1
    after = {name: digest for name, digest in content(fitted).items() if not name.startswith("stages")}
    assert after == before  # the old one still stands
    monkeypatch.setattr(po.methods.Laplace, "step", original)
    assert run(*fit_words(fitted)).code == 0  # and is found finished, the other one's stages untouched
    assert (fitted / "stages").is_dir()
    assert run(*fit_words(fitted, "--seed", "1", "--force")).code == 0
    assert run(*fit_words(tmp_path / "fresh", "--seed", "1")).code == 0
    assert content(fitted) == content(tmp_path / "fresh")


@pytest.mark.parametrize(
    ("step", "number"), [(1, signal.SIGINT), (7, signal.SIGTERM), (24, signal.SIGINT), (40, signal.SIGINT)]
)
def test_an_interrupted_run_goes_on_to_the_same_bits(run, fitted, content, tmp_path, monkeypatch, step, number):
    original = MAP.step

    def interrupt(self, joint, state, batch, key):
        if state.step + 1 == step:
            os.kill(os.getpid(), number)  # in the middle of a step, as Ctrl-C comes, or the kill of a scheduler
        return original(self, joint, state, batch, key)

    monkeypatch.setattr(MAP, "step", interrupt)
    monkeypatch.setattr(signal, "default_int_handler", signal.getsignal(signal.SIGINT))
    result = run(*fit_words(tmp_path / "other"))
    assert result.code == 130
    assert "the same command goes on from there" in result.err
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    monkeypatch.setattr(MAP, "step", original)
    assert run(*fit_words(tmp_path / "other")).code == 0
    assert content(tmp_path / "other") == content(fitted)


KILLS = {
    "in MAP": ("posterity.methods.MAP", "step", "arguments[1].step == 29"),
    "in Laplace": ("posterity.methods.Laplace", "step", "True"),
    "before the result is in its place": ("posterity.storage.RunFolder", "_replace", "self.path.name == 'other'"),
    "before the stages are removed": ("posterity.cli.frame.folders.Slot", "discard", "True"),
}


@pytest.mark.parametrize("place", KILLS)
def test_a_killed_run_goes_on_to_the_same_bits(run, process, fitted, content, tmp_path, place):
    owner, name, condition = KILLS[place]
    module, _, kind = owner.rpartition(".")
    code = f"""
        import importlib, os, sys
        from posterity.cli.main import main
        owner = getattr(importlib.import_module({module!r}), {kind!r})
        original = owner.{name}
        def killed(self, *arguments, **options):
            if {condition}:
                os._exit(9)
            return original(self, *arguments, **options)
        owner.{name} = killed
        sys.exit(main(sys.argv[1:]))
    """
    result = process("-c", textwrap.dedent(code), *fit_words(tmp_path / "other"))
    assert result.returncode == 9, result.stderr
    assert (tmp_path / "other" / "stages").is_dir()
    assert run(*fit_words(tmp_path / "other")).code == 0
    assert content(tmp_path / "other") == content(fitted)


def test_a_run_under_way_is_not_mixed_with_another(run, tmp_path, monkeypatch):
    monkeypatch.setattr(po.methods.Laplace, "step", None)
    assert run(*fit_words(tmp_path / "run")).code == 1
    monkeypatch.undo()
    result = run(*fit_words(tmp_path / "run", "--seed", "1"))
    assert result.code == 4
    assert "unfinished: its seed is 0 and 1 was asked for" in result.err
    assert run(*fit_words(tmp_path / "run", "--seed", "1", "--force")).code == 0
    assert RunFolder(tmp_path / "run").read("task").config["seed"] == 1


def test_two_processes_do_not_fit_in_one_folder(run, tmp_path):
    (tmp_path / "run").mkdir()
    with disk.locked(tmp_path / "run" / ".fit.lock", seconds=0.0):
        result = run(*fit_words(tmp_path / "run"))
    assert result.code == 4
    assert "another process" in result.err
    assert run(*fit_words(tmp_path / "run")).code == 0


@pytest.mark.parametrize("name", ["notes.txt", "stages/notes.txt"])
def test_a_folder_with_other_things_in_it_is_left_alone(run, tmp_path, name):
    path = tmp_path / "run" / name
    path.parent.mkdir(parents=True)
    path.write_text("mine")
    result = run(*fit_words(tmp_path / "run", "--force"))
    assert result.code == 4
    assert [p for p in (tmp_path / "run").rglob("*") if p.is_file()] == [path]


def test_a_file_is_no_folder(run, tmp_path):
    (tmp_path / "run").write_text("mine")
    assert run(*fit_words(tmp_path / "run")).code == 4
    assert run(*fit_words(tmp_path / "run" / "inner")).code == 4
    assert (tmp_path / "run").read_text() == "mine"


def test_a_run_that_diverges_says_so_and_leaves_no_stages(run, tmp_path):
    result = run(*fit_words(tmp_path / "run", "--step-size", "1e30"))
    assert result.code == 5
    error, hint = result.err.splitlines()
    assert "not finite at step" in error
    assert "--step-size" in hint
    assert not (tmp_path / "run" / "stages").exists()
    assert run(*fit_words(tmp_path / "run")).code == 0


@pytest.mark.parametrize("option", ["--checkpoint-steps", "--checkpoint-seconds"])
def test_checkpoints_need_a_positive_distance(run, tmp_path, option):
    result = run(*fit_words(tmp_path / "run", option, "0"))
    assert result.code == 2
    assert option in result.err
    assert not (tmp_path / "run").exists()
