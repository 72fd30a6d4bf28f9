"""Pruned modules compute the same function, and are as small as the zeros allow."""

import copy
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from prunedcases import agree, normal, randomised
from torch import Tensor, nn
from torch.nn import functional as F

import posterity as po
from posterity.networks import MLP, LeNet, MeanFieldNetwork, ResNet
from posterity.pruning import dead_units, pruned, unused_inputs

IMAGE = (2, 3, 9, 9)
LARGER = (2, 3, 12, 12)


def size(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def zero_some(module: nn.Module, seed: int, rate: float) -> None:
    """Rows and columns of weights, and scales and shifts, at random."""
    with torch.no_grad():
        for index, weight in enumerate(module.parameters()):
            weight[normal(seed + index, len(weight)).erf() * 0.5 + 0.5 < rate] = 0.0
            if weight.dim() > 1:
                columns = normal(seed + 500 + index, weight.shape[1]).erf() * 0.5 + 0.5 < rate
                weight[:, columns] = 0.0


ACTIVATIONS = [nn.ReLU, nn.Tanh, nn.Sigmoid, nn.Softplus, nn.LeakyReLU]
POOLS = [
    nn.Identity,
    lambda: nn.MaxPool2d(2),
    lambda: nn.AvgPool2d(2),
    lambda: nn.AvgPool2d(3, padding=1),
    lambda: nn.AvgPool2d(2, ceil_mode=True),
    lambda: nn.MaxPool2d(3, padding=1, stride=2),
]


@st.composite
def chains(draw: st.DrawFn) -> nn.Module:
    """Convolutions with and without batch norm, pooling and padding, then linear layers."""
    layers: list[nn.Module] = []
    channels = IMAGE[1]
    for _ in range(draw(st.integers(1, 2))):
        after, padding = draw(st.integers(1, 4)), draw(st.sampled_from([0, 1, "same"]))
        mode = draw(st.sampled_from(["zeros", "zeros", "reflect"]))
        bias = draw(st.booleans())
        layers.append(nn.Conv2d(channels, after, 3, padding=padding, padding_mode=mode, bias=bias))
        if draw(st.booleans()):
            layers.append(nn.BatchNorm2d(after, affine=draw(st.booleans())))
        layers += [draw(st.sampled_from(ACTIVATIONS))(), draw(st.sampled_from(POOLS))()]
        channels = after
    layers += [nn.Flatten(), nn.Dropout(0.4)]
    before = nn.Sequential(*layers).eval()(torch.zeros(LARGER)).shape[1]
    for _ in range(draw(st.integers(0, 2))):
        after = draw(st.integers(1, 4))
        layers.append(nn.Linear(before, after, bias=draw(st.booleans())))
        if draw(st.booleans()):
            layers.append(nn.BatchNorm1d(after))
        layers.append(draw(st.sampled_from(ACTIVATIONS))())
        before = after
    return nn.Sequential(*layers, nn.Linear(before, 2))


@given(chains(), st.integers(0, 10_000), st.floats(0.1, 0.95))
@settings(deadline=None, max_examples=40)
def test_any_chain_computes_the_same_function(net: nn.Module, seed: int, rate: float) -> None:
    net = randomised(net, seed)
    zero_some(net, seed + 3, rate)
    before = copy.deepcopy(net.state_dict())
    result = pruned(net)
    agree(net, result.module, normal(seed + 1, *LARGER))
    removed = sum(old - new for old, new in result.units.values())
    assert result.weights == (size(net), size(result.module))
    assert (result.weights[1] < result.weights[0]) == (removed > 0)
    assert set(dead_units(result.module).values()) <= {0}  # nothing is left to remove
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
    low = copy.deepcopy(net).float()
    agree(low, pruned(low).module, normal(seed + 1, *LARGER).float(), 1e-4)


def test_units_without_incoming_or_outgoing_weights_go_and_so_do_those_before_and_behind_them() -> None:
    net = randomised(MLP([3, 5, 4, 4, 2], activation="tanh"), 0)
    with torch.no_grad():
        net[0].weight[1] = 0.0  # a constant
        net[2].weight[:, 3] = 0.0  # unit 3 of the first layer is not seen
        net[2].weight[2, [0, 2, 4]] = 0.0  # unit 2 of the second layer sees constants only
        net[4].weight[:, 0] = 0.0
        net[4].weight[1] = 0.0
    result = pruned(net)
    assert result.units == {"0": (5, 3), "2": (4, 2), "4": (4, 3)}
    agree(net, result.module, normal(1, 7, 3))
    assert str(result).splitlines()[0] == "0: 3 of 5 units"
    assert type(result.module) is nn.Sequential  # its config would say [3, 5, 4, 4, 2]
    assert [name for name, _ in result.module.named_parameters()] == [name for name, _ in net.named_parameters()]
    assert [layer.out_features for layer in result.module if isinstance(layer, nn.Linear)] == [3, 2, 3, 2]


def test_nothing_to_remove_gives_an_equal_module() -> None:
    net = randomised(LeNet(), 0)
    result = pruned(net)
    assert type(result.module) is LeNet
    assert result.module is not net
    assert result.weights == (61_706, 61_706)
    assert all(torch.equal(value, net.state_dict()[name]) for name, value in result.module.state_dict().items())


@pytest.mark.parametrize("bias", [True, False])
def test_a_net_in_which_all_weights_are_zero_is_a_constant_of_one_unit_a_layer(bias: bool) -> None:
    layers = [nn.Conv2d(3, 8, 3, bias=bias), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 49, 5, bias=bias), nn.ReLU()]
    net = randomised(nn.Sequential(*layers, nn.Linear(5, 2, bias=bias)), 0)
    with torch.no_grad():
        for weight in net.parameters():
            if weight.dim() > 1:
                weight.zero_()
    result = pruned(net)
    assert result.units == {"0": (8, 1), "3": (5, 1)}
    agree(net, result.module, normal(1, *IMAGE), 1e-15)


@pytest.mark.parametrize("padding", [0, 1])
def test_constants_before_padding_become_one(padding: int) -> None:
    """At the edge a padded convolution sees less of them: no bias can say that, one channel can."""
    net = nn.Sequential(nn.Conv2d(3, 6, 3), nn.Sigmoid(), nn.Conv2d(6, 4, 3, padding=padding), nn.Flatten())
    net = randomised(nn.Sequential(*net, nn.Linear(4 * (7 if padding else 5) ** 2, 1)), 0)
    with torch.no_grad():
        net[0].weight[[0, 2, 3, 5]] = 0.0
    result = pruned(net)
    assert result.units == {"0": (6, 3 if padding else 2), "2": (4, 4)}
    agree(net, result.module, normal(1, *IMAGE))


@pytest.mark.parametrize(
    ("pool", "kept"), [(nn.AvgPool2d(3, padding=1), 4), (nn.AvgPool2d(2), 2), (nn.MaxPool2d(2), 2)]
)
def test_constants_that_averages_over_the_edge_change_stay(pool: nn.Module, kept: int) -> None:
    net = randomised(nn.Sequential(nn.Conv2d(3, 4, 3), nn.Sigmoid(), pool, nn.Conv2d(4, 2, 2)), 0)
    net[0].weight.data[:2] = 0.0
    result = pruned(net)
    assert result.units == {"0": (4, kept)}
    agree(net, result.module, normal(1, *IMAGE))


def test_a_scale_of_zero_in_batch_norm_makes_a_channel_constant() -> None:
    net = randomised(nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 2, 3)), 0)
    with torch.no_grad():
        net[1].weight[[1, 2]] = 0.0
    result = pruned(net)
    assert result.units == {"0": (4, 2)}
    assert result.module[1].num_features == 2
    agree(net, result.module, normal(1, *IMAGE))


def test_residual_networks_lose_channels_inside_their_blocks() -> None:
    net = randomised(ResNet(8, num_classes=3, width=4), 0)
    with torch.no_grad():
        for layer in net:
            if hasattr(layer, "conv1"):
                layer.conv1.weight[:2] = 0.0
                layer.conv2.weight[1] = 0.0  # its sum with the input is still needed
                layer.norm1.bias[:2] = -5.0  # below zero, whatever the statistics
                layer.norm1.weight[:2] = 0.0
    result = pruned(net)
    assert result.units == {"3.conv1": (4, 2), "4.conv1": (8, 6), "5.conv1": (16, 14)}
    agree(net, result.module, normal(1, *IMAGE))


class Branching(nn.Module):
    """Two readers of one layer, functions in place of layers, and a layer whose outputs are returned."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.left, self.right = nn.Conv2d(3, 6, 3), nn.Conv2d(6, 2, 3), nn.Conv2d(6, 2, 3, bias=False)
        self.head = nn.Linear(2 * 4, 4)
        self.out = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = F.relu(self.first(x) * 0.5)
        left = torch.flatten(F.max_pool2d(torch.tanh(self.left(hidden)), 2), 1)
        return self.out(F.gelu(self.head(left))), self.right(hidden.sigmoid())


def test_modules_with_branches_and_functions_of_torch() -> None:
    net = randomised(Branching(), 0)
    with torch.no_grad():
        net.first.weight[[0, 3]] = 0.0
        net.left.weight[:, 5] = 0.0  # still seen by the other
        net.left.weight[1] = 0.0
        net.head.weight[2] = 0.0
    result = pruned(net)
    assert result.units == {"first": (6, 4), "left": (2, 1), "head": (4, 3)}
    x = normal(1, *IMAGE)
    for mine, full in zip(result.module(x), net(x), strict=True):
        torch.testing.assert_close(mine, full, rtol=1e-10, atol=1e-10)
    assert result.module.right.bias is not None  # of constants that it saw


class Forked(nn.Module):
    """One layer that two others see; `way` is what is done on the way to the first of them."""

    def __init__(self, way: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.left, self.right = nn.Linear(4, 5), nn.Linear(5, 2), nn.Linear(5, 2)
        self.way = way

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        return self.left(self.way(hidden)) + self.right(hidden)


def doubled(hidden: Tensor) -> Tensor:
    hidden *= 2.0
    return hidden


@pytest.mark.parametrize(
    ("way", "kept"),
    [
        (nn.ReLU(), 2),
        (nn.ReLU(inplace=True), 5),
        (nn.Sequential(nn.Dropout(), nn.Flatten(), nn.ELU(inplace=True)), 5),
        (lambda hidden: F.relu(hidden, inplace=True), 5),
        (lambda hidden: F.hardtanh(hidden, -1.0, 1.0, True), 5),
        (lambda hidden: F.relu(torch.tanh(hidden), inplace=True), 2),
        (doubled, 5),
    ],
)
def test_units_that_a_branch_changes_in_place_are_changed_for_all(way: Callable[[Tensor], Tensor], kept: int) -> None:
    net = randomised(Forked(way), 0)
    with torch.no_grad():
        net.first.weight[:3] = 0.0
        net.first.bias[:3] = torch.tensor([-1.0, 0.5, -2.0])
    result = pruned(net)
    assert len(result.module.first.weight) == kept
    agree(net, result.module, normal(1, 5, 4))


class Averaging(nn.Module):
    """Code that computes with the size of a layer, as a number or as a tensor."""

    def __init__(self, tensor: bool) -> None:
        super().__init__()
        self.first, self.last, self.tensor = nn.Linear(4, 5), nn.Linear(5, 2), tensor

    def forward(self, x: Tensor) -> Tensor:
        total = self.last(torch.relu(self.first(x)))
        width = self.first.out_features
        return total * torch.tensor(1.0 / width) if self.tensor else total / width


@pytest.mark.parametrize("tensor", [False, True])
def test_code_that_computes_with_the_sizes_of_layers_is_refused(tensor: bool) -> None:
    net = randomised(Averaging(tensor), 0)
    agree(net, pruned(net).module, normal(1, 5, 4))  # nothing goes, so nothing changes
    net.first.weight.data[:2] = 0.0
    names = set(vars(net))
    with pytest.raises(TypeError, match=r"forward code of Averaging uses the sizes of its layers \(in .*self.width"):
        pruned(net)
    assert set(vars(net)) == names


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.twin, self.last = (nn.Linear(4, 4) for _ in range(4))
        self.twin.weight = self.middle.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.relu(self.twin(torch.relu(self.middle(torch.relu(self.first(x)))))))


class Attending(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.softmax(self.first(x), -1))


def test_what_cannot_be_told_stays() -> None:
    for net in (Tied(), Attending(), nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 2))):
        net = randomised(net, 0)
        with torch.no_grad():
            net.get_parameter("first.weight" if hasattr(net, "first") else "0.weight")[:2] = 0.0
        assert pruned(net).units == {}
        agree(net, pruned(net).module, normal(1, 5, 4))


def test_grouped_convolutions_and_pooling_of_features_stay() -> None:
    grouped = randomised(nn.Sequential(nn.Conv2d(3, 4, 1), nn.ReLU(), nn.Conv2d(4, 4, 1, groups=2)), 0)
    pooled = randomised(nn.Sequential(nn.Linear(3, 4), nn.MaxPool1d(2), nn.Linear(2, 2)), 0)
    for net, x in ((grouped, normal(1, *IMAGE)), (pooled, normal(1, 5, 3))):
        net[0].weight.data[:2] = 0.0
        assert pruned(net).units == {}
        agree(net, pruned(net).module, x)


def test_a_scaled_network_keeps_the_factor_of_its_full_width() -> None:
    net = randomised(MeanFieldNetwork(3, 10), 0)
    net[0].weight.data[:6] = 0.0
    result = pruned(net)
    assert result.units == {"0": (10, 4)}
    agree(net, result.module, normal(1, 5, 3))


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layer(x)


def test_inputs_that_no_layer_sees_are_told() -> None:
    image = randomised(nn.Sequential(nn.Flatten(), nn.Dropout(0.2), nn.Linear(12, 3)), 0)
    image[2].weight.data[:, [0, 7]] = 0.0
    assert unused_inputs(image).nonzero().flatten().tolist() == [0, 7]
    convolution = randomised(nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 1, 3)), 0)
    convolution[0].weight.data[:, 1] = 0.0
    assert unused_inputs(convolution).tolist() == [False, True, False]
    grouped = randomised(nn.Sequential(nn.Conv2d(4, 8, 3, groups=2), nn.ReLU(), nn.Conv2d(8, 1, 3)), 0)
    grouped[0].weight.data[4:, 1] = 0.0  # the second input of the second group
    assert unused_inputs(grouped).tolist() == [False, False, False, True]
    for net in (nn.Sequential(nn.MaxPool1d(2), nn.Linear(2, 1)), Residual()):
        with pytest.raises(ValueError, match=r"unused_inputs: the inputs of .* must go into linear layers"):
            unused_inputs(net)


class Deciding(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x if x.sum() > 0 else -x


def test_refusals_say_what_to_do() -> None:
    with pytest.raises(TypeError, match=r"forward code of Deciding cannot be traced: .* Prune a part that has"):
        pruned(Deciding())
    with pytest.raises(TypeError, match=r"must be given a module, such as q\.module\(\)"):
        pruned(torch.zeros(3))  # type: ignore[arg-type]


def test_the_module_of_a_point_has_its_weights_and_statistics() -> None:
    net = randomised(nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.ReLU(), nn.Linear(3, 1)), 0)
    net[3].bias.requires_grad_(False)
    joint = po.Joint(net, po.likelihoods.Gaussian(0.5), po.priors.Normal(), num_data=20)
    x, y = normal(1, 20, 2), normal(2, 20, 1)
    q, _ = po.infer(po.methods.MAP(30, None, po.optim.Adam(0.05)), joint, (x, y), progress=False)
    with torch.no_grad():
        torch.testing.assert_close(q.module()(x), q.predict(x).mean, rtol=1e-12, atol=1e-12)
    assert not torch.equal(q.module()[1].running_mean, net[1].running_mean)
    assert not q.module().training
    with pytest.raises(TypeError, match=r"Choose one: q\.member\(0\)"):
        po.posteriors.Point(joint, q.point().expand(2, -1)).module()
    with pytest.raises(TypeError, match="a Density has no module"):
        po.posteriors.Point(po.Density(lambda w: -w.sum(), {"w": (1,)}), torch.zeros(1)).module()
