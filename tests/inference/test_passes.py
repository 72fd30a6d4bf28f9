"""Passes of a run: bfloat16 under autocast, batches in pieces, compiled modules."""

import dataclasses
import logging

import pytest
import torch
from contracts.cases import classification, inputs, labels
from torch import nn

import posterity as po
from posterity.curvature import Diagonal, Full, Hessian, Kronecker, LowRank
from posterity.errors import BadFolder
from posterity.inference import plan
from posterity.inference.allocations import gradient_bytes
from posterity.methods import (
    HMC,
    MAP,
    SGHMC,
    SWAG,
    Ensemble,
    Laplace,
    LocalReparameterisation,
    MCDropout,
    MeanField,
    NaturalGradient,
)
from posterity.model import Batch
from posterity.model.passes import Passes
from posterity.numerics import Key
from posterity.optim import Adam

FLOAT64 = torch.float64
FIT = {"steps": 6, "batch_size": 12, "optimizer": Adam(0.02)}
METHODS = {
    "MAP": MAP(**FIT),
    "MeanField": MeanField(**FIT),
    "NaturalGradient": NaturalGradient(**FIT),
    "SWAG": SWAG(MAP(**FIT), every=1, rank=2, warmup=2),
    "Ensemble": Ensemble(MAP(**FIT), size=2),
    "SGHMC": SGHMC(draws=3, warmup=3, chains=2, batch_size=12),
    "HMC": HMC(draws=3, warmup=2, chains=1, step_size=0.01),
}


def with_passes(joint, **options):
    return dataclasses.replace(joint, network=joint.network.replace(passes=Passes(**options)))


@pytest.mark.parametrize("members", [None, 2])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("size", [1, 5, 8, 100])
def test_pieces_add_up_to_the_batch(members, weighted, size):
    joint = classification(FLOAT64)
    x, y = labels(FLOAT64)
    batch = Batch(x, y, torch.linspace(0.5, 2.0, len(x), dtype=FLOAT64) if weighted else None)
    theta = (
        joint.initial() if members is None else joint.initial() + 0.1 * Key(1).normal((members, joint.size), FLOAT64)
    )
    for run in ("value_and_grad", "data_value_and_grad"):
        whole, pieces = (getattr(j, run)(theta, batch) for j in (joint, with_passes(joint, micro_batch=size)))
        for a, b in zip(whole[:2], pieces[:2], strict=True):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_pieces_with_missing_targets_add_up_to_the_batch():
    x, y = labels(FLOAT64)
    joint, missing = classification(FLOAT64), y.clone()
    missing[::3] = -100
    batch = joint.check(Batch(x, missing))
    whole, pieces = (j.value_and_grad(joint.initial(), batch) for j in (joint, with_passes(joint, micro_batch=4)))
    for a, b in zip(whole[:2], pieces[:2], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_a_pass_has_no_more_rows_than_a_piece():
    seen = []

    class Watched(nn.Linear):
        def forward(self, x):
            seen.append(len(x))
            return super().forward(x)

    x, y = labels(torch.float32)
    joint = po.Joint(Watched(3, 2), po.likelihoods.Categorical(), po.priors.Normal(1.0), num_data=len(x))
    with_passes(joint, micro_batch=6).value_and_grad(joint.initial(), Batch(x, y))
    assert seen[-4:] == [6, 6, 6, 2]
    assert max(seen) == 6
    data = po.as_data((x, y))
    pieces = gradient_bytes(with_passes(joint, micro_batch=6), data, None)
    assert pieces == gradient_bytes(joint, data, 6) < gradient_bytes(joint, data, None)
    method = dataclasses.replace(METHODS["MeanField"], batch_size=None)
    assert plan(method, joint, (x, y), micro_batch=6).total < plan(method, joint, (x, y)).total


@pytest.mark.parametrize("name", METHODS)
def test_runs_in_pieces_are_the_runs(name, recwarn):
    joint = classification(FLOAT64)
    whole, _ = po.infer(METHODS[name], joint, labels(FLOAT64))
    pieces, _ = po.infer(METHODS[name], joint, labels(FLOAT64), micro_batch=5)
    x = inputs(FLOAT64, 4)
    torch.testing.assert_close(pieces.predict(x).probs, whole.predict(x).probs, rtol=1e-10, atol=1e-12)


def test_rows_that_see_each_other_are_refused():
    class Centred(nn.Linear):
        def forward(self, x):
            return super().forward(x - x.mean(0))

    x, y = labels(torch.float32)
    norm = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    for net in (norm, Centred(3, 2)):
        joint = po.Joint(net, po.likelihoods.Categorical(), po.priors.Normal(1.0), num_data=len(x))
        with pytest.raises(ValueError, match="micro_batch needs outputs of rows that do not depend on each other"):
            po.infer(METHODS["MAP"], joint, (x, y), micro_batch=4)
    norm[1].requires_grad_(False)
    joint = po.Joint(norm, po.likelihoods.Categorical(), po.priors.Normal(1.0), num_data=len(x))
    po.infer(METHODS["MAP"], joint, (x, y), micro_batch=4)


def dtypes_of(net, seen):
    """The net, in whose last layer the dtypes of inputs and outputs are noted."""

    class Watched(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = net

        def forward(self, x):
            y = self.net(x)
            seen.append((x.dtype, y.dtype))
            return y

    return Watched()


@pytest.mark.parametrize("name", [name for name in METHODS if name != "HMC"])
def test_bf16_is_near_float32_and_ends_in_it(name):
    seen = []
    x, y = labels(torch.float32)
    net = dtypes_of(classification(torch.float32).network.module, seen)
    joint = po.Joint(net, po.likelihoods.Categorical(), po.priors.Normal(1.0), num_data=len(x))
    full, exact = po.infer(METHODS[name], joint, (x, y))
    assert all(dtype == (torch.float32, torch.float32) for dtype in seen)
    seen.clear()
    q, trace = po.infer(METHODS[name], joint, (x, y), precision="bf16")
    if name not in ("Ensemble", "SGHMC"):  # products of members are rounded, and their sums with biases are not
        assert (torch.float32, torch.bfloat16) in seen
    assert not torch.equal(trace["loss"], exact["loss"])
    scale = exact["loss"].abs().max()
    assert float((trace["loss"] - exact["loss"]).abs().max() / scale) < 0.01  # 2^-8 is 0.004
    seen.clear()
    probs = q.predict(x).probs
    assert all(dtype == (torch.float32, torch.float32) for dtype in seen)
    torch.testing.assert_close(probs, full.predict(x).probs, rtol=0.0, atol=0.03)
    assert q.sample(2, Key(0)).dtype == torch.float32


class Tokens(nn.Module):
    """Logits of three classes at two positions, by layers of every kind of rule."""

    def __init__(self):
        super().__init__()
        self.table, self.slide = nn.Embedding(5, 4), nn.Conv1d(4, 4, 3, padding=1)
        self.norm, self.head = nn.LayerNorm(4), nn.Linear(4, 3)
        self.offset = nn.Parameter(torch.zeros(4))

    def forward(self, ids):
        x = self.slide(self.table(ids).mT).mT.tanh() + self.offset
        return self.head(self.norm(x)).mT


@pytest.mark.parametrize(
    ("structure", "classes"), [(Full(), 3), (Kronecker(), 3), (Kronecker(), 70), (Diagonal(), 3), (Diagonal(), 70)]
)
def test_laplace_in_bf16_is_near_float32_and_sums_in_it(structure, classes):
    seen = []
    ids = (Key(0).uniform((40, 2)) * 5).long()
    net = made_with(Tokens(), nn.Linear(4, classes))
    joint = po.Joint(dtypes_of(net, seen), po.likelihoods.Categorical(positions=1), po.priors.Normal(1.0), num_data=40)
    method, rows = Laplace(structure=structure, tuning=None), (ids, ids % 3)
    exact, _ = po.infer(method, joint, rows)
    assert all(dtype == (torch.int64, torch.float32) for dtype in seen)
    rough, _ = po.infer(method, joint, rows, precision="bf16")
    assert any(torch.bfloat16 in dtype for dtype in seen)
    data = [q.gaussian.precision.diagonal() - 1.0 for q in (exact, rough)]
    assert data[1].dtype == torch.float64
    assert not torch.equal(*data)
    assert float((data[1] - data[0]).norm() / data[0].norm()) < 0.02  # 2^-8 is 0.004
    torch.testing.assert_close(rough.log_evidence, exact.log_evidence, rtol=0.01, atol=0.0)
    seen.clear()
    rough.predict(ids)
    assert all(dtype == (torch.int64, torch.float32) for dtype in seen)


def made_with(net, head):
    net.head = head
    with torch.no_grad():
        for name, p in net.named_parameters():
            p.copy_(0.5 * Key(2).fold(name).normal(tuple(p.shape)))
    return net


@pytest.mark.parametrize(
    ("method", "option", "reason"),
    [
        (Laplace(Hessian()), {"precision": "bf16"}, "Laplace with these .* not allow bf16: its steps use curvature"),
        (Laplace(structure=LowRank(2)), {"precision": "bf16"}, "not allow bf16: its steps use curvature"),
        (Laplace(), {"micro_batch": 2}, "Laplace with these .* micro_batch: its steps .* cut their batches themselves"),
        (METHODS["HMC"], {"precision": "bf16"}, "HMC .* its steps compare log densities, of which bf16 keeps three"),
        (MAP(), {"precision": "bf16"}, "MAP .* its steps compare log densities"),
        (MeanField(**FIT, estimator=LocalReparameterisation()), {"micro_batch": 2}, "noise for each row"),
        (MCDropout(**FIT), {"micro_batch": 2}, "MCDropout .* draw masks for all rows"),
        (METHODS["MAP"], {"precision": "half"}, "precision must be 'bf16' or None. Got 'half'"),
        (METHODS["MAP"], {"micro_batch": 0}, "micro_batch must be a positive"),
    ],
    ids=str,
)
def test_what_makes_no_sense_is_refused(method, option, reason):
    joint = classification(torch.float32)
    joint = dataclasses.replace(joint, network=nn.Sequential(nn.Dropout(0.1), joint.network.module))
    with pytest.raises(ValueError, match=reason):
        po.infer(method, joint, labels(torch.float32), **option)


def test_bf16_needs_float32_and_a_network():
    with pytest.raises(ValueError, match=r"needs weights of float32\. Got torch.float64"):
        po.infer(METHODS["MAP"], classification(FLOAT64), labels(FLOAT64), precision="bf16")
    density = po.Density(lambda w: -w.square().sum(), {"w": (1,)})
    with pytest.raises(ValueError, match="a Density has none"):
        po.infer(METHODS["MAP"], density, None, precision="bf16")


def test_the_passes_belong_to_the_identity_of_a_run(tmp_path):
    joint, rows = classification(torch.float32), labels(torch.float32)
    options = {"precision": "bf16", "micro_batch": 4}
    q, _ = po.infer(METHODS["MAP"], joint, rows, checkpoint=tmp_path, **options)
    again, _ = po.infer(METHODS["MAP"], joint, rows, checkpoint=tmp_path, **options)
    assert torch.equal(again.point(), q.point())
    with pytest.raises(BadFolder, match="its precision differs: 'bf16', now None"):
        po.infer(METHODS["MAP"], joint, rows, checkpoint=tmp_path, micro_batch=4)
    with pytest.raises(BadFolder, match="its micro_batch differs: 4, now 5"):
        po.infer(METHODS["MAP"], joint, rows, checkpoint=tmp_path, precision="bf16", micro_batch=5)


@pytest.fixture
def compiled_calls():
    """A backend of torch.compile that runs the graph as it is, and the number of rows in each call of it."""
    calls = []

    def backend(graph, _):
        def run(*given):
            calls.append(len(given[-1]) if given[-1].dim() > 1 else None)
            return graph(*given)

        return run

    yield lambda net: torch.compile(net, backend=backend, dynamic=True), calls
    torch.compiler.reset()


@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning")  # torch.compile's own
def test_compiled_modules_run_as_compiled(compiled_calls, caplog):
    compile_, calls = compiled_calls
    plain = classification(torch.float32)
    with caplog.at_level(logging.INFO, "posterity"):
        joint = dataclasses.replace(plain, network=compile_(plain.network.module))
    assert "runs as compiled for one theta at a time" in caplog.text
    rows, x = labels(torch.float32), inputs(torch.float32, 4)
    for name in ("MAP", "MeanField", "SWAG"):
        calls.clear()
        with torch.device(x.device):  # a default device is a mode, but of no harm
            q, _ = po.infer(METHODS[name], joint, rows)
        assert len(calls) >= 5, name  # but for the first step, which is looked at
        expected, _ = po.infer(METHODS[name], plain, rows)
        torch.testing.assert_close(q.point(), expected.point())
        calls.clear()
        torch.testing.assert_close(q.predict(x).probs, expected.predict(x).probs)
        assert calls
    for method in (METHODS["Ensemble"], Laplace(tuning=None), METHODS["HMC"]):
        q, expected = (po.infer(method, j, rows, start=plain.initial())[0] for j in (joint, plain))
        torch.testing.assert_close(q.predict(x).probs, expected.predict(x).probs)
