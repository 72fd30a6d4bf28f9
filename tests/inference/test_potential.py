"""The log density over all rows: whole, in pieces, compiled."""

import gc
import logging
import threading
import weakref

import pytest
import torch
from torch import nn

import posterity as po
from posterity.inference.acceleration import Potential, accelerated, potential
from posterity.likelihoods import Categorical, Gaussian
from posterity.methods import HMC
from posterity.model.batch import Batch
from posterity.networks import MLP
from posterity.numerics import Key
from posterity.priors import Normal

pytestmark = pytest.mark.cpu
FLOAT64 = torch.float64
ROWS = 12


def draws(*shape, seed=0):
    return Key(seed).normal(shape, FLOAT64, "cpu")


class Conv(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 2, 3)
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        return self.head(torch.tanh(self.conv(x.reshape(-1, 1, 4, 4))).flatten(1))


class Named(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(2, 1), nn.Linear(2, 1)

    def forward(self, one, two):
        return self.one(one) + self.two(two).square()


def regression(module=None, members=None, **settings):
    torch.manual_seed(0)
    module = MLP((2, 4, 1), activation="tanh") if module is None else module
    prior = Normal(1.0 if members is None else torch.linspace(0.5, 2.0, members, dtype=FLOAT64))
    return po.Joint(module.to(FLOAT64), Gaussian(0.5, learn=True), prior, num_data=ROWS, **settings)


def named(seed):
    inputs = {"one": draws(ROWS, 2, seed=seed), "two": draws(ROWS, 2, seed=seed + 1)}
    return Batch(inputs, draws(ROWS, 1, seed=seed + 2))


def rows(seed):
    return Batch(draws(ROWS, 2, seed=seed), draws(ROWS, 1, seed=seed + 1))


def weighted(seed):
    return rows(seed)._replace(weights=draws(ROWS, seed=seed + 2).abs())


def own_rows(seed):
    return Batch(draws(3, ROWS, 2, seed=seed), draws(3, ROWS, 1, seed=seed + 1), None, True)


def own_weighted(seed):
    return own_rows(seed)._replace(weights=draws(3, ROWS, seed=seed + 2).abs())


def images(seed):
    return Batch(draws(ROWS, 16, seed=seed), torch.arange(ROWS) * (seed + 1) % 3)


def classes():
    torch.manual_seed(0)
    return po.Joint(Conv().to(FLOAT64), Categorical(), Normal(), num_data=ROWS)


CASES = {
    "network": (regression, weighted),
    "named inputs": (lambda: regression(Named()), named),
    "members": (lambda: regression(members=3), rows),
    "rows of members": (regression, own_weighted),
    "convolution": (classes, images),
}
cases = pytest.mark.parametrize(("make", "data"), CASES.values(), ids=CASES)


def theta_of(joint, seed=3):
    return 0.5 * draws(3, joint.size, seed=seed)


def stepped(target, theta, size):
    """Something to compile: a step along the gradient."""
    value, grad = target(theta)
    return theta + size * grad, value


def check(joint, batch, target, effort="compiled"):
    theta, size = theta_of(joint), torch.full((3, 1), 1e-2, dtype=FLOAT64)
    with accelerated(effort):
        found = target.run(stepped, target, theta, size)
    torch.testing.assert_close(found, stepped(Potential(joint, batch, 3), theta, size), rtol=1e-10, atol=1e-10)


def made(target):
    return sum(len(compiled._made) for compiled in target._compiled.values())


@cases
@pytest.mark.parametrize("effort", ["recorded", "compiled"])
def test_compiled_is_plain_for_these_rows_and_for_others(make, data, effort):
    joint = make()
    target = Potential(joint, data(1), 3)
    check(joint, data(1), target, effort)
    target.take(data(20))
    check(joint, data(20), target, effort)
    assert made(target) == 1  # other rows of the same shape need no other code
    assert not any(compiled._refused for compiled in target._compiled.values())


def most_in_two(joint, batch):
    """Bytes that all rows but a few fit in, so that the pieces are not alike."""
    return next(limit for limit in range(64, 10**6, 64) if len(Potential(joint, batch, 3, limit)._chunks) == 2) + 64


@cases
@pytest.mark.parametrize("pieces", [2, ROWS])
def test_pieces_add_up_to_the_whole(make, data, pieces):
    joint, batch = make(), data(1)
    whole = Potential(joint, batch, 3)
    limit = most_in_two(joint, batch) if pieces == 2 else 1
    parted = Potential(joint, batch, 3, limit)
    assert len(parted._chunks) == pieces
    for found, wanted in zip(parted(theta_of(joint)), whole(theta_of(joint)), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-10)


def test_pieces_are_compiled_with_the_rows_of_later():
    joint = regression()
    assert len(Potential(joint, weighted(1), 3, limit=1)._chunks) == ROWS
    target = Potential(joint, weighted(1), 3, limit=most_in_two(joint, weighted(1)))
    assert len(target._chunks) == 2
    check(joint, weighted(1), target)
    target.take(weighted(9))
    check(joint, weighted(9), target)
    assert made(target) == 1


def test_names_in_another_order_are_not_mixed_up():
    joint, batch = regression(Named()), named(1)
    target = Potential(joint, batch, 3)
    check(joint, batch, target)
    turned = batch._replace(inputs=dict(reversed(batch.inputs.items())))
    target.take(turned)
    check(joint, turned, target)


@pytest.mark.parametrize("batched", [False, True])
def test_a_density_is_compiled(batched):
    data = draws(30, 2)

    def log_density(x, scale):
        way = (x.unsqueeze(-2) - data) / scale.unsqueeze(-2)
        return (-0.5 * way.square()).sum((-1, -2)) - (30 * scale.log() + scale).sum(-1)

    shapes, positive = {"x": (2,), "scale": (2,)}, {"scale": po.model.Positive()}
    density = po.Density(log_density, shapes, positive, batched=batched, dtype=FLOAT64)
    target = Potential(density, None, 3)
    check(density, None, target)
    assert made(target) == 1


def test_dropout_is_off_and_nothing_is_drawn():
    joint = regression(nn.Sequential(nn.Linear(2, 8), nn.Dropout(0.5), nn.Linear(8, 1)))
    target, theta = Potential(joint, rows(1), 3), theta_of(joint)
    first, second = target(theta), target(theta)
    assert torch.equal(first[0], second[0])
    torch.testing.assert_close(first[0], joint.log_density(theta, rows(1)))


def test_a_density_that_draws_is_not_frozen(caplog):
    density = po.Density(
        lambda x: -(x + torch.randn_like(x)).square().sum(-1), {"x": (2,)}, batched=True, dtype=FLOAT64
    )
    target, theta = Potential(density, None, 3), draws(3, 2)
    with accelerated("compiled"), caplog.at_level(logging.WARNING, "posterity"):
        values = {float(target.run(stepped, target, theta, torch.ones(3, 1, dtype=FLOAT64))[1][0]) for _ in range(6)}
    assert len(values) == 6
    assert "not compiled" in caplog.text


def test_a_branch_in_a_density_falls_back_with_a_word(caplog):
    density = po.Density(
        lambda x: -x.square().sum(-1) if float(x.detach().sum()) > 0 else -2 * x.square().sum(-1),
        {"x": (2,)},
        batched=True,
        dtype=FLOAT64,
    )
    target, size = Potential(density, None, 3), torch.full((3, 1), 1e-3, dtype=FLOAT64)
    with accelerated("compiled"), caplog.at_level(logging.WARNING, "posterity"):
        for theta in (draws(3, 2).abs(), -draws(3, 2).abs()):
            found = target.run(stepped, target, theta, size)
            torch.testing.assert_close(found, stepped(target, theta, size))
    assert len(caplog.messages) == 1
    assert "runs one operation at a time" in caplog.text


@pytest.mark.parametrize(("number", "value"), [("LONG", 1), ("MUCH", 0)])
def test_a_variable_that_is_another_in_the_next_run_is_read_again(monkeypatch, number, value):
    """By little, seen from a far start in float32, and by half a standard deviation of the density."""
    monkeypatch.setattr(f"posterity.methods.parts.sampler.{number}", value)
    centre = 1.0
    density = po.Density(lambda x: -5000 * (x - centre).square().sum(), {"x": (2,)}, dtype=torch.float32)
    method = HMC(draws=200, warmup=200, chains=4, steps=4)
    for centre in (1.0, 1.005):
        q, _ = po.infer(method, density, None)
        assert 0.009 < float(q.theta.std()) < 0.011
        assert abs(float(q.theta.mean()) - centre) < 0.002


def test_a_problem_has_one_potential_and_may_go():
    joint, batch = regression(), rows(1)
    first = potential(joint, batch, 3)
    assert potential(joint, batch, 3) is first
    assert potential(joint, batch, 2) is not first
    other = rows(5)
    assert potential(joint, other, 3) is first
    assert first.batch is other
    gone = weakref.ref(joint)
    del joint, first
    gc.collect()
    assert gone() is None


def test_threads_with_one_problem_have_rows_of_their_own():
    joint, theta, own, other = regression(), draws(3, 18), rows(1), rows(5)
    target = potential(joint, own, 3)
    worker = threading.Thread(target=potential, args=(joint, other, 3))
    worker.start()
    worker.join()
    assert target.batch is own
    torch.testing.assert_close(target(theta), Potential(joint, own, 3)(theta), rtol=0.0, atol=0.0)
