import pytest
import torch
from drawn import normal
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

from posterity.model.layer_chains import linear_chain
from posterity.model.network import Network
from posterity.networks import MLP, MeanFieldNetwork
from posterity.numerics.random import Key

MEMBERS = 5


class Doubled(nn.Sequential):
    def forward(self, x):
        return 2 * super().forward(x)


def hooked():
    net = nn.Sequential(nn.Linear(3, 2), nn.Tanh())
    net[0].register_forward_hook(lambda module, args, output: 3 * output)
    return net


def chain():
    nested = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(7, 6, bias=False), nn.GELU())
    return nn.Sequential(nn.Linear(3, 7), nested, nn.Identity(), nn.Linear(6, 2))


def frozen(*names):
    net = MLP([3, 4, 2])
    for name, parameter in net.named_parameters():
        parameter.requires_grad_(name not in names)
    return net


OTHERS = {
    "another forward": lambda: Doubled(nn.Linear(3, 2)),
    "a hook": hooked,
    "a parametrisation": lambda: nn.Sequential(weight_norm(nn.Linear(3, 2)), nn.Tanh()),
    "a layer of another kind": lambda: nn.Sequential(nn.Linear(3, 2), nn.LayerNorm(2)),
    "first layer in place": lambda: nn.Sequential(nn.ReLU(inplace=True), nn.Linear(3, 2)),
    "nothing": nn.Sequential,
}


@pytest.mark.parametrize("make", OTHERS.values(), ids=OTHERS.keys())
def test_only_plain_chains_are_taken(make):
    assert linear_chain(make()) is None


CHAINS = {
    "nested": chain,
    "one layer": lambda: nn.Linear(3, 2),
    "deep": lambda: MLP([3, 4, 4, 2], "tanh"),
    "mean field": lambda: MeanFieldNetwork(3, width=5, outputs=2, activation="erf"),
    "frozen weight": lambda: frozen("2.weight"),
    "frozen bias": lambda: frozen("0.bias"),
    "frozen layer": lambda: frozen("0.weight", "0.bias"),
}


@pytest.mark.parametrize("per_member", [False, True], ids=["shared rows", "rows of their own"])
@pytest.mark.parametrize("make", CHAINS.values(), ids=CHAINS.keys())
def test_members_have_outputs_and_gradients_of_the_module(make, per_member):
    network = Network(make().double())
    assert network._chain is not None
    theta = network.initial + 0.3 * normal(Key(0), MEMBERS, network.layout.size)
    x = Key(1).normal((MEMBERS, 9, 3) if per_member else (9, 3), torch.float64)
    pull = normal(Key(2), MEMBERS, 9, 2)
    before = x.clone()
    together = theta.clone().requires_grad_()
    outputs = network.outputs(together, x, per_member=per_member)
    (outputs * pull).sum().backward()
    for index in range(MEMBERS):
        alone = theta[index].clone().requires_grad_()
        own = network.outputs(alone, x[index] if per_member else x)
        (own * pull[index]).sum().backward()
        torch.testing.assert_close(outputs[index], own, rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(together.grad[index], alone.grad, rtol=1e-10, atol=1e-12)
    assert torch.equal(x, before)
    assert all(p.dim() <= 2 for p in network._module.parameters())  # its own tensors are back


def test_inputs_with_positions_go_by_vmap():
    network = Network(MLP([3, 4, 2]).double())
    theta = network.initial + normal(Key(0), MEMBERS, network.layout.size)
    x = normal(Key(1), 5, 6, 3)
    torch.testing.assert_close(network.outputs(theta, x)[3], network.outputs(theta[3], x))
