"""The expected length of a normal vector."""

import math

import numpy as np
import pytest
import scipy.special
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from posterity.numerics.random import Key
from posterity.special import functions as module
from posterity.special.functions import expected_absolute, expected_norm


def isotropic(length: float, scale: float, size: int) -> float:
    """The closed form for one common scale."""
    ratio = math.exp(math.lgamma(0.5 * (size + 1)) - math.lgamma(0.5 * size))
    return scale * math.sqrt(2.0) * ratio * scipy.special.hyp1f1(-0.5, 0.5 * size, -0.5 * (length / scale) ** 2)


@given(st.integers(2, 40), st.floats(0.0, 20.0), st.floats(-2.0, 1.5))
@settings(deadline=None, max_examples=60)
def test_equals_the_closed_form_of_one_scale(size: int, length: float, log_scale: float) -> None:
    scale = 10.0**log_scale
    mean = torch.full((size,), length / math.sqrt(size), dtype=torch.float64)
    value = expected_norm(mean, torch.full_like(mean, scale))
    # scipy's series loses digits for a far mean, where the length is all but normal
    expected = isotropic(length, scale, size) if length < 10.0 * scale else None
    if expected is None:
        expected = length + (size - 1) * scale**2 / (2.0 * length)
        assert float(value) == pytest.approx(expected, rel=(size * scale / length) ** 2 * scale / length + 1e-8)
    else:
        assert float(value) == pytest.approx(expected, rel=1e-8)


@given(st.lists(st.tuples(st.floats(-3.0, 3.0), st.floats(1e-4, 5.0)), min_size=2, max_size=6), st.floats(0.01, 100.0))
@settings(deadline=None, max_examples=40)
def test_lies_within_its_bounds_and_scales(pairs: list[tuple[float, float]], factor: float) -> None:
    mean, scale = torch.tensor(pairs, dtype=torch.float64).unbind(-1)
    value = expected_norm(mean, scale)
    root = (mean.square() + scale.square()).sum().sqrt()
    assert torch.linalg.vector_norm(mean) - 1e-8 * root <= value <= root * (1.0 + 1e-8)
    assert float(value) >= float(expected_absolute(mean, scale).max()) - 1e-8 * float(root)
    torch.testing.assert_close(expected_norm(factor * mean, factor * scale), factor * value, rtol=1e-12, atol=0.0)


@pytest.mark.parametrize("size", [2, 3, 10])
def test_equals_an_average_over_draws(size: int) -> None:
    mean = Key(0).normal((size,), torch.float64, torch.get_default_device())
    scale = torch.logspace(-1.0, 0.5, size, dtype=torch.float64)
    draws = mean + scale * Key(1).normal((100_000, size), torch.float64, mean.device)
    lengths = torch.linalg.vector_norm(draws, dim=-1)
    assert abs(lengths.mean() - expected_norm(mean, scale)) <= 5.0 * lengths.std() / len(lengths) ** 0.5


def test_one_of_two_scales_far_below_the_other() -> None:
    scale = torch.tensor([[1.0, 1e-9], [1e-9, 1.0]], dtype=torch.float64)
    expected = torch.full((2,), math.sqrt(2.0 / math.pi), dtype=torch.float64)
    torch.testing.assert_close(expected_norm(torch.zeros_like(scale), scale), expected, rtol=1e-8, atol=0.0)


def test_the_integral_for_one_weight_is_the_closed_form() -> None:
    mean = torch.linspace(-3.0, 3.0, 25, dtype=torch.float64).unsqueeze(-1).requires_grad_()
    scale = torch.logspace(-2.0, 1.0, 25, dtype=torch.float64).unsqueeze(-1).requires_grad_()
    integral, closed = module._ExpectedNorm.apply(mean, scale), expected_norm(mean, scale)
    torch.testing.assert_close(integral, closed, rtol=1e-8, atol=0.0)
    torch.testing.assert_close(closed, expected_absolute(mean, scale).squeeze(-1))
    for got, wanted in zip(*(torch.autograd.grad(v.sum(), (mean, scale)) for v in (integral, closed)), strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-7, atol=2e-8)


def test_gradients() -> None:
    mean = Key(2).normal((4, 3), torch.float64, torch.get_default_device()).requires_grad_()
    scale = (0.1 + Key(3).uniform((4, 3), torch.float64, mean.device)).requires_grad_()
    assert torch.autograd.gradcheck(expected_norm, (mean, scale))
    assert torch.autograd.gradgradcheck(expected_norm, (mean, scale))


def test_points_have_their_length() -> None:
    mean = torch.tensor([[0.0, 0.0], [3.0, -4.0]])
    value = expected_norm(mean, torch.zeros_like(mean))
    torch.testing.assert_close(value, torch.tensor([0.0, 5.0]))
    assert value.dtype == torch.float32


def test_pieces_and_leading_axes(monkeypatch: pytest.MonkeyPatch) -> None:
    mean = Key(4).normal((2, 5, 3), torch.float64, torch.get_default_device())
    whole = expected_norm(mean, mean.abs())
    monkeypatch.setattr(module, "_BUDGET", 1)
    assert whole.shape == (2, 5)
    torch.testing.assert_close(expected_norm(mean, mean.abs()), whole, rtol=1e-14, atol=0.0)
    looped = torch.stack([expected_norm(row, row.abs()) for row in mean])
    torch.testing.assert_close(looped, whole, rtol=1e-14, atol=0.0)


def test_works_under_torch_func() -> None:
    mean = Key(5).normal((4, 3), torch.float64, torch.get_default_device())

    def length(row: Tensor) -> Tensor:
        return expected_norm(row, torch.ones_like(row))

    leaf = mean.clone().requires_grad_()
    (expected,) = torch.autograd.grad(length(leaf).sum(), leaf)
    torch.testing.assert_close(torch.func.vmap(torch.func.grad(length))(mean), expected)


def test_many_weights_are_nearly_their_root_mean_square() -> None:
    scale = torch.full((5000,), 0.1, dtype=torch.float64)
    assert float(expected_norm(torch.zeros_like(scale), scale)) == pytest.approx(
        0.1 * np.sqrt(5000.0) * (1.0 - 0.25 / 5000.0), rel=1e-8
    )
