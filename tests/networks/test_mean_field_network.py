"""The mean-field network: its formula, what its neurons may do without changing it, how it starts, what it refuses."""

import pytest
import torch
from drawn import normal
from torch import nn

import posterity as po
from posterity.networks import MeanFieldNetwork
from posterity.numerics import Key


@pytest.mark.parametrize(
    ("activation", "function"), [("relu", torch.relu), ("tanh", torch.tanh), ("erf", torch.erf), ("silu", nn.SiLU())]
)
def test_is_the_average_of_its_neurons(activation, function):
    net = MeanFieldNetwork(3, width=7, outputs=2, activation=activation).double()
    x = normal(Key(0), 5, 3)
    inner, outer = net[0].weight, net[2].weight
    neurons = torch.stack([outer[:, j] * function(x @ inner[j]).unsqueeze(-1) for j in range(7)])  # (N, rows, C)
    torch.testing.assert_close(net(x), neurons.mean(0))


def test_order_and_copies_of_the_neurons_do_not_matter():
    net, x = MeanFieldNetwork(3, width=6, outputs=2).double(), normal(Key(1), 5, 3)
    order = torch.tensor([3, 1, 5, 0, 2, 4])
    permuted, doubled = MeanFieldNetwork(3, width=6, outputs=2).double(), MeanFieldNetwork(3, 12, 2).double()
    with torch.no_grad():
        for other, index in ((permuted, order), (doubled, torch.cat([order, order]))):
            other[0].weight.copy_(net[0].weight[index])
            other[2].weight.copy_(net[2].weight[:, index])
    torch.testing.assert_close(permuted(x), net(x))
    torch.testing.assert_close(doubled(x), net(x))


def test_neurons_start_from_one_distribution_whatever_the_width():
    narrow, wide = (
        po.Joint(MeanFieldNetwork(4, width), po.likelihoods.Gaussian(), po.priors.Normal(), num_data=1).network
        for width in (50, 5000)
    )
    spreads = []
    for network in (narrow, wide):
        weights = network.layout.unflatten(network.fresh(Key(0)))
        spreads.append((weights["0.weight"].std().item(), weights["2.weight"].std().item()))
    assert spreads[0] == pytest.approx(spreads[1], rel=0.3)
    assert spreads[1][1] == pytest.approx(3**-0.5, rel=0.05)  # uniform on [-1, 1]


def test_the_variance_of_f_under_the_prior_falls_with_the_width():
    scale, draws = 0.2**0.5, 4000
    for width in (5, 40):
        net = MeanFieldNetwork(2, width).double()
        joint = po.Joint(net, po.likelihoods.Gaussian(), po.priors.Normal(scale), num_data=1)
        x = torch.tensor([[1.0, 0.5]], dtype=torch.float64)
        theta = joint.prior.sample((draws, joint.size), Key(3), torch.zeros(1, dtype=torch.float64))
        outputs = joint.network.outputs(theta, x).flatten()
        expected = float(x.square().sum()) / (50 * width)  # E a^2 E relu^2 / N = 0.2 (0.2 |x|^2 / 2) / N
        error = (outputs.square().std() / draws**0.5).item()
        assert abs(outputs.square().mean().item() - expected) < 5 * error


@pytest.mark.parametrize(
    "arguments", [{"inputs": 0, "width": 3}, {"inputs": 2, "width": 2.5}, {"inputs": 2, "width": 3, "outputs": -1}]
)
def test_refuses_sizes(arguments):
    with pytest.raises(ValueError, match=r"^MeanFieldNetwork\.\w+ must be a positive whole number\. Got "):
        MeanFieldNetwork(**arguments)


def test_names_the_nearest_activation():
    with pytest.raises(ValueError, match=r"^Unknown activation 'erff'\. Did you mean 'erf'\?$"):
        MeanFieldNetwork(2, 3, activation="erff")
