"""The group-lasso prior: groups, normaliser, draws, and the expected length under a normal."""

import math

import pytest
import torch
from goldcases import load
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from posterity.numerics.layout import Layout
from posterity.numerics.random import Key
from posterity.priors import GroupLasso, Laplace, Layerwise

GOLD = load("kl_gaussian_group_lasso")
CONVOLUTION = Layout.of({"weight": (4, 3, 2, 2), "bias": (4,)})


def one_group(size: int) -> Layout:
    return Layout.of({"weight": (1, size)})


def ramp(size: int) -> Tensor:
    return torch.linspace(-1.0, 1.3, size, dtype=torch.float64)


@pytest.mark.parametrize("index", range(len(GOLD.inputs["groups"])))
def test_gold(index: int) -> None:
    group = GOLD.inputs["groups"][index]
    mean, scale, rate = group["mu"], group["s"], group["lam"]
    prior = GroupLasso(rate).bound(one_group(len(mean)))
    log_normaliser = -prior.log_prob(torch.zeros_like(mean))
    GOLD.check(f"groups.{index}.log_Z", log_normaliser)
    GOLD.check(f"groups.{index}.kl", prior.kl(mean, scale))
    GOLD.check(f"groups.{index}.expected_norm", (prior.cross_entropy(mean, scale) - log_normaliser) / rate)
    variance = prior.variance(mean)
    GOLD.check(f"groups.{index}.prior_var_per_coordinate", variance[0])
    assert torch.equal(variance, variance[0].expand_as(variance))


@pytest.mark.parametrize("over", ["rows", "columns", "channels"])
def test_groups_of_a_convolution(over: str) -> None:
    prior, theta = GroupLasso(1.0, over).bound(CONVOLUTION), ramp(CONVOLUTION.size)
    tensors = CONVOLUTION.unflatten(theta)
    weight, bias = tensors["weight"], tensors["bias"]
    axes = {"rows": (1, 2, 3), "columns": (0,), "channels": (0, 2, 3)}[over]
    size = {"rows": 12, "columns": 4, "channels": 16}[over]
    total = weight.square().sum(axes).sqrt().sum() + bias.abs().sum()
    difference = prior.log_prob(theta) - prior.log_prob(torch.zeros_like(theta))
    torch.testing.assert_close(difference, -total, rtol=1e-12, atol=0.0)
    expected = [*[size + 1.0] * 48, *[2.0] * 4]
    assert prior.variance(theta).tolist() == expected


@given(st.integers(1, 5), st.integers(1, 5), st.floats(0.2, 5.0))
@settings(deadline=None, max_examples=30)
def test_columns_are_the_rows_of_the_transpose(rows: int, columns: int, rate: float) -> None:
    theta = ramp(rows * columns)
    transposed = theta.reshape(rows, columns).T.reshape(-1)
    by_rows = GroupLasso(rate).bound(Layout.of({"w": (columns, rows)}))
    for over in ("columns", "channels"):
        prior = GroupLasso(rate, over).bound(Layout.of({"w": (rows, columns)}))
        torch.testing.assert_close(prior.log_prob(theta), by_rows.log_prob(transposed), rtol=1e-12, atol=1e-12)
        precision = prior.precision(theta).reshape(rows, columns).T.reshape(-1)
        torch.testing.assert_close(precision, by_rows.precision(transposed), rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(
            prior.cross_entropy(theta, theta.abs() + 0.1), by_rows.cross_entropy(transposed, transposed.abs() + 0.1)
        )


@pytest.mark.parametrize("over", ["rows", "columns", "channels"])
@pytest.mark.parametrize("shape", [(5,), ()], ids=str)
def test_tensors_of_one_axis_are_laplace(shape: tuple[int, ...], over: str) -> None:
    layout = Layout.of({"bias": shape})
    theta, prior, laplace = ramp(layout.size), GroupLasso(2.5, over).bound(layout), Laplace(1.0 / 2.5)
    for method in ("log_prob", "variance", "precision"):
        torch.testing.assert_close(getattr(prior, method)(theta), getattr(laplace, method)(theta))
    torch.testing.assert_close(prior.kl(theta, theta.abs() + 0.2), laplace.kl(theta, theta.abs() + 0.2))


@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_density_integrates_to_one_over_the_radius(size: int) -> None:
    prior = GroupLasso(1.7).bound(one_group(size))
    grid = torch.linspace(-30.0, 5.0, 4001, dtype=torch.float64)
    radius = grid.exp()
    points = torch.zeros(len(radius), size, dtype=torch.float64)
    points[:, -1] = radius
    area = 2.0 * math.pi ** (0.5 * size) / math.gamma(0.5 * size)
    total = (prior.log_prob(points).exp() * radius**size).sum() * area * (grid[1] - grid[0])
    assert float(total) == pytest.approx(1.0, abs=1e-9)


@pytest.mark.parametrize("over", ["rows", "columns", "channels"])
def test_draws_have_the_variance_and_the_length(over: str) -> None:
    prior = GroupLasso(3.0, over).bound(CONVOLUTION)
    draws = prior.sample((20_000, CONVOLUTION.size), Key(0), torch.zeros(1).double())
    squares = draws.square()
    error = squares.std(0) / len(draws) ** 0.5
    assert ((squares.mean(0) - prior.variance(draws[0])).abs() <= 5.0 * error).all()
    axes = {"rows": (2, 3, 4), "columns": (1,), "channels": (1, 3, 4)}[over]
    size = {"rows": 12, "columns": 4, "channels": 16}[over]
    lengths = draws[:, :48].reshape(-1, 4, 3, 2, 2).square().sum(axes).sqrt().flatten(1)
    for power, moment in ((1, size / 3.0), (2, size * (size + 1) / 9.0)):  # of Gamma(n, 3)
        error = (lengths**power).std(0) / len(draws) ** 0.5
        assert (((lengths**power).mean(0) - moment).abs() <= 5.0 * error).all()
    pairs = (draws[:, 0] * draws[:, 12]).mean(), (draws[:, 0] * draws[:, 12]).std() / len(draws) ** 0.5
    assert abs(pairs[0]) <= 5.0 * pairs[1]  # a uniform direction has no preferred sign


def test_is_a_penalty_by_tensor_inside_layerwise() -> None:
    layout = Layout.of({"a.weight": (2, 3), "a.bias": (2,), "b.weight": (1, 2)})
    prior = Layerwise({"a.weight": GroupLasso(2.0, "columns"), "b.weight": GroupLasso(4.0), "*": Laplace(0.5)}).bound(
        layout
    )
    theta = ramp(layout.size)
    tensors = layout.unflatten(theta)
    penalty = (
        2.0 * tensors["a.weight"].square().sum(0).sqrt().sum()
        + 4.0 * tensors["b.weight"].square().sum(1).sqrt().sum()
        + tensors["a.bias"].abs().sum() / 0.5
    )
    difference = prior.log_prob(torch.zeros_like(theta)) - prior.log_prob(theta)
    torch.testing.assert_close(difference, penalty, rtol=1e-12, atol=0.0)


def test_a_group_of_zeros() -> None:
    prior = GroupLasso(2.0).bound(Layout.of({"w": (2, 2)}))
    theta = torch.tensor([0.0, 0.0, 3.0, 4.0])
    value, grad = prior.value_and_grad(theta)
    assert torch.isfinite(value)
    torch.testing.assert_close(grad, torch.tensor([0.0, 0.0, -1.2, -1.6]))
    precision = prior.precision(theta)
    assert precision[:2].tolist() == [math.inf, math.inf]
    torch.testing.assert_close(precision[2:], 2.0 * torch.tensor([16.0, 9.0]) / 125.0)


def test_must_be_bound() -> None:
    for call in (
        lambda: GroupLasso().log_prob(torch.zeros(2)),
        lambda: GroupLasso().sample((2,), Key(0), torch.zeros(2)),
        lambda: GroupLasso().cross_entropy(torch.zeros(2), torch.ones(2)),
    ):
        with pytest.raises(RuntimeError, match=r"GroupLasso must know the shapes.*bound\(layout\)"):
            call()


def test_equality_is_by_content() -> None:
    assert GroupLasso(2) == GroupLasso(torch.tensor(2.0))
    assert GroupLasso(torch.ones(3)) == GroupLasso(torch.ones(3).double())
    assert len({GroupLasso(), GroupLasso(over="columns"), GroupLasso().bound(CONVOLUTION), GroupLasso(1)}) == 3


@pytest.mark.parametrize(
    ("rate", "over", "message"),
    [
        (0.0, "rows", r"GroupLasso\.rate must be a positive number .*Got 0\.0"),
        (torch.ones(2, 2), "rows", r"GroupLasso\.rate must be a number or \(M,\)"),
        (1.0, "row", r"GroupLasso\.over must be 'rows', 'columns' or 'channels'\. Got 'row'"),
    ],
)
def test_refuses_bad_arguments(rate: object, over: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        GroupLasso(rate, over)


def test_refuses_theta_of_other_members() -> None:
    prior = GroupLasso(torch.ones(3)).bound(one_group(2))
    with pytest.raises(ValueError, match=r"GroupLasso: rate is for 3 members"):
        prior.log_prob(torch.zeros(2, 2))
