import logging

import pytest
import torch
from drawn import normal
from torch import nn

from posterity.inference import infer
from posterity.likelihoods import Categorical
from posterity.methods import MAP
from posterity.model import Joint, Tempering, layer_chains
from posterity.model.data import Batch
from posterity.model.layer_chains import image_chain
from posterity.model.network import Network
from posterity.networks import VGG, ConvNet, LeNet, ResNet
from posterity.numerics.random import Key
from posterity.optim import SGD
from posterity.priors import Laplace, Normal

MEMBERS = 3


def hooked():
    net = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(8, 3))
    net[0].register_forward_hook(lambda module, args, output: 3 * output)
    return net


def hooked_block():
    net = ResNet(8, width=2)
    net[3].norm2.register_forward_hook(lambda module, args, output: 3 * output)
    return net


OTHERS = {
    "linear layers": lambda: nn.Sequential(nn.Linear(3, 2), nn.ReLU()),
    "no flattening": lambda: nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU()),
    "flattening in part": lambda: nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(2), nn.Linear(4, 3)),
    "a pool first": lambda: nn.Sequential(nn.MaxPool2d(2), nn.Conv2d(1, 2, 3), nn.Flatten()),
    "linear on images": lambda: nn.Sequential(nn.Conv2d(1, 2, 3), nn.Linear(2, 2), nn.Flatten()),
    "convolution on rows": lambda: nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Conv2d(1, 2, 3)),
    "groups": lambda: nn.Sequential(nn.Conv2d(2, 2, 3, groups=2), nn.Flatten()),
    "circular": lambda: nn.Sequential(nn.Conv2d(1, 2, 3, padding=1, padding_mode="circular"), nn.Flatten()),
    "cumulative statistics": lambda: nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2, momentum=None), nn.Flatten()),
    "places of maxima": lambda: nn.Sequential(nn.Conv2d(1, 2, 3), nn.MaxPool2d(2, return_indices=True), nn.Flatten()),
    "dropout": lambda: nn.Sequential(nn.Conv2d(1, 2, 3), nn.Dropout2d(), nn.Flatten()),
    "a hook": hooked,
    "a hook in a block": hooked_block,
}


@pytest.mark.parametrize("make", OTHERS.values(), ids=OTHERS.keys())
def test_only_plain_chains_are_taken(make):
    assert image_chain(make()) is None


def normalised():
    layers = (nn.Conv2d(1, 3, 3, stride=2), nn.BatchNorm2d(3), nn.ReLU(inplace=True), nn.AvgPool2d(2))
    return nn.Sequential(*layers, nn.Sequential(nn.Conv2d(3, 2, 2, bias=False), nn.BatchNorm2d(2, affine=False)),
                         nn.Tanh(), nn.Flatten(), nn.Linear(2, 4), nn.ReLU(), nn.Linear(4, 2))  # fmt: skip


def frozen(*names):
    net = normalised()
    for name, parameter in net.named_parameters():
        parameter.requires_grad_(name not in names)
    return net


def untracked():
    return nn.Sequential(nn.Conv2d(1, 2, 5), nn.BatchNorm2d(2, track_running_stats=False), nn.Flatten())


CHAINS = {
    "lenet": lambda: LeNet(num_classes=2, image_size=12),
    "batch norm": normalised,
    "residual": lambda: ResNet(8, num_classes=2, in_channels=1, width=2),
    "frozen first layer": lambda: frozen("0.weight", "0.bias"),
    "frozen later layer": lambda: frozen("4.0.weight"),
    "frozen batch norm": lambda: frozen("1.weight", "1.bias"),
    "frozen linear layer": lambda: frozen("7.weight", "9.bias"),
    "no running statistics": untracked,
}


@pytest.mark.parametrize("one_by_one", [False, True], ids=["together", "one by one"])
@pytest.mark.parametrize("train", [False, True], ids=["evaluation", "training"])
@pytest.mark.parametrize("per_member", [False, True], ids=["shared rows", "rows of their own"])
@pytest.mark.parametrize("make", CHAINS.values(), ids=CHAINS.keys())
def test_members_have_outputs_gradients_and_statistics_of_the_module(make, per_member, train, one_by_one, monkeypatch):
    monkeypatch.setattr(Network, "one_by_one", one_by_one)
    torch.manual_seed(0)
    network = Network(make().double())
    assert network._chain is not None
    theta = network.initial + 0.3 * normal(Key(0), MEMBERS, network.layout.size)
    x = normal(Key(1), *((MEMBERS, 6, 1, 12, 12) if per_member else (6, 1, 12, 12)))
    before = x.clone()
    leaves = [view.detach().requires_grad_() for view in network.views(theta)]
    outputs, buffers = network.run(leaves, x, members=True, per_member=per_member, train=train)
    pull = normal(Key(2), *outputs.shape)
    grads = torch.autograd.grad((outputs * pull).sum(), leaves)
    for index in range(MEMBERS):
        own = [view.detach().requires_grad_() for view in network.views(theta[index])]
        alone, after = network.run(own, x[index] if per_member else x, train=train)
        torch.testing.assert_close(outputs[index], alone, rtol=1e-10, atol=1e-12)
        for together, grad in zip(grads, torch.autograd.grad((alone * pull[index]).sum(), own), strict=True):
            torch.testing.assert_close(together[index], grad, rtol=1e-9, atol=1e-11)
        assert after.keys() == buffers.keys()
        for name, value in after.items():
            torch.testing.assert_close(buffers[name][index], value, rtol=1e-10, atol=1e-12)
    assert torch.equal(x, before)


def test_members_in_turn_have_values_and_gradients_of_members_together(monkeypatch):
    torch.manual_seed(0)
    etas = torch.tensor([0.1, 1.0, 2.0], dtype=torch.float64)
    joint = Joint(normalised().double(), Categorical(), Normal(), 50, Tempering.tempered(etas))
    theta = joint.initial() + 0.3 * normal(Key(0), MEMBERS, joint.size)
    buffers = {name: torch.stack([b, b + 1, b + 2]) for name, b in joint.network.buffers.items()}
    for per_member in (False, True):
        x = normal(Key(1), *((MEMBERS, 6, 1, 12, 12) if per_member else (6, 1, 12, 12)))
        batch = Batch(x, torch.zeros(x.shape[:-3], dtype=torch.int64), per_member=per_member)
        found = {}
        for one_by_one in (False, True):
            monkeypatch.setattr(Network, "one_by_one", one_by_one)
            found[one_by_one] = joint.value_and_grad(theta, batch, buffers)
        for together, in_turn in zip(found[False][:2], found[True][:2], strict=True):
            torch.testing.assert_close(in_turn, together, rtol=1e-9, atol=1e-11)
        for name, value in found[False][2].items():
            torch.testing.assert_close(found[True][2][name], value, rtol=1e-10, atol=1e-12)


def test_other_shapes_give_the_error_of_the_module():
    network = Network(LeNet())
    with pytest.raises(RuntimeError, match="channels"):
        network.outputs(network.initial.expand(2, -1), torch.zeros(4, 3, 28, 28))


def test_only_wide_kernels_run_one_by_one_on_a_gpu():
    with torch.device("meta"):
        wide = {"vgg": VGG(19), "resnet": ResNet(20, width=32), "small": ConvNet(), "lenet": LeNet()}
    assert [name for name, net in wide.items() if image_chain(net).wide] == ["vgg"]


@pytest.mark.cuda
@pytest.mark.parametrize("half", [False, True], ids=["float32", "bfloat16"])
def test_wide_members_in_a_recorded_step_train_as_alone(half, monkeypatch, caplog):
    """Members share streams, of which there are fewer than members."""
    monkeypatch.setattr(layer_chains, "WIDE", 1)
    torch.manual_seed(0)
    module = normalised().cuda()
    x, key = normal(Key(1), 60, 1, 12, 12).float().cuda(), Key(2)
    data = x, (x.mean((1, 2, 3)) > 0).long()
    scales = torch.tensor([0.1, 0.2, 0.5, 1.0, 2.0, 4.0], device="cpu")
    method = MAP(30, 20, SGD(0.05, nesterov=True), proximal=True)

    def fitted(scale, start):
        joint = Joint(module, Categorical(), Laplace(scale), 60)
        with (
            torch.autocast("cuda", torch.bfloat16, enabled=half, cache_enabled=False),
            torch.backends.cudnn.flags(enabled=True, allow_tf32=False),
            caplog.at_level(logging.INFO),
        ):
            return infer(method, joint, data, start=start, seed=3, progress=False)[0]

    joint = Joint(module, Categorical(), Normal(), 60)
    start = torch.stack([joint.fresh(key.fold(index)) for index in range(len(scales))])
    together = fitted(scales, start)
    assert "not recorded" not in caplog.text
    tolerance = 0.05 if half else 1e-4
    for index, scale in enumerate(scales.tolist()):
        alone = fitted(scale, start[index])
        torch.testing.assert_close(together.member(index).theta, alone.theta, rtol=tolerance, atol=tolerance)
        for name, value in alone.buffers.items():
            torch.testing.assert_close(together.member(index).buffers[name], value, rtol=tolerance, atol=tolerance)
    if not half:
        monkeypatch.setattr(layer_chains, "WIDE", 1000)
        torch.testing.assert_close(fitted(scales, start).theta, together.theta, rtol=1e-3, atol=1e-3)
