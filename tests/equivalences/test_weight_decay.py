"""MAP with a normal prior is training with weight decay, step by step."""

import copy

import pytest
import torch
from contracts.cases import classification, labels, network, numbers
from torch.nn import functional as F

import posterity as po
from posterity.inference import Callback
from posterity.methods import MAP
from posterity.numerics import Key
from posterity.optim import SGD, Adam

FLOAT64 = torch.float64
STEPS, SIZE, SCALE = 25, 6, 0.7


class Path(Callback):
    def __init__(self):
        self.thetas = []

    def after_step(self, run):
        self.thetas.append(run.state.theta.clone())


def batches(rows, seed):
    """The very batches that `infer` feeds to the method."""
    feed = po.as_data(rows).minibatches(SIZE, STEPS, Key(seed).fold("batches"))
    return [(batch.inputs, batch.targets) for batch in feed.from_step(0)]


def by_hand(module, optimizer, rows, loss, seed):
    path = []
    for x, y in batches(rows, seed):
        optimizer.zero_grad()
        loss(module(x), y).backward()
        optimizer.step()
        path.append(torch.cat([p.detach().flatten() for p in module.parameters()]))
    return path


def loss_of(kind):
    return F.cross_entropy if kind == "classes" else lambda f, y: (f - y).square().mean() / (2 * 0.3**2)


@pytest.mark.parametrize("kind", ["classes", "numbers"])
@pytest.mark.parametrize("nesterov", [False, True])
def test_sgd_on_the_mean_loss_with_weight_decay(kind, nesterov):
    """Weight decay 1 / (s^2 N) on the mean loss, at the same step size."""
    module = network([3, 4, 2 if kind == "classes" else 1], FLOAT64)
    rows = labels(FLOAT64) if kind == "classes" else numbers(FLOAT64)
    likelihood = po.likelihoods.Categorical() if kind == "classes" else po.likelihoods.Gaussian(0.3)
    joint = po.Joint(module, likelihood, po.priors.Normal(SCALE), num_data=20)
    path = Path()
    method = MAP(steps=STEPS, batch_size=SIZE, optimizer=SGD(0.05, momentum=0.9, nesterov=nesterov))
    po.infer(method, joint, rows, seed=4, callbacks=[path])
    trained = copy.deepcopy(module)
    optimizer = torch.optim.SGD(
        trained.parameters(), lr=0.05, momentum=0.9, nesterov=nesterov, weight_decay=1 / (SCALE**2 * 20)
    )
    expected = by_hand(trained, optimizer, rows, loss_of(kind), 4)
    for ours, theirs in zip(path.thetas, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)
    assert not torch.allclose(path.thetas[-1], path.thetas[0], rtol=1e-2)


def test_adam_with_the_penalty_in_its_gradient():
    joint, path = classification(FLOAT64), Path()
    po.infer(MAP(steps=STEPS, batch_size=SIZE, optimizer=Adam(0.01)), joint, labels(FLOAT64), callbacks=[path])
    trained = network([3, 4, 2], FLOAT64)
    optimizer = torch.optim.Adam(trained.parameters(), lr=0.01, weight_decay=1 / (SCALE**2 * 20))
    expected = by_hand(trained, optimizer, labels(FLOAT64), F.cross_entropy, 0)
    for ours, theirs in zip(path.thetas, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-10)


def test_the_loss_is_the_penalised_mean_loss_with_its_constant():
    joint = classification(FLOAT64)
    _, trace = po.infer(MAP(steps=STEPS, batch_size=SIZE), joint, labels(FLOAT64), seed=4)
    module = network([3, 4, 2], FLOAT64)
    x, y = batches(labels(FLOAT64), 4)[0]
    with torch.no_grad():
        mean_loss = float(F.cross_entropy(module(x), y))
        normal = torch.distributions.Normal(0.0, torch.tensor(SCALE, dtype=FLOAT64))
        log_prior = sum(float(normal.log_prob(parameter).sum()) for parameter in module.parameters())
    assert float(trace["loss"][0]) == pytest.approx(mean_loss - log_prior / 20, rel=1e-12)
