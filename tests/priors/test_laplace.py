"""The Laplace prior."""

import math

import pytest
import torch
from goldcases import load
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from posterity.numerics.random import Key
from posterity.priors import Laplace

GOLD = load("kl_gaussian_laplace")

numbers = st.floats(-5.0, 5.0)
scales = st.floats(0.05, 20.0)


def column(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_gold_kl_and_its_gradient() -> None:
    mean, scale, own = (part.unsqueeze(-1) for part in GOLD.inputs["grid"].unbind(-1))  # a member for each row
    mean, scale = mean.requires_grad_(), scale.requires_grad_()
    prior = Laplace(own.squeeze(-1))
    kl = prior.kl(mean, scale)
    in_mean, in_scale = torch.autograd.grad(kl.sum(), (mean, scale))
    GOLD.check("kl", kl)
    GOLD.check("dkl_dmu", in_mean.squeeze(-1))
    GOLD.check("dkl_dsigma", in_scale.squeeze(-1))
    expected_absolute = (prior.cross_entropy(mean, scale) - (2.0 * own.squeeze(-1)).log()) * own.squeeze(-1)
    GOLD.check("expected_abs", expected_absolute)


@given(st.lists(numbers, min_size=1, max_size=6), numbers, scales)
@settings(deadline=None, max_examples=40)
def test_log_prob_equals_torch(values: list[float], mean: float, scale: float) -> None:
    theta = column(*values)
    expected = torch.distributions.Laplace(column(mean), column(scale)).log_prob(theta).sum()
    torch.testing.assert_close(Laplace(scale, mean).log_prob(theta), expected, rtol=1e-10, atol=1e-10)


@given(numbers, numbers, scales, scales)
@settings(deadline=None, max_examples=40)
def test_a_shift_of_both_changes_nothing(mean: float, shift: float, scale: float, own: float) -> None:
    shifted = Laplace(own, shift).kl(column(mean + shift), column(scale))
    torch.testing.assert_close(shifted, Laplace(own).kl(column(mean), column(scale)), rtol=1e-9, atol=1e-9)
    assert float(shifted) > 0.0


def test_narrow_posteriors_approach_the_penalty() -> None:
    # theory 002-04: differences of the KL between two means tend to those of the penalty |w| / b.
    prior, scale = Laplace(0.4), column(1e-6)
    difference = prior.kl(column(1.7), scale) - prior.kl(column(-0.3), scale)
    assert float(difference) == pytest.approx((1.7 - 0.3) / 0.4, rel=1e-9)


def test_scale_is_not_the_standard_deviation() -> None:
    draws = Laplace(0.5).sample((100_000,), Key(0), torch.zeros(1).double())
    error = draws.abs().std() / len(draws) ** 0.5
    assert abs(draws.abs().mean() - 0.5) <= 5.0 * error
    torch.testing.assert_close(Laplace(0.5).variance(torch.zeros(1)), torch.tensor([0.5]))


def test_has_no_curvature_even_at_the_kink() -> None:
    theta = torch.tensor([0.0, 1.0, -2.0])
    assert torch.equal(Laplace(0.5).precision(theta), torch.zeros(3))
    assert Laplace(0.5).value_and_grad(theta)[1].tolist() == [0.0, -2.0, 2.0]


def test_a_learnt_scale_keeps_its_graph() -> None:
    scale = torch.tensor(0.7, dtype=torch.float64, requires_grad=True)
    prior, theta = Laplace(scale), column(0.3, -1.0)
    for _ in range(2):
        (grad,) = torch.autograd.grad(prior.log_prob(theta), scale)
        assert float(grad) == pytest.approx(1.3 / 0.7**2 - 2.0 / 0.7, rel=1e-12)


def test_equality_is_by_content() -> None:
    assert Laplace(2) == Laplace(2.0) == Laplace(torch.tensor(2.0))
    assert Laplace(torch.ones(3)) == Laplace(torch.ones(3, dtype=torch.float64))
    assert len({Laplace(torch.ones(3)), Laplace(torch.ones(3)), Laplace(1.0)}) == 2
    assert Laplace(1.0) != Laplace(1.0, 0.5)
    assert Laplace(1.0) != Laplace(1.0 + 1e-12)


@pytest.mark.parametrize(
    ("scale", "mean", "message"),
    [
        (0.0, 0.0, r"Laplace\.scale must be a positive number or a tensor \(M,\).*Got 0\.0"),
        (torch.ones(1, 3), 0.0, r"Laplace\.scale must be a number or \(M,\).*Got tensor\(1, 3\).*Use Layerwise"),
        (1.0, math.nan, r"Laplace\.mean must be a finite number\. Got nan"),
        (1.0, torch.zeros(3), r"Laplace\.mean must be a finite number\. Got tensor\(3,\)"),
    ],
)
def test_refuses_bad_arguments(scale: object, mean: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Laplace(scale, mean)


@pytest.mark.parametrize("shape", [(4,), (2, 4)], ids=str)
def test_refuses_theta_of_other_members(shape: tuple[int, ...]) -> None:
    prior, theta = Laplace(torch.ones(3)), torch.zeros(shape)
    for call in (
        lambda: prior.log_prob(theta),
        lambda: prior.precision(theta),
        lambda: prior.variance(theta),
        lambda: prior.cross_entropy(theta, theta + 1.0),
        lambda: prior.sample(shape, Key(0), theta),
    ):
        with pytest.raises(ValueError, match=r"Laplace: scale is for 3 members, so theta must be \(\.\.\., 3, P\)"):
            call()
