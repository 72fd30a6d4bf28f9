"""The normal prior."""

import math
import re

import pytest
import torch
from goldcases import load
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from posterity.numerics.layout import Layout
from posterity.numerics.random import Key
from posterity.priors import Normal

GOLD = load("kl_gaussians")

numbers = st.floats(-5.0, 5.0)
scales = st.floats(0.05, 20.0)


def column(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_gold_kl() -> None:
    mean, scale, mean0, scale0 = (GOLD.inputs[name] for name in ("m", "s", "m0", "s0"))
    GOLD.check("kl_total", Normal(scale0.unsqueeze(0), mean0).kl(mean, scale))
    each = Normal(scale0, mean0.unsqueeze(-1))  # five members of one weight
    GOLD.check("kl_per_coordinate", each.kl(mean.unsqueeze(-1), scale.unsqueeze(-1)))


def test_gold_entropy_is_cross_entropy_with_itself() -> None:
    mean, scale = GOLD.inputs["m"], GOLD.inputs["s"]
    GOLD.check("entropy_q_diag", Normal(scale.unsqueeze(0), mean).cross_entropy(mean, scale))


def test_gold_kl_is_cross_entropy_minus_entropy() -> None:
    mean, scale, mean0, scale0 = (GOLD.inputs[name] for name in ("m", "s", "m0", "s0"))
    cross = Normal(scale0.unsqueeze(0), mean0).cross_entropy(mean, scale)
    GOLD.check("kl_total", cross - GOLD.at("entropy_q_diag"))


@given(numbers, scales, numbers, scales)
@settings(deadline=None, max_examples=60)
def test_kl_is_cross_entropy_minus_entropy(mean: float, scale: float, mean0: float, scale0: float) -> None:
    prior = Normal(scale0, mean0)
    entropy = 0.5 * math.log(2.0 * math.pi * math.e) + math.log(scale)
    kl = float(prior.kl(column(mean), column(scale)))
    assert kl == pytest.approx(float(prior.cross_entropy(column(mean), column(scale))) - entropy, rel=1e-9, abs=1e-9)
    assert kl >= 0.0


@given(numbers, scales)
@settings(deadline=None, max_examples=40)
def test_kl_is_zero_at_the_prior(mean: float, scale: float) -> None:
    rounding = 0.0 if torch.get_default_device().type == "cpu" else 1e-30  # a GPU's s / s may miss 1 by one rounding
    assert 0.0 <= float(Normal(scale, mean).kl(column(mean), column(scale))) <= rounding


@pytest.mark.parametrize("shift", [1e-3, 1e-5, 1e-7])
@pytest.mark.parametrize("scale", [0.03, 1.0, 70.0])
def test_kl_is_accurate_near_the_prior(shift: float, scale: float) -> None:
    # KL = e^2 / 4 + e^3 / 12 + ... in e = 2 log(s / s0). What is left of the rounding is of order eps * e.
    exponent = 2.0 * shift
    kl = float(Normal(scale).kl(column(0.0), column(scale * math.exp(shift))))
    assert kl == pytest.approx(exponent**2 / 4.0 + exponent**3 / 12.0, rel=1e-6, abs=4e-16 * exponent)


@given(st.lists(numbers, min_size=1, max_size=6), numbers, scales)
@settings(deadline=None, max_examples=40)
def test_log_prob_equals_torch(values: list[float], mean: float, scale: float) -> None:
    theta = column(*values)
    expected = torch.distributions.Normal(column(mean), column(scale)).log_prob(theta).sum()
    torch.testing.assert_close(Normal(scale, mean).log_prob(theta), expected, rtol=1e-10, atol=1e-10)


@given(st.lists(numbers, min_size=2, max_size=6), scales)
@settings(deadline=None, max_examples=40)
def test_all_forms_of_one_scale_agree(values: list[float], scale: float) -> None:
    theta = column(*values)
    expected = Normal(scale).log_prob(theta)
    size = len(values)
    for prior in (
        Normal(column(scale).squeeze(0)),
        Normal(torch.full((1, size), scale).double(), torch.zeros(1, size)),
        Normal(torch.full((1, size), scale, dtype=torch.float64), torch.zeros(size)),
    ):
        torch.testing.assert_close(prior.log_prob(theta), expected, rtol=1e-6, atol=1e-6)
        assert prior.log_prob(theta).shape == ()
        assert prior.value_and_grad(theta)[0].shape == ()
    members = Normal(torch.full((2,), scale, dtype=torch.float64))
    torch.testing.assert_close(members.log_prob(theta.expand(2, -1)), expected.expand(2))


def test_large_vectors_in_float32() -> None:
    theta = Key(0).normal((478_410,), torch.float32, torch.get_default_device())
    prior = Normal(torch.full((1, len(theta)), 0.3, dtype=torch.float64))
    for candidate in (prior, Normal(0.3)):
        value, grad = candidate.value_and_grad(theta)
        assert float(value) == pytest.approx(float(candidate.log_prob(theta.double())), rel=1e-5)
        torch.testing.assert_close(grad, -theta / 0.09)


def test_casts_are_made_once() -> None:
    prior = Normal(torch.full((1, 4), 0.5, dtype=torch.float64))
    theta = torch.zeros(4)
    first = prior._constants(theta.shape, theta)
    assert prior._constants(theta.shape, theta) is first
    assert prior._constants(theta.shape, theta.double()) is not first


def test_casts_made_under_a_transform_are_not_kept() -> None:
    prior, theta = Normal(torch.full((1, 4), 0.5, dtype=torch.float64)), torch.zeros(4)
    torch.func.grad(prior.log_prob)(theta)
    assert prior._constants(theta.shape, theta).scale.data_ptr() != 0  # what is left of a transform has no storage


def test_a_learnt_scale_keeps_its_graph() -> None:
    scale = torch.tensor(0.7, dtype=torch.float64, requires_grad=True)
    prior, theta = Normal(scale), column(0.3, -1.0)
    prior.value_and_grad(theta)
    for _ in range(2):
        (grad,) = torch.autograd.grad(prior.log_prob(theta), scale)
        assert float(grad) == pytest.approx(1.09 / 0.7**3 - 2.0 / 0.7, rel=1e-12)


def test_equality_is_by_content() -> None:
    assert Normal(2) == Normal(2.0) == Normal(torch.tensor(2.0))
    assert Normal(torch.ones(3)) == Normal(torch.ones(3, dtype=torch.float64))
    assert len({Normal(torch.ones(3)), Normal(torch.ones(3))}) == 1
    assert Normal(torch.ones(3)) != Normal(torch.ones(1, 3))
    assert Normal(1.0) != Normal(1.0, 0.5)
    assert Normal(1.0) != Normal(1.0 + 1e-12)


@pytest.mark.parametrize(
    ("scale", "mean", "message"),
    [
        (0.0, 0.0, r"Normal\.scale must be a positive number .*Got 0\.0"),
        (-1.0, 0.0, r"Got -1\.0"),
        (math.inf, 0.0, "Got inf"),
        (True, 0.0, "Got True"),
        (torch.tensor([1.0, math.nan]), 0.0, r"Got tensor\(2,\) \[1\.0, nan\]"),
        (torch.ones(1, 2, 3), 0.0, r"\(1, P\) or \(M, P\)\. Got tensor\(1, 2, 3\)"),
        (1.0, math.nan, r"Normal\.mean must be a finite number.*Got nan"),
        (1.0, "0", "Got '0'"),
        (1.0, torch.tensor([math.inf]), r"Got tensor\(1,\) \[inf\]"),
        (1.0, torch.ones(1, 1, 1), r"Got tensor\(1, 1, 1\)"),
        (torch.ones(2), torch.zeros(3, 4), "must agree on M and P"),
        (torch.ones(1, 3), torch.zeros(4), "must agree on M and P"),
    ],
)
def test_refuses_bad_arguments(scale: object, mean: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Normal(scale, mean)


@pytest.mark.parametrize("shape", [(4,), (2, 4), (3, 2, 4)], ids=str)
def test_refuses_theta_of_other_members(shape: tuple[int, ...]) -> None:
    prior, theta = Normal(torch.ones(3)), torch.zeros(shape)
    message = f"for 3 members, so theta must be (..., 3, P). Got theta of shape {shape}"
    for call in (
        lambda: prior.log_prob(theta),
        lambda: prior.value_and_grad(theta),
        lambda: prior.precision(theta),
        lambda: prior.variance(theta),
        lambda: prior.kl(theta, theta + 1.0),
        lambda: prior.cross_entropy(theta, theta + 1.0),
        lambda: prior.sample(shape, Key(0), theta),
    ):
        with pytest.raises(ValueError, match=re.escape(message)):
            call()


@pytest.mark.parametrize("prior", [Normal(torch.ones(1, 3)), Normal(1.0, torch.zeros(3)), Normal(torch.ones(2, 3))])
def test_refuses_another_number_of_weights(prior: Normal) -> None:
    with pytest.raises(ValueError, match=r"for 3 weights\. Got tensors of 5"):
        prior.bound(Layout.of({"w": (5,)}))
    with pytest.raises(ValueError, match=r"for 3 weights\. Got theta of shape \(2, 5\)"):
        prior.log_prob(torch.zeros(2, 5))
    assert prior.bound(Layout.of({"w": (3,)})) is prior
