"""Adapters of low rank (LoRA) beside frozen layers: subsets, curvature of both factors, starts of members."""

import logging
import math

import pytest
import torch
from matrixcases import as_matrix
from torch import nn

import posterity as po
from posterity.curvature import CorrectedKronecker, Diagonal, Full, GaussNewton, Kronecker
from posterity.curvature.survey import survey
from posterity.methods import MAP, SGHMC, SWAG, Ensemble, Laplace, LastLayer, MeanField, NaturalGradient
from posterity.model import Batch
from posterity.numerics import Key
from posterity.optim import Adam

FLOAT64 = torch.float64
FIT = {"steps": 12, "batch_size": None, "optimizer": Adam(0.02)}
METHODS = {
    "MAP": MAP(**FIT),
    "Kronecker": Laplace(structure=Kronecker(), tuning=None),
    "corrected": Laplace(structure=CorrectedKronecker(), tuning=None),
    "diagonal": Laplace(structure=Diagonal(), tuning=None),
    "full": Laplace(structure=Full(), tuning=None),
    "last layer": Laplace(subset=LastLayer(), tuning=None),
    "MeanField": MeanField(**FIT),
    "NaturalGradient": NaturalGradient(**FIT),
    "SWAG": SWAG(MAP(**FIT), every=2, rank=2, warmup=2),
    "Ensemble": Ensemble(MAP(**FIT), size=3),
    "SGHMC": SGHMC(draws=3, warmup=3, chains=2),
}


class Adapted(nn.Module):
    """base(x) + B A x, with A random, B zero and a frozen base."""

    def __init__(self, base, rank=2):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.A, self.B = nn.Linear(base.in_features, rank, bias=False), nn.Linear(rank, base.out_features, bias=False)
        nn.init.zeros_(self.B.weight)

    def forward(self, x):
        return self.base(x) + self.B(self.A(x))


def adapted(dtype=FLOAT64):
    net = nn.Sequential(Adapted(nn.Linear(4, 5)), nn.Tanh(), Adapted(nn.Linear(5, 3))).to(dtype)
    with torch.no_grad():
        for name, p in net.named_parameters():
            if not name.endswith("B.weight"):
                p.copy_(0.5 * Key(2).fold(name).normal(tuple(p.shape), dtype))
    return net


def rows(dtype=FLOAT64, count=20, positions=()):
    x = Key(1).normal((count, *positions, 4), dtype)
    return x, x[..., :3].argmax(-1)


def problem(net, num_data=20):
    return po.Joint(net, po.likelihoods.Categorical(), po.priors.Normal(0.7), num_data=num_data)


def trained(joint):
    """Weights with both factors away from zero."""
    return joint.initial() + 0.3 * Key(5).normal((joint.size,), FLOAT64)


def dense_curvature(net, joint, theta, x):
    """J^T (diag p - p p^T) J of all rows, by plain autodiff through the module itself."""

    def outputs(flat):
        return torch.func.functional_call(net, joint.network.layout.unflatten(flat), (x,))

    jacobian, probs = torch.func.jacrev(outputs)(theta), outputs(theta).softmax(-1)
    fisher = torch.diag_embed(probs) - probs.unsqueeze(-1) * probs.unsqueeze(-2)
    return torch.einsum("nka,nkl,nlb->ab", jacobian, fisher, jacobian)


def test_theta_has_the_adapters_alone():
    joint = problem(adapted())
    assert joint.network.layout.names == ("0.A.weight", "0.B.weight", "2.A.weight", "2.B.weight")
    assert (joint.num_weights, joint.num_random, joint.size) == (34, 34, 34)
    assert set(joint.network.frozen) == {"0.base.weight", "0.base.bias", "2.base.weight", "2.base.bias"}
    theta = trained(joint)
    expected = -0.5 * (theta / 0.7).square().sum() - 34 * (math.log(0.7) + 0.5 * math.log(2 * math.pi))
    torch.testing.assert_close(joint.log_prior(theta), expected)


def test_curvature_of_both_factors_is_the_dense_one():
    net = adapted()
    joint, (x, y) = problem(net), rows()
    theta = trained(joint)
    dense = dense_curvature(net, joint, theta, x)
    batch = Batch(x, y)
    torch.testing.assert_close(GaussNewton().matrix(joint, theta, batch, None), dense, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(GaussNewton().diagonal(joint, theta, batch, None), dense.diagonal(), rtol=1e-10, atol=0)
    assert {place.kind for place in survey(joint, x).places} == {"matrix"}


def test_kronecker_factors_of_each_factor():
    """Exact for one row, where the block of each factor is G (x) A; for many rows N times the means of both."""
    net = adapted()
    x, y = rows()
    for count in (1, 20):
        joint = problem(net, count)
        theta = trained(joint)
        q, _ = po.infer(Laplace(structure=Kronecker(), tuning=None), joint, (x[:count], y[:count]), start=theta)
        precision = as_matrix(q.gaussian.precision)
        each = [dense_curvature(net, joint, theta, row) for row in x[:count].unsqueeze(1)]
        for part in joint.network.layout:
            own = slice(part.offset, part.offset + part.size)
            out, width = part.shape
            blocks = torch.stack([m[own, own].reshape(out, width, out, width) for m in each])
            if count == 1:
                expected = blocks[0]
            else:  # a row's block is G (x) A with A = a a^T, whose scale its trace gives
                inner = torch.stack([features(net, joint, theta, part.name, row) for row in x])  # (N, I)
                outer = torch.einsum("nojpj->nop", blocks) / inner.square().sum(-1)[:, None, None]
                gram = torch.einsum("ni,nj->ij", inner, inner) / count
                expected = torch.einsum("op,ij->oipj", outer.sum(0), gram)
            expected = expected.reshape(part.size, part.size) + torch.eye(part.size, dtype=FLOAT64) / 0.7**2
            torch.testing.assert_close(precision[own, own], expected, rtol=1e-9, atol=1e-9)


def features(net, joint, theta, name, row):
    """The input of one factor at one row."""
    layer = dict(net.named_modules())[name.rpartition(".")[0]]
    seen = []
    hook = layer.register_forward_pre_hook(lambda _, given: seen.append(given[0].detach()))
    torch.func.functional_call(net, joint.network.layout.unflatten(theta), (row.unsqueeze(0),))
    hook.remove()
    return seen[0][0]


@pytest.mark.parametrize("name", METHODS)
def test_methods_run_on_adapters(name):
    net = adapted(torch.float32)
    before = {key: value.clone() for key, value in net.state_dict().items()}
    joint, data = problem(net), rows(torch.float32)
    q, _ = po.infer(METHODS[name], joint, data)
    probs = q.predict(data[0]).probs
    assert probs.shape == (20, 3)
    torch.testing.assert_close(probs.sum(-1), torch.ones_like(probs[:, 0]))
    assert all(torch.equal(before[key], value) for key, value in net.state_dict().items())
    assert q.sample(2, Key(0)).shape[-1] == 34


def test_members_begin_at_the_frozen_network(caplog):
    """A of each member is drawn anew, and B stays zero."""
    joint = problem(adapted(torch.float32))
    x, _ = rows(torch.float32)
    starts = torch.stack([joint.fresh(Key(0).fold(index)) for index in range(3)])
    parts = joint.network.layout.unflatten(starts)
    assert not bool(parts["0.B.weight"].any() | parts["2.B.weight"].any())
    assert len({float(a.norm()) for a in parts["0.A.weight"]}) == 3
    torch.testing.assert_close(joint.outputs(starts, x), joint.outputs(joint.initial(), x).expand(3, -1, -1))
    with caplog.at_level(logging.ERROR):
        q, _ = po.infer(METHODS["Ensemble"], joint, rows(torch.float32))
    assert len({float(member.point().norm()) for member in q.posteriors}) == 3


def test_a_model_of_zeros_begins_anew_everywhere():
    net = nn.Linear(3, 2)
    nn.init.zeros_(net.weight)
    assert bool(problem(net).fresh(Key(0))[:6].any())


def test_the_evidence_is_that_of_the_adapters():
    net = adapted()
    joint, data = problem(net), rows()
    q, _ = po.infer(METHODS["full"], joint, data, start=trained(joint))
    theta, matrix = q.point(), as_matrix(q.gaussian.precision)
    likelihood = joint.log_likelihood(theta, Batch(*data))
    scatter = (theta / 0.7).square().sum()
    expected = likelihood - 0.5 * (torch.logdet(matrix) + 2 * 34 * math.log(0.7) + scatter)
    torch.testing.assert_close(q.log_evidence, expected, rtol=1e-10, atol=0.0)


def test_adapters_are_saved_and_loaded(tmp_path):
    joint, data = problem(adapted()), rows()
    q, _ = po.infer(METHODS["Kronecker"], joint, data, start=trained(joint))
    q.save(tmp_path)
    again = po.load(tmp_path, adapted())
    assert torch.equal(again.predict(data[0]).probs, q.predict(data[0]).probs)
