"""Folders whose hashes are right and whose content is not: refused by name, or read as what they say.

A mutation may be harmless: another seed, or a number that is as valid as the one before. What is read then is used to
the end, and must work.
"""

import copy
import random
import shutil

import pytest
import torch
from benchmarkfiles import load
from torch import nn

import posterity as po
from posterity.cli.main import main
from posterity.errors import BadFolder
from posterity.likelihoods import Gaussian
from posterity.methods import MAP
from posterity.priors import Normal
from posterity.storage import Part, RunFolder

pytestmark = pytest.mark.cpu
resealed = load("resealed")
MUTATIONS = 8  # of each kind; `python -m benchmarks.resealed` makes 2,000 in all


@pytest.mark.parametrize(
    ("family", "kind"), [(family, kind) for family, (kinds, _, _) in resealed.FAMILIES.items() for kind in kinds]
)
def test_a_resealed_folder_is_refused_or_says_what_it_says(family, kind, tmp_path):
    outcome = resealed.FAMILIES[family][1](kind, tmp_path)
    counts, wrong = resealed.counted(outcome, f"{family} {kind}", MUTATIONS, seed=1)
    assert not wrong
    assert counts["silent"] == counts["traceback"] == 0
    assert counts["refused"] > MUTATIONS * (0.2 if family == "run folder" else 0.6)


def test_what_stands_in_for_a_value_is_silent_and_what_is_raised_raw_is_a_traceback(tmp_path, monkeypatch):
    outcome = resealed.of_posterior("point", tmp_path)
    first = po.load(tmp_path / "run", resealed.network(True))
    other = po.posteriors.Point(first.joint, first.theta + 1.0, first.buffers)
    monkeypatch.setattr(po, "load", lambda *_: other)
    assert outcome(random.Random(0)) == "silent"
    monkeypatch.setattr(po, "load", lambda *_: first)
    assert outcome(random.Random(0)) == "harmless"
    monkeypatch.setattr(po, "load", lambda *_: {}["theta"])
    counts, wrong = resealed.counted(outcome, "point", 1, 0)
    assert counts["traceback"] == 1
    assert "KeyError" in wrong[0]


def test_an_ensemble_without_a_tensor_of_one_member_is_refused(tmp_path):
    """A member's tensor that is gone used to be taken from the first member."""
    resealed.of_posterior("ensemble", tmp_path / "ensemble")
    stored = RunFolder(tmp_path / "ensemble" / "run").read("posterior")
    names = [name for name in stored.tensors if name.startswith("2.")]
    assert "2.posterior.theta" in names
    for index, name in enumerate(names):
        tensors = {key: tensor for key, tensor in stored.tensors.items() if key != name}
        RunFolder(tmp_path / str(index)).commit({"posterior": Part(stored.config, tensors)})
        with pytest.raises(BadFolder, match=f"Component 2 .* lacks '{name[2:]}'"):
            po.load(tmp_path / str(index), resealed.network(True))


@pytest.mark.parametrize("name", ["low", "high", "spread", "margin"])
@pytest.mark.parametrize("change", ["gone", "longer", "whole", "nan", "negative"])
def test_a_reach_that_is_none_is_refused(runs, name, change, capsys, tmp_path):
    """A tensor that was gone used to leave the column of rows outside the training data away."""
    table, run = runs
    stored = RunFolder(run).read("reach").tensors
    tensor = stored[name]
    changed = {
        "longer": torch.cat([tensor.view(-1)] * 2),
        "whole": tensor.long(),
        "nan": tensor * float("nan"),
        "negative": (tensor if name == "high" else -tensor) - 1e6 if name != "low" else tensor + 1e6,
    }
    tensors = {key: value for key, value in stored.items() if key != name}
    shutil.copytree(run, tmp_path / "run")
    RunFolder(tmp_path / "run").commit(
        {"reach": Part({}, tensors if change == "gone" else {**tensors, name: changed[change]})}
    )
    assert main(["predict", str(tmp_path / "run"), "--data", str(table)]) == 4
    error = capsys.readouterr().err
    assert "part 'reach'" in error
    assert "Traceback" not in error


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    (table := folder / "table.csv").write_text(
        "a,b,y\n" + "".join(f"{row},{row % 7},{row % 5}.5\n" for row in range(40))
    )
    assert (
        main(["fit", str(table), "--target", "y", "--method", "map", "--steps", "3", "--out", str(folder / "run")]) == 0
    )
    return table, folder / "run"


def test_noise_that_is_no_scale_is_refused(tmp_path):
    problem = po.Joint(nn.Linear(2, 1).double(), Gaussian(scale=0.5), Normal(), num_data=12)
    x = resealed.rows()[0]
    po.infer(MAP(steps=1), problem, (x, x[:, :1]))[0].save(tmp_path)
    stored = RunFolder(tmp_path).read("posterior")
    for scale in (-1.0, "0.5", None, True, {"float": "inf"}, {"tuple": []}):
        config = copy.deepcopy(dict(stored.config))
        config["joint"]["likelihood"]["fields"]["scale"] = scale
        RunFolder(tmp_path).commit({"posterior": Part(config, stored.tensors)})
        with pytest.raises(BadFolder, match=r"Gaussian"):
            po.load(tmp_path, nn.Linear(2, 1).double())


def test_a_data_set_that_is_made_on_the_spot_must_be_known(tmp_path, capsys):
    """Another name used to be taken for a wrong argument, with exit code 2."""
    assert main(["fit", "two-moons", "--method", "map", "--steps", "3", "--out", str(tmp_path)]) == 0
    folder = RunFolder(tmp_path)
    parts = {name: folder.read(name) for name in folder.parts()}
    parts["task"] = Part({**parts["task"].config, "data": "x"}, parts["task"].tensors)
    folder.commit(parts)
    capsys.readouterr()
    assert main(["predict", str(tmp_path)]) == 4
    assert "Unknown data set 'x'" in capsys.readouterr().err
