"""Posteriors on disk: what comes back, and what is refused."""

import pytest
import torch
from contracts.cases import classification, inputs, labels, network, numbers, regression
from torch import nn

import posterity as po
from posterity.curvature import Diagonal
from posterity.errors import BadFolder
from posterity.methods import MAP, Laplace
from posterity.numerics import Key
from posterity.storage import Part, RunFolder
from posterity.storage.folder import OWNERS

FLOAT64 = torch.float64


@pytest.fixture
def folder(tmp_path):
    q, _ = po.infer(Laplace(tuning=None), classification(FLOAT64), labels(FLOAT64))
    q.save(tmp_path / "run")
    return tmp_path / "run"


def net(dtype=FLOAT64):
    return network([3, 4, 2], dtype)


@pytest.mark.parametrize("structure", [po.curvature.Full(), Diagonal()], ids=str)
@pytest.mark.parametrize("part", ["whole", "frozen", "points"])
def test_what_was_saved_comes_back(structure, part, tmp_path):
    joint = classification(FLOAT64)
    joint = {"whole": joint, "frozen": joint.with_weights("2.*"), "points": joint.with_weights(random="0.*")}[part]
    q, _ = po.infer(Laplace(tuning=None, structure=structure), joint, labels(FLOAT64))
    q.save(tmp_path)
    other = net()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.normal_()
    loaded = po.load(tmp_path, other)
    x = inputs(FLOAT64, 4)
    assert torch.equal(loaded.predict(x).probs, q.predict(x).probs)
    assert torch.equal(loaded.sample(2, Key(0)), q.sample(2, Key(0)))
    assert torch.equal(loaded.log_evidence, q.log_evidence)
    assert loaded.joint.prior == q.joint.prior
    assert loaded.joint.tempering == q.joint.tempering
    assert loaded.joint.num_data == 20
    assert loaded.joint.random == q.joint.random
    # A run can go on from it as from the first.
    again, _ = po.infer(MAP(steps=2), joint, labels(FLOAT64), start=loaded)
    first, _ = po.infer(MAP(steps=2), joint, labels(FLOAT64), start=q)
    assert torch.equal(again.point(), first.point())


def test_density_posteriors_come_back(tmp_path):
    def density(names=("a", "b")):
        return po.Density(
            lambda **v: -sum(t.square().sum() for t in v.values()), {n: (2,) for n in names}, dtype=FLOAT64
        )

    q, _ = po.infer(Laplace(tuning=None, curvature=po.curvature.Hessian()), density(), None)
    q.save(tmp_path)
    loaded = po.load(tmp_path, density())
    assert all(torch.equal(one, two) for one, two in zip(loaded.draws(3).values(), q.draws(3).values(), strict=True))
    with pytest.raises(BadFolder, match="belongs to another Density: its parameters, constraints or dtype differ"):
        po.load(tmp_path, density(("a", "c")))
    with pytest.raises(BadFolder, match=r"posterior of a Density\. Pass that Density, not a MLP"):
        po.load(tmp_path, net())


def test_saving_again_replaces(folder):
    q, _ = po.infer(MAP(steps=1), classification(FLOAT64), labels(FLOAT64))
    q.save(folder)
    assert isinstance(po.load(folder, net()), po.posteriors.Point)
    assert RunFolder(folder).parts() == ("posterior",)


def test_a_folder_may_have_the_checkpoint_of_the_run_and_nothing_larger(tmp_path):
    run = RunFolder(tmp_path)
    q, _ = po.infer(MAP(steps=2), classification(FLOAT64), labels(FLOAT64), checkpoint=tmp_path)
    q.save(tmp_path)
    assert "state" in " ".join(run.parts())
    for owner, what in OWNERS.items():
        run.commit({owner: Part({})}, drop=OWNERS)
        with pytest.raises(BadFolder, match=f"holds {what}, which would be mixed with what is saved"):
            q.save(tmp_path)


def test_a_missing_folder(tmp_path):
    with pytest.raises(BadFolder, match="There is no run folder"):
        po.load(tmp_path / "nowhere", net())


def test_a_folder_without_a_posterior(tmp_path):
    po.infer(MAP(steps=1), classification(FLOAT64), labels(FLOAT64), checkpoint=tmp_path)
    with pytest.raises(BadFolder, match="holds a run, no posterior"):
        po.load(tmp_path, net())


@pytest.mark.parametrize("name", ["tensors.safetensors", "config.json"])
def test_a_truncated_file(folder, name):
    (path,) = folder.rglob(name)
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(BadFolder, match=f"{name}' is truncated"):
        po.load(folder, net())


@pytest.mark.parametrize("name", ["tensors.safetensors", "config.json"])
def test_a_tampered_file(folder, name):
    (path,) = folder.rglob(name)
    content = bytearray(path.read_bytes())
    content[-3] ^= 1
    path.write_bytes(bytes(content))
    with pytest.raises(BadFolder, match=f"{name}' was altered"):
        po.load(folder, net())


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (lambda: network([3, 5, 2], FLOAT64), r"another network: '0\.bias' was saved with shape \(4,\)"),
        (lambda: network([3, 2], FLOAT64), r"another network: '0\.bias' was saved"),
        (lambda: net(torch.float32), r"torch\.float64 model and this one is torch\.float32"),
        (
            lambda: po.networks.MLP([3, 4, 2], activation="relu").double(),
            r"'\(1\): Tanh\(\)' where this one has '\(1\): ReLU",
        ),
        (lambda: po.networks.MLP, r"holds the posterior of a network\. Pass that nn\.Module, not the class MLP"),
        (lambda: po.Density(lambda u: u.sum(), {"u": ()}), r"Pass that nn\.Module, not a Density"),
    ],
    ids=["width", "depth", "dtype", "activation", "class", "density"],
)
def test_another_model(folder, model, message):
    with pytest.raises(BadFolder, match=message) as caught:
        po.load(folder, model())
    assert "\n" not in str(caught.value)


def test_a_frozen_weight_cannot_have_a_posterior(folder):
    model = net()
    model[0].bias.requires_grad_(False)
    with pytest.raises(BadFolder, match=r"'0\.bias' has a posterior in this folder but requires_grad=False here"):
        po.load(folder, model)


def test_a_posterior_of_the_future(folder):
    part = RunFolder(folder).read("posterior")
    config = {**part.config, "posterior": {"type": "Nebula", "fields": {}}}
    RunFolder(folder).commit({"posterior": Part(config, part.tensors)})
    with pytest.raises(BadFolder, match=r"Unknown posterior 'Nebula'.*Upgrade posterity"):
        po.load(folder, net())


def test_loading_leaves_the_module_alone(folder):
    model = net().train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    po.load(folder, model).predict(inputs(FLOAT64, 3))
    assert model.training
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_learnt_noise_comes_back(tmp_path):
    q, _ = po.infer(MAP(steps=20), regression(FLOAT64), numbers(FLOAT64))
    q.save(tmp_path)
    loaded = po.load(tmp_path, regression(FLOAT64).network._module)
    assert loaded.joint.likelihood == q.joint.likelihood
    assert loaded.joint.likelihood.scale != 0.3


def test_a_module_of_ones_own(tmp_path):
    class Own(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(3, 2)

        def forward(self, x):
            return self.layer(x).tanh()

    joint = po.Joint(Own().double(), po.likelihoods.Categorical(), po.priors.Normal(), num_data=20)
    q, _ = po.infer(Laplace(tuning=None), joint, labels(FLOAT64))
    q.save(tmp_path)
    assert torch.equal(po.load(tmp_path, Own().double()).point(), q.point())
