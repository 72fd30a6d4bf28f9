"""Normal expectations by the trapezoid rule."""

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from posterity.special import quadrature
from posterity.special.quadrature import normal_expectation

# Smooth functions that vary over distances of 1 around zero, however wide the normal.
SMOOTH: dict[str, Callable[[Tensor], Tensor]] = {
    "log(1 + x^2)": lambda x: torch.log1p(x.square()),
    "log sigmoid": F.logsigmoid,
    "sigmoid": torch.sigmoid,
    "spike and slab": lambda x: torch.logaddexp(-0.5 * x.square(), 3.0 - 5e-7 * x.square()),
}


def number(value: float) -> Tensor:
    return torch.tensor(value, dtype=torch.float64)


@given(st.floats(-50.0, 50.0), st.floats(1e-6, 1e4))
@settings(deadline=None, max_examples=60)
def test_moments_are_exact(mean: float, scale: float) -> None:
    first = normal_expectation(lambda x: x, number(mean), number(scale), width=1.0)
    second = normal_expectation(torch.square, number(mean), number(scale))
    assert float(first) == pytest.approx(mean, rel=1e-9, abs=1e-9 * scale)
    assert float(second) == pytest.approx(mean**2 + scale**2, rel=1e-9)


@given(st.sampled_from(sorted(SMOOTH)), st.floats(-20.0, 20.0), st.floats(-3.0, 4.0))
@settings(deadline=None, max_examples=60)
def test_few_nodes_equal_many(name: str, mean: float, log_scale: float) -> None:
    function, scale = SMOOTH[name], number(10.0**log_scale)
    dense = normal_expectation(function, number(mean), scale, points=20_001, width=1.0)
    torch.testing.assert_close(
        normal_expectation(function, number(mean), scale, width=1.0), dense, rtol=1e-9, atol=1e-12
    )


def test_equidistant_nodes_are_enough_for_wide_functions() -> None:
    # E cos(w) = exp(-scale^2 / 2) cos(mean), at the 401 nodes that the notes say suffice.
    mean, scale = torch.tensor([0.3, -2.0, 9.0]).double(), torch.tensor([0.1, 1.0, 3.0]).double()
    expected = torch.exp(-0.5 * scale.square()) * mean.cos()
    torch.testing.assert_close(normal_expectation(torch.cos, mean, scale), expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("mean", [0.0, 1e-9, -0.4, 3.0, 8.9, 50.0])
@pytest.mark.parametrize("scale", [0.1, 1.0, 200.0])
def test_kink_and_singularity_at_zero(mean: float, scale: float) -> None:
    ratio = mean / scale
    absolute = scale * math.sqrt(2.0 / math.pi) * math.exp(-0.5 * ratio**2) + mean * math.erf(ratio / math.sqrt(2.0))
    value = normal_expectation(torch.abs, number(mean), number(scale), width=0.0)
    assert float(value) == pytest.approx(absolute, rel=2e-7)
    if mean == 0.0:  # E log w^2 of a standard normal is -gamma - log 2
        value = normal_expectation(lambda x: x.square().clamp_min(1e-300).log(), number(0.0), number(scale), width=0.0)
        assert float(value) == pytest.approx(-0.5772156649 - math.log(2.0) + 2.0 * math.log(scale), abs=1e-6)


def test_differentiable_to_any_order() -> None:
    mean = torch.tensor([0.3, -2.0], dtype=torch.float64, requires_grad=True)
    scale = torch.tensor([0.7, 1.5], dtype=torch.float64, requires_grad=True)

    def expectation(mean: Tensor, scale: Tensor) -> Tensor:
        return normal_expectation(lambda x: torch.log1p(x.square()), mean, scale, width=1.0)

    assert torch.autograd.gradcheck(expectation, (mean, scale))
    assert torch.autograd.gradgradcheck(expectation, (mean, scale))
    third = torch.autograd.functional.hessian(
        lambda m: torch.autograd.grad(expectation(m, scale).sum(), m, create_graph=True)[0].sum(), mean
    )
    equidistant = torch.autograd.functional.hessian(
        lambda m: normal_expectation(
            lambda x: 2.0 * x / (1.0 + x.square()), m, scale.detach(), points=4001
        ).sum(),  # of the derivative
        mean,
    )
    torch.testing.assert_close(third, equidistant, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("scale", [1e-3, 1e-5, 1e-7])
def test_narrow_normals_keep_their_gradient(scale: float) -> None:
    mean, deviation = number(2.0).requires_grad_(), number(scale).requires_grad_()
    value = normal_expectation(lambda x: torch.log1p(x.square()), mean, deviation, width=1.0)
    in_mean, in_scale = torch.autograd.grad(value, (mean, deviation))
    assert value.item() == pytest.approx(math.log(5.0) - 0.12 * scale**2, rel=1e-9)
    assert in_mean.item() == pytest.approx(0.8, rel=1e-6)
    assert in_scale.item() == pytest.approx(-0.24 * scale, rel=1e-5, abs=1e-8)


def test_a_point_has_the_value_of_the_function() -> None:
    mean = torch.tensor([0.0, -1.5, 1e3], dtype=torch.float64)
    for width in (None, 1.0):
        value = normal_expectation(torch.atan, mean, torch.zeros_like(mean), width=width)
        torch.testing.assert_close(value, mean.atan(), rtol=1e-14, atol=0.0)


def test_pieces_and_broadcasting(monkeypatch: pytest.MonkeyPatch) -> None:
    mean, scale = torch.linspace(-2.0, 2.0, 6).reshape(2, 3), torch.tensor(0.5)
    whole = normal_expectation(torch.sigmoid, mean, scale, width=1.0)
    calls = []
    monkeypatch.setattr(quadrature, "_BUDGET", 900)  # two rows of 401 nodes at a time
    pieces = normal_expectation(lambda x: calls.append(x.shape) or torch.sigmoid(x), mean, scale, width=1.0)
    assert calls == [(2, 401)] * 3
    assert whole.dtype == torch.float32
    assert whole.shape == (2, 3)
    assert torch.equal(pieces, whole)


def test_works_under_torch_func() -> None:
    mean, scale = torch.tensor([0.1, 2.0]).double(), torch.tensor([1.0, 0.3]).double()

    def expectation(m: Tensor, s: Tensor) -> Tensor:
        return normal_expectation(torch.sigmoid, m, s, width=1.0)

    torch.testing.assert_close(torch.func.vmap(expectation)(mean, scale), expectation(mean, scale))
    batched = torch.func.vmap(torch.func.grad(expectation))(mean, scale)
    leaf = mean.clone().requires_grad_()
    torch.testing.assert_close(batched, torch.autograd.grad(expectation(leaf, scale).sum(), leaf)[0])
