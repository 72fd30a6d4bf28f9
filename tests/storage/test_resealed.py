"""Folders whose hashes are right and whose content is not: refused by name, or read as what they say.

A mutation may be harmless: another seed, or a number that is as valid as the one before. What is read then is used to
the end, and must work.
"""

import copy
import math
import random
import shutil

import pytest
import torch
from torch import nn

import posterity as po
from posterity.cli.main import main
from posterity.errors import BadFolder
from posterity.likelihoods import Categorical, Gaussian
from posterity.methods import MAP, NUTS, SGHMC, Ensemble, Laplace, MCDropout, MeanField
from posterity.numerics import Key
from posterity.priors import Layerwise, Normal
from posterity.storage import Part, RunFolder

pytestmark = pytest.mark.cpu
KINDS = {
    "point": MAP(steps=2),
    "dense": Laplace(tuning=None),
    "kronecker": Laplace(structure=po.curvature.Kronecker(), tuning=None),
    "factorised": MeanField(steps=2),
    "chains": NUTS(chains=2, warmup=2, draws=3, max_depth=2),
    "dropout": MCDropout(steps=2),
    "ensemble": Ensemble(MAP(steps=2), size=3),
}
MUTATIONS = 25  # of each kind


def model():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Dropout(0.5), nn.Tanh(), nn.Linear(3, 2)).double()


def plain_model():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 2)).double()


def network(kind):
    return model() if kind in ("point", "dropout", "ensemble") else plain_model()


def rows():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(12, 2, generator=generator, dtype=torch.float64)
    return x, (x[:, 0] > 0).long()


def joint(kind):
    prior = Layerwise({"0.weight": Normal(torch.full((1, 6), 0.7, dtype=torch.float64)), "*": Normal(1.5)})
    return po.Joint(network(kind), Categorical(), Normal(1.5) if kind == "kronecker" else prior, num_data=12)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    made = {}
    for kind, method in KINDS.items():
        made[kind] = tmp_path_factory.mktemp(kind) / "run"
        po.infer(method, joint(kind), rows(), seed=1)[0].save(made[kind])
    return made


def slots(value, path=()):
    """The paths of all nodes of a JSON value but the outermost."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield (*path, key)
        yield from slots(item, (*path, key))


def mutated_config(config, chance):
    config = copy.deepcopy(config)
    *path, last = chance.choice(list(slots(config)))
    parent = config
    for key in path:
        parent = parent[key]
    if chance.random() < 0.25:
        del parent[last]
        return config
    choices = [None, "x", [], {}, True, -1, 0, 3.5, 10**30, [1, 2], {"tensor": "x"}, {"float": "nan"}, "12", -1e300]
    parent[last] = chance.choice([value for value in choices if value != parent[last]])
    return config


def mutated_tensors(tensors, chance):
    tensors = dict(tensors)
    name = chance.choice(sorted(tensors))
    tensor, kind = tensors[name], chance.choice(["drop", "cast", "shorten", "nan", "longer", "whole"])
    if kind == "drop":
        del tensors[name]
    elif kind == "cast":
        tensors[name] = tensor.half() if tensor.is_floating_point() else tensor.float()
    elif kind == "shorten":
        tensors[name] = tensor[..., :-1].clone() if tensor.dim() else tensor[None]
    elif kind == "longer":
        tensors[name] = torch.cat([tensor, tensor], -1) if tensor.dim() else tensor.expand(2).clone()
    elif kind == "whole":
        tensors[name] = tensor.long() if tensor.is_floating_point() else tensor.double()
    else:
        tensor = tensor.clone() if tensor.is_floating_point() else tensor.double()
        tensor.view(-1)[chance.randrange(tensor.numel())] = chance.choice([math.nan, math.inf, -math.inf])
        tensors[name] = tensor
    return tensors


def damage(folder, part, chance, into=None):
    """Change one thing in a part of the folder, and seal it again, there or elsewhere; returns what is stored now."""
    stored = RunFolder(folder).read(part)
    if stored.tensors and (not stored.config or chance.random() < 0.5):
        changed = Part(stored.config, mutated_tensors(stored.tensors, chance))
    else:
        changed = Part(mutated_config(dict(stored.config), chance), stored.tensors)
    RunFolder(into or folder).commit({part: changed})
    return changed


def used(posterior):
    """Everything that a posterior does with its content."""
    x = rows()[0]
    probs = posterior.predict(x, draws=3).probs
    assert probs.isfinite().all()
    posterior.point()
    posterior.parts()
    if not isinstance(posterior, po.posteriors.Dropout | po.posteriors.Mixture):
        assert posterior.sample(2, Key(0)).isfinite().all()
    return probs


@pytest.mark.parametrize("kind", KINDS)
def test_a_resealed_posterior_is_refused_or_sound(folders, kind, tmp_path):
    refused = []
    before = used(po.load(folders[kind], network(kind)))
    for seed in range(MUTATIONS):
        chance, folder = random.Random(f"{kind} {seed}"), tmp_path / "run"
        changed = damage(folders[kind], "posterior", chance, folder)
        try:
            posterior = po.load(folder, network(kind))
        except BadFolder as error:
            refused.append(str(error))
            continue
        # What was read is what is stored: nothing stands in for anything.
        again = posterior.parts()["posterior"]
        assert again.config == changed.config
        assert again.tensors.keys() == changed.tensors.keys()
        assert all(torch.equal(again.tensors[name], tensor) for name, tensor in changed.tensors.items())
        assert used(posterior).shape == before.shape
    assert len(refused) > MUTATIONS * 0.7
    assert all(str(tmp_path / "run") in message and "\n" not in message for message in refused)


def test_an_ensemble_without_a_tensor_of_one_member_is_refused(folders, tmp_path):
    """A member's tensor that is gone used to be taken from the first member."""
    stored = RunFolder(folders["ensemble"]).read("posterior")
    names = [name for name in stored.tensors if name.startswith("2.")]
    assert "2.posterior.theta" in names
    for index, name in enumerate(names):
        tensors = {key: tensor for key, tensor in stored.tensors.items() if key != name}
        RunFolder(tmp_path / str(index)).commit({"posterior": Part(stored.config, tensors)})
        with pytest.raises(BadFolder, match=f"Component 2 .* lacks '{name[2:]}'"):
            po.load(tmp_path / str(index), network("ensemble"))


@pytest.mark.parametrize("kind", ["sghmc", "nuts", "ensemble"])
def test_a_resealed_checkpoint_is_refused_or_continues(kind, tmp_path):
    method = {
        "sghmc": SGHMC(chains=2, warmup=2, draws=3, thin=1),
        "nuts": NUTS(chains=2, warmup=2, draws=3, max_depth=2),
        "ensemble": Ensemble(MAP(steps=5), size=2),
    }[kind]

    class Stop(po.inference.Callback):
        def after_step(self, run):
            if run.step == 4:
                raise KeyboardInterrupt

    def fit(folder, *callbacks):
        problem = po.Joint(plain_model(), Categorical(), Normal(), num_data=12)
        return po.infer(
            method, problem, rows(), checkpoint=po.inference.Checkpoint(folder, steps=1), callbacks=callbacks
        )

    with pytest.raises(KeyboardInterrupt):
        fit(tmp_path / "run", Stop())
    refused = 0
    for seed in range(MUTATIONS // 2):
        chance, folder = random.Random(f"{kind} {seed}"), tmp_path / str(seed)
        shutil.copytree(tmp_path / "run", folder)
        part = chance.choice([part for part in RunFolder(folder).parts() if part != "run"])
        damage(folder, part, chance)
        try:
            fit(folder)
        except BadFolder:
            refused += 1
        except po.errors.Diverged:  # a number of the state that is finite and absurd
            pass
    assert refused > MUTATIONS / 2 * 0.6


def test_the_command_line_says_in_one_line_which_folder_is_wrong(tmp_path, capsys):
    table = tmp_path / "table.csv"
    table.write_text("a,b,y\n" + "".join(f"{row},{('u', 'v')[row % 2]},{row % 5 * 1.5}\n" for row in range(40)))
    fit = ("fit", str(table), "--target", "y", "--method", "laplace", "--steps", "3", "--hidden", "2")
    assert main([*fit, "--out", str(tmp_path / "run"), "--quiet"]) == 0
    codes = []
    for seed in range(MUTATIONS):
        chance, folder = random.Random(seed), tmp_path / "changed"
        shutil.copytree(tmp_path / "run", folder, dirs_exist_ok=True)
        damage(folder, chance.choice(["task", "preprocessing", "posterior"]), chance)
        capsys.readouterr()
        codes.append(main(["predict", str(folder), "--data", str(table)]))
        errors = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
        assert codes[-1] in (0, 4), errors
        assert len(errors) == (codes[-1] == 4)
        assert all(str(folder) in line for line in errors)
    assert codes.count(4) > MUTATIONS * 0.6


def test_noise_that_is_no_scale_is_refused(tmp_path):
    problem = po.Joint(nn.Linear(2, 1).double(), Gaussian(scale=0.5), Normal(), num_data=12)
    x = rows()[0]
    po.infer(MAP(steps=1), problem, (x, x[:, :1]))[0].save(tmp_path)
    stored = RunFolder(tmp_path).read("posterior")
    for scale in (-1.0, "0.5", None, True, {"float": "inf"}, {"tuple": []}):
        config = copy.deepcopy(dict(stored.config))
        config["joint"]["likelihood"]["fields"]["scale"] = scale
        RunFolder(tmp_path).commit({"posterior": Part(config, stored.tensors)})
        with pytest.raises(BadFolder, match="Gaussian"):
            po.load(tmp_path, nn.Linear(2, 1).double())
