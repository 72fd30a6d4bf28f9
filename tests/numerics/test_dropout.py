"""Dropout by masks from outside: every way in which a network calls for it, and torch's generator left alone."""

import pytest
import torch
from drawn import generator_states
from torch import Tensor, nn
from torch.nn import functional as F

from posterity.model import Network
from posterity.model.dropout_sites import dropout_sites
from posterity.numerics import Key
from posterity.numerics.dropout import Dropping, KeyedMasks, Masks, NoMasks, Site


class Fixed(Masks):
    """Every second unit of a row stays; the calls are noted."""

    def __init__(self) -> None:
        self.calls: list[tuple[tuple[int, ...], float]] = []

    def keep(self, index: int, shape: tuple[int, ...], rate: float | Tensor, like: Tensor) -> Tensor:
        assert index == len(self.calls)
        self.calls.append((shape, float(rate)))
        size = torch.Size(shape).numel()
        return (torch.arange(size, device=like.device) % 2).reshape(shape).to(like)


def dropped(function, *args):
    masks, before = Fixed(), generator_states()
    with Dropping(masks):
        outputs = function(*args)
    assert torch.equal(generator_states(), before)
    return outputs, masks.calls


X = torch.arange(1.0, 25.0).reshape(2, 3, 4)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(
    ("function", "shape"),
    [
        (F.dropout, (2, 3, 4)),
        (F.dropout1d, (2, 3, 1)),
        (F.dropout2d, (2, 3, 1)),
        (lambda x, p, training: F.dropout2d(x.unsqueeze(3), p, training).squeeze(3), (2, 3, 1, 1)),
        (lambda x, p, training: F.dropout3d(x[:, :, :, None, None], p, training)[..., 0, 0], (2, 3, 1, 1, 1)),
        (lambda x, p, training: F.dropout1d(x[0], p, training), (3, 1)),
        (lambda x, p, training: F.dropout3d(x.unsqueeze(3), p, training).squeeze(3), (2, 1, 1, 1)),
        (torch.dropout, (2, 3, 4)),
        (torch.feature_dropout, (2, 3, 1)),
        (lambda x, p, training: F.dropout(x.clone(), p, training, True), (2, 3, 4)),
        (lambda x, p, training: torch.dropout_(x.clone(), p, training), (2, 3, 4)),
    ],
)
def test_units_go_and_the_others_are_scaled_whatever_the_mode(function, shape, training):
    outputs, calls = dropped(function, X, 0.25, training)
    assert calls == [(shape, 0.25)]
    size = torch.Size(shape).numel()
    mask = (torch.arange(size) % 2).reshape(shape).float()
    source = X[0] if len(shape) == 2 else X
    while mask.dim() > 3:
        mask = mask.squeeze(-1)
    if shape == (2, 1, 1, 1):  # unbatched: the first axis has the channels
        mask = (torch.arange(2) % 2).float().reshape(2, 1, 1)
    torch.testing.assert_close(outputs, source * mask / 0.75)


def test_in_place_dropout_changes_its_input():
    x = torch.ones(2, 2)
    outputs, _ = dropped(lambda: F.dropout(x, 0.5, False, True))
    assert outputs is x
    assert x.tolist() == [[0.0, 2.0], [0.0, 2.0]]


@pytest.mark.parametrize("function", [F.alpha_dropout, torch.alpha_dropout, F.feature_alpha_dropout])
def test_alpha_dropout_is_that_of_torch(function):
    """By the values that torch's own has for a unit that goes and for one that stays."""
    rate, x = 0.3, torch.full((4000, 1), 0.7)
    torch.manual_seed(0)
    known = function(x, rate, True).unique()
    outputs, _ = dropped(function, x, rate, False)
    torch.testing.assert_close(outputs.unique(), known)
    assert float(outputs[0]) == pytest.approx(float(known[0]))  # the first mask is 0


def attention_by_hand(q, k, v, mask, rate, causal=False):
    scores = q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5
    if causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:]).triu(1).bool(), -torch.inf)
    return (scores.softmax(-1) * mask / (1 - rate)) @ v


@pytest.mark.parametrize("causal", [True, False])
def test_attention_drops_its_weights(causal):
    q, k, v = Key(0).normal((3, 2, 4, 5, 6))
    outputs, calls = dropped(lambda: F.scaled_dot_product_attention(q, k, v, dropout_p=0.5, is_causal=causal))
    mask = (torch.arange(2 * 4 * 5 * 5) % 2).reshape(2, 4, 5, 5).float()
    assert calls == [((2, 4, 5, 5), 0.5)]
    torch.testing.assert_close(outputs, attention_by_hand(q, k, v, mask, 0.5, causal))


def test_attention_by_masks_scale_and_grouped_queries_is_torchs_where_nothing_goes():
    class All(Masks):
        def keep(self, index, shape, rate, like):
            return torch.full(shape, 0.5)  # cancels the division by 1 - 0.5

    q, (k, v) = Key(0).normal((2, 4, 5, 6)), Key(1).normal((2, 2, 2, 5, 6))
    biased, chosen = Key(2).normal((5, 5)), Key(3).uniform((5, 5)) > 0.3
    chosen[:, 0] = True
    for mask in (biased, chosen):
        options = {"attn_mask": mask, "scale": 0.7, "enable_gqa": True}
        with Dropping(All()):
            outputs = F.scaled_dot_product_attention(q, k, v, dropout_p=0.5, **options)
        torch.testing.assert_close(outputs, F.scaled_dot_product_attention(q, k, v, **options))


def test_attention_without_a_rate_is_torchs():
    q, k, v = Key(0).normal((3, 2, 4, 5, 6))
    outputs, calls = dropped(lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True))
    assert calls == []
    assert torch.equal(outputs, F.scaled_dot_product_attention(q, k, v, is_causal=True))


@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("batch_first", [True, False])
def test_multi_head_attention_drops_in_evaluation_mode_too(need_weights, batch_first):
    torch.manual_seed(0)
    layer = nn.MultiheadAttention(8, 2, dropout=0.25, batch_first=batch_first).eval()
    x = Key(0).normal((3, 5, 8) if batch_first else (5, 3, 8))
    (outputs, _), calls = dropped(lambda: layer(x, x, x, need_weights=need_weights))
    assert calls == [((6, 5, 5) if need_weights else (3, 2, 5, 5), 0.25)]
    plain = layer(x, x, x, need_weights=need_weights)[0]
    assert not torch.allclose(outputs, plain)
    with Dropping(NoMasks()):
        torch.testing.assert_close(layer(x, x, x, need_weights=need_weights)[0], plain)


def test_a_transformer_layer_drops_at_its_four_places():
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True).eval()
    with torch.no_grad():
        _, calls = dropped(layer, Key(0).normal((3, 5, 8)))
    assert [shape for shape, _ in calls] == [(3, 2, 5, 5), (3, 5, 8), (3, 5, 16), (3, 5, 8)]


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
@pytest.mark.parametrize("bidirectional", [True, False])
def test_recurrent_layers_drop_between_layers(kind, bidirectional):
    torch.manual_seed(0)
    layer = kind(3, 4, 3, dropout=0.5, batch_first=True, bidirectional=bidirectional).double()
    x = Key(0).normal((2, 5, 3), torch.float64)  # cuDNN may round float32 to TF32
    (outputs, state), calls = dropped(layer, x)
    width = 8 if bidirectional else 4
    assert calls == [((2, 5, width), 0.5)] * 2
    with Dropping(NoMasks()):
        whole = layer(x)
    layer.dropout = 0.0
    torch.testing.assert_close(whole, layer(x))
    options = {"batch_first": True, "bidirectional": bidirectional, "dtype": torch.float64}
    singles = [kind(3 if i == 0 else width, 4, **options) for i in range(3)]
    for index, single in enumerate(singles):
        single.load_state_dict(
            {
                name.replace(f"_l{index}", "_l0"): value
                for name, value in layer.state_dict().items()
                if f"_l{index}" in name
            }
        )
    between = x
    for index, single in enumerate(singles):
        between, _ = single(between)
        if index < 2:
            between = 2.0 * between * (torch.arange(between.numel()) % 2).reshape(between.shape)
    torch.testing.assert_close(outputs, between)
    first = state[0] if isinstance(state, tuple) else state
    assert first.shape == (6 if bidirectional else 3, 2, 4)


def test_packed_sequences_are_refused_where_they_would_be_dropped():
    layer = nn.GRU(3, 4, 2, dropout=0.5)
    packed = nn.utils.rnn.pack_padded_sequence(torch.ones(5, 2, 3), torch.tensor([5, 3], device="cpu"))
    with pytest.raises(ValueError, match="Got a packed sequence"):
        dropped(layer, packed)
    layer.dropout = 0.0
    (outputs, _), calls = dropped(layer, packed)
    assert calls == []
    assert torch.equal(outputs.data, layer(packed)[0].data)


def test_a_rate_of_one_is_refused():
    with pytest.raises(ValueError, match=r"at least 0 and below 1\. Got 1\.0"):
        dropped(nn.Dropout(1.0), X)


def test_masks_have_the_rate_and_a_key():
    site = (Site(0.3, (1, 500), 0),)
    like = torch.zeros(400, 500)
    masks = KeyedMasks(Key(5), site, shared=False).keep(0, (400, 500), 0.3, like)
    assert masks.unique().tolist() == [0.0, 1.0]
    assert float(masks.mean()) == pytest.approx(0.7, abs=5 * (0.21 / masks.numel()) ** 0.5)
    assert torch.equal(masks, KeyedMasks(Key(5), site, shared=False).keep(0, (400, 500), 0.3, like))
    assert not torch.equal(masks, KeyedMasks(Key(6), site, shared=False).keep(0, (400, 500), 0.3, like))
    assert torch.equal(KeyedMasks(Key(5), site, shared=False).keep(0, (400, 500), 0.3, like.double()).float(), masks)
    one = KeyedMasks(Key(5), site, shared=True).keep(0, (400, 500), 0.3, like)
    assert one.shape == (1, 500)


def test_one_mask_for_all_rows_keeps_the_entries_of_a_row_together():
    site = Site(0.5, (2, 30), 0, repeats=2)  # two heads
    keep = KeyedMasks(Key(1), (site,), shared=True).keep(0, (8, 30), 0.5, torch.zeros(8, 30))
    assert keep.shape == (8, 30)
    assert torch.equal(keep, keep[:2].repeat(4, 1))
    assert not torch.equal(keep[0], keep[1])


@pytest.mark.parametrize("temperature", [0.1, 1.0])
def test_relaxed_masks_have_the_gradient_of_their_formula(temperature):
    rate = torch.tensor(0.3, dtype=torch.float64, requires_grad=True)
    like = torch.zeros(1000, dtype=torch.float64)
    site = (Site(0.3, (1000,), None),)
    keep = KeyedMasks(Key(0), site, shared=False, relaxed=temperature).keep(0, (1000,), rate, like)
    hard = KeyedMasks(Key(0), site, shared=False).keep(0, (1000,), rate, like)
    u = Key(0).fold(0).uniform((1000,), torch.float32).double()
    logit = torch.log(u / (1 - u))
    expected = 1 - torch.sigmoid((torch.log(rate / (1 - rate)) - logit) / temperature)
    torch.testing.assert_close(keep, expected)
    assert torch.equal(keep.detach().round(), hard)  # the coin is its limit
    grad = torch.autograd.grad(keep.sum(), rate)[0]
    torch.testing.assert_close(grad, torch.autograd.grad(expected.sum(), rate)[0])
    assert float(grad) < 0  # the higher the rate the less stays


class Awkward(nn.Module):
    """Dropout of rows on the second axis, of a table without rows, and of both in one axis."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.ones(4))
        self.head = nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        table = F.dropout(self.table, 0.1, self.training)
        turned = F.dropout(x.T, 0.2, self.training).T
        flat = F.dropout(x.reshape(-1), 0.3, self.training).reshape(x.shape)
        pairs = F.dropout(x @ x.T, 0.4, self.training)
        return self.head((table * turned + flat) + 0 * pairs.sum())


def test_the_axis_of_the_rows_is_found():
    found = dropout_sites(Network(Awkward()), torch.ones(1, 4))
    assert found.sites == (
        Site(0.1, (4,), None),
        Site(0.2, (4, 1), 1),
        Site(0.3, (4,), 0, repeats=4),
        Site(0.4, (2, 2), None, clear=False),
    )
    assert not found.training
    with pytest.raises(ValueError, match="dropout number 4"):
        KeyedMasks(Key(0), found.sites, shared=True).keep(3, (5, 5), 0.4, torch.zeros(5, 5))


class Conditional(nn.Module):
    """The rate is 0 in evaluation mode, as in many transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(6, 1)
        self.norm = nn.BatchNorm1d(1)

    def forward(self, x: Tensor) -> Tensor:
        mixed = F.scaled_dot_product_attention(x, x, x, dropout_p=0.5 if self.training else 0.0)
        return self.norm(self.head(mixed.mean(1)))


def test_a_rate_that_hangs_on_the_training_mode_is_found():
    network = Network(Conditional())
    x = Key(0).normal((3, 5, 6))
    found = dropout_sites(network, x)
    assert found.training
    assert [site.rate for site in found.sites] == [0.5]
    masks = KeyedMasks(Key(1), found.sites, shared=True)
    before = network.outputs(network.initial, x)
    with network.dropping(masks, training=True):
        inside = network.outputs(network.initial, x)
        assert not network._module.norm.training  # batch norm is as the pass wants it
    assert not torch.allclose(inside, before)
    assert torch.equal(network.outputs(network.initial, x), before)
    assert not network._module.training


class Noisy(nn.Module):
    def __init__(self, always: bool) -> None:
        super().__init__()
        self.head, self.drop, self.always = nn.Linear(2, 1), nn.Dropout(0.1), always

    def forward(self, x: Tensor) -> Tensor:
        if self.always or self.training:
            x = x + torch.randn_like(x)
        return self.head(self.drop(x))


def test_numbers_without_a_key_are_refused_where_they_are_drawn_in_evaluation_mode():
    always, sometimes = (Network(Noisy(always)) for always in (True, False))
    before = generator_states()
    with pytest.raises(ValueError, match="draws random numbers in another way"):
        dropout_sites(always, torch.ones(2, 2))
    found = dropout_sites(sometimes, torch.ones(2, 2))
    assert not found.training
    assert torch.equal(generator_states(), before)


def test_a_pass_with_more_calls_than_the_first_is_refused():
    with pytest.raises(RuntimeError, match="more than the 1 times"):
        KeyedMasks(Key(0), (Site(0.1, (1,), 0),), shared=True).keep(1, (1,), 0.1, torch.zeros(1))


def test_a_pass_that_fails_leaves_the_network_as_it_was():
    network = Network(Conditional())
    found = dropout_sites(network, Key(0).normal((3, 5, 6)))
    before = network.outputs(network.initial, torch.ones(2, 5, 6))
    with pytest.raises(RuntimeError), network.dropping(NoMasks(), training=found.training):
        network.outputs(network.initial, torch.ones(2, 5, 7))
    assert not network._dropping
    assert not any(module.training for module in network._module.modules())
    assert torch.equal(network.outputs(network.initial, torch.ones(2, 5, 6)), before)
