"""Units behind functions of torch in place of modules, and along axes that only the inputs tell."""

import copy
import operator
from collections.abc import Callable

import pytest
import torch
from prunedcases import agree, normal, randomised
from torch import Tensor, nn
from torch.nn import functional as F

from posterity.networks import LeNet
from posterity.pruning import dead_units, pruned, unused_inputs

SPATIAL: dict[int, tuple[int, ...]] = {0: (5, 3), 1: (5, 3, 12), 2: (5, 3, 9, 10), 3: (2, 3, 6, 7, 6)}
CONVOLUTIONS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
Step = Callable[[Tensor, bool], Tensor]


class Stepping(nn.Module):
    """A layer, a function of what it gives, and a linear layer."""

    def __init__(self, axes: int, step: Step, inner: bool = False) -> None:
        super().__init__()
        self.first = nn.Linear(3, 6) if axes == 0 else CONVOLUTIONS[axes](3, 6, 2)
        self.inner = CONVOLUTIONS[axes](6, 6, 1) if inner else nn.Identity()
        self.step, self.last = step, nn.Identity()
        with torch.no_grad():
            features = self.eval()(torch.zeros(SPATIAL[axes])).shape[-1]
        self.last = nn.Linear(features, 2)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.last(self.step(torch.sigmoid(self.inner(self.first(x))), self.training))
        return result


def zeroed(module: nn.Module, seed: int) -> nn.Module:
    """Random, with rows and columns of zeros: of six units three are constants, one is not seen."""
    module = randomised(module, seed)
    with torch.no_grad():
        module.first.weight[[0, 2, 5]] = 0.0
        deeper = not isinstance(module.inner, nn.Identity)
        later = module.inner.weight if deeper else module.last.weight
        span = later.shape[1] // len(module.first.weight)
        later[:, 3 * span : 4 * span] = 0.0
        if deeper:
            later[1] = 0.0
    return module


def flat(x: Tensor) -> Tensor:
    return x.flatten(1)


def rows_of_shape(x: Tensor, training: bool) -> Tensor:
    rows = x.shape[0]
    return F.relu(x).reshape((rows, -1))


SEEN_THROUGH: dict[str, tuple[int, Step]] = {
    "dropout": (0, lambda x, training: F.dropout(x, 0.3, training)),
    "dropout of channels": (2, lambda x, training: flat(F.dropout2d(x, training=training))),
    "alpha dropout": (1, lambda x, training: flat(F.alpha_dropout(x, 0.2, training))),
    "max_pool1d": (1, lambda x, _: flat(F.max_pool1d(x, 2))),
    "max_pool3d": (3, lambda x, _: flat(F.max_pool3d(x, 2, 1))),
    "torch.max_pool2d": (2, lambda x, _: flat(torch.max_pool2d(x, 2, padding=1))),
    "avg_pool1d": (1, lambda x, _: flat(F.avg_pool1d(x, 3))),
    "avg_pool2d": (2, lambda x, _: flat(F.avg_pool2d(x, 2, 1))),
    "avg_pool3d": (3, lambda x, _: flat(F.avg_pool3d(x, kernel_size=2))),
    "adaptive averages": (2, lambda x, _: flat(F.adaptive_avg_pool2d(x, (2, 1)))),
    "adaptive maxima": (1, lambda x, _: flat(F.adaptive_max_pool1d(x, 2))),
    "view": (2, lambda x, _: x.view(x.size(0), -1)),
    "view by shape": (1, rows_of_shape),
    "reshape by sizes": (3, lambda x, _: torch.reshape(x, (x.size()[0], -1))),
    "reshape of rows": (0, lambda x, _: x.reshape(x.size(dim=0), -1)),
    "mean": (2, lambda x, _: x.mean((2, 3))),
    "mean from behind": (2, lambda x, _: torch.mean(x, dim=[-1, -2])),
    "mean that keeps axes": (3, lambda x, _: flat(x.mean((2, 3, 4), keepdim=True))),
    "mean of a sequence": (1, lambda x, _: x.mean(-1)),
    "view of means": (2, lambda x, _: F.relu(x).mean((2, 3)).view(x.size(0), -1)),
    "largest": (2, lambda x, _: torch.tanh(x.amax(dim=(2, 3)))),
}


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("name", SEEN_THROUGH)
def test_functions_of_torch_are_seen_through(name: str, seed: int) -> None:
    axes, step = SEEN_THROUGH[name]
    net = zeroed(Stepping(axes, step), seed)
    x = normal(seed + 1, *SPATIAL[axes])
    for result in (pruned(net), pruned(net, x)):
        assert result.units == {"first": (6, 2)}
        assert result.stay == {}
        agree(net, result.module, x)
        agree(net, result.module, x[:1])
    deeper = zeroed(Stepping(axes, step, inner=True), seed)
    result = pruned(deeper)
    assert result.units == {"first": (6, 2), "inner": (6, 5)}
    agree(deeper, result.module, x)


@pytest.mark.parametrize(
    ("step", "removed"),
    [
        (lambda x, _: flat(F.avg_pool2d(x, 3, 2, 1)), 1),
        (lambda x, _: flat(F.avg_pool2d(x, 2, ceil_mode=True)), 1),
        (lambda x, _: flat(F.avg_pool2d(x, 2, divisor_override=3)), 1),
        (lambda x, _: flat(F.avg_pool2d(x, 2, padding=0)), 4),
    ],
)
def test_constants_that_averages_by_functions_change_stay(step: Step, removed: int) -> None:
    net = zeroed(Stepping(2, step), 0)
    assert dead_units(net) == {"first": removed}
    agree(net, pruned(net).module, normal(1, *SPATIAL[2]))


def mixed(x: Tensor, training: bool) -> Tensor:
    """Sizes of a tensor with another first axis."""
    return x.view(x.transpose(0, 1).size(0), -1)


@pytest.mark.parametrize(
    ("axes", "step", "reason"),
    [
        (0, lambda x, _: F.dropout(x, 0.0), "dropout sees them"),  # it drops in evaluation mode, too
        (2, lambda x, _: x.view(-1, 6 * 72), "view sees them"),
        (2, lambda x, _: x.view(x.size(0), 432), "view sees them together with others"),
        (2, lambda x, _: x.view(5, -1), "view sees them"),
        (2, lambda x, _: flat(x) / x.size(1), "size sees them"),
        (2, lambda x, _: flat(x) / x.shape[1], "getattr sees them"),
        (1, lambda x, _: flat(x) / x.size(0), "truediv sees them together with others"),
        (1, mixed, "transpose sees them"),
        (2, lambda x, _: x.mean((1, 2)), "mean sees them"),
        (2, lambda x, _: x.mean(3).flatten(1), "mean sees them"),
        (2, lambda x, _: flat(x.softmax(1)), "softmax sees them"),
        (1, lambda x, _: flat(F.max_pool2d(x, 3, 1, 1)), "max_pool2d sees them"),  # over channels
        (1, lambda x, _: flat(F.avg_pool2d(x, 3, 1, 1)), "avg_pool2d sees them"),
        (2, lambda x, _: flat(F.adaptive_avg_pool3d(x, 6)), "adaptive_avg_pool3d sees them"),
    ],
)
def test_what_mixes_units_or_counts_them_is_told(axes: int, step: Step, reason: str) -> None:
    net = randomised(Stepping(axes, step), 0)
    net.first.weight.data[:2] = 0.0
    result = pruned(net)
    assert result.units == {}
    assert result.stay == {"first": reason}
    assert str(result).startswith(f"first: all units stay, since {reason}\nweights: ")
    assert all(torch.equal(mine, its) for mine, its in zip(result.module.parameters(), net.parameters(), strict=True))


class Rows(nn.Module):
    """The number of rows is read from the inputs, before layers, or before a sum over the first axis."""

    def __init__(self, summed: bool) -> None:
        super().__init__()
        self.first, self.last, self.summed = nn.Conv1d(3, 6, 2), nn.Linear(6 * 11, 2), summed

    def forward(self, x: Tensor) -> Tensor:
        rows = x.shape[0]
        x = x.sum(0, keepdim=True) if self.summed else x
        result: Tensor = self.last(F.relu(self.first(x)).view(rows, -1))
        return result


def test_rows_are_counted_along_the_axis_that_is_kept() -> None:
    kept, summed = randomised(Rows(False), 0), randomised(Rows(True), 0)
    for net in (kept, summed):
        net.first.weight.data[:2] = 0.0
    agree(kept, pruned(kept).module, normal(1, *SPATIAL[1]))
    assert dead_units(kept) == {"first": 2}
    assert dead_units(summed) == {}


def test_pooling_and_norms_of_other_axes_than_those_of_space_are_told() -> None:
    """They take units for positions."""
    pooled = nn.Sequential(nn.Conv1d(3, 4, 3), nn.MaxPool2d(3, stride=1, padding=1), nn.Conv1d(4, 3, 1))
    across = nn.Sequential(nn.Linear(6, 7), nn.BatchNorm2d(7), nn.Linear(7, 3))
    image = nn.Sequential(nn.Conv2d(3, 5, 3), nn.BatchNorm1d(5), nn.Conv2d(5, 2, 1))
    cases = ((pooled, (2, 3, 12)), (across, (5, 7, 2, 6)), (image, (3, 7, 7)))
    for net, shape in cases:
        net = randomised(net, 0)
        net[0].weight.data[:2] = 0.0
        assert list(pruned(net).stay) == ["0"]
        agree(net, pruned(net).module, normal(1, *shape))


NORMED = (nn.Sequential(nn.Linear(6, 7), nn.BatchNorm1d(7), nn.ReLU(), nn.Linear(7, 3)), (5, 6), (5, 7, 6))
FLATTENED = (nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(100, 3)), (2, 3, 7, 7), (3, 12, 12))
SEQUENCE = (nn.Sequential(nn.Conv1d(3, 4, 3), nn.BatchNorm1d(4), nn.Conv1d(4, 2, 1)), (2, 3, 9), (3, 6))


@pytest.mark.parametrize(("net", "rows", "others"), [NORMED, FLATTENED, SEQUENCE], ids=["norm", "flatten", "sequence"])
def test_inputs_tell_along_which_axis_units_lie(net: nn.Module, rows: tuple[int, ...], others: tuple[int, ...]) -> None:
    net = randomised(copy.deepcopy(net), 0)
    net[0].weight.data[[0, 2]] = 0.0
    count = len(net[0].weight)
    assumed = pruned(net)
    assert assumed.assumes_batches
    assert "for inputs in batches, (N, features) or" in str(assumed)
    batch, other = normal(1, *rows), normal(1, *others)
    told = pruned(net, batch)
    assert told.units == assumed.units == {"0": (count, count - 2)}
    assert "batches" not in str(told)
    agree(net, assumed.module, batch)
    agree(net, told.module, batch)
    stayed = pruned(net, other)
    assert stayed.units == dead_units(net, other) == {}
    assert "no batch" in stayed.stay["0"] or "along another axis" in stayed.stay["0"]
    agree(net, stayed.module, other)
    with pytest.raises(RuntimeError):  # never another function
        assumed.module(other)


def test_what_layers_tell_of_axes_needs_no_inputs() -> None:
    plain = nn.Sequential(nn.Linear(6, 7), nn.ReLU(), nn.Linear(7, 3))
    behind = nn.Sequential(nn.Flatten(), nn.Linear(6, 7), nn.BatchNorm1d(7), nn.Linear(7, 3))
    image = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(100, 3))
    for net, shape in ((plain, (5, 7, 6)), (behind, (5, 3, 2)), (image, (2, 3, 7, 7))):
        net = randomised(net, 0)
        first = next(layer for layer in net if hasattr(layer, "weight"))
        first.weight.data[:2] = 0.0
        result = pruned(net)
        assert sum(map(operator.sub, *zip(*result.units.values(), strict=True))) == 2
        assert not result.assumes_batches
        agree(net, result.module, normal(1, *shape))


class Named(nn.Module):
    """Two named inputs, and a tensor that the code makes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)

    def forward(self, x: Tensor, shift: Tensor) -> Tensor:
        x *= torch.tensor(2.0)
        result: Tensor = self.last(self.norm(self.first(x))) + shift
        return result


def test_inputs_may_be_several_and_are_left_as_they_are() -> None:
    net = randomised(Named(), 0)
    net.first.weight.data[:2] = 0.0
    rows, sequences, shift = normal(1, 5, 3), normal(1, 5, 4, 3), normal(2, 2)
    before = rows.clone()
    assert pruned(net, (rows, shift)).units == pruned(net, {"shift": shift, "x": rows}).units == {"first": (4, 2)}
    assert torch.equal(rows, before)
    assert pruned(net, (sequences, shift)).stay["first"] == "norm (BatchNorm1d) works along another axis"
    with pytest.raises(ValueError, match=r"Named does not accept these inputs \(inputs\[0\] \(2,\), .* Pass a batch"):
        pruned(net, (shift, rows))
    with pytest.raises(TypeError, match=r"inputs must be a tensor, a tuple of them or a dict by name. Got \[1.0\]"):
        pruned(net, [1.0])  # type: ignore[arg-type]


def test_complex_and_lazy_weights_are_refused() -> None:
    net = nn.Sequential(nn.Linear(3, 4, dtype=torch.complex64), nn.Tanh(), nn.Linear(4, 2, dtype=torch.complex64))
    with pytest.raises(
        ValueError, match=r"pruned: all weights must have a floating dtype. Got torch.complex64 in '0.w"
    ):
        pruned(net)
    lazy = nn.Sequential(nn.LazyLinear(3), nn.ReLU(), nn.LazyLinear(2))
    for function in (pruned, dead_units, unused_inputs):
        with pytest.raises(ValueError, match=r"'0.weight' has no shape yet. Call the lazy model on a batch"):
            function(lazy)


def test_compiled_modules_are_those_that_were_compiled() -> None:
    net = randomised(LeNet(), 0)
    net[0].weight.data[:2] = 0.0
    compiled = torch.compile(net, backend="eager")
    result = pruned(compiled)
    assert result.units == pruned(net).units
    assert result.units["0"] == (6, 4)
    assert type(result.module) is nn.Sequential
    agree(net, result.module, normal(1, 2, 1, 28, 28))
    assert torch.equal(unused_inputs(compiled), unused_inputs(net))


def test_inputs_that_a_view_flattens_are_told() -> None:
    class Flat(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(12, 2)

        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = self.layer(F.dropout(x.view(x.shape[0], -1), 0.2, self.training))
            return result

    net = Flat()
    net.layer.weight.data[:, [0, 7]] = 0.0
    assert unused_inputs(net).nonzero().flatten().tolist() == [0, 7]
    assert net.training
