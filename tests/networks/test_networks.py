"""Networks: shapes, values, names, rebuilding from their config, and what they refuse."""

import copy
import json

import pytest
import torch
from torch import nn

from posterity.networks import MLP, VGG, ConvNet, LeNet, MeanFieldNetwork, ResNet
from posterity.numerics import Key

NETWORKS = [
    (MLP((3, 5, 4, 2)), (3,), 2),
    (MLP([3, 2], activation="tanh", bias=False), (3,), 2),
    (LeNet(), (1, 28, 28), 10),
    (LeNet(num_classes=3, in_channels=2, image_size=12), (2, 12, 12), 3),
    (LeNet(in_channels=3, image_size=33), (3, 33, 33), 10),
    (ResNet(depth=8, num_classes=3, in_channels=2, width=5), (2, 9, 12), 3),
    (ResNet(width=2), (3, 32, 32), 10),
    (VGG(11, num_classes=3, in_channels=2, width=4), (2, 32, 32), 3),
    (VGG(19, batch_norm=False, width=2), (3, 32, 32), 10),
    (ConvNet(num_classes=3, in_channels=1, width=4), (1, 28, 28), 3),
    (ConvNet(width=2), (3, 32, 32), 10),
    (MeanFieldNetwork(3, width=7, outputs=2, activation="erf"), (3,), 2),
]


@pytest.mark.parametrize(("net", "inputs", "outputs"), NETWORKS)
def test_takes_inputs_and_gives_outputs_for_each_row(net, inputs, outputs):
    assert net(torch.zeros(7, *inputs)).shape == (7, outputs)


@pytest.mark.parametrize(("net", "inputs", "outputs"), NETWORKS)
def test_config_survives_json_and_rebuilds_the_same_architecture(net, inputs, outputs):
    rebuilt = type(net)(**json.loads(json.dumps(net.config)))
    rebuilt.load_state_dict(net.state_dict())
    x = Key(0).normal((2, *inputs))
    assert repr(rebuilt) == repr(net)
    assert torch.equal(rebuilt(x), net(x))


def test_config_cannot_be_changed_from_outside():
    net = MLP((2, 3, 1))
    net.config["sizes"].append(9)
    assert net.config == {"sizes": [2, 3, 1], "activation": "relu", "bias": True, "dropout": 0.0}


def test_copies_keep_the_config():
    assert copy.deepcopy(LeNet(image_size=20)).config == {"num_classes": 10, "in_channels": 1, "image_size": 20}


@pytest.mark.parametrize(
    ("activation", "function"),
    [
        ("relu", torch.relu),
        ("tanh", torch.tanh),
        ("sigmoid", torch.sigmoid),
        ("gelu", nn.functional.gelu),
        ("silu", nn.functional.silu),
    ],
)
def test_mlp_is_linear_layers_with_the_activation_between(activation, function):
    net = MLP((2, 6, 3), activation=activation)
    x = Key(1).normal((5, 2))
    hidden = function(x @ net[0].weight.T + net[0].bias)
    torch.testing.assert_close(net(x), hidden @ net[2].weight.T + net[2].bias)


def test_mlp_without_bias_maps_zero_to_zero_and_names_weights_in_order():
    net = MLP((2, 4, 4, 1), activation="tanh", bias=False)
    assert [name for name, _ in net.named_parameters()] == ["0.weight", "2.weight", "4.weight"]
    assert torch.equal(net(torch.zeros(3, 2)), torch.zeros(3, 1))


def test_lenet_has_the_classic_layers():
    shapes = [tuple(p.shape) for name, p in LeNet().named_parameters() if name.endswith("weight")]
    assert shapes == [(6, 1, 5, 5), (16, 6, 5, 5), (120, 400), (84, 120), (10, 84)]
    assert [type(layer) for layer in LeNet()].count(nn.MaxPool2d) == 2


def test_a_slice_is_a_plain_sequence_of_the_same_layers():
    net = MLP((2, 6, 3))
    features = net[:-1]
    assert type(features) is nn.Sequential
    assert features[0] is net[0]
    assert features(torch.zeros(4, 2)).shape == (4, 6)


@pytest.mark.parametrize("sizes", [(), (3,), (3, 0), (3, -1, 2), (3, 2.0), (True, 2), ("3", 2)])
def test_mlp_refuses_sizes(sizes):
    with pytest.raises(ValueError, match=r"^MLP\.sizes must be at least 2 positive whole numbers.* Got \[.*\]\.$"):
        MLP(sizes)


def test_mlp_names_the_nearest_activation():
    with pytest.raises(ValueError, match=r"^Unknown activation 'relo'\. Did you mean 'relu'\?$"):
        MLP((2, 1), activation="relo")


@pytest.mark.parametrize(
    "arguments",
    [{"num_classes": 0}, {"in_channels": -1}, {"image_size": 11}, {"num_classes": 2.5}, {"image_size": True}],
)
def test_lenet_refuses_sizes(arguments):
    (name,) = arguments
    with pytest.raises(ValueError, match=rf"^LeNet\.{name} must be a whole number of at least \d+\. Got "):
        LeNet(**arguments)
