"""The residual network: layers, shortcuts, weight counts, and members under `Network`."""

import logging

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from posterity.model.network import Network
from posterity.networks import ResNet
from posterity.networks.convolutional import ResidualBlock
from posterity.numerics import Key


def small() -> ResNet:
    """Eight layers deep, with batch norm statistics and weights that are not those of the start."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net = ResNet(depth=8, num_classes=3, in_channels=2, width=4).double()
    for index, layer in enumerate(m for m in net.modules() if isinstance(m, nn.BatchNorm2d)):
        key, like = Key(index), layer.running_mean
        layer.running_mean = key.fold("mean").normal(tuple(like.shape), like.dtype).to(like.device)
        layer.running_var = (1 + key.fold("variance").uniform(tuple(like.shape))).to(like)
    return net


def images(rows: int) -> torch.Tensor:
    return Key(3).normal((rows, 2, 8, 8), torch.float64).to(torch.get_default_device())


# The counts of table 6 of He et al. (2016), in millions, to the digits given there.
@pytest.mark.parametrize(("depth", "millions"), [(20, 0.27), (32, 0.46), (44, 0.66), (56, 0.85)])
def test_has_the_published_number_of_weights(depth, millions):
    assert round(sum(p.numel() for p in ResNet(depth).parameters()) / 1e6, 2) == millions


@pytest.mark.parametrize("depth", [8, 14, 20])
def test_depth_counts_the_layers_with_weights_other_than_norms(depth):
    layers = [m for m in ResNet(depth, width=2).modules() if isinstance(m, (nn.Conv2d, nn.Linear))]
    assert len(layers) == depth


def test_resolution_halves_where_channels_double():
    x, shapes = torch.zeros(1, 3, 32, 32), []
    for layer in ResNet():
        x = layer(x)
        shapes.append(tuple(x.shape[1:]))
    assert shapes == [(16, 32, 32)] * 6 + [(32, 16, 16)] * 3 + [(64, 8, 8)] * 3 + [(64, 1, 1), (64,), (10,)]


def test_a_block_whose_convolutions_are_zero_passes_its_input_by_the_shortcut():
    block = ResidualBlock(2, 5, stride=2).eval()
    nn.init.zeros_(block.conv2.weight)
    x = torch.rand(3, 2, 5, 6)
    found = block(x)
    assert found.shape == (3, 5, 3, 3)
    assert torch.equal(found[:, 1:3], x[:, :, ::2, ::2])
    assert found[:, [0, 3, 4]].count_nonzero() == 0


def test_a_block_adds_two_normalised_convolutions_to_its_input():
    block = small()[3].eval()
    x = Key(1).normal((2, 4, 6, 6), torch.float64).to(torch.get_default_device())
    inner = F.relu(block.norm1(F.conv2d(x, block.conv1.weight, padding=1)))
    change = block.norm2(F.conv2d(inner, block.conv2.weight, padding=1))
    torch.testing.assert_close(block(x), F.relu(x + change))


@pytest.mark.parametrize("train", [False, True])
def test_members_give_what_each_gives_alone_at_once(train, caplog):
    network = Network(small())
    theta = network.initial + 0.1 * Key(5).normal((3, network.layout.size), torch.float64).to(network.device)
    with caplog.at_level(logging.WARNING, logger="posterity"):
        outputs, after = network.run(network.views(theta), images(4), members=True, train=train)
    assert not caplog.records  # vmap took it
    for index, member in enumerate(theta):
        alone, buffers = network.run(network.views(member), images(4), train=train)
        torch.testing.assert_close(outputs[index], alone)
        for name, value in buffers.items():
            torch.testing.assert_close(after[name][index], value)


def test_evaluation_mode_treats_each_row_alone_and_training_mode_does_not():
    network, x = Network(small()), images(4)
    weights = network.views(network.initial)
    together, alone = (network.run(weights, rows)[0] for rows in (x, x[:1]))
    torch.testing.assert_close(together[:1], alone)
    together, alone = (network.run(weights, rows, train=True)[0] for rows in (x, x[:1]))
    assert (together[:1] - alone).abs().max() > 1e-3


def test_training_mode_moves_the_running_statistics_of_every_norm_and_leaves_the_module():
    net = small()
    network = Network(net)
    _, after = network.run(network.views(network.initial), images(4), train=True)
    means = [name for name in after if name.endswith("running_mean")]
    assert len(means) == 7
    for name in means:
        assert not torch.equal(after[name], network.buffers[name])
        assert torch.equal(network.buffers[name], net.get_buffer(name))


def test_fresh_weights_depend_on_the_key_alone():
    network = Network(small())
    assert torch.equal(network.fresh(Key(1)), network.fresh(Key(1)))
    assert not torch.equal(network.fresh(Key(1)), network.fresh(Key(2)))


@pytest.mark.parametrize("arguments", [{"num_classes": 0}, {"in_channels": -1}, {"width": 2.5}, {"depth": True}])
def test_refuses_sizes(arguments):
    (name,) = arguments
    with pytest.raises(ValueError, match=rf"^ResNet\.{name} must be a positive whole number\. Got "):
        ResNet(**arguments)


@pytest.mark.parametrize("depth", [1, 2, 7, 18, 21])
def test_refuses_depths_that_do_not_fit_three_equal_groups(depth):
    with pytest.raises(ValueError, match=rf"^ResNet\.depth must be 6 n \+ 2 with n at least 1.* Got {depth}\.$"):
        ResNet(depth)
