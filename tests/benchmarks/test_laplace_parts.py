"""What the Laplace benchmarks share."""

import pytest
import torch
from benchmarkfiles import load
from torch import nn

from posterity.networks import MLP, LeNet

parts = load("laplace_parts")


def test_batches_are_all_rows_in_order_and_know_how_many_there_are():
    x, y = torch.arange(14.0).reshape(7, 2), torch.arange(7)
    batches = parts.Batches(x, y, size=3)
    assert [len(labels) for _, labels in batches] == [3, 3, 1]
    assert torch.equal(torch.cat([rows for rows, _ in batches]), x)
    assert torch.equal(torch.cat([labels for _, labels in batches]), y)
    assert (len(batches), len(batches.dataset)) == (3, 7)


@pytest.mark.parametrize(("net", "kind", "shape"), [("mlp", MLP, (784,)), ("lenet", LeNet, (1, 28, 28))])
def test_a_problem_depends_on_its_seed_alone(net, kind, shape):
    module, x, y = parts.problem(net, 30, seed=1)
    again, same, labels = parts.problem(net, 30, seed=1)
    assert isinstance(module, kind)
    assert x.shape == (30, *shape)
    assert module(x).shape == (30, 10)
    assert y.unique().numel() > 3
    assert torch.equal(x, same)
    assert torch.equal(y, labels)
    assert all(torch.equal(a, b) for a, b in zip(module.parameters(), again.parameters(), strict=True))
    assert not torch.equal(x, parts.problem(net, 30, seed=2)[1])


def test_biases_are_left_out_of_a_copy():
    net = LeNet()
    bare = parts.without_biases(net)
    assert [name for name, _ in bare.named_parameters()] == [n for n, _ in net.named_parameters() if "weight" in n]
    assert bare(torch.zeros(2, 1, 28, 28)).count_nonzero() == 0
    assert net[0].bias is not None


def test_an_epoch_leaves_the_module_alone():
    net = MLP((3, 2))
    parts.epoch(net, parts.Batches(torch.zeros(4, 3), torch.zeros(4, dtype=torch.int64), size=2))()
    assert all(weight.grad is None for weight in net.parameters())


def test_the_prior_outside_the_last_layer_is_that_of_all_other_weights():
    net = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))
    values = torch.tensor([2.0, -1.0, 5.0, 7.0])
    nn.utils.vector_to_parameters(values, net.parameters())
    wanted = -0.5 * (4.0 + 1.0) - torch.tensor(2 * torch.pi).log().item()
    assert parts.prior_outside(net) == pytest.approx(wanted, rel=1e-6)
