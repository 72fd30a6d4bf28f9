"""Members of networks with convolutions: as groups of channels they are what they are alone."""

import collections
import logging

import pytest
import torch
from drawn import normal
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from posterity.inference import infer
from posterity.likelihoods import Categorical
from posterity.methods import MAP
from posterity.model import Joint, Tempering, layouts, members
from posterity.model.data import Batch
from posterity.model.network import Network
from posterity.networks import VGG, ConvNet, LeNet, ResNet
from posterity.numerics.random import Key
from posterity.optim import SGD
from posterity.priors import Laplace, Normal

MEMBERS = 3


def hooked():
    net = nn.Sequential(nn.Conv2d(1, 2, 5), nn.Flatten(), nn.Linear(128, 3))
    net[0].register_forward_hook(lambda module, args, output: 3 * output)
    return net


class Written(nn.Module):
    """What people write between convolutions: additions, gates, concatenations, padding, sizes, views, in place."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Conv2d(1, 4, 3, padding=1), nn.Conv2d(4, 6, 3, stride=2, padding=1, bias=False)
        self.norm, self.group = nn.BatchNorm2d(6), nn.GroupNorm(2, 8)
        self.down, self.up = nn.Linear(6, 3), nn.Linear(3, 6)
        self.deep, self.point = nn.Conv2d(6, 6, 3, padding="same", groups=6), nn.Conv2d(6, 2, 1)
        self.attention, self.scale = nn.Conv2d(6, 1, 1), nn.Parameter(torch.ones(6, 1, 1))
        self.linear = nn.Linear(8, 3)

    def forward(self, x):
        x = self.first(x)
        x += 0.5
        shortcut = F.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, 1, 1))
        x = F.relu(self.norm(self.second(x)) + shortcut, inplace=True)
        gate = torch.sigmoid(self.up(F.silu(self.down(x.mean((2, 3))))))
        x = x * gate[:, :, None, None]
        x = self.deep(x) * torch.sigmoid(self.attention(x)) * self.scale - x / 2
        x = torch.cat([x, self.point(x)], 1)
        x = F.max_pool2d(self.group(F.pad(x, (1, 1, 1, 1), mode="reflect")), 2)
        assert isinstance(x, torch.Tensor)
        assert x.shape[1:] == (8, 4, 4)
        return self.linear(F.adaptive_avg_pool2d(x, 1).view(x.size(0), -1))


class Doubled(nn.Module):
    """Its first kernels have groups, of which members share the images."""

    def __init__(self):
        super().__init__()
        self.kernel = nn.Conv2d(2, 4, 12, groups=2)

    def forward(self, x):
        return self.kernel(torch.cat([x, x.square()], 1)).flatten(1)


class Viewing(nn.Module):
    """It takes images with the channels first in memory alone."""

    def __init__(self):
        super().__init__()
        self.kernel, self.linear = nn.Conv2d(1, 2, 7), nn.Linear(72, 2)

    def forward(self, x):
        x = self.kernel(x)
        return self.linear(x.view(x.shape[0], -1))


class Branching(nn.Module):
    """Its path depends on numbers, which no members share."""

    def __init__(self):
        super().__init__()
        self.kernel, self.linear = nn.Conv2d(1, 2, 5), nn.Linear(2, 2)

    def forward(self, x):
        x = self.kernel(x)
        return self.linear(x.mean((2, 3)) if x.sum() > 0 else x.amax((2, 3)))


class Unusual(nn.Module):
    """vmap takes it; groups do not, since its outputs are of no member."""

    def __init__(self):
        super().__init__()
        self.kernel = nn.Conv2d(1, 2, 12)

    def forward(self, x):
        return {"logits": self.kernel(x).flatten(1)}


def residual():
    from benchmarkfiles import load

    return load("laplace_resnet").OwnResNet()


def cumulative():
    return nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2, momentum=None), nn.Flatten(), nn.Linear(200, 2))


OTHERS = {"branches": Branching, "outputs by name": Unusual, "cumulative statistics": cumulative}


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


def of_rows():
    return nn.Sequential(nn.Conv2d(1, 3, 12), nn.Flatten(), nn.BatchNorm1d(3), nn.GELU(), nn.Linear(3, 2))


GROUPED = {
    "a module of one's own": Written,
    "a hook": hooked,
    "batch norm first": lambda: nn.Sequential(nn.BatchNorm2d(1), nn.Conv2d(1, 2, 12), nn.Flatten()),
    "grouped kernels first": Doubled,
    "a view of many pixels": Viewing,
    "circular": lambda: nn.Sequential(nn.Conv2d(1, 2, 3, padding=1, padding_mode="circular"), nn.Flatten()),
    "places of maxima": lambda: nn.Sequential(nn.Conv2d(1, 2, 3), nn.AdaptiveMaxPool2d(1), nn.Flatten()),
    "transposed": lambda: nn.Sequential(nn.Conv2d(1, 2, 5), nn.ConvTranspose2d(2, 1, 3), nn.Flatten()),
    "layer norm": lambda: nn.Sequential(nn.Conv2d(1, 2, 5), nn.LayerNorm((2, 8, 8)), nn.Flatten()),
    "one by one pixel": of_rows,
    "lenet": lambda: LeNet(num_classes=2, image_size=12),
    "batch norm": normalised,
    "residual": lambda: ResNet(8, num_classes=2, in_channels=1, width=2),
    "frozen first layer": lambda: frozen("0.weight", "0.bias"),
    "frozen later layer": lambda: frozen("4.0.weight"),
    "frozen batch norm": lambda: frozen("1.weight", "1.bias"),
    "frozen linear layer": lambda: frozen("7.weight", "9.bias"),
    "no running statistics": untracked,
}


@pytest.mark.parametrize("way", ["together", "one by one", "channels last"])
@pytest.mark.parametrize("train", [False, True], ids=["evaluation", "training"])
@pytest.mark.parametrize("per_member", [False, True], ids=["shared rows", "rows of their own"])
@pytest.mark.parametrize("make", GROUPED.values(), ids=GROUPED.keys())
def test_members_have_outputs_gradients_and_statistics_of_the_module(make, per_member, train, way, monkeypatch):
    monkeypatch.setattr(Network, "one_by_one", way == "one by one")
    monkeypatch.setattr(layouts, "CHANNELS_LAST_ON", ("cpu",) if way == "channels last" else ())
    torch.manual_seed(0)
    network = Network(make().double())
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
    assert not network._together._ungrouped


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
    nets = {"vgg": VGG(11), "resnet": ResNet(20, width=32), "small": ConvNet(), "lenet": LeNet()}
    assert [name for name, net in nets.items() if Network(net)._together.wide] == ["vgg"]


class Calls(TorchDispatchMode):
    """Counts the operations of torch, by name."""

    def __init__(self):
        super().__init__()
        self.counts = collections.Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.counts[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def test_a_resnet_of_one_s_own_makes_the_calls_of_one_member(monkeypatch):
    """One call of each layer for all members, and no movement of members between layers; vmap moves them."""
    monkeypatch.setattr(Network, "one_by_one", False)
    torch.manual_seed(0)
    joint = Joint(residual().double(), Categorical(), Normal(), 4)
    batch = joint.check(Batch(normal(Key(1), 4, 3, 8, 8), torch.arange(4)))
    theta = joint.initial() + 0.1 * normal(Key(0), MEMBERS, joint.size)
    buffers = joint.starting_buffers(theta)
    counts, values = {}, {}
    for way in ("one", "groups", "vmap"):
        monkeypatch.setattr(joint.network._together, "_ungrouped", ["told"] if way == "vmap" else [])
        given = (theta[0], batch, None) if way == "one" else (theta, batch, buffers)
        joint.value_and_grad(*given)
        with Calls() as calls:
            values[way] = joint.value_and_grad(*given)
        counts[way] = calls.counts
    for name in ("convolution", "convolution_backward", "native_batch_norm", "relu", "add", "avg_pool2d"):
        assert counts["groups"][name] == counts["one"][name] > 0, name
    assert counts["groups"]["permute"] == 0 < counts["vmap"]["permute"]
    for own, other in zip(values["groups"][:2], values["vmap"][:2], strict=True):
        torch.testing.assert_close(own, other, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("make", OTHERS.values(), ids=OTHERS.keys())
def test_what_no_rule_covers_is_left_to_vmap_or_a_loop(make, monkeypatch, caplog):
    monkeypatch.setattr(Network, "one_by_one", False)
    torch.manual_seed(0)
    network = Network(make().double())
    theta = network.initial + 0.3 * normal(Key(0), MEMBERS, network.layout.size)
    x = normal(Key(1), 6, 1, 12, 12)
    with caplog.at_level(logging.INFO, logger="posterity"):
        for _ in range(2):
            outputs, buffers = network.run(network.views(theta), x, members=True, train=True)
    assert caplog.text.count("members do not run as groups of channels: ") == 1
    for index in range(MEMBERS):
        alone, after = network.run(network.views(theta[index]), x, train=True)
        torch.testing.assert_close(outputs[index], alone, rtol=1e-10, atol=1e-12)
        for name, value in after.items():
            torch.testing.assert_close(buffers[name][index], value, rtol=1e-10, atol=1e-12)


@pytest.mark.cuda
@pytest.mark.parametrize("half", [False, True], ids=["float32", "bfloat16"])
def test_wide_members_in_a_recorded_step_train_as_alone(half, monkeypatch, caplog):
    """Members share streams, of which there are fewer than members."""
    monkeypatch.setattr(members, "WIDE", 1)
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
        monkeypatch.setattr(members, "WIDE", 1000)
        torch.testing.assert_close(fitted(scales, start).theta, together.theta, rtol=1e-3, atol=1e-3)
