"""Posteriors of modules that were trained elsewhere."""

import pytest
import torch
from torch import nn

import posterity as po
from posterity.likelihoods import Categorical, Gaussian
from posterity.posteriors import Dropout, Mixture, Point

FLOAT64 = torch.float64


def net(seed: int, frozen: bool = False) -> nn.Module:
    """A network whose batch-norm statistics and frozen weights are its own."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        module = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(0.3), nn.Linear(8, 4)).double()
        module(2.0 * torch.randn(50, 3, dtype=FLOAT64) + seed)
    module[0].requires_grad_(not frozen)
    return module.eval()


def inputs(rows: int = 7) -> torch.Tensor:
    return po.Key(0).normal((rows, 3), FLOAT64)


@pytest.mark.parametrize("frozen", [False, True])
def test_an_ensemble_predicts_the_mean_of_its_modules_and_comes_back(tmp_path, frozen):
    modules, x = [net(seed, frozen) for seed in range(3)], inputs()
    before = [{name: value.clone() for name, value in module.state_dict().items()} for module in modules]
    q = Mixture.of(modules, Categorical())
    wanted = torch.stack([module(x).softmax(-1) for module in modules]).mean(0)
    assert torch.allclose(q.predict(x).probs, wanted, atol=1e-14)
    q.save(tmp_path / "run")
    again = po.load(tmp_path / "run", net(9, frozen))
    assert torch.equal(again.predict(x).probs, q.predict(x).probs)
    for module, state in zip(modules, before, strict=True):
        assert all(torch.equal(value, state[name]) for name, value in module.state_dict().items())
    weighted = Mixture.of(modules, Categorical(), weights=torch.tensor([0.5, 0.25, 0.25])).predict(x).probs
    assert torch.allclose(weighted, 0.75 * wanted + 0.25 * modules[0](x).softmax(-1), atol=1e-14)


def test_a_point_predicts_as_its_module_and_starts_a_run():
    x, module = inputs(40), net(1)
    q = Point.of(module, Gaussian(scale=0.5))
    assert torch.allclose(q.predict(x).mean, module(x), atol=1e-14)
    assert torch.allclose(q.predict(x).std, torch.tensor(0.5, dtype=FLOAT64))
    joint = po.Joint(net(2), Gaussian(scale=0.5), po.priors.Normal(1.0), num_data=40)
    laplace, _ = po.infer(po.methods.Laplace(tuning=None), joint, (x, module(x).detach()), start=q)
    assert torch.equal(laplace.point(), q.theta)
    assert torch.allclose(laplace.predict(x).mean, module(x), atol=1e-13)  # with its own batch-norm statistics


def test_dropout_of_a_trained_module_is_what_training_would_have_given(tmp_path):
    x, module = inputs(), net(3)
    q = Dropout.of(module, Categorical(), example=x)
    joint = po.Joint(module, Categorical(), po.priors.Normal(1.0), num_data=7)
    fit = po.methods.MCDropout(steps=1, optimizer=po.optim.SGD(1e-300), schedule=po.optim.Constant())
    trained, _ = po.infer(fit, joint, (x, torch.arange(7) % 4))
    own = {name: b for name, b in joint.network.buffers.items() if name in joint.network.running}
    trained = Dropout(trained.joint, trained.theta, own, True, trained.example)  # the step has moved the statistics
    assert torch.allclose(q.predict(x, draws=20).draws, trained.predict(x, draws=20).draws, atol=1e-12)
    assert torch.allclose(q.sample(2), trained.sample(2), atol=1e-14)
    q.save(tmp_path / "run")
    again = po.load(tmp_path / "run", net(8))
    assert torch.equal(again.predict(x, draws=5).probs, q.predict(x, draws=5).probs)


def test_an_ensemble_starts_a_run_of_its_members():
    x, modules = inputs(30), [net(seed) for seed in range(2)]
    joint = po.Joint(net(5), Categorical(), po.priors.Normal(1.0), num_data=30)
    laplace = po.methods.Ensemble(po.methods.Laplace(structure=po.curvature.Diagonal(), tuning=None), size=2)
    q, _ = po.infer(laplace, joint, (x, torch.arange(30) % 4), start=Mixture.of(modules, Categorical()))
    for module, component in zip(modules, q.posteriors, strict=True):  # with weights and statistics of their own
        mean = component.output_moments(x)[0]
        assert torch.allclose(mean, module(x), atol=1e-12)
    frozen = [net(seed, frozen=True) for seed in range(2)]
    joint = po.Joint(net(5, frozen=True), Categorical(), po.priors.Normal(1.0), num_data=30)
    with pytest.raises(ValueError, match=r"'0.weight', which is no part of theta, differs.*q.posteriors\[0\]"):
        po.infer(laplace, joint, (x, torch.arange(30) % 4), start=Mixture.of(frozen, Categorical()))


def test_what_cannot_be_a_posterior_is_refused():
    with pytest.raises(ValueError, match=r"Mixture.of: the modules must have one architecture.*in number 1"):
        Mixture.of([net(0), nn.Linear(3, 4)], Categorical())
    with pytest.raises(ValueError, match=r"one architecture and dtype.*in number 1"):
        Mixture.of([net(0), net(1).float()], Categorical())
    with pytest.raises(ValueError, match=r"Point.of: the noise must be given.*Gaussian\(scale=float"):
        Point.of(net(0), Gaussian())
    with pytest.raises(ValueError, match=r"Dropout.of: the noise must be given"):
        Dropout.of(net(0), Gaussian(scale=1.0, learn=True))
    with pytest.raises(ValueError, match="no layer drops"):
        Dropout.of(nn.Linear(3, 4), Categorical(), example=torch.zeros(2, 3))
    with pytest.raises(ValueError, match=r"Mixture.weights: a mixture needs at least one component"):
        Mixture.of([], Categorical())
    with pytest.raises(ValueError, match=r"MCDropout.steps must be a positive.*posteriors.Dropout.of\(module"):
        po.methods.MCDropout(steps=0)


class Tokens(nn.Module):
    """Logits with the classes last, as models of Hugging Face return them."""

    def __init__(self):
        super().__init__()
        self.layer, self.drop = nn.Linear(3, 4).double(), nn.Dropout(0.5)

    def forward(self, x):
        return self.layer(self.drop(x))


def test_networks_with_an_adapter_are_taken_as_modules_are():
    network = po.model.Network(Tokens(), outputs=lambda out: out.movedim(-1, 1))
    x, y = po.Key(0).normal((6, 5, 3), FLOAT64), torch.arange(30).reshape(6, 5) % 4
    likelihood, wanted = Categorical(positions=1), network.module(x).movedim(-1, 1).softmax(1)
    for q in (Point.of(network, likelihood), Mixture.of([network, network], likelihood)):
        assert torch.allclose(q.predict(x).probs, wanted, atol=1e-14)
    assert Dropout.of(network, likelihood).predict(x, draws=5).probs.shape == (6, 4, 5)
    short = po.laplace(network, (x, y), "classification", prior=po.priors.Normal(1.0), tuning=None)
    assert short.joint.likelihood == likelihood
    assert torch.equal(short.joint.network.initial, network.initial)
    with pytest.raises(po.errors.BadData, match=r"Network\(module, outputs=lambda out"):
        po.laplace(Tokens(), (x, y), "classification")


class Named(nn.Module):
    """A network that takes its inputs by name."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 4).double()

    def forward(self, *, x):
        return self.layer(x)


def test_rows_name_their_targets_as_the_network_says():
    network = po.model.Network(Named(), labels="target")
    x, y = inputs(12), torch.arange(12) % 4
    rows = {"x": x, "target": y}
    loader = torch.utils.data.DataLoader([{"x": a, "target": b} for a, b in zip(x, y, strict=True)], batch_size=4)
    for data in (rows, loader):
        q = po.laplace(network, data, "classification", prior=po.priors.Normal(1.0), tuning=None)
        pred, labels = po.posteriors.with_targets(q, data)
        assert torch.equal(labels, y)
        assert torch.allclose(pred.probs, q.predict({"x": x}).probs)
        joint = po.Joint(network, Categorical(), po.priors.Normal(), num_data=12)
        states = [Named().state_dict() for _ in range(3)]
        swag = po.methods.SWAG(rank=2).from_checkpoints(joint, states, data)
        assert torch.allclose(swag.mean, torch.stack([joint.network.layout.flatten(s) for s in states]).mean(0))
