"""Thresholds against the conditions of the minimum, and against a plain minimiser."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import minimize
from torch import Tensor

from posterity.numerics import Key
from posterity.optim.shrinkage import group_threshold, soft_threshold


def normal(seed: int, *shape: int) -> Tensor:
    return Key(seed).normal(shape, torch.float64, "cpu").to(torch.get_default_device())


def cost(w: Tensor, z: Tensor, a: Tensor) -> Tensor:
    return ((w - z).square() / (2.0 * a)).sum(-1) + torch.linalg.vector_norm(w, dim=-1)


def test_soft_threshold_is_that_of_groups_of_one() -> None:
    z, a = 2.0 * normal(0, 50), normal(1, 50).exp()
    expected = z.sign() * (z.abs() - a).clamp_min(0.0)
    torch.testing.assert_close(soft_threshold(z, a), expected, rtol=0.0, atol=1e-15)
    torch.testing.assert_close(group_threshold(z[:, None], a[:, None])[:, 0], expected, rtol=1e-12, atol=1e-14)
    assert 0 < int((expected == 0).sum()) < 50


def test_soft_threshold_keeps_the_sign_where_it_ends_at_the_kink() -> None:
    assert soft_threshold(torch.tensor([1.0, -1.0, 0.0]), torch.ones(3)).tolist() == [0.0, 0.0, 0.0]


@given(st.integers(0, 10_000), st.integers(1, 40), st.floats(0.0, 3.0), st.floats(0.01, 20.0))
@settings(deadline=None, max_examples=60)
def test_groups_meet_the_conditions_of_the_minimum(seed: int, size: int, spread: float, factor: float) -> None:
    """0 is the minimum where ||z / a|| <= 1; elsewhere (w - z) / a + w / ||w|| = 0."""
    z = normal(seed, 20, size) * (spread * normal(seed + 1, 20, size)).exp()
    a = factor * (spread * normal(seed + 2, 20, size)).exp()
    w = group_threshold(z, a)
    gone = torch.linalg.vector_norm(z / a, dim=-1) <= 1.0
    assert torch.equal(gone, (w == 0).all(-1))
    length = torch.linalg.vector_norm(w, dim=-1, keepdim=True)
    slope = ((w - z) / a + w / length)[~gone]
    # Where w is short against z its length is a difference, and has lost as many digits.
    lost = (torch.linalg.vector_norm(z, dim=-1, keepdim=True) / length)[~gone]
    assert bool((slope.abs() < 1e-10 * (1.0 + lost) * (1.0 + (z / a).abs()[~gone])).all())


@pytest.mark.parametrize("seed", range(5))
def test_groups_are_where_a_plain_minimiser_ends(seed: int) -> None:
    z, a = 3.0 * normal(seed, 4), 0.5 * normal(seed + 50, 4).exp()
    found = minimize(
        lambda w: float(cost(torch.from_numpy(w).to(z), z, a)), z.cpu().numpy(), method="BFGS", options={"gtol": 1e-9}
    )
    np.testing.assert_allclose(group_threshold(z, a).cpu().numpy(), found.x, atol=1e-5)


def test_one_threshold_for_a_group_is_the_closed_form() -> None:
    z = normal(3, 6, 5)
    for a in (0.8, torch.tensor(0.8, dtype=torch.float64), torch.full((6, 1), 0.8, dtype=torch.float64)):
        torch.testing.assert_close(
            group_threshold(z, a), group_threshold(z, torch.full_like(z, 0.8)), rtol=1e-11, atol=1e-13
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_thresholds_and_weights_of_zero_and_large_ratios_stay_finite(dtype: torch.dtype) -> None:
    z = torch.tensor([[0.0, 0.0], [1.0, 0.0], [1.0, 2.0], [1e-20, 1e3], [0.0, 0.0], [1.0, 1.0]], dtype=dtype)
    a = torch.tensor([[1.0, 2.0], [0.0, 0.0], [0.0, 1e6], [1e-25, 1e5], [0.0, 0.0], [1e-8, 1e8]], dtype=dtype)
    w = group_threshold(z, a)
    assert bool(torch.isfinite(w).all())
    assert w[[0, 1, 4]].tolist() == [[0.0, 0.0], [1.0, 0.0], [0.0, 0.0]]
    torch.testing.assert_close(w[2], torch.tensor([1.0, 2e-6], dtype=dtype), rtol=1e-5, atol=0.0)
