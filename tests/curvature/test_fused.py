"""Fused and shared weights (attention, recurrent layers, Conv1D, tied heads) against dense autodiff in float64."""

import logging
from functools import partial

import pytest
import torch
from curvaturecases import FLOAT64, Truth, close, made, truth
from torch import Tensor, nn
from torch.nn import functional as F

import posterity as po
from posterity.curvature import CorrectedKronecker, GaussNewton, Kronecker
from posterity.curvature import derivatives as derivatives_file
from posterity.curvature import kronecker as kronecker_file
from posterity.curvature.curvature import Rows
from posterity.curvature.survey import survey
from posterity.likelihoods import Categorical
from posterity.methods import Laplace, LastLayer
from posterity.numerics import Key

ROWS = 5


def normal(*shape: int) -> Tensor:
    return Key(1).normal((ROWS, *shape), FLOAT64)


def tokens(width: int, entries: int = 6) -> Tensor:
    return (Key(2).uniform((ROWS, width)) * entries).long()


class Recurrent(nn.Module):
    """A recurrent layer below a linear one, on sequences (N, T, I)."""

    def __init__(self, kind: type[nn.RNNBase], **options: object) -> None:
        super().__init__()
        self.cell = kind(2, 3, **options)
        width = (getattr(self.cell, "proj_size", 0) or 3) * (1 + self.cell.bidirectional)
        self.head = nn.Linear(width, 2)

    def forward(self, x: Tensor) -> Tensor:
        outputs, state = self.cell(x if self.cell.batch_first else x.transpose(0, 1))
        last = state[0] if isinstance(state, tuple) else state
        return self.head(outputs.mean(1 if self.cell.batch_first else 0)) + last.mean((0, 2)).unsqueeze(-1)


class Cells(nn.Module):
    """A loop of cells."""

    def __init__(self, kind: type[nn.RNNCellBase], **options: object) -> None:
        super().__init__()
        self.cell, self.head = kind(2, 3, **options), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        state = None
        for step in x.unbind(1):
            state = self.cell(step, state)
        return self.head(state[0] if isinstance(state, tuple) else state)


class Attention(nn.Module):
    """Attention of queries to other inputs, or to themselves."""

    def __init__(self, across: bool = False, **options: object) -> None:
        super().__init__()
        self.across, self.mix, self.head = across, nn.MultiheadAttention(4, 2, **options), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.mix.batch_first else x.transpose(0, 1)
        keys, values = (x.tanh()[..., :width] if self.across else x for width in (self.mix.kdim, self.mix.vdim))
        mixed = self.mix(x, keys, values)[0]
        return self.head(mixed.mean(1 if self.mix.batch_first else 0))


class Conv1D(nn.Module):
    """GPT-2's linear layer, with weights (in, out) and its rows flattened."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.zeros(inputs, outputs)), nn.Parameter(torch.zeros(outputs))

    def forward(self, x: Tensor) -> Tensor:
        flat = torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight)
        return flat.view(*x.shape[:-1], -1)


class Causal(nn.Module):
    """A small language model: a causal mask with -inf, fused attention, tied head, logits (N, V, T)."""

    def __init__(self, entries: int = 6, width: int = 4, length: int = 3, tied: bool = True) -> None:
        super().__init__()
        self.table, self.place = nn.Embedding(entries, width), nn.Parameter(torch.zeros(1, length, width))
        self.mix, self.norm = Conv1D(width, 3 * width), nn.LayerNorm(width)
        self.out, self.head = Conv1D(width, width), nn.Linear(width, entries, bias=False)
        if tied:
            self.head.weight = self.table.weight
        self.register_buffer("mask", torch.full((length, length), -torch.inf).triu(1))

    def forward(self, index: Tensor) -> Tensor:
        hidden = self.table(index) + self.place[:, : index.shape[1]]
        query, key, value = self.mix(self.norm(hidden)).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=self.mask)
        hidden = hidden + self.out(mixed.transpose(1, 2).flatten(-2))
        return self.head(hidden).transpose(1, 2)


class Patches(nn.Module):
    """A class token and learnt positions before an encoder layer."""

    def __init__(self, **options: object) -> None:
        super().__init__()
        self.token, self.place = nn.Parameter(torch.zeros(1, 1, 4)), nn.Parameter(torch.zeros(1, 4, 4))
        self.layer = nn.TransformerEncoderLayer(4, 2, 5, batch_first=True, **options)
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        joined = torch.cat([self.token.expand(len(x), -1, -1), x], 1) + self.place
        return self.head(self.layer(joined)[:, 0])


class Sliced(nn.Module):
    """Rows of one tensor as several layers."""

    def __init__(self, rows: int = 7) -> None:
        super().__init__()
        self.w, self.b = nn.Parameter(torch.zeros(rows, 3)), nn.Parameter(torch.zeros(rows))

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.linear(x, self.w[:3], self.b[:3]).tanh()
        return F.linear(hidden, self.w[3:5], self.b[3:5]) + F.linear(x, self.w.narrow(0, 5, 2), self.b[5:7])


def causal(tied: bool) -> nn.Module:
    module = made(Causal, 6, 4, 3, tied)
    module.mask.copy_(torch.full((3, 3), -torch.inf).triu(1))  # `made` draws buffers
    return module


CASES = {
    **{
        f"{kind.__name__} {options}": (partial(made, partial(Recurrent, kind, **options)), normal(4, 2))
        for kind in (nn.LSTM, nn.GRU, nn.RNN)
        for options in (
            {"batch_first": True},
            {},
            {"num_layers": 2, "bidirectional": True, "batch_first": True},
            {"bias": False, "bidirectional": True},
        )
    },
    "relu": (lambda: made(lambda: Recurrent(nn.RNN, nonlinearity="relu")), normal(4, 2)),
    "projected": (lambda: made(lambda: Recurrent(nn.LSTM, proj_size=2, num_layers=2)), normal(4, 2)),
    "dropout between layers": (lambda: made(lambda: Recurrent(nn.GRU, num_layers=2, dropout=0.5)), normal(4, 2)),
    "LSTM cells": (lambda: made(lambda: Cells(nn.LSTMCell)), normal(3, 2)),
    "GRU cells": (lambda: made(lambda: Cells(nn.GRUCell, bias=False)), normal(3, 2)),
    "plain cells": (lambda: made(lambda: Cells(nn.RNNCell)), normal(3, 2)),
    "attention": (lambda: made(lambda: Attention(batch_first=True)), normal(3, 4)),
    "attention, sequence first": (lambda: made(Attention), normal(3, 4)),
    "attention across": (lambda: made(lambda: Attention(across=True, batch_first=True)), normal(3, 4)),
    "attention without biases": (lambda: made(lambda: Attention(across=True, bias=False)), normal(3, 4)),
    "attention to other widths": (
        lambda: made(lambda: Attention(across=True, batch_first=True, kdim=3, vdim=2)),
        normal(3, 4),
    ),
    "Conv1D": (lambda: made(lambda: nn.Sequential(Conv1D(2, 3), nn.Tanh(), Conv1D(3, 2))), normal(4, 2)),
    "rows of a tensor": (lambda: made(Sliced), normal(3)),
    "encoder layer": (lambda: made(Patches), normal(3, 4)),
    "encoder layer, norm first": (lambda: made(lambda: Patches(norm_first=True)), normal(3, 4)),
}  # fmt: skip
every_case = pytest.mark.parametrize("name", CASES)


def problem(name: str, **options) -> Truth:
    build, inputs = CASES[name]
    return truth(build(), inputs, **options)


@every_case
def test_matrix_diagonal_and_products(name: str) -> None:
    case = problem(name)
    assert not survey(case.joint, case.batch.inputs).explicit
    close(GaussNewton().matrix(case.joint, case.theta, case.batch, None), case.matrix)
    close(GaussNewton().diagonal(case.joint, case.theta, case.batch, None), case.matrix.diagonal())


@pytest.mark.parametrize("tied", [True, False])
def test_a_causal_language_model_with_a_tied_head(tied: bool) -> None:
    """Both uses of a tied weight are in its derivatives, and -inf in a buffer does no harm."""
    case = truth(causal(tied), tokens(3), Categorical(positions=1))
    known = survey(case.joint, case.batch.inputs)
    assert not known.explicit
    assert (known.output is None) == tied
    close(GaussNewton().matrix(case.joint, case.theta, case.batch, None), case.matrix)
    close(GaussNewton().diagonal(case.joint, case.theta, case.batch, None), case.matrix.diagonal())


@pytest.mark.parametrize("name", ["attention across", "rows of a tensor", "LSTM {}", "Conv1D"])
def test_single_tensors_and_single_weights(name: str) -> None:
    for tensor, parameter in CASES[name][0]().named_parameters():
        case = problem(name, random=tensor)
        close(GaussNewton().matrix(case.joint, case.theta, case.batch, None), case.matrix)
        assert case.matrix.shape[0] == parameter.numel()
    case = problem(name, random=torch.tensor([0, 3, 8, 13]))
    close(GaussNewton().matrix(case.joint, case.theta, case.batch, None), case.matrix)


def kronecker(case: Truth) -> tuple[dict[str, Tensor], Rows]:
    rows = Rows(GaussNewton(), case.joint, case.theta, case.batch, None, Key(0))
    prior = torch.ones(rows.size, dtype=FLOAT64)
    Kronecker().check_prior(rows.places, prior)
    sums = Kronecker().add({}, rows, 0)
    sums = Kronecker().end(sums, rows, 0, prior)
    Kronecker().precision(sums, rows.places, 1.0, prior).matvec(prior)
    return sums, rows


@pytest.mark.parametrize("name", ["LSTM {}", "GRU {'batch_first': True}", "LSTM cells", "plain cells"])
def test_factors_of_a_recurrent_weight_count_its_steps_as_positions(name: str, monkeypatch) -> None:
    """A is the mean over rows and steps of the hidden states h h^T, and G the sum over rows and steps of g g^T."""
    monkeypatch.setattr(kronecker_file, "SMALL", 0)
    case = problem(name)
    sums, rows = kronecker(case)
    assert not any(key.endswith(("matrix", "diagonal")) for key in sums)
    kept: list[tuple[Tensor, Tensor]] = []
    module = CASES[name][0]()
    cell, suffix = module.cell, "_l0" if isinstance(module.cell, nn.RNNBase) else ""
    recurrent, bias = (getattr(cell, f"{kind}_hh{suffix}") for kind in ("weight", "bias"))

    def step(x: Tensor, states: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        inside = F.linear(x, getattr(cell, f"weight_ih{suffix}"), getattr(cell, f"bias_ih{suffix}"))
        gates = F.linear(states[0], recurrent, bias)
        gates.retain_grad()
        kept.append((states[0], gates))
        if isinstance(cell, (nn.LSTM, nn.LSTMCell)):
            i, f, g, o = (inside + gates).chunk(4, 1)
            memory = f.sigmoid() * states[1] + i.sigmoid() * g.tanh()
            return o.sigmoid() * memory.tanh(), memory
        if isinstance(cell, nn.GRU):
            (r, z, n), (a, b, c) = inside.chunk(3, 1), gates.chunk(3, 1)
            z = (z + b).sigmoid()
            return ((1 - z) * (n + (r + a).sigmoid() * c).tanh() + z * states[0],)
        return ((inside + gates).tanh(),)

    states = tuple(torch.zeros(ROWS, 3, dtype=FLOAT64) for _ in range(2))
    outputs = []
    for x in case.batch.inputs.unbind(1):
        states = step(x, states)
        outputs.append(states[0])
    if suffix:
        result = module.head(torch.stack(outputs).mean(0)) + states[0].mean(1, keepdim=True)
    else:
        result = module.head(states[0])
    close(result.detach(), case.outputs)
    outer, inner = torch.zeros(len(bias), len(bias), dtype=FLOAT64), torch.zeros(4, 4, dtype=FLOAT64)
    for hidden, _ in kept:
        ones = torch.cat([hidden.detach(), torch.ones(ROWS, 1, dtype=FLOAT64)], 1)
        inner += ones.T @ ones / len(kept)
    for column in range(2):
        grads = torch.autograd.grad(result[:, column].sum() / 0.7, [gates for _, gates in kept], retain_graph=True)
        outer += sum(grad.T @ grad for grad in grads)
    (index,) = [i for i, p in enumerate(rows.places) if p.block.names[0].endswith(f"weight_hh{suffix}")]
    close(sums[f"{index}.outer"][0], outer)
    close(sums[f"{index}.inner"][0], inner)


@pytest.mark.parametrize("name", ["attention", "attention across", "Conv1D", "rows of a tensor"])
def test_factors_of_fused_weights_are_exact_for_one_row_at_one_position(name: str) -> None:
    build, inputs = CASES[name]
    single = inputs[:1, :1] if inputs.dim() == 3 else inputs[:1]
    case = truth(build(), single, None if name == "Conv1D" else Categorical())
    sums, rows = kronecker(case)
    for index, place in enumerate(rows.places):
        where = place.block.index
        exact = case.matrix[where][:, where]
        if place.kind == "matrix":
            close(torch.kron(sums[f"{index}.outer"][0], sums[f"{index}.inner"][0]), exact)
    parts = [place for place in rows.places if place.kind == "matrix"]
    assert len(parts) >= 2
    assert sum(place.block.size for place in rows.places) == case.joint.num_weights


def test_each_part_of_a_fused_weight_that_acts_on_other_inputs_has_factors_of_its_own() -> None:
    case = problem("attention across")
    blocks = [p.block for p in survey(case.joint, case.batch.inputs).places if "mix.in_proj_weight" in p.block.names]
    assert [block.rows for block in blocks] == [4, 4, 4]  # queries, keys and values
    case = problem("attention")
    blocks = [p.block for p in survey(case.joint, case.batch.inputs).places if "mix.in_proj_weight" in p.block.names]
    assert [block.rows for block in blocks] == [12]


@every_case
def test_kronecker_knows_every_weight(name: str, monkeypatch, caplog) -> None:
    """No weight of these layers keeps a mere diagonal, but norms and learnt positions."""
    monkeypatch.setattr(kronecker_file, "SMALL", 3)
    kronecker_file.say_diagonal.cache_clear()
    with caplog.at_level(logging.WARNING, logger="posterity"):
        kronecker(problem(name))
    diagonal = [r.message for r in caplog.records if not any(w in r.message for w in ("norm", "token", "place"))]
    assert not diagonal


def test_predictions_of_a_fused_network_are_those_of_its_dense_jacobian(monkeypatch) -> None:
    monkeypatch.setattr(kronecker_file, "SMALL", 0)
    for name in ("attention, sequence first", "GRU {}", "Conv1D", "attention across"):
        case = problem(name)
        data = (case.batch.inputs, case.batch.targets)
        for structure in (Kronecker(), CorrectedKronecker()):
            q, _ = po.infer(Laplace(structure=structure, tuning=None), case.joint, data, progress=False)
            slopes = case.slopes.reshape(ROWS, -1, case.slopes.shape[-1])
            close(q.output_moments(data[0])[1], slopes @ q.gaussian.precision.covariance() @ slopes.mT)


def test_weights_without_a_rule_are_differentiated_by_columns_where_outputs_are_many(monkeypatch) -> None:
    class Looking(nn.Module):
        def __init__(self, refused: bool) -> None:
            super().__init__()
            self.refused, self.scale, self.head = refused, nn.Parameter(torch.zeros(2)), nn.Linear(2, 5)

        def forward(self, x: Tensor) -> Tensor:
            sign = -1.0 if self.refused and bool(x.isnan().any()) else 1.0  # vmap cannot decide it
            return sign * self.head(x * self.scale.exp()).tanh()

    monkeypatch.setattr(derivatives_file, "MANY", 3)
    for refused in (False, True):
        case = truth(made(Looking, refused), normal(2), Categorical())
        assert set(survey(case.joint, case.batch.inputs).explicit) == {"scale"}
        close(GaussNewton().matrix(case.joint, case.theta, case.batch, None), case.matrix)  # 4 columns of 5 outputs


class Packed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.LSTM(2, 3, batch_first=True), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        lengths = torch.full((len(x),), x.shape[1], device="cpu")
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True)
        return self.head(self.cell(packed)[1][0][-1])


def test_packed_sequences_are_refused_with_a_remedy_unless_the_last_layer_is_wanted() -> None:
    joint = po.Joint(made(Packed), po.likelihoods.Gaussian(1.0), po.priors.Normal(1.0), ROWS)
    data = (normal(3, 2), torch.zeros(ROWS, 2, dtype=FLOAT64))
    with pytest.raises(ValueError, match="packed sequence"):
        po.infer(Laplace(tuning=None), joint, data, progress=False)
    q, _ = po.infer(Laplace(tuning=None, subset=LastLayer()), joint, data, progress=False)
    assert q.predict(data[0]).mean.shape == (ROWS, 2)


class Odd(nn.Module):
    """Uses that look like those with rules: a copy of rows, a shift of rows on the second axis, a norm of positions."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.table, self.shift = kind, nn.Parameter(torch.zeros(6, 3)), nn.Parameter(torch.zeros(3))
        self.norm, self.head = nn.BatchNorm1d(3), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "rows by index":
            return self.head(x[:, 0]) + F.linear(x[:, 1], self.table[torch.tensor([4, 1])]).tanh()
        if self.kind == "shift on the second axis":
            return self.head((x.transpose(0, 1) + self.shift).tanh().sum(0))
        if self.kind == "norm of flattened positions":
            return self.head(self.norm(x.flatten(0, 1)).unflatten(0, x.shape[:2]).tanh().sum(1))
        if self.kind == "a number for each row":
            return (self.head(x[:, 0])[:, 0] + self.shift[:1]).tanh()
        return (self.head(x[:, 0]) + self.table[1:2, :2]).tanh()


@pytest.mark.parametrize(
    "kind",
    ["rows by index", "shift on the second axis", "norm of flattened positions", "a number for each row", "a part"],
)
def test_uses_that_look_like_those_with_rules(kind: str) -> None:
    case = truth(made(Odd, kind), normal(4, 3))
    close(GaussNewton().matrix(case.joint, case.theta, case.batch, None), case.matrix)
    close(GaussNewton().diagonal(case.joint, case.theta, case.batch, None), case.matrix.diagonal())


@pytest.mark.parametrize("name", ["attention across", "LSTM {}", "Conv1D", "rows of a tensor", "encoder layer"])
def test_noise_in_layers_leaves_fused_weights_to_be_drawn_once(name: str) -> None:
    """Flipout replaces linear maps that the module itself calls, and no others."""
    build, inputs = CASES[name]
    case = problem(name)
    method = po.methods.MeanField(estimator=po.methods.Flipout(), steps=2, batch_size=None)
    joint = po.Joint(build(), po.likelihoods.Gaussian(0.7), po.priors.Normal(0.8), ROWS)
    q, _ = po.infer(method, joint, (inputs, case.batch.targets), progress=False)
    assert torch.isfinite(q.point()).all()


def test_rows_that_cannot_be_told_are_not_guessed() -> None:
    """Without derivatives at these weights, (N T) and (T N) look alike."""

    class Flat(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(2, 3), nn.Linear(3, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.b(self.a(x.transpose(0, 1).flatten(0, 1)).tanh().unflatten(0, (x.shape[1], -1)).sum(0))

    module = made(Flat)
    with torch.no_grad():
        module.b.weight.zero_()
    case = truth(module, normal(3, 2))
    assert set(survey(case.joint, case.batch.inputs).explicit) == {"a.weight", "a.bias"}
    close(GaussNewton().matrix(case.joint, case.theta, case.batch, None), case.matrix)
    case = truth(made(Flat), normal(3, 2))
    assert survey(case.joint, case.batch.inputs).layouts["a.weight"] == "flat second"
