"""Variational inference of low rank plus diagonal against exact posteriors, mean-field optima and evidence."""

from itertools import cycle

import pytest
import torch
from drawn import normal
from goldcases import load
from torch import Tensor, nn

import posterity as po
from posterity.evidence import elbo
from posterity.likelihoods import Gaussian as Noise
from posterity.methods import Conjugate, LowRankGaussian, low_rank_gaussian
from posterity.numerics import Key
from posterity.optim import Adam, Cosine
from posterity.posteriors import Gaussian
from posterity.precisions import Diagonal
from posterity.priors import FanIn, Normal

FLOAT64 = torch.float64
SETTINGS = {"batch_size": None, "optimizer": Adam(0.05), "schedule": Cosine(), "initial_scales": FanIn(0.3)}
Problem = tuple[po.Joint, tuple[Tensor, Tensor]]


def linear(columns: int) -> nn.Linear:
    net = nn.Linear(columns, 1, bias=False).to(FLOAT64)
    nn.init.zeros_(net.weight)
    return net


def gold() -> Problem:
    given = load("linear_meanfield_vi").inputs
    prior, noise = Normal(given["alpha"] ** -0.5), Noise(given["beta"] ** -0.5)
    return po.Joint(linear(2), noise, prior, num_data=7), (given["X"], given["y"].unsqueeze(1))


def correlated() -> Problem:
    """Five weights whose inputs all go up and down together, in two ways."""
    ways = normal(Key(1), 30, 2) @ normal(Key(2), 2, 5)
    x = ways + 0.5 * normal(Key(3), 30, 5)
    return po.Joint(linear(5), Noise(0.5), Normal(1.0), num_data=30), (x, x.sum(-1, keepdim=True))


def without_noise(problem: Problem, rank: int, monkeypatch: pytest.MonkeyPatch, steps: int) -> Gaussian:
    """A fit by draws at the corners of a simplex, whose first two moments are exact: all that linear models ask for."""
    joint, rows = problem
    size = joint.num_weights + rank
    ones = torch.cat([torch.ones(size + 1, 1), torch.eye(size + 1, size)], 1).to(FLOAT64)
    corners = torch.linalg.qr(ones)[0][:, 1:] * (size + 1) ** 0.5
    noise = cycle([corner.split((joint.num_weights, rank)) for corner in corners])
    monkeypatch.setattr(low_rank_gaussian, "_noise", lambda *_: next(noise))
    q, _ = po.infer(LowRankGaussian(rank=rank, steps=steps, draws=size + 1, **SETTINGS), joint, rows)
    return q


@pytest.mark.parametrize("rank", [1, 2])
def test_reaches_posterior_and_evidence_of_two_weights(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Any covariance of two weights is diagonal plus rank one."""
    joint, rows = gold()
    exact = po.infer(Conjugate(), joint, rows)[0].gaussian
    q = without_noise((joint, rows), rank, monkeypatch, 400)
    found = elbo(q, rows)
    assert found.standard_error == 0.0
    assert abs(found.elbo - load("linear_meanfield_vi").at("rows.1.log_evidence")) < 1e-6
    torch.testing.assert_close(q.mean, exact.mean, rtol=1e-4, atol=0.0)
    torch.testing.assert_close(q.precision.covariance(), exact.precision.covariance(), rtol=1e-3, atol=1e-6)


def test_the_bound_rises_with_the_rank_from_mean_field_to_the_evidence(monkeypatch: pytest.MonkeyPatch) -> None:
    joint, rows = correlated()
    exact = po.infer(Conjugate(), joint, rows)[0].gaussian
    evidence = float(exact.log_evidence)
    factorised = elbo(Gaussian(joint, exact.mean, Diagonal(exact.precision.diagonal())), rows).elbo
    one, two, all_ = (elbo(without_noise((joint, rows), rank, monkeypatch, 500), rows).elbo for rank in (1, 2, 5))
    assert factorised < one - 0.1
    assert one < two - 0.1
    assert two < evidence
    assert abs(all_ - evidence) < 1e-3


def test_by_draws_it_comes_near() -> None:
    """Nearer to the evidence than the best factorised Gaussian, and the trace says so."""
    joint, rows = gold()
    q, trace = po.infer(LowRankGaussian(rank=1, steps=1000, draws=4, **SETTINGS), joint, rows)
    evidence = load("linear_meanfield_vi").at("rows.1.log_evidence")
    best_factorised = load("linear_meanfield_vi").at("rows.1.elbo_eta")
    found = elbo(q, rows).elbo
    assert evidence > found > evidence - 0.5 * (evidence - best_factorised)
    last = trace["elbo"][-200:] * 7
    assert abs(float(last.mean()) - found) < 5.0 * float(last.std()) / 200**0.5 + 1e-3
    torch.testing.assert_close(trace["elbo"], trace["data_fit"] - trace["kl"])
