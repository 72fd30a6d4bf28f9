"""Dense derivatives against torch's own."""

import pytest
import torch

from posterity.numerics import Key, autodiff
from posterity.numerics.autodiff import chunk_rows, dense_hessian, row_jacobians


def curved(theta):
    return (theta[:3].prod() + theta.sin().sum() * theta.square().sum()).exp() ** 0.1


def test_hessian_is_the_one_of_autograd(monkeypatch):
    theta = 0.3 * Key(0).normal((6,), torch.float64)
    wanted = torch.autograd.functional.hessian(curved, theta)
    torch.testing.assert_close(dense_hessian(curved, theta), wanted, rtol=1e-12, atol=1e-12)
    assert torch.equal(dense_hessian(curved, theta), dense_hessian(curved, theta).T)
    monkeypatch.setattr(autodiff.chunk_rows, "__defaults__", (1,))  # one row at a time
    assert chunk_rows(100) == 1
    torch.testing.assert_close(dense_hessian(curved, theta), wanted, rtol=1e-12, atol=1e-12)


def test_hessian_of_a_linear_function_is_zero():
    assert torch.equal(dense_hessian(lambda t: 3.0 * t.sum(), torch.ones(4)), torch.zeros(4, 4))


@pytest.mark.parametrize("event", [(), (3,), (2, 3)])
def test_row_jacobians_are_those_of_autograd(event):
    theta = Key(0).normal((4,), torch.float64)
    rows = {"a": Key(1).normal((5, 2), torch.float64), "b": Key(2).normal((5,), torch.float64)}

    def one(weights, row):
        scale = torch.arange(1.0, 1.0 + torch.Size(event).numel(), dtype=torch.float64).reshape(event)
        return scale * (weights[:2] @ row["a"]).tanh() + (weights[2] * row["b"] + weights[3] ** 2).sin()

    outputs, jacobian = row_jacobians(one, theta, rows)
    assert jacobian.shape == (5, torch.Size(event).numel(), 4)
    for n in range(5):
        row = {name: value[n] for name, value in rows.items()}
        torch.testing.assert_close(outputs[n], one(theta, row).reshape(-1), rtol=1e-12, atol=1e-12)
        wanted = torch.autograd.functional.jacobian(lambda t, row=row: one(t, row).reshape(-1), theta)
        torch.testing.assert_close(jacobian[n], wanted, rtol=1e-12, atol=1e-12)


def test_row_jacobians_take_a_tensor_or_a_tuple():
    theta, x = torch.ones(2), torch.arange(6.0).reshape(3, 2)
    _, jacobian = row_jacobians(lambda t, row: t @ row, theta, x)
    assert torch.equal(jacobian[:, 0], x)
    _, jacobian = row_jacobians(lambda t, row: t @ row[0] * row[1], theta, (x, torch.full((3,), 2.0)))
    assert torch.equal(jacobian[:, 0], 2 * x)


def test_chunks_fit_the_budget():
    assert chunk_rows(10, budget=100) == 10
    assert chunk_rows(1000, budget=100) == 1
    assert chunk_rows(0, budget=100) == 100
