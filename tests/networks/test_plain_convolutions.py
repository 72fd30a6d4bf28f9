"""The plain convolutional networks: layers, weight counts, training and members under `Network`."""

import logging

import pytest
import torch
from torch import nn

import posterity as po
from posterity.methods import MAP
from posterity.model.network import Network
from posterity.networks import VGG, ConvNet
from posterity.numerics import Key


def products(net: nn.Module, image: tuple[int, ...]) -> int:
    """How many products of a weight and a number one image takes."""
    x, count = torch.zeros(1, *image), 0
    for layer in net.eval():
        x = layer(x)
        if isinstance(layer, (nn.Conv2d, nn.Linear)):
            count += layer.weight.numel() * x[0, 0].numel()
    return count


# Table 2 of Simonyan and Zisserman (2015), in millions, less the three linear layers of 25088 x 4096, 4096^2 and 4096 x
# 1000 weights with their biases.
LARGE_HEAD = (25088 + 1) * 4096 + (4096 + 1) * 4096 + (4096 + 1) * 1000


@pytest.mark.parametrize(("depth", "millions"), [(11, 133), (13, 133), (16, 138), (19, 144)])
def test_convolutions_have_the_published_number_of_weights(depth, millions):
    found = sum(p.numel() for p in VGG(depth, batch_norm=False)[:-1].parameters())
    assert round((found + LARGE_HEAD) / 1e6) == millions


@pytest.mark.parametrize("depth", [11, 13, 16, 19])
@pytest.mark.parametrize("batch_norm", [False, True])
def test_depth_counts_the_convolutions_and_three_linear_layers_of_the_original(depth, batch_norm):
    net = VGG(depth, width=2, batch_norm=batch_norm)
    kinds = [type(layer) for layer in net]
    assert kinds.count(nn.Conv2d) == depth - 3
    assert kinds.count(nn.Linear) == 1
    assert kinds.count(nn.BatchNorm2d) == (depth - 3 if batch_norm else 0)
    assert all((layer.bias is None) == batch_norm for layer in net if isinstance(layer, nn.Conv2d))


def test_five_stages_leave_one_pixel():
    x, shapes = torch.zeros(1, 3, 32, 32), []
    for layer in VGG(11, width=4).eval():
        x = layer(x)
        if isinstance(layer, (nn.MaxPool2d, nn.Flatten)):
            shapes.append(tuple(x.shape[1:]))
    assert shapes == [(4, 16, 16), (8, 8, 8), (16, 4, 4), (32, 2, 2), (32, 1, 1), (32,)]


@pytest.mark.parametrize(("channels", "side"), [(1, 28), (3, 32), (2, 8)])
def test_the_small_net_takes_images_of_several_sizes(channels, side):
    assert ConvNet(in_channels=channels, width=3)(torch.zeros(2, channels, side, side)).shape == (2, 10)


def test_the_small_net_has_biases_in_place_of_batch_norm():
    kinds = [type(layer) for layer in ConvNet(width=2, batch_norm=False)]
    assert (kinds.count(nn.Conv2d), kinds.count(nn.BatchNorm2d)) == (6, 0)
    assert all(layer.bias is not None for layer in ConvNet(width=2, batch_norm=False) if isinstance(layer, nn.Conv2d))
    assert all(layer.bias is None for layer in ConvNet(width=2) if isinstance(layer, nn.Conv2d))


def test_the_small_net_is_cheap():
    assert round(products(ConvNet(), (3, 32, 32)) / 1e6) == 34


def trained(net: nn.Module, side: int) -> tuple[float, float]:
    """Mean loss of the first and last steps on images of bright patches, by place."""
    rows = 60
    y = torch.arange(rows) % 3
    x = 0.3 * Key(0).normal((rows, 1, side, side))
    for row, label in enumerate(y.tolist()):
        x[row, 0, 9 * label : 9 * label + 9] += 1.5 * (label + 1)
    joint = po.Joint(net, po.likelihoods.Categorical(), po.priors.Normal(1.0), num_data=rows)
    _, trace = po.infer(MAP(steps=30, batch_size=20), joint, (x, y))
    return float(trace["loss"][:3].mean()), float(trace["loss"][-3:].mean())


@pytest.mark.parametrize(
    ("make", "side"),
    [
        (lambda: VGG(11, num_classes=3, in_channels=1, width=4), 32),
        (lambda: ConvNet(num_classes=3, in_channels=1, width=4), 28),
    ],
    ids=["vgg", "conv net"],
)
def test_training_lowers_the_loss(make, side):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net = make()
    first, last = trained(net, side)
    assert last < first - 0.2


@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize("make", [lambda: VGG(11, width=2), lambda: ConvNet(width=2)], ids=["vgg", "conv net"])
def test_members_give_what_each_gives_alone_at_once(make, train, caplog):
    network = Network(make().double())
    theta = network.initial + 0.1 * Key(5).normal((3, network.layout.size), torch.float64).to(network.device)
    x = Key(3).normal((4, 3, 32, 32), torch.float64).to(network.device)
    with caplog.at_level(logging.WARNING, logger="posterity"):
        outputs, after = network.run(network.views(theta), x, members=True, train=train)
    assert not caplog.records  # vmap took it
    for index, member in enumerate(theta):
        alone, buffers = network.run(network.views(member), x, train=train)
        torch.testing.assert_close(outputs[index], alone)
        for name, value in buffers.items():
            torch.testing.assert_close(after[name][index], value)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: VGG(12), r"^VGG\.depth must be 11, 13, 16 or 19\. Got 12\.$"),
        (lambda: VGG(True), r"^VGG\.depth must be"),
        (lambda: VGG(width=0), r"^VGG\.width must be a positive whole number\. Got 0\.$"),
        (lambda: VGG(num_classes=2.0), r"^VGG\.num_classes must be"),
        (lambda: VGG(batch_norm=1), r"^VGG\.batch_norm must be True or False\. Got 1\.$"),
        (lambda: ConvNet(width=0), r"^ConvNet\.width must be a positive whole number\. Got 0\.$"),
        (lambda: ConvNet(in_channels=True), r"^ConvNet\.in_channels must be"),
        (lambda: ConvNet(batch_norm=None), r"^ConvNet\.batch_norm must be True or False\. Got None\.$"),
    ],
)
def test_odd_sizes_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()
