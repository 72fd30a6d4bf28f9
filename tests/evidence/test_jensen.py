"""The views of EM: bound, gap, Q function and Fisher's identity."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from posterity.evidence import jensen
from posterity.numerics import Key
from tests.goldcases import load

SEEDS = st.integers(0, 10**6)


def tables(seed: int) -> tuple[Tensor, Tensor]:
    """log p(y, z) (N, K, L) and some q of that shape."""
    log_joint = 3.0 * Key(seed).normal((5, 3, 2), torch.float64)
    q = torch.softmax(Key(seed).fold("q").normal((5, 6), torch.float64), -1).reshape(5, 3, 2)
    return log_joint, q


@given(SEEDS)
@settings(max_examples=50, deadline=None)
def test_the_gap_between_log_likelihood_and_bound_is_the_kl(seed: int) -> None:
    log_joint, q = tables(seed)
    gap = jensen.kl_gap(log_joint, q, 2)
    truth = jensen.log_likelihood(log_joint, 2)
    assert bool((gap >= 0).all())
    torch.testing.assert_close(jensen.jensen_bound(log_joint, q, 2) + gap, truth, rtol=1e-12, atol=1e-12)


@given(SEEDS)
@settings(max_examples=50, deadline=None)
def test_the_posterior_makes_the_bound_tight(seed: int) -> None:
    log_joint, _ = tables(seed)
    q = jensen.posterior(log_joint, 2)
    truth = log_joint.exp().sum((1, 2)).log()
    torch.testing.assert_close(jensen.jensen_bound(log_joint, q, 2), truth, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(q.sum((1, 2)), torch.ones(5, dtype=torch.float64))
    assert float(jensen.kl_gap(log_joint, q, 2).abs().max()) < 1e-12


def test_the_bound_is_the_q_function_and_the_entropy() -> None:
    log_joint, q = tables(3)
    naive = (q * (log_joint - q.log())).sum((1, 2))
    torch.testing.assert_close(jensen.q_function(log_joint, q, 2) + jensen.entropy(q, 2), naive)
    torch.testing.assert_close(jensen.jensen_bound(log_joint, q, 2), naive)


def test_impossible_values_count_nothing_where_q_leaves_them_out() -> None:
    log_joint = torch.tensor([[0.0, -torch.inf]])
    assert float(jensen.jensen_bound(log_joint, torch.tensor([[1.0, 0.0]]))) == 0.0
    assert float(jensen.kl_gap(log_joint, torch.tensor([[1.0, 0.0]]))) == 0.0
    assert float(jensen.jensen_bound(log_joint, torch.tensor([[0.5, 0.5]]))) == -torch.inf


def test_one_q_for_each_point() -> None:
    case = load("em_gmm_1d")
    y = case.inputs["y"].unsqueeze(1)
    pi, means, variances = (torch.as_tensor(case.inputs[name], dtype=torch.float64) for name in ("pi", "mu", "var"))

    def log_joint(values: dict[str, Tensor]) -> Tensor:
        log_weights = torch.stack([pi, 1.0 - pi]).log()
        squares = (y - values["means"]).square() / variances
        return log_weights - 0.5 * (squares + variances.log() + math.log(2.0 * math.pi))

    table = log_joint({"means": means})
    q = jensen.posterior(table)
    case.check("bound_at_posterior", float(jensen.jensen_bound(table, q).sum()))
    case.check("log_lik0", float(jensen.log_likelihood(table).sum()))
    case.check("grad_mu0", jensen.fisher_gradient(log_joint, {"means": means})["means"])


@pytest.mark.parametrize("tight", [True, False])
def test_fishers_identity_holds_at_the_posterior_only(tight: bool) -> None:
    y = Key(0).normal((6, 1), torch.float64)
    values = {"means": torch.tensor([-0.5, 0.7], dtype=torch.float64), "unused": torch.zeros(1)}

    def log_joint(values: dict[str, Tensor]) -> Tensor:
        return -0.5 * (y - values["means"]).square() * torch.tensor([1.0, 3.0])

    leaf = values["means"].clone().requires_grad_()
    (truth,) = torch.autograd.grad(jensen.log_likelihood(log_joint({"means": leaf})).sum(), leaf)
    q = None if tight else torch.full((6, 2), 0.5, dtype=torch.float64)
    found = jensen.fisher_gradient(log_joint, values, q)
    assert torch.allclose(found["means"], truth, rtol=1e-12) == tight
    assert float(found["unused"]) == 0.0
