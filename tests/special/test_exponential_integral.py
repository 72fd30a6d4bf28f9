"""The scaled exponential integral and its derivatives."""

import numpy as np
import pytest
import scipy.special
import torch
from torch import Tensor

from posterity.special.functions import scaled_exponential_integral


def grid() -> Tensor:
    """From 1e-12 to 500, and both sides of the border between series and fraction."""
    border = torch.tensor([1.0, 2.9999999, 3.0, 3.0000001], dtype=torch.float64)
    return torch.cat([torch.logspace(-12.0, 2.7, 600, dtype=torch.float64), border])


def derivatives(values: Tensor, order: int, count: int) -> Tensor:
    """The derivative of the given count, by repeated autograd."""
    values = values.clone().requires_grad_()
    result = scaled_exponential_integral(values, order)
    for _ in range(count):
        (result,) = torch.autograd.grad(result.sum(), values, create_graph=True)
    return result.detach()


@pytest.mark.parametrize("order", [1, 2, 3, 5])
def test_equals_scipy(order: int) -> None:
    values = grid()
    expected = scipy.special.expn(order, values.cpu().numpy()) * np.exp(values.cpu().numpy())
    result = scaled_exponential_integral(values, order).cpu().numpy()
    np.testing.assert_allclose(result, expected, rtol=1e-10)


def test_equals_scipy_exp1() -> None:
    values = grid()
    expected = scipy.special.exp1(values.cpu().numpy())
    result = (torch.exp(-values) * scaled_exponential_integral(values)).cpu().numpy()
    np.testing.assert_allclose(result, expected, rtol=1e-10)


def test_first_derivative() -> None:
    values = grid()
    expected = scaled_exponential_integral(values) - 1.0 / values
    torch.testing.assert_close(derivatives(values, 1, 1), expected, rtol=1e-9, atol=1e-13)


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("order", [1, 2, 3])
def test_derivatives_keep_their_digits_far_out(order: int, count: int) -> None:
    # G_n(x) = 1/x - n/x^2 + n (n+1)/x^3 - ..., where G_1 - 1/x would have lost eight digits.
    values = torch.tensor([1e8], dtype=torch.float64)
    leading = (-1.0) ** count * torch.exp(torch.lgamma(torch.tensor(count + 1.0).double())) / values ** (count + 1)
    torch.testing.assert_close(derivatives(values, order, count), leading, rtol=1e-6, atol=0.0)


@pytest.mark.parametrize("order", [1, 2, 3])
def test_derivatives_near_zero_and_at_the_border(order: int) -> None:
    values = torch.tensor([1e-5, 1e-3, 0.3, 0.999, 1.001, 2.999, 3.001, 30.0], dtype=torch.float64)
    step = 1e-4 * values
    ahead, behind = (scaled_exponential_integral(values + sign * step, order) for sign in (1.0, -1.0))
    torch.testing.assert_close(derivatives(values, order, 1), (ahead - behind) / (2.0 * step), rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("order", [2, 3])
def test_derivatives_keep_their_digits_near_zero(order: int) -> None:
    # The form that is right far out, ((n - 1) G_n - n G_(n+1)) / x, would have lost ten digits here.
    values = torch.tensor([1e-10], dtype=torch.float64)
    expected = scaled_exponential_integral(values, order) - scaled_exponential_integral(values, order - 1)
    torch.testing.assert_close(derivatives(values, order, 1), expected, rtol=1e-12, atol=0.0)


def test_ends_of_the_axis() -> None:
    ends = torch.tensor([0.0, torch.inf])
    assert scaled_exponential_integral(ends).tolist() == [torch.inf, 0.0]
    assert scaled_exponential_integral(ends, 2).tolist() == [1.0, 0.0]
    assert scaled_exponential_integral(ends, 3).tolist() == [0.5, 0.0]


def test_float32_is_rounded_once() -> None:
    values = grid().float()
    expected = scaled_exponential_integral(values.double()).float()
    result = scaled_exponential_integral(values)
    assert result.dtype == torch.float32
    assert torch.equal(result, expected)


def test_works_under_torch_func() -> None:
    values = torch.tensor([0.2, 4.0], dtype=torch.float64)
    second = torch.func.vmap(torch.func.grad(torch.func.grad(scaled_exponential_integral)))(values)
    torch.testing.assert_close(second, derivatives(values, 1, 2))
