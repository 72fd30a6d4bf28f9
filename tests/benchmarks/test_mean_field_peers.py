"""How peers are set up and judged, on a library made here."""

import math
import sys

import pytest
import torch
from benchmarkfiles import load
from torch import nn

from posterity.networks import LeNet, ResNet
from posterity.numerics import Key

layers = load("mean_field_layers")
peers = load("mean_field_peers")
NAMES = layers.Layers("_mu", "_rho", nn.functional.softplus, layers.softplus_inverse, 0.5)


class Bayesian(nn.Module):
    """A linear layer in the manner of such libraries."""

    def __init__(self, plain):
        super().__init__()
        self.weight_mu, self.weight_rho = (nn.Parameter(torch.ones_like(plain.weight)) for _ in range(2))
        self.bias_mu, self.bias_rho = (nn.Parameter(torch.ones_like(plain.bias)) for _ in range(2))

    def forward(self, x):
        draw = [
            mean + nn.functional.softplus(rho) * torch.randn_like(mean)
            for mean, rho in ((self.weight_mu, self.weight_rho), (self.bias_mu, self.bias_rho))
        ]
        return nn.functional.linear(x, *draw)


def build(problem, weight=1.0):
    """A peer that counts the KL `weight` times, and adds a constant."""
    module = layers.replaced(problem, NAMES, Bayesian, lambda conv: pytest.fail("no convolution here"))

    def loss():
        kl = sum(
            (math.log(0.5) - s.log() + (s.square() + m.square()) / 0.5 - 0.5).sum()
            for layer in module.modules()
            for m, s in ((mean, nn.functional.softplus(rho)) for mean, rho in NAMES.pairs(layer))
        )
        fit = nn.functional.cross_entropy(module(problem.x), problem.y)
        return fit + weight * kl / peers.NUM_DATA + 7.0

    return layers.trained(problem, module, NAMES, loss)


@pytest.fixture
def problem():
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    return layers.Problem(module, Key(0).normal((6, 3)), torch.arange(6) % 2)


def test_layers_are_found_at_every_depth():
    assert [name for _, name, _ in layers.layers_of(LeNet())] == ["0", "3", "7", "9", "11"]
    assert len(list(layers.layers_of(ResNet(20)))) == 20


def test_replaced_layers_stand_at_the_plain_weights(problem):
    module = layers.replaced(problem, NAMES, Bayesian, None)
    assert isinstance(problem.module[0], nn.Linear)
    for new, plain in ((module[0], problem.module[0]), (module[2], problem.module[2])):
        assert torch.equal(new.weight_mu, plain.weight)
        assert torch.equal(new.bias_mu, plain.bias)
        scales = nn.functional.softplus(torch.cat([new.weight_rho.flatten(), new.bias_rho]))
        torch.testing.assert_close(scales, torch.full_like(scales, problem.scale))


def test_the_exact_kl_is_that_of_the_starting_point(problem):
    weights = torch.cat([p.detach().flatten() for p in problem.module.parameters()]).double()
    each = math.log(0.5 / problem.scale) + (problem.scale**2 + weights.square()) / 0.5 - 0.5
    assert build(problem).kl == pytest.approx(float(each.sum()), rel=1e-6)


def test_a_peer_steps_and_averages_probabilities(problem):
    peer = build(problem)
    before = peer.objective()
    probs = peer.predict(problem.x, 3)
    torch.testing.assert_close(probs, problem.module(problem.x).softmax(-1).detach(), rtol=1e-2, atol=1e-3)
    for _ in range(20):
        peer.step()
    assert peer.objective() < before
    assert all(p.grad is None for p in problem.module.parameters())


@pytest.mark.parametrize("weight", [1.0, 0.25, 300.0])
def test_the_kl_weight_is_measured_whatever_constants_are_added(problem, weight, monkeypatch):
    monkeypatch.setattr(peers, "NUM_DATA", 100)  # of so small a network the KL would be nothing among 60,000
    found = peers.peer_kl_weight(lambda start: build(start, weight), problem.module, problem.x, problem.y)
    assert found == pytest.approx(weight, rel=0.01)


def test_the_kl_weight_is_of_differences():
    values = {1e-5: (3.0, 500.0), 1e-4: (2.0, 200.0)}
    assert peers.kl_weight(values.__getitem__) == pytest.approx(peers.NUM_DATA / 300.0)


@pytest.mark.parametrize("name", list(peers.PEERS))
def test_a_peer_that_is_not_installed_is_an_import_error(problem, name, monkeypatch):
    package = {"TyXe": "pyro", "TyXe local reparameterization": "pyro", "posteriors vi.diag": "posteriors"}.get(
        name, name.split(" ")[0].replace("-", "_")
    )
    monkeypatch.setitem(sys.modules, package, None)  # as if it were not there
    with pytest.raises(ImportError):
        peers.PEERS[name](problem)
