"""What every prior must do; a new prior is one row of CASES, and one of ONE_WEIGHT."""

import copy
import math
import pickle
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from posterity.numerics.layout import Layout
from posterity.numerics.random import Key
from posterity.priors import FanIn, Glorot, He, Layerwise, Normal, Prior


@dataclass(frozen=True)
class Opaque(Prior):
    """A normal prior that does not say so, with the gradient of the base class: keeps `Layerwise` from fusing."""

    inner: Normal

    def log_prob(self, theta: Tensor) -> Tensor:
        return self.inner.log_prob(theta)

    def sample(self, shape: tuple[int, ...], key: Key, like: Tensor) -> Tensor:
        return self.inner.sample(shape, key, like)

    def variance(self, like: Tensor) -> Tensor:
        return self.inner.variance(like)

    def cross_entropy(self, mean: Tensor, scale: Tensor) -> Tensor:
        return self.inner.cross_entropy(mean, scale)

    def precision(self, theta: Tensor) -> Tensor:
        return self.inner.precision(theta)


def spread(*shape: int) -> Tensor:
    """Distinct positive numbers."""
    return 0.4 + 0.1 * torch.arange(math.prod(shape), dtype=torch.float64).reshape(shape)


TENSORS = {"first.weight": (2, 1), "first.bias": (2,), "last.weight": (1, 2), "last.bias": (1,)}
LAYOUT = Layout.of(TENSORS)
SIZE = LAYOUT.size  # 7
MEMBERS = torch.tensor([0.5, 1.0, 2.0])

CASES: dict[str, Prior] = {
    "normal": Normal(0.7),
    "normal mean": Normal(0.7, -0.3),
    "normal mean per weight": Normal(0.7, spread(SIZE)),
    "normal per weight": Normal(spread(1, SIZE)),
    "normal per weight and mean": Normal(spread(1, SIZE), spread(SIZE)),
    "normal members": Normal(MEMBERS),
    "normal members and mean": Normal(MEMBERS, spread(3, SIZE)),
    "normal members per weight": Normal(spread(3, SIZE), -0.2),
    "normal mean of members": Normal(1.1, spread(3, SIZE)),
    "layerwise fan-in": Layerwise.of(FanIn(gain=1.5)),
    "layerwise mixed rules": Layerwise({"first.*": He(), "last.weight": Glorot(), "*": Normal(0.3, 0.1)}),
    "layerwise members": Layerwise({"*.weight": FanIn(), "*": Normal(MEMBERS)}),
    "layerwise blocks": Layerwise({"first.*": FanIn(), "*": Opaque(Normal(0.6, 0.2))}),
    "layerwise blocks members": Layerwise({"*.weight": Opaque(Normal(1.2)), "*": Normal(MEMBERS)}),
}
ONE_WEIGHT: dict[str, Prior] = {
    "normal": Normal(0.7),
    "normal mean": Normal(1.7, -0.9),
    "normal per weight": Normal(torch.tensor([[0.3]]), torch.tensor([0.4])),
    "layerwise": Layerwise.of(Normal(1.3)),
}

every_case = pytest.mark.parametrize("name", CASES)
every_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
one_weight = pytest.mark.parametrize("name", ONE_WEIGHT)


def bound_case(name: str) -> Prior:
    return copy.deepcopy(CASES[name]).bound(LAYOUT)


def theta_for(prior: Prior, lead: tuple[int, ...] = (), dtype: torch.dtype = torch.float64) -> Tensor:
    members = () if prior.num_members is None else (prior.num_members,)
    return Key(11).normal((*lead, *members, SIZE), torch.float64, torch.get_default_device()).to(dtype)


@one_weight
def test_density_integrates_to_one(name: str) -> None:
    prior = ONE_WEIGHT[name].bound(Layout.of({"w": (1,)}))
    # w = sinh(t) makes the trapezoid rule exact to rounding for smooth densities, heavy tails included.
    grid = torch.linspace(-36.0, 36.0, 20_001, dtype=torch.float64)
    total = (prior.log_prob(grid.sinh().unsqueeze(-1)).exp() * grid.cosh()).sum() * (grid[1] - grid[0])
    assert float(total) == pytest.approx(1.0, abs=1e-6)


@one_weight
@pytest.mark.parametrize(("mean", "scale"), [(0.0, 1.0), (-1.3, 0.2), (2.5, 1.7)])
def test_cross_entropy_equals_quadrature(name: str, mean: float, scale: float) -> None:
    prior = ONE_WEIGHT[name].bound(Layout.of({"w": (1,)}))
    nodes = torch.linspace(-9.0, 9.0, 4001, dtype=torch.float64)
    weights = torch.exp(-0.5 * nodes.square()) / math.sqrt(2.0 * math.pi) * (nodes[1] - nodes[0])
    expected = -(weights * prior.log_prob((mean + scale * nodes).unsqueeze(-1))).sum()
    value = prior.cross_entropy(torch.tensor([mean]).double(), torch.tensor([scale]).double())
    assert float(value) == pytest.approx(float(expected), rel=1e-6)


@every_case
def test_cross_entropy_equals_an_average_over_draws(name: str) -> None:
    prior = bound_case(name)
    mean = theta_for(prior)
    scale = 0.2 + 0.1 * mean.abs()
    noise = Key(12).normal((20_000, *mean.shape), mean.dtype, mean.device)
    values = -prior.log_prob(mean + scale * noise)
    error = values.std(0) / len(values) ** 0.5
    value = prior.cross_entropy(mean, scale)
    assert value.shape == mean.shape[:-1]
    assert ((values.mean(0) - value).abs() <= 5.0 * error).all()


@every_case
def test_samples_have_the_variance(name: str) -> None:
    prior = bound_case(name)
    like = theta_for(prior)
    variance = prior.variance(like)
    assert variance.shape == like.shape
    draws = prior.sample((20_000, *like.shape), Key(13), like)
    squares = (draws - draws.mean(0)).square()
    error = squares.std(0) / len(draws) ** 0.5
    there = torch.isfinite(variance)
    assert ((squares.mean(0) - variance).abs() <= 5.0 * error)[there].all()


@every_case
def test_samples_score_as_the_density_says(name: str) -> None:
    # E[d log p / d theta] = 0 under p itself, entry by entry; it fails when sample and log_prob disagree on a mean.
    prior = bound_case(name)
    like = theta_for(prior)
    _, scores = prior.value_and_grad(prior.sample((20_000, *like.shape), Key(14), like))
    assert (scores.mean(0).abs() <= 5.0 * scores.std(0) / len(scores) ** 0.5).all()


@every_case
def test_sampling_depends_on_the_key_alone(name: str) -> None:
    prior = bound_case(name)
    like = theta_for(prior)
    first = prior.sample(tuple(like.shape), Key(1), like)
    assert torch.equal(first, prior.sample(tuple(like.shape), Key(1), like))
    assert not torch.equal(first, prior.sample(tuple(like.shape), Key(2), like))


@every_case
@pytest.mark.parametrize("lead", [(), (2,)], ids=["one", "lead"])
def test_value_and_grad_equals_autograd(name: str, lead: tuple[int, ...]) -> None:
    prior = bound_case(name)
    theta = theta_for(prior, lead).requires_grad_()
    before = theta.detach().clone()
    expected = prior.log_prob(theta)
    (expected_grad,) = torch.autograd.grad(expected.sum(), theta)
    value, grad = prior.value_and_grad(theta)
    torch.testing.assert_close(value, expected.detach(), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(grad, expected_grad, rtol=1e-12, atol=1e-12)
    assert not value.requires_grad
    assert not grad.requires_grad
    grad.zero_()
    assert torch.equal(theta.detach(), before)
    torch.testing.assert_close(prior.value_and_grad(theta)[1], expected_grad, rtol=1e-12, atol=1e-12)


@every_case
def test_precision_is_the_diagonal_of_the_hessian(name: str) -> None:
    prior = bound_case(name)
    theta = theta_for(prior)
    hessian = torch.autograd.functional.hessian(lambda t: -prior.log_prob(t).sum(), theta)
    diagonal = hessian.reshape(theta.numel(), theta.numel()).diagonal().reshape(theta.shape)
    precision = prior.precision(theta)
    torch.testing.assert_close(precision, diagonal, rtol=1e-12, atol=1e-12)
    precision.zero_()  # a new tensor: writing to it must not reach the prior
    torch.testing.assert_close(prior.precision(theta), diagonal, rtol=1e-12, atol=1e-12)


@every_case
def test_members_equal_a_loop(name: str) -> None:
    prior = bound_case(name)
    thetas = theta_for(prior, () if prior.num_members else (3,))  # (3, P)
    scales = 0.1 + thetas.abs()
    members = [prior.member(index) for index in range(3)]
    assert all(member.num_members is None for member in members)

    def loop(function: str, *arguments: Tensor) -> Tensor:
        rows = zip(members, *arguments, strict=True)
        return torch.stack([getattr(member, function)(*row) for member, *row in rows])

    for function in ("log_prob", "precision", "variance"):
        torch.testing.assert_close(getattr(prior, function)(thetas), loop(function, thetas), rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(prior.cross_entropy(thetas, scales), loop("cross_entropy", thetas, scales))
    values, grads = prior.value_and_grad(thetas)
    for index, member in enumerate(members):
        value, grad = member.value_and_grad(thetas[index])
        torch.testing.assert_close(values[index], value, rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(grads[index], grad, rtol=1e-10, atol=1e-10)


@every_case
@every_dtype
def test_dtype_is_kept(name: str, dtype: torch.dtype) -> None:
    prior = bound_case(name)
    theta = theta_for(prior, dtype=dtype)
    value, grad = prior.value_and_grad(theta)
    tensors = {
        "log_prob": prior.log_prob(theta),
        "value": value,
        "grad": grad,
        "precision": prior.precision(theta),
        "variance": prior.variance(theta),
        "cross_entropy": prior.cross_entropy(theta, theta.abs()),
        "sample": prior.sample(tuple(theta.shape), Key(0), theta),
    }
    assert {label: tensor.dtype for label, tensor in tensors.items()} == dict.fromkeys(tensors, dtype)
    exact = prior.log_prob(theta.double())
    torch.testing.assert_close(value.double(), exact, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(tensors["log_prob"].double(), exact, rtol=1e-5, atol=1e-5)


@every_case
def test_works_under_torch_func_and_after_it(name: str) -> None:
    prior = bound_case(name)
    thetas = theta_for(prior, (2,), torch.float32)
    batched = torch.func.vmap(torch.func.grad(lambda t: prior.log_prob(t).sum()))(thetas)
    torch.testing.assert_close(batched, prior.value_and_grad(thetas)[1])


@every_case
def test_is_usable_in_training_after_inference_mode(name: str) -> None:
    prior = bound_case(name)
    theta = theta_for(prior).requires_grad_()
    with torch.inference_mode():
        prior.log_prob(theta.detach())
    (grad,) = torch.autograd.grad(prior.log_prob(theta).sum(), theta)
    torch.testing.assert_close(grad, prior.value_and_grad(theta)[1])


@every_case
def test_is_a_value(name: str) -> None:
    for prior in (CASES[name], bound_case(name)):
        twin = pickle.loads(pickle.dumps(prior))
        assert twin == prior
        assert hash(twin) == hash(prior)
        assert prior != Normal(123.0)
        assert type(prior).__name__ in repr(prior)


@every_case
def test_bound_is_idempotent(name: str) -> None:
    prior = bound_case(name)
    assert prior.bound(LAYOUT) == prior
    assert prior.num_members == CASES[name].num_members
