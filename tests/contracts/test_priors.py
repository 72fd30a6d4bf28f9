"""What every prior must do; a new prior is one row of CASES, and one of ONE_WEIGHT."""

import copy
import math
import pickle
from dataclasses import replace

import pytest
import torch
from opaqueprior import Opaque
from torch import Tensor

from posterity.numerics import Block
from posterity.numerics.layout import Layout
from posterity.numerics.random import Key
from posterity.precisions import BlockDiagonal, Dense, Diagonal, Kronecker, LowRank, PerMember
from posterity.priors import (
    Cauchy,
    Correlated,
    FanIn,
    Glorot,
    GroupLasso,
    HalfCauchy,
    He,
    Hierarchical,
    Horseshoe,
    Laplace,
    Layerwise,
    Logistic,
    LogNormal,
    Normal,
    Prior,
    ScaleMixture,
    StudentT,
    Tabulated,
    around,
)
from posterity.storage.values import decode, encode


def spread(*shape: int) -> Tensor:
    """Distinct positive numbers."""
    return 0.4 + 0.1 * torch.arange(math.prod(shape), dtype=torch.float64).reshape(shape)


TENSORS = {"first.weight": (2, 1), "first.bias": (2,), "last.weight": (1, 2), "last.bias": (1,)}
LAYOUT = Layout.of(TENSORS)
SIZE = LAYOUT.size  # 7
MEMBERS = torch.tensor([0.5, 1.0, 2.0])
FACTOR = spread(3, SIZE).sin()
DENSE = Dense(FACTOR.T @ FACTOR, spread(SIZE))
LAYERS = BlockDiagonal(
    (Block(("first.weight", "first.bias"), 2, 1, 0, 2), Block(("last.weight", "last.bias"), 1, 2, 4, 6)),
    (
        Kronecker.of(spread(1, 2, 1) * torch.eye(2), spread(1, 2, 1) * torch.eye(2), torch.ones(4), 3.0),
        Kronecker.of(torch.ones(1, 1, 1), torch.ones(1, 3, 3), torch.ones(3), 2.0),
    ),
    SIZE,
)

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
    "correlated dense": Correlated(spread(SIZE), DENSE),
    "correlated diagonal": Correlated(spread(SIZE), Diagonal(spread(SIZE))),
    "correlated low rank": Correlated(-spread(SIZE), LowRank(FACTOR, spread(SIZE), 2.0)),
    "correlated layers": Correlated(torch.zeros(SIZE), LAYERS),
    "correlated members": Correlated(spread(3, SIZE), PerMember((DENSE, LAYERS, DENSE))),
    "around": around({name: spread(*shape) for name, shape in TENSORS.items()}, 0.3),
    "laplace": Laplace(0.7),
    "laplace mean": Laplace(0.7, -0.3),
    "laplace members": Laplace(MEMBERS),
    "student-t": StudentT(12.0, 0.6),
    "student-t members": StudentT(1.5, MEMBERS),
    "cauchy": Cauchy(0.4),
    "cauchy members": Cauchy(MEMBERS),
    "logistic": Logistic(0.5),
    "logistic members": Logistic(MEMBERS),
    "scale mixture": ScaleMixture((0.3, 0.7), (1.5, 0.2)),
    "scale mixture members": ScaleMixture((0.2, 0.3, 0.5), (2.0, 0.7, 0.1), MEMBERS),
    "tabulated": Tabulated.of(lambda x: -0.3 * x**4 + 0.2 * x),
    "tabulated kink": Tabulated.of(lambda x: -0.3 * x**2 - 2.0 * x.abs(), kink=True),
    "tabulated members": replace(Tabulated.of(lambda x: -2.0 * (1.0 + (x - 0.3) ** 2).log(), mean=0.3), scale=MEMBERS),
    "horseshoe": Horseshoe(0.5),
    "horseshoe members": Horseshoe(MEMBERS),
    "group lasso rows": GroupLasso(2.0),
    "group lasso columns": GroupLasso(1.5, "columns"),
    "group lasso channels members": GroupLasso(MEMBERS, "channels"),
    "hierarchical normal": Hierarchical(Normal(0.5), LogNormal(1.2, 0.3)),
    "hierarchical half-Cauchy members": Hierarchical(Normal(MEMBERS), HalfCauchy(0.8)),
    "hierarchical laplace members": Hierarchical(Laplace(MEMBERS), LogNormal(0.5, 0.2)),
    "hierarchical group lasso": Hierarchical(GroupLasso(2.0, "columns"), LogNormal(0.9, 0.3)),
    "hierarchical layerwise": Hierarchical(Layerwise.of(FanIn()), LogNormal(1.0, 0.2)),
    "layerwise of many": Layerwise(
        {
            "first.weight": GroupLasso(3.0),
            "last.weight": Hierarchical(Normal(), LogNormal(1.0, 0.2)),
            "*": Laplace(MEMBERS),
        }
    ),
}
ONE_WEIGHT: dict[str, Prior] = {
    "normal": Normal(0.7),
    "normal mean": Normal(1.7, -0.9),
    "normal per weight": Normal(torch.tensor([[0.3]]), torch.tensor([0.4])),
    "layerwise": Layerwise.of(Normal(1.3)),
    "correlated": Correlated(torch.tensor([0.2]), Dense(torch.tensor([[2.5]]))),
    "laplace": Laplace(0.4),
    "student-t": StudentT(1.7, 0.3),
    "student-t without mean": StudentT(0.6),
    "cauchy": Cauchy(0.3),
    "logistic": Logistic(0.4),
    "scale mixture": ScaleMixture((0.5, 0.5), (1.0, 0.05), 1.4),
    "tabulated": Tabulated.of(lambda x: -0.3 * x**4 + 0.2 * x),
    "tabulated kink": Tabulated.of(lambda x: -0.3 * x**2 - 2.0 * x.abs(), kink=True),
    "tabulated tails": Tabulated.of(lambda x: -(1.0 + x**2).log()),
    "horseshoe": Horseshoe(0.3),
    "group lasso": GroupLasso(1.8),
    "hierarchical": Hierarchical(Normal(0.6), LogNormal(0.5, 1.5)),
    "hierarchical laplace": Hierarchical(Laplace(0.6), LogNormal(2.0, 0.1)),
    "hierarchical half-Cauchy": Hierarchical(Normal(1.6), HalfCauchy(0.5)),
}
# E log p of a common scale is no integral over single weights: these refuse, all others must have it.
WITHOUT_CROSS_ENTROPY = ("hierarchical", "layerwise of many")

every_case = pytest.mark.parametrize("name", CASES)
every_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
one_weight = pytest.mark.parametrize("name", ONE_WEIGHT)


def having_cross_entropy(cases: dict[str, Prior]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("name", [name for name in cases if not name.startswith(WITHOUT_CROSS_ENTROPY)])


def bound_case(name: str) -> Prior:
    return copy.deepcopy(CASES[name]).bound(LAYOUT)


def theta_for(prior: Prior, lead: tuple[int, ...] = (), dtype: torch.dtype = torch.float64) -> Tensor:
    members = () if prior.num_members is None else (prior.num_members,)
    return Key(11).normal((*lead, *members, SIZE), torch.float64, torch.get_default_device()).to(dtype)


def axis() -> tuple[Tensor, Tensor]:
    """Nodes on both sides of zero, from 1e-35 to 1e35, and their lengths.

    Equidistant in log |w| the trapezoid rule is exact to rounding for a kink or pole at zero and for heavy tails.
    """
    grid = torch.linspace(-80.0, 80.0, 4001, dtype=torch.float64)
    lengths = grid.exp() * (grid[1] - grid[0])
    return torch.cat([-grid.exp(), grid.exp()]), torch.cat([lengths, lengths])


@one_weight
def test_density_integrates_to_one(name: str) -> None:
    prior = ONE_WEIGHT[name].bound(Layout.of({"w": (1,)}))
    weights, volumes = axis()
    assert float((prior.log_prob(weights.unsqueeze(-1)).exp() * volumes).sum()) == pytest.approx(1.0, abs=1e-6)


@having_cross_entropy(ONE_WEIGHT)
@pytest.mark.parametrize(("mean", "scale"), [(0.0, 1.0), (-1.3, 0.2), (2.5, 1.7)])
def test_cross_entropy_equals_quadrature(name: str, mean: float, scale: float) -> None:
    prior = ONE_WEIGHT[name].bound(Layout.of({"w": (1,)}))
    weights, volumes = axis()
    density = torch.exp(-0.5 * ((weights - mean) / scale).square()) / (math.sqrt(2.0 * math.pi) * scale)
    there = density > 0.0
    expected = -(density * volumes * prior.log_prob(weights.unsqueeze(-1)))[there].sum()
    value = prior.cross_entropy(torch.tensor([mean]).double(), torch.tensor([scale]).double())
    assert float(value) == pytest.approx(float(expected), rel=1e-6)


@having_cross_entropy(CASES)
def test_kl_is_cross_entropy_minus_entropy(name: str) -> None:
    prior = bound_case(name)
    mean = theta_for(prior)
    scale = 0.2 + 0.1 * mean.abs()
    entropy = (scale.log() + 0.5 * math.log(2.0 * math.pi * math.e)).sum(-1)
    torch.testing.assert_close(prior.kl(mean, scale), prior.cross_entropy(mean, scale) - entropy)
    assert (prior.kl(mean, scale) > 0.0).all()


@having_cross_entropy(CASES)
def test_cross_entropy_is_differentiable(name: str) -> None:
    prior = bound_case(name)
    mean, scale = theta_for(prior).requires_grad_(), (0.2 + theta_for(prior).abs()).requires_grad_()
    grads = torch.autograd.grad(prior.cross_entropy(mean, scale).sum(), (mean, scale))
    direction = [Key(seed).normal(tuple(mean.shape), mean.dtype, mean.device) for seed in (1, 2)]
    step = 1e-4
    with torch.no_grad():
        ahead, behind = (
            prior.cross_entropy(mean + sign * direction[0], scale + sign * direction[1]).sum() for sign in (step, -step)
        )
    slope = sum((grad * way).sum() for grad, way in zip(grads, direction, strict=True))
    torch.testing.assert_close((ahead - behind) / (2.0 * step), slope, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", [name for name in CASES if name.startswith(WITHOUT_CROSS_ENTROPY)])
def test_what_has_no_cross_entropy_says_what_to_do(name: str) -> None:
    prior = bound_case(name)
    theta = theta_for(prior)
    for call in (prior.cross_entropy, prior.kl):
        with pytest.raises(TypeError, match="over draws instead"):
            call(theta, theta.abs())


@having_cross_entropy(CASES)
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
    _, scores = prior.value_and_grad(prior.sample((2_000, *like.shape), Key(14), like))
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
        batched, looped = getattr(prior, function)(thetas), loop(function, thetas)
        torch.testing.assert_close(batched, looped, rtol=1e-10, atol=1e-10, equal_nan=True)
    if not name.startswith(WITHOUT_CROSS_ENTROPY):
        looped = loop("cross_entropy", thetas, scales)
        torch.testing.assert_close(prior.cross_entropy(thetas, scales), looped, rtol=1e-10, atol=1e-10)
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
        "sample": prior.sample(tuple(theta.shape), Key(0), theta),
    }
    if not name.startswith(WITHOUT_CROSS_ENTROPY):
        tensors["cross_entropy"] = prior.cross_entropy(theta, theta.abs())
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


@pytest.mark.parametrize("name", [name for name in CASES if "blocks" not in name])  # Opaque is this file's own
def test_is_stored_through_its_fields(name: str) -> None:
    tensors: dict[str, Tensor] = {}
    assert decode(encode(CASES[name], tensors, "prior"), tensors) == CASES[name]


@every_case
def test_bound_is_idempotent(name: str) -> None:
    prior = bound_case(name)
    assert prior.bound(LAYOUT) == prior
    assert prior.num_members == CASES[name].num_members
