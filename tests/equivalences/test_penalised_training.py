"""Fits under the prior of a penalty, and training with that penalty written out in torch."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

import posterity as po
from posterity import penalties
from posterity.methods import MAP, MeanField
from posterity.methods.parts.gradients.estimator import DataTerm, Estimator, Factorised, Gradients, Memory
from posterity.model import Batch
from posterity.model.network import Buffers
from posterity.numerics import Key
from posterity.optim import SGD
from posterity.penalties import Gaussian, Penalty, from_prior, prior_of
from posterity.priors import FanIn, GroupLasso, Laplace, Logistic, Normal, Prior, StudentT

ROWS, STEP, STRENGTH = 20, 0.05, 0.4
Groups = Callable[[Tensor], Tensor]
# Each penalty with the groups (count, size) whose lengths it adds up, written out by hand; None for squares.
KINDS: dict[str, tuple[Penalty, Groups | None]] = {
    "squares": (penalties.SquaredL2(), None),
    "l1": (penalties.L1(), lambda w: w.reshape(-1, 1)),
    "rows": (penalties.GroupLasso("rows"), lambda w: w.reshape(len(w), -1)),
    "columns": (penalties.GroupLasso("columns"), lambda w: w.reshape(len(w), -1).T),
    "channels": (penalties.GroupLasso("channels"), lambda w: w.transpose(0, 1).reshape(w.shape[1], -1)),
}
kinked = pytest.mark.parametrize("kind", ["l1", "rows", "columns", "channels"])


def normal(seed: int, *shape: int) -> Tensor:
    return Key(seed).normal(shape, torch.float64, "cpu").to(torch.get_default_device())


def network() -> nn.Sequential:
    """A convolution and a linear layer in float64, always with the same weights."""
    net = nn.Sequential(nn.Conv2d(2, 3, 2), nn.Tanh(), nn.Flatten(), nn.Linear(12, 2)).double()
    for index, parameter in enumerate(net.parameters()):
        parameter.data.copy_(0.4 * normal(index, *parameter.shape))
    return net


def images() -> tuple[Tensor, Tensor]:
    return normal(10, ROWS, 2, 3, 3), normal(11, ROWS, 2)


def mode(kind: str, steps: int, *, momentum: float = 0.0, proximal: bool = False) -> Tensor:
    net = network()
    prior = prior_of(net, KINDS[kind][0], FanIn(), strength=STRENGTH)
    joint = po.Joint(net, po.likelihoods.Gaussian(1.0), prior, num_data=ROWS)
    method = MAP(steps, None, SGD(STEP, momentum), proximal=proximal)
    return po.infer(method, joint, images(), progress=False)[0].theta


def factor(kind: str, weight: Tensor) -> float:
    """lambda_l of theory 002-14: the variance of one weight is 1 / P."""
    groups, inputs = KINDS[kind][1], weight[0].numel()
    return inputs / 2 if groups is None else math.sqrt(inputs * (groups(weight).shape[1] + 1))


def smooth_loss(net: nn.Sequential) -> Tensor:
    """The mean of -log p over the rows, with the decay of the biases' prior N(0, 10^2)."""
    inputs, targets = images()
    loss = 0.5 * (net(inputs) - targets).square().sum(-1).mean()
    return loss + sum((net[i].bias.square().sum() for i in (0, 3)), torch.zeros(())) / (200.0 * ROWS)


def flat(net: nn.Sequential) -> Tensor:
    return torch.cat([parameter.detach().reshape(-1) for parameter in net.parameters()])


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("kind", KINDS)
def test_the_mode_is_that_of_training_with_the_penalty_in_the_loss(kind: str, momentum: float) -> None:
    net, groups = network(), KINDS[kind][1]
    optimizer = torch.optim.SGD(net.parameters(), lr=STEP, momentum=momentum)
    for _ in range(40):
        optimizer.zero_grad()
        loss = smooth_loss(net)
        for weight in (net[0].weight, net[3].weight):
            r = weight.square().sum() if groups is None else groups(weight).square().sum(1).sqrt().sum()
            loss = loss + STRENGTH / ROWS * factor(kind, weight.detach()) * r
        loss.backward()
        optimizer.step()
    assert float((flat(net) - flat(network())).abs().max()) > 0.05
    torch.testing.assert_close(mode(kind, 40, momentum=momentum), flat(net), rtol=0.0, atol=1e-9)


@kinked
def test_proximal_steps_are_those_of_a_loop_in_torch(kind: str) -> None:
    net, groups = network(), KINDS[kind][1]
    assert groups is not None
    for _ in range(150):
        net.zero_grad()
        smooth_loss(net).backward()
        with torch.no_grad():
            for parameter in net.parameters():
                assert parameter.grad is not None
                parameter -= STEP * parameter.grad
            for weight in (net[0].weight, net[3].weight):
                for group in groups(torch.arange(weight.numel()).reshape(weight.shape)):  # places in the tensor
                    values = weight.view(-1)[group]
                    length, less = float(values.norm()), STEP * STRENGTH / ROWS * factor(kind, weight)
                    weight.view(-1)[group] = values * (1.0 - less / length) if length > less else 0.0
    found, wanted = mode(kind, 150, proximal=True), flat(net)
    assert 0.05 < float((wanted == 0).double().mean()) < 0.95
    assert torch.equal(found == 0, wanted == 0)
    torch.testing.assert_close(found, wanted, rtol=0.0, atol=1e-9)


@dataclass(frozen=True)
class ExactLinear(Estimator):
    """E log p(D | w) of a linear model y = w x with unit noise: no draws, so that fits can be compared."""

    def data_term(
        self,
        joint: object,
        q: Factorised,
        batch: Batch,
        buffers: Buffers,
        memory: Memory,
        key: Key,
        out: Gradients | None = None,
    ) -> DataTerm:
        mean, scale = (value.detach().clone().requires_grad_() for value in (q.mean, q.scale))
        with torch.enable_grad():
            value = expected_fit(mean, scale)
            grads = torch.autograd.grad(value, (mean, scale))
        return DataTerm(value.detach(), *grads, buffers, memory)


def regression() -> tuple[Tensor, Tensor]:
    x = normal(12, ROWS, 3)
    return x, x @ torch.tensor([[0.9, -0.4], [0.0, 0.1], [0.3, 0.0]], dtype=torch.float64)


def expected_fit(mean: Tensor, scale: Tensor) -> Tensor:
    x, y = regression()
    residual = (y - x @ mean.view(2, 3).T).square() + x.square() @ scale.view(2, 3).square().T
    return -0.5 * residual.sum() - 0.5 * y.numel() * math.log(2.0 * math.pi)


@pytest.mark.parametrize(
    "prior",
    [Normal(0.7), Laplace(0.4), GroupLasso(3.0), GroupLasso(3.0, "columns"), Logistic(0.4), StudentT(3.0, 0.5)],
    ids=["normal", "laplace", "rows", "columns", "logistic", "student-t"],
)
def test_variational_inference_is_training_with_the_converted_penalty(prior: Prior) -> None:
    net = nn.Linear(3, 2, bias=False).double()
    start = 0.3 * normal(13, 2, 3)
    net.weight.data.copy_(start)
    joint = po.Joint(net, po.likelihoods.Gaussian(1.0), prior, num_data=ROWS)
    method = MeanField(200, None, SGD(STEP, 0.0), estimator=ExactLinear())
    q, trace = po.infer(method, joint, regression(), progress=False)
    penalty = from_prior(prior, Gaussian())
    mean = start.clone().requires_grad_()
    log_scale = torch.full_like(start, math.log(0.1 * 3**-0.5)).requires_grad_()
    optimizer = torch.optim.SGD([mean, log_scale], lr=STEP)
    for _ in range(200):
        optimizer.zero_grad()
        loss = (penalty.of(mean, log_scale.exp()) - expected_fit(mean, log_scale.exp())) / ROWS
        loss.backward()
        optimizer.step()
    torch.testing.assert_close(q.mean, mean.detach().reshape(-1), rtol=0.0, atol=1e-6)
    torch.testing.assert_close(q.variance.sqrt(), log_scale.detach().exp().reshape(-1), rtol=0.0, atol=1e-6)
    assert float(trace["elbo"][-1]) == pytest.approx(-float(loss.detach()), abs=1e-6)
    assert float((q.variance.sqrt() / (0.1 * 3**-0.5) - 1.0).abs().min()) > 0.2
