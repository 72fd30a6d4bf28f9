"""Counts of neurons and parameters."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import posterity as po
from posterity.model import Network, neurons, parameters
from posterity.networks import MLP, LeNet, MeanFieldNetwork, ResNet

sizes = st.integers(1, 30)


def joint_of(net: nn.Module, **choices: object) -> po.Joint:
    return po.Joint(net, po.likelihoods.Gaussian(), po.priors.Normal(), num_data=10, **choices)


@given(sizes, sizes, sizes, st.floats(0.01, 100.0))
@settings(deadline=None, max_examples=20)
def test_the_two_counts_agree_for_one_hidden_layer(inputs: int, width: int, outputs: int, tau: float) -> None:
    net = MeanFieldNetwork(inputs, width, outputs)
    per_neuron = inputs + outputs
    assert neurons(net) == net.width == width
    assert parameters(net) == per_neuron * width
    by_neurons = po.Tempering.balanced(tau, 1000, neurons(net)).eta
    by_parameters = po.Tempering.balanced(tau * per_neuron, 1000, parameters(net)).eta
    assert by_neurons == pytest.approx(by_parameters, rel=1e-12)


@pytest.mark.parametrize("kind", [lambda net: net, Network, joint_of], ids=["module", "network", "joint"])
def test_modules_networks_and_joints_count_alike(kind) -> None:
    model = kind(MLP([3, 20, 7, 2]))
    assert neurons(model) == 27
    assert parameters(model) == 3 * 20 + 20 + 20 * 7 + 7 + 7 * 2 + 2


def test_the_resnet_of_the_literature_has_its_parameters() -> None:
    net = ResNet(20)
    assert parameters(net) == 269_722
    assert neurons(net) == 16 + 6 * (16 + 32 + 64)  # the first convolution, then three blocks of two in each group
    assert float(po.Tempering.balanced(1.0, 50_000, parameters(net)).eta) == pytest.approx(0.185, abs=5e-4)


def test_channels_and_linear_outputs_are_neurons() -> None:
    net = LeNet()
    layers = [layer for layer in net.modules() if isinstance(layer, (nn.Linear, nn.Conv2d))]
    assert neurons(net) == sum(layer.weight.shape[0] for layer in layers[:-1])


def test_a_layer_that_is_used_twice_counts_once() -> None:
    shared = nn.Linear(4, 4)
    net = nn.Sequential(shared, nn.ReLU(), shared, nn.ReLU(), nn.Linear(4, 1))
    assert neurons(net) == 4
    assert parameters(net) == 20 + 5


def test_norms_and_biases_are_no_neurons() -> None:
    assert neurons(nn.Sequential(nn.Linear(3, 8), nn.LayerNorm(8), nn.PReLU(8), nn.Linear(8, 1))) == 8


def test_parameters_are_those_with_a_distribution() -> None:
    net = MLP([3, 20, 1])
    joint = joint_of(net)
    assert parameters(joint.with_weights("2.*")) == 21
    assert parameters(joint.with_weights(random="2.weight")) == 20
    assert parameters(joint_of(net, random=torch.tensor([0, 5, 9]))) == 3
    net[0].weight.requires_grad_(False)
    assert parameters(net) == 20 + 21


def frozen() -> nn.Module:
    net = MLP([3, 20, 1])
    net[0].weight.requires_grad_(False)
    return net


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: nn.Linear(3, 1), "the network has no hidden layer"),
        (lambda: nn.LSTM(3, 4), "Got LSTM"),
        (lambda: nn.Sequential(nn.Linear(3, 4), nn.MultiheadAttention(4, 2)), "Got MultiheadAttention '1'"),
        (lambda: nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 1)), "Got Embedding '0'"),
        (frozen, "some are fixed"),
        (lambda: joint_of(MLP([3, 20, 1])).with_weights("2.*"), "some are fixed"),
        (lambda: joint_of(MLP([3, 20, 1]), random="2.*"), "some are fixed"),
    ],
    ids=["linear", "recurrent", "attention", "embedding", "frozen", "subset", "points"],
)
def test_what_cannot_be_counted_is_refused(make, message: str) -> None:
    with pytest.raises(ValueError, match=rf"neurons: .*{message}.*parameters\(\.\.\.\)"):
        neurons(make())
