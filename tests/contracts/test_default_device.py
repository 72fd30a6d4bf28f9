"""What is asked of tensors on one device does not depend on torch's default device, nor wait for another."""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from posterity import penalties as p
from posterity.inference import Method, infer
from posterity.inference.allocations import gradient_bytes
from posterity.likelihoods import Bernoulli, Gaussian, Likelihood, Probit, StudentT
from posterity.methods import ExpectationPropagation, ProbabilisticBackpropagation
from posterity.methods.low_rank_gaussian import _inverse_root
from posterity.model import Compose, Crop, Flip, Joint, as_data
from posterity.numerics import Key
from posterity.numerics.compiled import nothing_read
from posterity.numerics.layout import Layout
from posterity.optim.shrinkage import group_threshold, soft_threshold
from posterity.penalties.expansion import Member
from posterity.penalties.inversion import invert
from posterity.priors import EdgeOfChaos, GroupLasso, Laplace, Logistic, Normal, Prior, Tabulated
from posterity.pruning import pruned, unused_inputs
from posterity.theory import signal_propagation

W = torch.tensor([[-1.5, -0.2, 0.0, 0.4, 3.0, 40.0]], dtype=torch.float64, device="cpu")  # (1, 6)
MU = torch.linspace(-4.0, 4.0, 81, dtype=torch.float64, device="cpu")
LAYOUT = Layout.of({"weight": (1, 6)})


def logistic(z: Tensor) -> Tensor:
    return torch.sigmoid(z) * torch.sigmoid(-z)


def unnamed(prior: Prior) -> p.Function:
    return p.Function(p.Divergence(prior, p.Gaussian()).each, "a KL")


PENALTIES: dict[str, Callable[[], p.Penalty]] = {
    "squares": p.SquaredL2,
    "l1": p.L1,
    "groups": lambda: p.GroupLasso("columns"),
    "elastic net": lambda: p.Sum((p.SquaredL2(), p.L1()), (1.0, 0.5)),
    "quartic": lambda: p.Function(lambda mu, nu: mu**4),
    "waves": lambda: p.Function(lambda mu, nu: mu.square() + 0.2 * mu.cos()),
    "spline": lambda: unnamed(Logistic(0.5)),
    "bounded": lambda: p.Function(lambda mu, nu: mu.square() / (1.0 + mu.square())),
}
FAMILIES: dict[str, Callable[[], p.Family]] = {
    "points": p.Dirac,
    "gaussian": lambda: p.Gaussian(0.5),
    "gaussians": lambda: p.Gaussian((0.3, 0.5)),
    "translates": lambda: p.Translation(logistic, -36.0, 36.0, scale=0.3),
}


def network() -> nn.Sequential:
    """A convolution and a linear layer on the CPU; three channels do nothing."""
    net = nn.Sequential(nn.Conv2d(3, 4, 3, device="cpu"), nn.Tanh(), nn.Flatten(), nn.Linear(16, 2, device="cpu"))
    with torch.no_grad():
        for index, parameter in enumerate(net.parameters()):
            parameter.copy_(Key(index).normal(tuple(parameter.shape), device="cpu"))
        net[0].weight[:2].zero_()
        net[3].weight[:, 8:12].zero_()
    return net


def told(penalty: p.Penalty, family: p.Family) -> Any:
    """All numbers of a verdict, and its words."""
    found = p.to_prior(penalty, family, shape=(1, 6))
    numbers = [found.kappa, found.K, found.residual, found.noise_amplification, found.log_alpha(W)]
    prior = [] if found.prior is None else [found.prior.bound(LAYOUT).log_prob(W)]
    return [*numbers, *prior], (found.satisfies_star, found.explanation, found.route)


def of_prior(prior: Prior) -> Any:
    """All that a prior says."""
    bound, scale = prior.bound(LAYOUT), torch.full_like(W, 0.4)
    values = [bound.log_prob(W), bound.sample((3, 6), Key(0), W), bound.variance(W), bound.precision(W)]
    steps = [bound.proximal(W, 0.3), bound.proximal(W, torch.full_like(W, 0.3)), *bound.smooth_value_and_grad(W)]
    return [*values, *steps, *bound.cross_entropy_and_grad(W, scale)], bound.nonsmooth


def of_divergence(prior: Prior, family: p.Family) -> Any:
    penalty = p.from_prior(prior, family)
    return [penalty(W), penalty.of(W, torch.full_like(W, 0.4)), penalty.factor(0.5, (1, 6))], penalty.separates


def of_network(penalty: p.Penalty) -> Any:
    """Factors, priors and groups of a network."""
    net = network()
    factors, prior = p.layer_factors(net, penalty, EdgeOfChaos(torch.tanh)), p.prior_of(net, penalty)
    layout = Layout.of({name: tuple(parameter.shape) for name, parameter in net.named_parameters()})
    theta = torch.cat([parameter.detach().reshape(-1) for parameter in net.parameters()])
    groups = [[group["weight_decay"], group["factor"]] for group in p.param_groups(net, penalty, 10)]
    term = p.penalty_term(net, penalty, factors).detach()
    return [
        *factors.values(),
        *p.usual_factors(net, penalty).values(),
        term,
        prior.bound(layout).log_prob(theta),
    ], groups


def of_chaos(activation: str | Callable[[Tensor], Tensor]) -> Any:
    edge = EdgeOfChaos(activation, 0.05)
    return [edge.weight_variance, edge.q_star, edge.chi, *signal_propagation(activation, 1.5, width=8, depth=2)], None


def of_pruning() -> Any:
    smaller, images = pruned(network()), Key(7).normal((2, 3, 4, 4), device="cpu")
    with torch.no_grad():
        return [smaller.module(images), unused_inputs(network())], smaller.units


def of_images() -> Any:
    images = Key(7).uniform((5, 3, 8, 8), device="cpu")
    return [Compose((Crop(2), Crop(1, "reflect"), Flip()))(images, Key(0))], None


def of_fourier() -> Any:
    found = invert(MU, 2.0 * MU.square().unsqueeze(0), [Member(p.Gaussian(0.5), 0.5)], "fourier")
    return [found.kappa, found.residual, found.log_alpha(W)], found.explanation


def of_memory() -> Any:
    """Bytes of a gradient at three rows."""
    rows = as_data((Key(7).normal((3, 3, 4, 4), device="cpu"), torch.zeros(3, 2, device="cpu")))
    return [], gradient_bytes(Joint(network(), Gaussian(0.3), Normal(1.0), num_data=3), rows, None)


def of_fit(method: Method, likelihood: Likelihood, *sizes: int, members: int | None = None) -> Any:
    """Moments, prior scale and predictions of a fit to labels; linear layers of these sizes, ReLUs between them."""
    linear = [nn.Linear(inputs, outputs, dtype=torch.float64, device="cpu") for inputs, outputs in pairwise(sizes)]
    net = nn.Sequential(*[module for layer in linear for module in (layer, nn.ReLU())][:-1])
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.fill_(0.1)
    x = Key(0).normal((members or 1, 12, 2), torch.float64, "cpu")
    y = (x.sum(-1, keepdim=True) + Key(1).normal((members or 1, 12, 1), torch.float64, "cpu") > 0).double()
    rows = as_data((x, y), per_member=True) if members else (x[0], y[0])
    q, trace = infer(method, Joint(net, likelihood, Normal(), num_data=12), rows, progress=False)
    q = q.member(0) if members else q
    scale = q.joint.prior.by_tensor(q.joint.network.layout)[0].scale
    return [q.point(), q.as_gaussian().precision.covariance(), q.predict(x[0]).mean, scale], list(trace)


DOORS: dict[str, Callable[[], Any]] = {
    **{
        f"to_prior, {name}, {reader}": lambda make=make, family=family: told(make(), family())
        for name, make in PENALTIES.items()
        for reader, family in FAMILIES.items()
        if (name, reader) != ("spline", "points")  # a KL of points is infinite
    },
    **{
        f"from_prior, {type(prior).__name__}, {reader}": lambda prior=prior, family=family: of_divergence(
            prior, family()
        )
        for prior in (Normal(0.5), Laplace(0.5), Logistic(0.5))
        for reader, family in FAMILIES.items()
    },
    **{
        f"network, {name}": lambda name=name: of_network(PENALTIES[name]())
        for name in ("squares", "groups", "elastic net", "quartic")
    },
    "table": lambda: of_prior(Tabulated.of(lambda x: -(x**4))),
    "table with a kink": lambda: of_prior(Tabulated.of(lambda x: -(x**4) - x.abs(), kink=True)),
    "laplace": lambda: of_prior(Laplace(0.5)),
    "group lasso": lambda: of_prior(GroupLasso(2.0)),
    "factors of a prior": lambda: (list(p.factors_of(Normal(0.5), network()).factors.values()), None),
    "thresholds": lambda: ([soft_threshold(W, 0.3, 0.1), group_threshold(W, 0.3), group_threshold(W, W.abs())], None),
    "edge of chaos": lambda: of_chaos(torch.tanh),
    "edge of chaos of a module": lambda: of_chaos(nn.Hardtanh()),
    "fourier": of_fourier,
    "pruning": of_pruning,
    "augmentation": of_images,
    "memory": of_memory,
    "root of a low-rank part": lambda: (list(_inverse_root(torch.diag_embed(1.0 + W.square()))), None),
    "propagation, probit": lambda: of_fit(ExpectationPropagation(), Probit(), 2, 1),
    "propagation, logistic": lambda: of_fit(ExpectationPropagation(), Bernoulli(), 2, 1),
    "propagation, noise": lambda: of_fit(ExpectationPropagation(), Gaussian(), 2, 1),
    "propagation in turn, outliers": lambda: of_fit(
        ExpectationPropagation(order="sequential"), StudentT(4.0, 1.0), 2, 1
    ),
    "backpropagation": lambda: of_fit(ProbabilisticBackpropagation(passes=2), Gaussian(), 2, 3, 1),
    "backpropagation of members": lambda: of_fit(
        ProbabilisticBackpropagation(passes=2), Gaussian(), 2, 3, 1, members=2
    ),
}


@pytest.mark.parametrize("door", DOORS)
def test_a_default_device_of_another_kind_changes_nothing(door: str) -> None:
    """Tensors of the device "meta" have no numbers: what is made there by oversight meets an error."""
    with torch.device("meta"):
        numbers, rest = DOORS[door]()
    with torch.device("cpu"):
        wanted, wanted_rest = DOORS[door]()
    torch.testing.assert_close(numbers, wanted, rtol=0.0, atol=0.0, equal_nan=True)
    assert rest == wanted_rest


@pytest.mark.cuda
def test_a_table_is_copied_to_the_device_of_the_weights_once() -> None:
    def step(weights: Tensor) -> list[Tensor]:
        moved, scale = prior.proximal(weights, 0.3), torch.full_like(weights, 0.4)
        return [moved, *prior.smooth_value_and_grad(weights), *prior.cross_entropy_and_grad(weights, scale)]

    prior, there = Tabulated.of(lambda x: -(x**4) - x.abs(), kink=True), W.cuda()
    step(there)
    with nothing_read():
        found = step(there)
    torch.testing.assert_close(found, [value.cuda() for value in step(W)])
