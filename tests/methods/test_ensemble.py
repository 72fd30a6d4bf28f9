import dataclasses
import logging
import random

import numpy as np
import pytest
import torch
from contracts.cases import ROWS, classification, labels, linear_regression, numbers, regression, tunable_regression
from drawn import normal
from torch import nn

import posterity as po
from posterity.errors import Diverged
from posterity.inference import Callback, Checkpoint, Sequential
from posterity.methods import MAP, Conjugate, Ensemble, FullRank, Laplace, MeanField, OnlineLaplace
from posterity.methods.parts.subset import LargestVariance
from posterity.model.data import TensorData, as_data
from posterity.numerics import Key
from posterity.optim import SGD
from posterity.posteriors import Linearized, Mixture, Point
from posterity.priors import Normal

FLOAT64 = torch.float64


def alone(method, index, size, joint, rows, start, seed=0):
    """What `infer` does, for a method alone, at the start and in the order of rows of one member."""
    key, method = Key(seed), method.settled(joint, as_data(rows))
    joint = method.prepared(joint, as_data(rows))
    data = TensorData(joint.check(as_data(rows).first()))
    order = Ensemble(method, size).order_keys(key.fold("batches"))[index]
    method = method.settled(joint, data)
    state = method.init(joint, start, key.fold("init"))
    for step, batch in enumerate(method.batches(data, order).from_step(0)):
        state, _ = method.step(joint, state, batch, key.fold("steps").fold(step))
    return method.posterior(joint, [method.keep(state)])


WAYS = {
    "map": (MAP(steps=23, batch_size=6), regression, numbers),
    "map on all rows": (MAP(steps=9, batch_size=None), classification, labels),
    "mean field": (MeanField(steps=23, batch_size=6), regression, numbers),
    "full rank": (FullRank(steps=9, batch_size=6), classification, labels),
    "laplace": (Laplace(batch_size=6), tunable_regression, numbers),
    "laplace in turn": (Laplace(tuning=None, subset=LargestVariance(5), batch_size=6), classification, labels),
    "conjugate, in turn": (Conjugate(batch_size=6), linear_regression, numbers),
    "online laplace, in turn": (
        OnlineLaplace(MAP(steps=7, batch_size=6), Laplace(batch_size=6, tuning=None), rounds=2),
        tunable_regression,
        numbers,
    ),
}


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS.keys())
def test_a_member_is_what_the_method_gives_alone(way):
    method, problem, data = way
    joint, rows = problem(FLOAT64), data(FLOAT64)
    start = joint.initial() + 0.1 * normal(Key(7), 3, joint.size)
    q, _ = po.infer(Ensemble(method, 3), joint, rows, start=start)
    for index, component in enumerate(q.posteriors):
        own = alone(method, index, 3, joint, rows, start[index])
        assert type(component) is type(own)
        torch.testing.assert_close(component.point(), own.point(), rtol=1e-10, atol=1e-10)
        one, two = component.predict(rows[0], draws=5), own.predict(rows[0], draws=5)
        torch.testing.assert_close(one.mean, two.mean, rtol=1e-9, atol=1e-10)
        torch.testing.assert_close(one.variance, two.variance, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS.keys())
def test_members_are_tasks_for_an_executor(way):
    method, problem, data = way
    joint, rows = problem(FLOAT64), data(FLOAT64)
    ensemble = Ensemble(method, 3)
    q, trace = po.infer(ensemble, joint, rows, seed=4)
    outcomes = Sequential().run(ensemble.tasks(joint, rows, seed=4))
    apart = Mixture([outcome.posterior for outcome in outcomes])
    torch.testing.assert_close(q.point(), apart.point(), rtol=1e-10, atol=1e-10)
    one, two = q.predict(rows[0], draws=6), apart.predict(rows[0], draws=6)
    torch.testing.assert_close(one.mean, two.mean, rtol=1e-9, atol=1e-10)
    for name in trace:
        columns = torch.stack([outcome.trace[name] for outcome in outcomes], dim=1)
        torch.testing.assert_close(trace[name], columns, rtol=1e-9, atol=1e-9)


def test_tasks_begin_at_the_members_of_an_ensemble_and_see_their_own_rows(tmp_path):
    x, y = numbers(FLOAT64)
    rows = as_data((torch.stack([x, 2 * x]), torch.stack([y, -y])), per_member=True)
    joint, ensemble = regression(FLOAT64), Ensemble(MAP(steps=9, batch_size=6), 2)
    q, _ = po.infer(ensemble, joint, rows)
    again, _ = po.infer(ensemble, joint, rows, start=q)
    outcomes = Sequential().run(ensemble.tasks(joint, rows, start=q), tmp_path)
    for component, outcome in zip(again.posteriors, outcomes, strict=True):
        torch.testing.assert_close(component.theta, outcome.posterior.theta, rtol=1e-10, atol=1e-10)
    stored = Sequential().run(ensemble.tasks(joint, rows, start=q), tmp_path)
    assert all(torch.equal(a.posterior.theta, b.posterior.theta) for a, b in zip(outcomes, stored, strict=True))


class Bent(nn.Module):
    """Nothing but vmap, or a loop where it refuses, can run its members."""

    def __init__(self, refused):
        super().__init__()
        self.first, self.second, self.refused = nn.Linear(3, 5), nn.Linear(5, 1), refused

    def forward(self, x):
        if self.refused and float(x.sum()) > 1e9:
            return x
        return self.second(self.first(x).tanh()) * self.first.bias.mean()


@pytest.mark.parametrize("refused", [False, True])
def test_members_of_any_module_are_those_alone(refused):
    joint = po.Joint(Bent(refused).double(), po.likelihoods.Gaussian(0.3, learn=True), Normal(1.0), ROWS)
    rows, method = numbers(FLOAT64), MAP(steps=11, batch_size=6)
    q, _ = po.infer(Ensemble(method, 2), joint, rows)
    start = torch.stack([joint.fresh(Key(0).fold("start").fold(index)) for index in range(2)])
    for index in range(2):
        own = alone(method, index, 2, joint, rows, start[index])
        torch.testing.assert_close(q.posteriors[index].theta, own.theta, rtol=1e-10, atol=1e-10)
        assert q.posteriors[index].joint.likelihood.scale == pytest.approx(own.joint.likelihood.scale, rel=1e-10)


def test_batch_norm_has_statistics_of_each_member_and_goes_on_to_laplace():
    net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 2)).double()
    joint = po.Joint(net, po.likelihoods.Categorical(), Normal(1.0), ROWS)
    rows, method = labels(FLOAT64), MAP(steps=9, batch_size=6)
    q, _ = po.infer(Ensemble(method, 2), joint, rows)
    start = torch.stack([joint.fresh(Key(0).fold("start").fold(index)) for index in range(2)])
    own = alone(method, 1, 2, joint, rows, start[1])
    for name in own.buffers:
        torch.testing.assert_close(q.posteriors[1].buffers[name], own.buffers[name], rtol=1e-10, atol=1e-10)
    assert not torch.equal(q.buffers["1.running_mean"][0], q.buffers["1.running_mean"][1])
    laplace, _ = po.infer(Ensemble(Laplace(tuning=None), 2), joint, rows, start=q)
    single, _ = po.infer(Laplace(tuning=None), joint, rows, start=q.posteriors[1])
    assert isinstance(laplace.posteriors[1], Linearized)
    torch.testing.assert_close(
        laplace.posteriors[1].predict(rows[0]).probs, single.predict(rows[0]).probs, rtol=1e-9, atol=1e-9
    )


def test_members_begin_at_fresh_weights_and_see_rows_in_their_own_order():
    joint, rows = classification(FLOAT64), labels(FLOAT64)
    ensemble = Ensemble(MAP(steps=3, batch_size=5), 4)
    start = ensemble.initial(joint, Key(3))
    assert start.shape == (4, joint.size)
    assert len({tuple(row.tolist()) for row in start}) == 4
    batches = list(ensemble.batches(as_data(rows), Key(1)).from_step(0))
    seen = {tuple(map(float, batch.inputs[member, :, 0])) for batch in batches for member in range(4)}
    assert len(seen) == 12
    alike = list(Ensemble(MAP(steps=4, batch_size=5), 4).batches(as_data(rows), Key(1)).from_step(0))
    orders = [sorted(float(v) for batch in alike for v in batch.inputs[m, :, 0]) for m in range(4)]
    assert all(order == sorted(rows[0][:, 0].tolist()) for order in orders)  # a pass has each row once


def test_one_start_for_all_still_gives_different_members():
    joint = classification(FLOAT64)
    q, _ = po.infer(Ensemble(MAP(steps=5, batch_size=6), 2), joint, labels(FLOAT64), start=joint.initial())
    assert not torch.equal(q.posteriors[0].theta, q.posteriors[1].theta)
    q, _ = po.infer(Ensemble(MAP(steps=5, batch_size=None), 2), joint, labels(FLOAT64), start=joint.initial())
    torch.testing.assert_close(q.posteriors[0].theta, q.posteriors[1].theta)


def test_learnt_noise_goes_on_to_the_next_method():
    joint = regression(FLOAT64)
    q, _ = po.infer(Ensemble(MAP(steps=30, batch_size=6), 3), joint, numbers(FLOAT64))
    scales = [one.joint.likelihood.scale for one in q.posteriors]
    assert len(set(scales)) == 3
    assert q.joint.likelihood.scale.flatten().tolist() == pytest.approx(scales)
    laplace, _ = po.infer(Ensemble(Laplace(tuning=None), 3), joint, numbers(FLOAT64), start=q)
    assert [one.joint.likelihood.scale for one in laplace.posteriors] == pytest.approx(scales)


class Exploding(nn.Module):
    """Not finite where its one weight is beyond 5."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))

    def forward(self, x):
        return x * self.weight * torch.where(self.weight > 5.0, torch.inf, 1.0)


def explosive():
    joint = po.Joint(Exploding().double(), po.likelihoods.Gaussian(0.3, learn=True), Normal(1.0), 20)
    x = torch.linspace(-1, 1, 20, dtype=FLOAT64).unsqueeze(1)
    return joint, (x, 2 * x)


@pytest.mark.parametrize("method", [MAP(steps=9, batch_size=None), MeanField(steps=9, batch_size=6)], ids=["map", "vi"])
def test_a_member_that_diverges_is_named_and_the_others_kept(method, caplog):
    joint, rows = explosive()
    start = torch.tensor([[1.0], [9.0], [0.5], [8.0]], dtype=FLOAT64)
    with caplog.at_level(logging.WARNING, "posterity"):
        q, trace = po.infer(Ensemble(method, 4), joint, rows, start=start, validation=rows)
    (message,) = [r.getMessage() for r in caplog.records if "diverged" in r.getMessage()]
    assert "of 4 members, these diverged and are left out: 1, 3" in message
    good, _ = po.infer(Ensemble(method, 4), joint, rows, start=start.clamp_max(1.0))
    for index, place in ((0, 0), (1, 2)):
        torch.testing.assert_close(q.posteriors[index].point(), good.posteriors[place].point(), rtol=0, atol=0)
    assert len(q.posteriors) == 2
    assert bool(torch.isfinite(trace["loss"]).all())


def test_a_run_with_a_diverged_member_is_stored_and_taken_up_again(tmp_path):
    joint, rows = explosive()
    ensemble, start = Ensemble(MAP(steps=9, batch_size=6), 3), torch.tensor([[1.0], [9.0], [0.5]], dtype=FLOAT64)
    whole, _ = po.infer(ensemble, joint, rows, start=start)

    class Interrupted(Callback):
        def after_step(self, run):
            if run.step == 6:
                raise KeyboardInterrupt

    kept = Checkpoint(tmp_path, seconds=None, steps=4)
    with pytest.raises(KeyboardInterrupt):
        po.infer(ensemble, joint, rows, start=start, checkpoint=kept, callbacks=[Interrupted()])
    q, trace = po.infer(ensemble, joint, rows, start=start, checkpoint=kept)
    torch.testing.assert_close(q.point(), whole.point(), rtol=0, atol=0)
    assert len(q.posteriors) == 2
    assert len(trace["loss"]) == 9


def test_a_member_without_a_finite_curvature_is_left_out(caplog):
    joint, rows = classification(FLOAT64), labels(FLOAT64)
    good, _ = po.infer(Laplace(tuning=None), joint, rows)
    start = torch.stack([joint.initial(), torch.full_like(joint.initial(), 1e308), joint.initial()])
    with caplog.at_level(logging.WARNING, "posterity"):
        q, _ = po.infer(Ensemble(Laplace(tuning=None), 3), joint, rows, start=start)
    assert any("left out: 1 " in record.getMessage() for record in caplog.records)
    assert len(q.posteriors) == 2
    for one in q.posteriors:
        torch.testing.assert_close(one.gaussian.precision.variance(), good.gaussian.precision.variance())


def test_a_run_stops_when_no_member_is_left():
    joint, rows = explosive()
    with pytest.raises(Diverged, match="not finite at step 1"):
        po.infer(Ensemble(MAP(steps=9), 2), joint, rows, start=torch.full((2, 1), 9.0, dtype=FLOAT64))


def test_a_last_step_that_breaks_a_member_leaves_it_out(caplog):
    joint = regression(FLOAT64)
    ensemble = Ensemble(MAP(steps=1, batch_size=None, optimizer=SGD(1e-3)), 2)
    state = ensemble.init(joint, joint.initial(), Key(0))
    state.members.theta[1, 3] = torch.nan
    assert ensemble.keep(state).alive.tolist() == [True, False]
    q = ensemble.posterior(joint, [ensemble.keep(state)])
    assert len(q.posteriors) == 1
    assert "left out: 1" in caplog.text


def test_an_ensemble_of_tempered_members():
    joint = dataclasses.replace(classification(FLOAT64), tempering=po.Tempering(torch.tensor([1.0, 3.0]), 1.0))
    q, _ = po.infer(Ensemble(MAP(steps=5, batch_size=6), 2), joint, labels(FLOAT64))
    assert [float(one.joint.tempering.likelihood_power) for one in q.posteriors] == [1.0, 3.0]


def test_an_ensemble_on_a_density_begins_apart():
    density = po.Density(lambda w: -0.5 * (w - 3).square().sum(), {"w": (2,)})
    q, trace = po.infer(Ensemble(MAP(steps=2), 3), density, None)
    assert isinstance(q, Mixture)
    assert len({round(float(v), 6) for v in trace["loss"][0]}) == 3
    assert q.sample(9, Key(0)).shape == (9, 2)


def test_bytes_are_those_of_all_members():
    joint, rows = classification(torch.float32), labels(torch.float32)
    one, five = po.plan(MAP(batch_size=6), joint, rows), po.plan(Ensemble(MAP(batch_size=6), 5), joint, rows)
    for name in ("weights", "optimiser", "gradient"):  # held in every phase
        assert five.parts[name] == 5 * one.parts[name]
    assert 4 * (one.total - one.parts["data"]) < five.total - five.parts["data"] <= 5 * (one.total - one.parts["data"])
    assert five.method.startswith("Ensemble of 5, each MAP over")


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda: Ensemble(MAP(), 0), ValueError, "Ensemble.size must be a positive whole number of members. Got 0"),
        (lambda: Ensemble(MAP), TypeError, r"Ensemble.method must be a Method.*Call it: MAP\(\)"),
        (lambda: Ensemble(Ensemble(MAP())), TypeError, "Got an Ensemble"),
    ],
)
def test_what_is_no_ensemble_is_refused(make, error, words):
    with pytest.raises(error, match=words):
        make()


def test_other_numbers_of_starts_are_refused():
    joint = classification(FLOAT64)
    with pytest.raises(ValueError, match=r"Got 3 rows\. Use size=3"):
        po.infer(Ensemble(MAP(), 2), joint, labels(FLOAT64), start=joint.initial().expand(3, -1))


def test_a_layer_that_cannot_be_initialised_anew_asks_for_a_start():
    joint, rows = explosive()
    with pytest.raises(
        ValueError, match=r"no reset_parameters.*start=function\), a function that returns a new module"
    ):
        po.infer(Ensemble(MAP(), 2), joint, rows)


class Tokens(nn.Module):
    """A class token and positions without `reset_parameters`, and a frozen table."""

    def __init__(self, width=3, table=2.0):
        super().__init__()
        self.token = nn.Parameter(torch.randn(width, dtype=FLOAT64))
        self.positions = nn.Parameter(torch.tensor(np.random.randn(width)) + random.gauss(0.0, 1.0))
        self.head = nn.Linear(width, 2, dtype=FLOAT64)
        self.norm = nn.BatchNorm1d(width, dtype=FLOAT64)
        self.register_buffer("table", torch.full((width,), table, dtype=FLOAT64))

    def forward(self, x):
        return self.head(self.norm(x[:, :3] * self.table + self.token + self.positions))


def test_members_begin_at_the_modules_of_a_function():
    joint, rows = po.Joint(Tokens(), po.likelihoods.Categorical(), Normal(1.0), num_data=ROWS), labels(FLOAT64)
    before = torch.get_rng_state(), np.random.get_state()[1].copy(), random.getstate()
    fit = Ensemble(MAP(steps=1, optimizer=SGD(1e-300), batch_size=None), 3)
    q, _ = po.infer(fit, joint, rows, start=Tokens, seed=4)
    after = torch.get_rng_state(), np.random.get_state()[1], random.getstate()
    assert torch.equal(before[0], after[0])
    assert (before[1] == after[1]).all()
    assert before[2] == after[2]
    thetas = torch.stack([component.theta for component in q.posteriors])
    assert (thetas.std(0) > 0)[:12].all()  # tokens, positions and the head's weights
    torch.manual_seed(Key(4).fold("start").fold(1).seed)  # member 1 is the module under its key
    assert torch.equal(thetas[1, :3], torch.randn(3, dtype=FLOAT64))
    again, _ = po.infer(fit, joint, rows, start=Tokens, seed=4)
    assert all(torch.equal(a.theta, b.theta) for a, b in zip(q.posteriors, again.posteriors, strict=True))
    outcomes = Sequential().run(fit.tasks(joint, rows, start=Tokens, seed=4))
    assert all(torch.allclose(a.posterior.theta, b.theta) for a, b in zip(outcomes, q.posteriors, strict=True))
    single, _ = po.infer(fit.method, joint, rows, start=Tokens, seed=4)
    torch.manual_seed(Key(4).fold("start").seed)
    assert torch.equal(single.theta[:3], torch.randn(3, dtype=FLOAT64))


def test_functions_that_make_no_fresh_modules_are_refused():
    joint, rows = po.Joint(Tokens(), po.likelihoods.Categorical(), Normal(1.0), num_data=ROWS), labels(FLOAT64)
    trained = Tokens()
    for start, error, words in (
        (lambda: trained, ValueError, "two calls of the function gave the same weights"),
        (lambda: 3, TypeError, r"must return a torch.nn.Module\. Got int"),
        (lambda: Tokens(4), ValueError, "'table' is no part of theta"),
        (lambda: Tokens(table=3.0), ValueError, "'table' is no part of theta, and differs"),
        (lambda: nn.Linear(3, 2), ValueError, "'table' is no part of theta"),
        (trained, TypeError, "Leave it out: the joint begins at its module's own weights"),
    ):
        with pytest.raises(error, match=words):
            po.infer(Ensemble(MAP(), 2), joint, rows, start=start)
    with pytest.raises(ValueError, match=r"'positions' is no part of theta, and differs"):
        po.infer(Ensemble(MAP(), 2), joint.with_weights("token"), rows, start=Tokens)
    plain = po.Joint(nn.Sequential(nn.Linear(6, 2, dtype=FLOAT64)), joint.likelihood, joint.prior, ROWS)
    with pytest.raises(ValueError, match=r"'0.weight' of shape \(2, 6\). Got none"):
        po.infer(Ensemble(MAP(), 2), plain, rows, start=lambda: nn.Linear(6, 2))


def test_a_loader_gives_all_members_the_same_rows():
    rows = torch.utils.data.TensorDataset(*labels(FLOAT64))
    loader = torch.utils.data.DataLoader(rows, batch_size=10)
    q, _ = po.infer(Ensemble(MAP(steps=4), 2), classification(FLOAT64), loader)
    assert all(isinstance(one, Point) for one in q.posteriors)
