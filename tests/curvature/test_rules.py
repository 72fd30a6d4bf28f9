"""Every rule for a layer, and every way around a layer without one, against dense autodiff of the module."""

import logging
from collections import Counter
from functools import partial

import pytest
import torch
from curvaturecases import FLOAT64, close, made, truth
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import posterity as po
from posterity.curvature import GaussNewton, explicit
from posterity.curvature.curvature import Rows
from posterity.curvature.derivatives import derivatives
from posterity.curvature.survey import survey
from posterity.jacobians import jacobian
from posterity.jacobians.convolution import Convolution
from posterity.model import layouts
from posterity.numerics import Key

ROWS = 5


def normal(*shape: int) -> Tensor:
    return Key(1).normal((ROWS, *shape), FLOAT64)


def tokens(width: int, entries: int = 6) -> Tensor:
    return (Key(2).uniform((ROWS, width)) * entries).long()


class Flow(nn.Module):
    """Named parts, and a function of (parts, *inputs) as the forward pass."""

    def __init__(self, function, **parts) -> None:
        super().__init__()
        self.function = function
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.function(self, *inputs)


def flow(function, **parts):
    return lambda: Flow(function, **{name: part() for name, part in parts.items()})


def sequential(*builders):
    return lambda: nn.Sequential(*[build() for build in builders])


def images(layer, features: int):
    return sequential(layer, nn.Tanh, nn.Flatten, lambda: nn.Linear(features, 2))


def parameter(*shape: int):
    return lambda: nn.Parameter(torch.zeros(shape))


def linear(i: int, o: int, **options):
    return lambda: nn.Linear(i, o, **options)


def tied_weights():
    module = Flow(lambda m, x: m.b(m.a(x).tanh()), a=nn.Linear(3, 3), b=nn.Linear(3, 3))
    module.b.weight = module.a.weight
    return module


def tied_table():
    module = Flow(lambda m, t: m.head(m.table(t).sum(1).tanh()), table=nn.Embedding(6, 3), head=nn.Linear(3, 6))
    module.head.weight = module.table.weight
    return module


def overwritten(m: nn.Module, x: Tensor) -> Tensor:
    hidden = 2.0 * m.a(x)
    out = m.b(hidden)
    hidden.mul_(0.0)
    return out


def later_written(m: nn.Module, x: Tensor) -> Tensor:
    hidden = m.a(x.tanh())
    hidden += x
    return m.b(F.relu(hidden, inplace=True))


def residual(m: nn.Module, x: Tensor) -> Tensor:
    hidden = F.relu(m.norm(m.a(x)), inplace=True)
    hidden = m.again(m.b(hidden))
    hidden += m.shortcut(x)
    return m.head(F.relu(hidden, inplace=True).mean((2, 3)))


def sequence_first(m: nn.Module, x: Tensor) -> Tensor:
    return m.b(m.a(x.transpose(0, 1)).tanh().sum(0))


def flattened(m: nn.Module, x: Tensor) -> Tensor:
    return m.b(m.a(x.flatten(0, 1)).tanh().unflatten(0, (-1, x.shape[1])).sum(1))


def attention(m: nn.Module, x: Tensor) -> Tensor:
    return m.b(m.mix(x, x, x, need_weights=False)[0].mean(1))


def two_by_two(m: nn.Module, x: Tensor) -> Tensor:
    return m.a(x).unflatten(1, (2, 2))


def normed(layer):
    return sequential(linear(3, 4), layer, nn.Tanh, linear(4, 2))


def on_images(layer):
    return images(lambda: nn.Sequential(nn.Conv2d(1, 4, 2), layer()), 36)


# (module, inputs, names without a rule)
CASES = {
    "linear": (sequential(linear(3, 2)), normal(3), ()),
    "linear without bias": (sequential(linear(3, 4, bias=False), nn.Tanh, linear(4, 2, bias=False)), normal(3), ()),
    "linear at positions": (flow(lambda m, x: m.b(m.a(x).tanh()).sum(1), a=linear(3, 4), b=linear(4, 2)),
                            normal(4, 3), ()),
    "linear at a grid": (flow(lambda m, x: m.b(m.a(x).tanh()).sum((1, 2)), a=linear(3, 4), b=linear(4, 2)),
                         normal(2, 3, 3), ()),
    "outputs at positions": (sequential(linear(3, 4), nn.Tanh, linear(4, 2)), normal(4, 3), ()),
    "conv1d": (images(lambda: nn.Conv1d(2, 3, 3, stride=2, padding=1), 12), normal(2, 8), ()),
    "conv1d, dilated": (images(lambda: nn.Conv1d(2, 4, 2, dilation=3, groups=2, bias=False), 20), normal(2, 8), ()),
    "conv2d": (images(lambda: nn.Conv2d(2, 3, (3, 2), stride=(2, 1), padding=(1, 0)), 36), normal(2, 5, 5), ()),
    "conv2d, same": (images(lambda: nn.Conv2d(1, 2, 3, padding="same", dilation=2), 50), normal(1, 5, 5), ()),
    "conv2d, valid": (images(lambda: nn.Conv2d(1, 2, 3, padding="valid"), 18), normal(1, 5, 5), ()),
    "conv2d, same and even": (images(lambda: nn.Conv2d(1, 2, 2, padding="same"), 50), normal(1, 5, 5),
                              ("0.weight", "0.bias")),
    "conv2d, circular": (images(lambda: nn.Conv2d(1, 2, 3, padding=1, padding_mode="circular"), 50),
                         normal(1, 5, 5), ()),
    "conv2d, groups": (images(lambda: nn.Conv2d(4, 6, 3, groups=2, padding=1), 96), normal(4, 4, 4), ()),
    "conv2d, depthwise": (images(lambda: nn.Conv2d(3, 3, 2, groups=3), 27), normal(3, 4, 4), ()),
    "conv2d, 1x1": (images(lambda: nn.Conv2d(3, 2, 1), 32), normal(3, 4, 4), ()),
    "conv2d, 1x1 with stride": (images(lambda: nn.Conv2d(3, 2, 1, stride=(2, 3), bias=False), 8), normal(3, 4, 4), ()),
    "conv2d, 1x1 with padding": (images(lambda: nn.Conv2d(2, 2, 1, padding=1), 72), normal(2, 4, 4), ()),
    "conv2d, no overlap": (images(lambda: nn.Conv2d(1, 2, 2, stride=3), 8), normal(1, 6, 6), ()),
    "conv3d": (images(lambda: nn.Conv3d(1, 2, 2), 16), normal(1, 3, 3, 3), ("0.weight", "0.bias")),
    "transposed": (images(lambda: nn.ConvTranspose2d(1, 2, 2), 50), normal(1, 4, 4), ()),
    "transposed, with stride": (images(lambda: nn.ConvTranspose2d(2, 3, (3, 2), (2, 3), 1, (1, 0), dilation=(1, 2)),
                                       84), normal(2, 2, 3), ()),
    "transposed, one axis": (images(lambda: nn.ConvTranspose1d(2, 3, 3, stride=2, bias=False), 27), normal(2, 4), ()),
    "transposed, groups": (images(lambda: nn.ConvTranspose2d(2, 2, 2, groups=2), 18), normal(2, 2, 2),
                           ("0.weight", "0.bias")),
    "embedding": (flow(lambda m, t: m.b(m.a(t).tanh().sum(1)), a=lambda: nn.Embedding(6, 3), b=linear(3, 2)),
                  tokens(4), ()),
    "embedding, padded": (flow(lambda m, t: m.b(m.a(t).tanh().flatten(1)),
                               a=lambda: nn.Embedding(6, 3, padding_idx=-2), b=linear(12, 2)), tokens(4), ()),
    "embedding of one token": (flow(lambda m, t: m.b(m.a(t[:, 0]).tanh()), a=lambda: nn.Embedding(6, 3),
                                    b=linear(3, 2)), tokens(1), ()),
    "embedding bag": (flow(lambda m, t: m.b(m.a(t)), a=lambda: nn.EmbeddingBag(6, 3), b=linear(3, 2)), tokens(4),
                      ("a.weight",)),
    "batch norm": (normed(lambda: nn.BatchNorm1d(4)), normal(3), ()),
    "batch norm of images": (on_images(lambda: nn.BatchNorm2d(4)), normal(1, 4, 4), ()),
    "batch norm without weights": (normed(lambda: nn.BatchNorm1d(4, affine=False)), normal(3), ()),
    "layer norm": (normed(lambda: nn.LayerNorm(4)), normal(3), ()),
    "layer norm without bias": (normed(lambda: nn.LayerNorm(4, bias=False)), normal(3), ()),
    "layer norm of images": (on_images(lambda: nn.LayerNorm((4, 3, 3))), normal(1, 4, 4), ()),
    "layer norm of axes": (on_images(lambda: nn.LayerNorm((3, 3))), normal(1, 4, 4), ()),
    "group norm": (on_images(lambda: nn.GroupNorm(2, 4)), normal(1, 4, 4), ()),
    "instance norm": (on_images(lambda: nn.InstanceNorm2d(4, affine=True)), normal(1, 4, 4), ()),
    "instance norm, tracked": (on_images(lambda: nn.InstanceNorm2d(4, affine=True, track_running_stats=True)),
                               normal(1, 4, 4), ()),
    "rms norm": (normed(lambda: nn.RMSNorm(4)), normal(3), ()),
    "used twice": (flow(lambda m, x: m.b(m.a(m.a(x).tanh()).tanh()), a=linear(3, 3), b=linear(3, 2)), normal(3), ()),
    "convolution used twice": (flow(lambda m, x: m.b(m.a(m.a(x).tanh()).tanh().flatten(1)),
                                    a=lambda: nn.Conv2d(1, 1, 3, padding=1), b=linear(16, 2)), normal(1, 4, 4), ()),
    "tied, other biases": (tied_weights, normal(3), ()),
    "tied embedding": (tied_table, tokens(4), ()),
    "transposed use": (flow(lambda m, x: F.linear(m.a(x).tanh(), m.a.weight.T), a=linear(3, 4)), normal(3), ()),
    "lstm": (flow(lambda m, x: m.b(m.cell(x)[0][:, -1]), cell=lambda: nn.LSTM(2, 2, batch_first=True),
                  b=linear(2, 2)), normal(3, 2), ()),
    "attention": (flow(attention, mix=lambda: nn.MultiheadAttention(4, 2, batch_first=True), b=linear(4, 2)),
                  normal(3, 4), ()),
    "a scalar": (flow(lambda m, x: m.s * m.a(x).tanh(), s=parameter(), a=linear(3, 2)), normal(3), ("s",)),
    "functional": (flow(lambda m, x: (x @ m.w).tanh() + m.c, w=parameter(3, 2), c=parameter(2)), normal(3), ()),
    "weight norm": (sequential(lambda: nn.utils.parametrizations.weight_norm(nn.Linear(3, 4)), nn.Tanh, linear(4, 2)),
                    normal(3), ("0.parametrizations.weight.original0", "0.parametrizations.weight.original1")),
    "bias used alone": (flow(lambda m, x: m.a(x).tanh() * m.a.bias, a=linear(3, 2)), normal(3), ("a.bias",)),
    "weight as input": (flow(lambda m, x: m.a(x) + m.a(m.w), w=parameter(1, 3), a=linear(3, 2)), normal(3), None),
    "norm of a weight": (flow(lambda m, x: m.a(x) * m.norm(m.w), a=linear(3, 4), w=parameter(1, 4),
                              norm=lambda: nn.LayerNorm(4)), normal(3), ("w", "norm.weight", "norm.bias")),
    "sequence first": (flow(sequence_first, a=linear(2, 3), b=linear(3, 2)), normal(4, 2), ()),
    "as many positions as rows": (flow(sequence_first, a=linear(2, 3), b=linear(3, 2)), normal(2, 2), ()),
    "flattened": (flow(flattened, a=linear(2, 3), b=linear(3, 2)), normal(4, 2), ()),
    "flattened, one position": (flow(flattened, a=linear(2, 3), b=linear(3, 2)), normal(1, 2), ()),
    "in-place relu": (sequential(linear(3, 4), lambda: nn.ReLU(inplace=True), linear(4, 2)), normal(3), ()),
    "in-place sum": (flow(later_written, a=linear(3, 3), b=linear(3, 2)), normal(3), ()),
    "residual block": (
        flow(
            residual,
            a=lambda: nn.Conv2d(2, 3, 3, stride=2, padding=1, bias=False),
            norm=lambda: nn.BatchNorm2d(3),
            b=lambda: nn.Conv2d(3, 3, 3, padding=1, bias=False),
            again=lambda: nn.BatchNorm2d(3),
            shortcut=lambda: nn.Conv2d(2, 3, 1, stride=2, bias=False),
            head=linear(3, 2),
        ),
        normal(2, 5, 5),
        (),
    ),
    "unused": (flow(lambda m, x: m.a(x), a=linear(3, 2), b=linear(3, 2)), normal(3), ()),
    "two inputs": (flow(lambda m, x, t: m.a(x) * m.b(t).mean(1), a=linear(3, 2), b=lambda: nn.Embedding(6, 2)),
                   (normal(3), tokens(4)), ()),
    "no event axis": (flow(lambda m, x: m.b(m.a(x).tanh()).squeeze(-1), a=linear(3, 4), b=linear(4, 1)), normal(3), ()),
    "two event axes": (flow(two_by_two, a=linear(3, 4)), normal(3), ()),
    "outputs of two heads": (flow(lambda m, x: torch.cat([m.a(x), m.b(x)], -1), a=linear(3, 2), b=linear(3, 1)),
                             normal(3), ()),
    "skips": (flow(lambda m, x: m.b(x + m.a(x).tanh()), a=linear(3, 3), b=linear(3, 2)), normal(3), ()),
    "max pooling": (sequential(lambda: nn.Conv2d(1, 2, 3, padding=1), nn.GELU, lambda: nn.MaxPool2d(2),
                               lambda: nn.Conv2d(2, 2, 2), nn.Tanh, nn.Flatten, linear(8, 3)), normal(1, 6, 6), ()),
}  # fmt: skip

every_case = pytest.mark.parametrize("name", CASES)
pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")


@every_case
def test_matrix_and_diagonal_are_those_of_plain_autodiff(name: str) -> None:
    build, inputs, without_rule = CASES[name]
    case = truth(made(build), inputs)
    matrix = GaussNewton().matrix(case.joint, case.theta, case.batch, None)
    close(matrix, case.matrix)
    close(GaussNewton().diagonal(case.joint, case.theta, case.batch, None), case.matrix.diagonal())
    if without_rule is not None:
        assert set(survey(case.joint, inputs).explicit) == set(without_rule)


@every_case
def test_jacobians_are_those_of_plain_autodiff_in_one_chunk_or_many(name: str) -> None:
    build, inputs, _ = CASES[name]
    small = truth(made(build), inputs)
    times = 4  # 20 rows, so that the least chunk of 16 leaves a rest
    many = po.model.batch.map_inputs(lambda tensor: tensor.repeat(times, *[1] * (tensor.dim() - 1)), inputs)
    wanted = small.slopes.reshape(ROWS, -1, small.slopes.shape[-1]).repeat(times, 1, 1)
    for budget in (None, 1):
        found = torch.zeros_like(wanted)
        seen = torch.zeros(times * ROWS)
        for piece in derivatives(small.joint, small.theta, many, budget=budget):
            rows = piece.jacobian.rows()
            width = rows.shape[1]
            first = int(seen[piece.low])
            found[piece.low : piece.low + len(rows), first : first + width] = rows
            seen[piece.low : piece.low + len(rows)] += width
            assert piece.fresh == (first == 0)
            torch.testing.assert_close(piece.outputs, small.outputs.repeat(
                times, *[1] * (small.outputs.dim() - 1))[piece.low : piece.low + len(rows)])  # fmt: skip
            if budget == 1 and not survey(small.joint, many).only_head:  # an output layer needs no backward pass
                assert width == 1
        assert (seen == wanted.shape[1]).all()
        close(found, wanted)


@every_case
def test_all_columns_in_one_batched_pass_as_on_a_gpu(name, monkeypatch, caplog) -> None:
    monkeypatch.setattr(jacobian, "SMALL_PARTS_ON", ())
    monkeypatch.setattr(layouts, "CHANNELS_LAST_ON", ("cpu",))
    explicit._log_once.cache_clear()
    build, inputs, _ = CASES[name]
    case = truth(made(build), inputs)
    close(GaussNewton().matrix(case.joint, case.theta, case.batch, None), case.matrix)
    close(GaussNewton().diagonal(case.joint, case.theta, case.batch, None), case.matrix.diagonal())
    assert "columns go one after the other" not in caplog.text


class Calls(TorchDispatchMode):
    """Counts the operations that run, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.counts[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def test_a_batched_pass_calls_each_operation_once_for_all_columns_and_copies_nothing(monkeypatch) -> None:
    monkeypatch.setattr(jacobian, "SMALL_PARTS_ON", ())
    monkeypatch.setattr(layouts, "CHANNELS_LAST_ON", ("cpu",))
    convolution = partial(nn.Conv2d, 2, 2, 3, padding=1, bias=False)
    norm = partial(nn.BatchNorm2d, 2)
    pool = partial(nn.AdaptiveAvgPool2d, 1)
    layers = (convolution, norm, nn.ReLU) * 2 + (convolution, nn.ReLU, pool, nn.Flatten, linear(2, 4))
    case = truth(made(sequential(*layers)), normal(2, 6, 6))
    rows = Rows(GaussNewton(), case.joint, case.theta, case.batch, None, Key(0))
    assert rows.places  # by a survey, which is not counted
    with Calls() as calls:
        (piece,) = rows.jacobians()
    assert calls.counts["convolution_backward"] == 2
    assert calls.counts["threshold_backward"] == 3
    assert calls.counts["native_batch_norm_backward"] == 0
    assert calls.counts["clone"] == 4  # images and three kernels, with their channels last
    with Calls() as calls:
        for part in piece.jacobian.parts:
            if isinstance(part, Convolution):
                part.outer_gram()
    assert calls.counts["bmm"] == 3
    assert calls.counts["clone"] == 0  # gradients have their channels last, as the images


@every_case
def test_products_are_those_of_the_matrix(name: str) -> None:
    build, inputs, _ = CASES[name]
    case = truth(made(build), inputs)
    vectors = Key(3).normal((2, case.joint.num_weights), FLOAT64)
    rows = Rows(GaussNewton(), case.joint, case.theta, case.batch, None, Key(0))
    if name == "embedding bag":
        with pytest.raises(ValueError, match=r"embedding_bag_backward.*Use the structure Full"):  # no second derivative
            rows.products(vectors)
        return
    close(rows.products(vectors), vectors @ case.matrix)


def test_an_input_that_is_overwritten_later_is_not_read_as_it_is_then() -> None:
    """Autograd refuses it where the layer is random; where it is fixed, nothing is lost."""
    module = made(flow(overwritten, a=linear(3, 4), b=linear(4, 2)))
    joint = po.Joint(module, po.likelihoods.Gaussian(0.7), po.priors.Normal(), ROWS)
    batch = po.model.Batch(normal(3), torch.zeros(ROWS, 2, dtype=FLOAT64))
    with pytest.raises(RuntimeError, match="inplace operation"):
        GaussNewton().matrix(joint, joint.initial(), batch, None)
    head = module.b.weight.detach()
    slopes = torch.einsum("oh,ni->nohi", 2.0 * head, normal(3)).reshape(ROWS * 2, 12) / 0.7
    found = GaussNewton().matrix(joint.with_weights(random="a.weight"), joint.initial(), batch, None)
    close(found, slopes.T @ slopes)


@pytest.mark.parametrize("random", ["2.*", "0.bias", "*weight", ("0.weight", "2.bias")])
def test_tensors_by_pattern_and_by_name(random) -> None:
    case = truth(made(sequential(linear(3, 4), nn.Tanh, linear(4, 2))), normal(3), random=random)
    assert case.matrix.shape[0] < case.joint.num_weights
    close(GaussNewton().matrix(case.joint, case.theta, case.batch, None), case.matrix)
    close(GaussNewton().diagonal(case.joint, case.theta, case.batch, None), case.matrix.diagonal())


@pytest.mark.parametrize("name", ["tied embedding", "lstm", "conv2d, groups", "batch norm", "functional"])
def test_parts_of_every_kind(name: str) -> None:
    build, inputs, _ = CASES[name]
    module = made(build)
    for tensor, _ in module.named_parameters():
        case = truth(module, inputs, random=tensor)
        close(GaussNewton().matrix(case.joint, case.theta, case.batch, None), case.matrix)


@pytest.mark.parametrize("name", ["linear", "tied embedding", "lstm", "conv2d, groups", "batch norm", "unused"])
def test_single_weights(name: str) -> None:
    build, inputs, _ = CASES[name]
    module = made(build)
    size = sum(p.numel() for p in module.parameters())
    for number in range(4):  # index tensors come and go, maybe at the same address
        index = (Key(number).uniform((size,)) < 0.4).nonzero().squeeze(-1)
        case = truth(module, inputs, random=index)
        assert case.matrix.shape[0] == index.numel()
        close(GaussNewton().matrix(case.joint, case.theta, case.batch, None), case.matrix)
        close(GaussNewton().diagonal(case.joint, case.theta, case.batch, None), case.matrix.diagonal())


def test_other_single_weights_of_one_network_are_not_taken_for_the_last_ones() -> None:
    """A survey is kept for a network: it must not be found again by the address of an index that is gone."""
    case = truth(made(CASES["linear"][0]), CASES["linear"][1])
    for number in range(200):
        index = torch.tensor([number % 8])
        joint = po.Joint(case.joint.network, case.joint.likelihood, case.joint.prior, ROWS, random=index)
        found = GaussNewton().diagonal(joint, case.theta, case.batch, None)
        close(found, case.matrix.diagonal()[index])
        del joint, index


@every_case
def test_float32_stays_close(name: str) -> None:
    build, inputs, _ = CASES[name]
    case = truth(made(build), inputs)
    single = po.Joint(made(build).float(), case.joint.likelihood, case.joint.prior, ROWS)
    cast = case.batch.map(lambda t: t.float() if t.is_floating_point() else t)
    matrix = GaussNewton().matrix(single, case.theta.float(), cast, None)
    close(matrix, case.matrix, 1e-4)


def test_layers_without_a_rule_are_named(caplog: pytest.LogCaptureFixture) -> None:
    build, inputs, _ = CASES["a scalar"]
    with caplog.at_level(logging.INFO, logger="posterity"):
        case = truth(made(build), inputs)
        GaussNewton().matrix(case.joint, case.theta, case.batch, None)
    assert "curvature of 's' by whole Jacobians, because it goes through mul" in caplog.text


@pytest.mark.parametrize("order", [lambda x: torch.arange(len(x) - 1, -1, -1), lambda x: x[:, 0].argsort()])
def test_a_layer_that_runs_on_the_rows_in_another_order(order):
    def forward(self, x):
        places = order(x)
        return self.last(torch.tanh(self.first(x[places]))[places.argsort()])

    module = made(lambda: Flow(forward, first=nn.Linear(3, 4), last=nn.Linear(4, 2)))
    joint = po.Joint(module, po.likelihoods.Gaussian(scale=1.0), po.priors.Normal(), num_data=ROWS)
    inputs = normal(3)
    assert set(survey(joint, inputs).explicit) == {"first.weight", "first.bias"}
    got = torch.cat([piece.jacobian.rows() for piece in derivatives(joint, joint.network.initial, inputs)])

    def row_by_row(flat: Tensor) -> Tensor:  # where there is one order only
        return torch.cat([joint.network.outputs(flat, row[None], None) for row in inputs])

    close(got, torch.autograd.functional.jacobian(row_by_row, joint.network.initial))


class PartlyWithoutGradients(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            hidden = self.second(self.first(x).tanh())
        return self.head(hidden.tanh())


def test_what_a_module_runs_without_gradients_has_none() -> None:
    net = made(PartlyWithoutGradients)
    joint = po.Joint(net, po.likelihoods.Gaussian(), po.priors.Normal(), ROWS)
    x = Key(11).normal((ROWS, 3), torch.float64)
    batch = po.model.Batch(x, torch.zeros(ROWS, 2, dtype=torch.float64))
    matrix = GaussNewton().matrix(joint, joint.network.initial, batch, None)
    hidden = 3 * 4 + 4 + 4 * 4 + 4
    assert not matrix[:hidden].any()
    with torch.no_grad():
        features = torch.cat([net.second(net.first(x).tanh()).tanh(), torch.ones(ROWS, 1, dtype=torch.float64)], 1)
    weights = matrix[hidden : hidden + 4, hidden : hidden + 4]
    torch.testing.assert_close(weights, (features.T @ features)[:4, :4], rtol=1e-12, atol=1e-12)
