"""Proximal steps of priors: members, step sizes by weight, blocks, and that no other point is better."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode

from posterity.numerics import Key
from posterity.numerics.layout import Layout
from posterity.priors import Cauchy, GroupLasso, Laplace, Layerwise, Normal, Prior, StudentT, Tabulated

LAYOUT = Layout.of({"0.weight": (4, 3, 2, 2), "0.bias": (4,), "2.weight": (2, 4)})
BLOCKS = Layerwise({"0.weight": GroupLasso(1.5, "channels"), "0.bias": Normal(0.5), "2.weight": Laplace(0.4, 0.1)})
KINKED = {
    "laplace": Laplace(0.7),
    "laplace about a mean": Laplace(0.7, 0.3),
    "rows": GroupLasso(1.5),
    "columns": GroupLasso(1.5, "columns"),
    "channels": GroupLasso(1.5, "channels"),
    "blocks": BLOCKS,
}
KINKS = pytest.mark.parametrize("prior", [prior.bound(LAYOUT) for prior in KINKED.values()], ids=[*KINKED])


def normal(seed: int, *shape: int) -> Tensor:
    return Key(seed).normal(shape, torch.float64, "cpu").to(torch.get_default_device())


def kinked_part(prior: Prior, theta: Tensor) -> Tensor:
    """log p of the blocks with kinks."""
    if prior.num_members is None and hasattr(prior, "priors"):
        pieces = zip(prior.priors, torch.split(theta, [part.size for part in LAYOUT], dim=-1), strict=True)
        return torch.stack([p.log_prob(piece) for p, piece in pieces if p.nonsmooth]).sum(0)
    return prior.log_prob(theta)


def cost(prior: Prior, w: Tensor, z: Tensor, step: float | Tensor) -> Tensor:
    return ((w - z).square() / (2.0 * step)).sum(-1) - kinked_part(prior, w)


@KINKS
@pytest.mark.parametrize("by_weight", [False, True])
def test_no_other_point_is_better(prior: Prior, by_weight: bool) -> None:
    z = normal(0, LAYOUT.size)
    step: float | Tensor = 0.3 * normal(1, LAYOUT.size).exp() if by_weight else 0.3
    w = prior.proximal(z, step)
    assert bool((w != z).any())
    best = cost(prior, w, z, step)
    for size in (1e-4, 1e-2, 1.0):
        others = w + size * normal(2, 200, LAYOUT.size)
        sparse = torch.where(normal(3, 200, LAYOUT.size) > 1.5, others, w)  # most weights where they were
        for candidates in (others, sparse):
            assert bool((cost(prior, candidates, z, step) >= best - 1e-12).all())


@KINKS
def test_a_step_for_each_weight_that_is_the_same_for_all_is_one_number(prior: Prior) -> None:
    z = normal(4, 3, LAYOUT.size)
    by_weight = prior.proximal(z, torch.full_like(z, 0.2))
    torch.testing.assert_close(prior.proximal(z, 0.2), by_weight, rtol=1e-10, atol=1e-12)
    column = prior.proximal(z, torch.full((3, 1), 0.2, dtype=torch.float64))
    torch.testing.assert_close(column, by_weight, rtol=1e-10, atol=1e-12)
    assert torch.equal(prior.proximal(z, 0.0), z)


@pytest.mark.parametrize(
    "prior",
    [
        Laplace(torch.tensor([0.2, 0.5, 3.0])),
        GroupLasso(torch.tensor([0.5, 2.0, 9.0]), "columns"),
        Layerwise({"0.weight": GroupLasso(torch.tensor([0.5, 2.0, 9.0])), "*": Normal(1.0)}),
    ],
)
@pytest.mark.parametrize("shape", [(), (3, 1), (3, LAYOUT.size)])
def test_members_are_what_they_are_alone(prior: Prior, shape: tuple[int, ...]) -> None:
    z = normal(5, 3, LAYOUT.size)
    step = 0.3 * normal(6, *shape).exp()
    together = prior.bound(LAYOUT).proximal(z, step)
    for index in range(3):
        alone = prior.member(index).bound(LAYOUT).proximal(z[index], step[index] if shape else step)
        torch.testing.assert_close(together[index], alone, rtol=1e-12, atol=1e-14)
        assert torch.equal(together[index] == 0, alone == 0)


@KINKS
def test_what_is_done_does_not_depend_on_the_numbers(prior: Prior) -> None:
    """Tensors without numbers go through: a CUDA graph can hold the step."""
    with FakeTensorMode():
        theta = torch.empty(3, LAYOUT.size, dtype=torch.float64)
        for step in (torch.empty(()), torch.empty(3, LAYOUT.size, dtype=torch.float64)):
            assert prior.proximal(theta, step).shape == theta.shape


@KINKS
def test_gradients_of_the_smooth_part_are_those_of_blocks_without_kinks(prior: Prior) -> None:
    theta = normal(7, 2, LAYOUT.size)
    value, grad = prior.smooth_value_and_grad(theta)
    whole_value, whole_grad = prior.value_and_grad(theta)
    torch.testing.assert_close(value, whole_value, rtol=1e-13, atol=0.0)
    bias = slice(48, 52)
    smooth = torch.zeros_like(grad)
    if prior.log_prob(theta).shape == (2,) and hasattr(prior, "priors"):
        smooth[:, bias] = whole_grad[:, bias]
    torch.testing.assert_close(grad, smooth, rtol=1e-13, atol=0.0)
    assert prior.nonsmooth


@pytest.mark.parametrize("scale", [1.0, torch.tensor([0.5, 2.0])])
@pytest.mark.parametrize("centre", [0.0, 0.7])
def test_a_table_with_a_kink_is_split_into_a_laplace_and_a_smooth_part(centre: float, scale: float | Tensor) -> None:
    """-log p is 2 |x| + 3 x^2 + 0.5 x for x = (w - centre) / scale."""
    prior = Tabulated.of(lambda x: -2.0 * x.abs() - 3.0 * x.square() - 0.5 * x, width=0.4, kink=True)
    prior = replace(prior, mean=centre, scale=scale)
    theta = normal(9, 2, LAYOUT.size) + centre
    theta[:, :5] = centre
    x = (theta - centre) / torch.as_tensor(scale).reshape(-1, 1)
    value, grad = prior.smooth_value_and_grad(theta)
    torch.testing.assert_close(value, prior.log_prob(theta))
    torch.testing.assert_close(grad * torch.as_tensor(scale).reshape(-1, 1), -6.0 * x - 0.5, rtol=1e-5, atol=1e-6)
    laplace = Laplace(torch.as_tensor(scale, dtype=torch.float64) / 2.0, centre)
    torch.testing.assert_close(prior.proximal(theta, 0.3), laplace.proximal(theta, 0.3), rtol=1e-7, atol=1e-8)
    assert prior.nonsmooth


@pytest.mark.parametrize(
    "prior",
    [
        Normal(0.3),
        StudentT(4.0, 0.5),
        Cauchy(0.2),
        Layerwise.of(Normal(2.0)),
        Tabulated.of(lambda x: -(x**4)),
        Tabulated.of(lambda x: x.abs() - x.square(), kink=True),  # a dip, at which no mode lies
    ],
)
def test_priors_without_kinks_leave_theta_to_the_gradient(prior: Prior) -> None:
    bound, theta = prior.bound(LAYOUT), normal(8, LAYOUT.size)
    assert not bound.nonsmooth
    assert torch.equal(bound.proximal(theta, 0.5), theta)
    assert torch.equal(bound.smooth_value_and_grad(theta)[1], bound.value_and_grad(theta)[1])
