"""The short way into torch's engine is the long one."""

import torch
from torch import nn

from posterity.model.backward import backward


def test_gradients_are_added_as_by_torch():
    module = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()
    inputs = torch.linspace(-1.0, 1.0, 15, dtype=torch.float64).reshape(5, 3)
    (0.7 * module(inputs).square().sum()).backward()
    wanted = [2.0 * parameter.grad for parameter in module.parameters()]
    backward(module(inputs).square().sum(), 0.7)
    for parameter, grad in zip(module.parameters(), wanted, strict=True):
        torch.testing.assert_close(parameter.grad, grad)


def test_leaves_out_of_reach_keep_their_gradient():
    used, other = (torch.ones(2, requires_grad=True) for _ in range(2))
    other.grad = torch.full((2,), 5.0)
    backward(used.sum(), 3.0)
    assert used.grad.tolist() == [3.0, 3.0]
    assert other.grad.tolist() == [5.0, 5.0]
