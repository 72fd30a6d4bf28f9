"""Weights of any number type under penalties, tensors without entries, and sums of terms that have other factors."""

import pytest
import torch
from torch import nn

from posterity.numerics import Key
from posterity.penalties import (
    L1,
    Function,
    GroupLasso,
    SquaredL2,
    Sum,
    factors_of,
    layer_factors,
    param_groups,
    penalty_term,
    prior_of,
    usual_factors,
)
from posterity.priors import Laplace

PENALTIES = {
    "l2_squared": SquaredL2(),
    "l1": L1(),
    "group_rows": GroupLasso("rows"),
    "group_cols": GroupLasso("columns"),
}


def random_layer(inputs, outputs, dtype):
    """A linear layer whose weights are rounded to float16, always the same."""
    layer = nn.Linear(inputs, outputs).to(dtype)
    drawn = Key(3).normal((outputs, inputs), torch.float32, "cpu").half()
    layer.weight.data.copy_(drawn)
    return layer


def test_usual_factors_of_a_sum_are_those_that_its_terms_share():
    net = nn.Linear(9, 9)
    assert usual_factors(net, Sum((L1(), SquaredL2()))) == {"weight": 1.0}
    assert usual_factors(net, Sum((GroupLasso(), GroupLasso("columns")), (1.0, 2.0))) == {"weight": 3.0}
    for mixed, other in (
        (Sum((GroupLasso(), L1())), net),
        (Sum((GroupLasso(), GroupLasso("columns"))), nn.Linear(9, 4)),
    ):
        with pytest.raises(ValueError, match=r"one factor by layer. Got sum of .* for each term"):
            usual_factors(other, mixed)


def test_tensors_without_entries_are_not_penalised():
    with pytest.warns(UserWarning, match="zero-element"):
        net = nn.Sequential(nn.Linear(0, 3), nn.Linear(3, 4), nn.Linear(4, 0))
    for penalty in (L1(), GroupLasso()):
        assert list(layer_factors(net, penalty)) == list(usual_factors(net, penalty)) == ["1.weight"]
    with pytest.raises(ValueError, match="no trained tensor has a fan-in"):
        layer_factors(net[0], L1())


@pytest.mark.parametrize(
    "call",
    [
        lambda net: layer_factors(net, L1()),
        lambda net: usual_factors(net, L1()),
        lambda net: prior_of(net, L1()),
        lambda net: prior_of(net, L1(), {"weight": 1.0}),
        lambda net: param_groups(net, L1(), 10),
        lambda net: penalty_term(net, SquaredL2(), {"weight": 1.0}),
        lambda net: factors_of(Laplace(), net),
    ],
)
def test_complex_weights_are_refused(call):
    with pytest.raises(ValueError, match=r"Linear: all weights must have a floating dtype. Got torch.complex64 in 'we"):
        call(nn.Linear(3, 2, dtype=torch.complex64))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    "penalty", [*PENALTIES.values(), Sum((L1(), SquaredL2())), Function(lambda mu, nu: mu**2)], ids=str
)
def test_half_precision_weights_are_summed_in_float32(penalty, dtype):
    net, twin = random_layer(300, 400, dtype), random_layer(300, 400, torch.float32)
    twin.weight.data.copy_(net.weight.data)
    factors = {"weight": 100.0}  # beyond the largest number of float16
    terms = [penalty_term(each, penalty, factors) for each in (net, twin)]
    assert terms[0].dtype == torch.float32
    assert torch.equal(*terms)
    for term in terms:
        term.backward()
    assert net.weight.grad.dtype == dtype
    assert torch.equal(net.weight.grad, twin.weight.grad.to(dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kind", PENALTIES)
def test_other_weights_are_summed_in_their_own_type(kind, dtype):
    net, penalty = nn.Sequential(random_layer(9, 8, dtype), nn.Tanh(), random_layer(8, 5, dtype)), PENALTIES[kind]
    groups = {
        "l2_squared": lambda weight: weight.square(),
        "l1": lambda weight: weight.abs(),
        "group_rows": lambda weight: torch.linalg.vector_norm(weight, dim=1),
        "group_cols": lambda weight: torch.linalg.vector_norm(weight.T, dim=1),
    }
    weights, factors = (net[0].weight, net[2].weight), layer_factors(net, penalty)
    plain = torch.stack([factor * groups[kind](w).sum() for factor, w in zip(factors.values(), weights, strict=True)])
    found = penalty_term(net, penalty, factors)
    assert found.dtype == dtype
    assert torch.equal(found, plain.sum())
    for mine, its in zip(torch.autograd.grad(found, weights), torch.autograd.grad(plain.sum(), weights), strict=True):
        assert torch.equal(mine, its)
