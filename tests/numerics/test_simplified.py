"""Graphs without what is known beforehand compute the same."""

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from posterity.numerics.simplified import simplify

FLOAT64 = torch.float64


def value_and_grad(theta):
    """A log density with shapes, single parts and powers that autograd makes work of."""
    leaf = theta.detach().requires_grad_()
    with torch.enable_grad():
        (part,) = leaf.split([3], -1)
        parts = torch.cat([part.view(4, 3)], 1)
        value = leaf.new_zeros(4) + torch.nn.functional.softplus(parts).sum(-1) - 0.5 * parts.square().sum(-1)
        (grad,) = torch.autograd.grad(value.sum(), leaf)
    return value.detach(), grad


def traced(function, *arguments):
    return make_fx(function, tracing_mode="fake", _allow_non_fake_inputs=True)(*arguments)


def size(graph):
    return sum(node.op == "call_function" for node in graph.graph.nodes)


def test_a_gradient_is_the_same_to_the_bit_with_fewer_operations():
    theta = torch.randn(4, 3, dtype=FLOAT64)
    graph = traced(value_and_grad, theta)
    before = size(graph)
    simplify(graph)
    assert size(graph) < 0.7 * before
    for seed in range(3):
        other = torch.randn(4, 3, dtype=FLOAT64, generator=torch.Generator().manual_seed(seed))
        assert all(map(torch.equal, graph(other), value_and_grad(other)))


@pytest.mark.parametrize(
    "function",
    [
        lambda x: torch.zeros_like(x).add_(1.0) + x,
        lambda x: x + torch.bernoulli(torch.zeros_like(x) + 0.5),
        lambda x: x.expand(2, 3, 3) + torch.zeros(2, 1, 1, dtype=x.dtype),
        lambda x: x.to(torch.float32) + torch.zeros(3, 3),
        lambda x: x + torch.zeros(2, 3, 3, dtype=x.dtype),
        lambda x: x.T * torch.ones_like(x),
        lambda x: torch.add(x, torch.zeros_like(x), alpha=2.0) * torch.ones((), dtype=FLOAT64),
        lambda x: torch.zeros_like(x) + 2.0,
    ],
    ids=["in place", "random", "expanded", "dtype", "larger", "strides", "alpha", "constant"],
)
def test_shapes_dtypes_and_randomness_stay(function):
    x = torch.randn(3, 3, dtype=FLOAT64)
    graph = traced(function, x)
    simplify(graph)
    torch.manual_seed(1)
    found = graph(x)
    torch.manual_seed(1)
    expected = function(x)
    assert torch.equal(found, expected)
    assert (found.dtype, found.stride()) == (expected.dtype, expected.stride())


def test_data_that_a_function_closes_over_are_read_each_time():
    data = torch.ones(3, dtype=FLOAT64)
    graph = traced(lambda x: x * data, torch.ones(3, dtype=FLOAT64))
    simplify(graph)
    data.mul_(3.0)
    assert graph(torch.ones(3, dtype=FLOAT64)).tolist() == [3.0, 3.0, 3.0]


@pytest.mark.parametrize(
    "function",
    [
        torch.zeros_like,
        lambda x: torch.zeros_like(x).detach().view(3, 1),
        lambda x: torch.zeros_like(x).split([1, 2])[1],
        lambda x: x + torch.zeros_like(x),
        lambda x: torch.cat([x]).detach(),
    ],
)
def test_results_are_tensors_of_their_own(function):
    x = torch.ones(3, dtype=FLOAT64)
    graph = traced(function, x)
    simplify(graph)
    graph(x).add_(5.0)
    assert torch.equal(graph(x), function(x))
    assert x.tolist() == [1.0, 1.0, 1.0]


def test_large_results_are_not_kept():
    graph = traced(lambda x: x + torch.ones(300, 300, dtype=x.dtype), torch.ones((), dtype=FLOAT64))
    simplify(graph)
    assert not list(graph.buffers())
