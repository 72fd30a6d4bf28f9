"""What SGLD and SGHMC share: steps, cycles, chains, batch norm, and how they fail."""

import dataclasses
import math

import pytest
import torch
from contracts.cases import classification, inputs, labels, numbers, regression
from torch import nn

import posterity as po
from posterity.errors import Diverged
from posterity.inference import Checkpoint
from posterity.inference.kept import kept_bytes
from posterity.likelihoods import Gaussian
from posterity.methods import MAP, SGHMC, SGLD, Ensemble, Plain, RMSprop
from posterity.methods.parts.minibatch_chains import chain_gradients
from posterity.model import Batch
from posterity.numerics import Key
from posterity.optim import SGD, Constant, Cosine, Cycles
from posterity.priors import Normal

FLOAT64 = torch.float64
each_kind = pytest.mark.parametrize("kind", [SGLD, SGHMC])
each_rule = pytest.mark.parametrize("rule", [Plain(), RMSprop()], ids=repr)


def kept_steps(method):
    return sorted(method.traits.kept_steps)


def test_every_thin_th_step_after_the_warmup_is_kept():
    method = SGLD(draws=3, warmup=4, thin=2)
    assert method.steps == 10
    assert kept_steps(method) == [6, 8, 10]


@pytest.mark.parametrize(
    ("settings", "kept"),
    [
        ({"draws": 4, "warmup": 0, "thin": 1}, [9, 10, 19, 20]),
        ({"draws": 3, "warmup": 0, "thin": 1}, [9, 10, 19]),
        ({"draws": 2, "warmup": 0, "thin": 2}, [10, 20]),
        ({"draws": 2, "warmup": 1, "thin": 1}, [19, 20]),
        ({"draws": 1, "warmup": 20, "thin": 2}, [30]),
    ],
)
def test_draws_come_from_the_sampling_part_of_cycles_only(settings, kept):
    method = SGLD(schedule=Cycles(length=10, explore=0.8), **settings)
    assert kept_steps(method) == kept
    assert method.steps == kept[-1]
    assert all(method.schedule.samples(step - 1) for step in kept)


@each_kind
@each_rule
def test_a_cycle_explores_without_noise_and_samples_with_it(kind, rule):
    """Two keys give the same numbers while there is no noise."""
    joint, batch = regression(FLOAT64), regression(FLOAT64).check(Batch(*numbers(FLOAT64)))
    cycles = Cycles(length=10, explore=0.5)
    method = kind(draws=5, chains=2, schedule=cycles, step_size=1e-4, warmup=1, thin=1, preconditioner=rule)
    for step, alike in ((0, True), (4, True), (5, False), (9, False), (10, True)):
        state = method.init(joint, joint.initial(), Key(0))._replace(step=step)
        first, second = (method.step(joint, state, batch, Key(seed))[0].theta for seed in (1, 2))
        assert torch.equal(first, second) == alike
    assert method.init(joint, joint.initial(), Key(0)).theta.shape == (2, joint.size)


@each_kind
@each_rule
@pytest.mark.parametrize("schedule", [Constant(), Cosine(warmup=0.2), Cycles(length=7, explore=0.5)], ids=repr)
@pytest.mark.parametrize("dtype", [torch.float32, FLOAT64], ids=str)
def test_a_step_number_that_is_a_tensor_does_the_same_to_the_bit(kind, rule, schedule, dtype):
    """As in a recorded step, which reads no tensor; 3 and 4 are before and after the end of the warm-up."""
    joint = regression(dtype)
    batch = joint.check(Batch(*numbers(dtype)))
    method = kind(draws=4, warmup=4, chains=2, thin=2, schedule=schedule, preconditioner=rule)
    for step in (0, 3, 4, 9):
        states = [
            method.init(joint, joint.initial(), Key(0))._replace(step=count)
            for count in (step, torch.tensor(float(step), dtype=FLOAT64))
        ]
        (one, said), (two, other) = (method.step(joint, state, batch, Key(1)) for state in states)
        assert torch.equal(one.theta, two.theta)
        assert (one.known is None and two.known is None) or torch.equal(one.known, two.known)
        assert one.theta.dtype == two.theta.dtype == dtype
        assert type(one.step) is int
        assert said.keys() == other.keys()
        for name in said:
            assert said[name].shape == other[name].shape == (2,)
            assert torch.equal(said[name], other[name])


def test_a_learning_rate_of_sgd_converts():
    """Without noise, SGLD is gradient ascent on the mean log density, at any temperature of the likelihood."""
    tempering = po.Tempering.cold(0.5)
    joint = dataclasses.replace(regression(FLOAT64), tempering=tempering)
    size = SGLD.step_size_for(0.02, joint)
    assert size == pytest.approx(0.02 / (20 * 2.0))
    cycles = Cycles(length=100, explore=0.9, final=0.99)
    method = SGLD(draws=1, warmup=0, chains=1, step_size=size, batch_size=None, thin=1, schedule=cycles)
    _, trace = po.infer(method, joint, numbers(FLOAT64), start=joint.initial())
    plain = dataclasses.replace(joint, tempering=po.Tempering.bayes())
    fit = MAP(steps=10, batch_size=None, optimizer=SGD(0.02, momentum=0.0))
    _, wanted = po.infer(fit, plain, numbers(FLOAT64))
    torch.testing.assert_close(trace["loss"][:10, 0] / 2.0, wanted["loss"], rtol=1e-3, atol=0.0)
    assert float(wanted["loss"][0] - wanted["loss"][-1]) > 0.1


@pytest.mark.parametrize(("rule", "rate"), [(Plain(), 0.03), (RMSprop(), 0.001)], ids=repr)
def test_usual_step_sizes_follow_from_a_learning_rate(rule, rate):
    joint = regression(FLOAT64)
    data = po.as_data(numbers(FLOAT64))
    assert SGLD(preconditioner=rule).settled(joint, data).step_size_at(joint, 0) == pytest.approx(rate / 20)
    sghmc = SGHMC(preconditioner=rule, momentum=0.75, schedule=Cosine()).settled(joint, data)
    assert sghmc.step_size_at(joint, 0) == pytest.approx((0.5 * rate / 20) ** 0.5)
    assert sghmc.step_size_at(joint, sghmc.steps // 2) == pytest.approx(0.5 * (0.5 * rate / 20) ** 0.5)


def test_sghmc_moves_as_sgd_with_momentum():
    """Under a constant gradient both come to lr / (1 - momentum) a step, but for a factor (1 + momentum) / 2."""
    density = po.Density(lambda x: 3.0 * x.sum(), {"x": (1,)}, dtype=FLOAT64)
    size = SGHMC.step_size_for(0.01, density)
    assert size == pytest.approx(0.1)
    cycles = Cycles(length=100_000, explore=0.99, final=0.9)
    method = SGHMC(draws=1, warmup=0, chains=1, step_size=size, thin=1, schedule=cycles, momentum=0.9)
    state = method.init(density, density.initial(), Key(0))
    for step in range(300):
        before, state = state.theta, method.step(density, state, None, Key(step))[0]
    assert float(state.theta - before) == pytest.approx(3.0 * 0.01 / 0.1 * 0.95, rel=1e-3)


def test_the_preconditioner_is_a_mean_of_squares_that_rests_after_the_warmup():
    density = po.Density(lambda x: (x * torch.tensor([2.0, 0.0], dtype=FLOAT64)).sum(), {"x": (2,)}, dtype=FLOAT64)
    method = SGLD(1, 3, 1, 0.01, thin=2, preconditioner=RMSprop(decay=0.5, damping=0.25))
    state = method.init(density, density.initial(), Key(0))
    known = []
    for step in range(5):
        before, key = state.theta, Key(step)
        state, _ = method.step(density, state, None, key)
        matrix = 1.0 / (torch.tensor([2.0, 0.0], dtype=FLOAT64) + 0.25)  # the mean of equal squares, from the first on
        noise = key.normal((1, 2), torch.float32).double()
        moved = 0.01 * matrix * torch.tensor([2.0, 0.0], dtype=FLOAT64) + (0.02 * matrix).sqrt() * noise
        torch.testing.assert_close(state.theta - before, moved)
        known.append(float(state.known[0, 0]))
    assert known == pytest.approx([2.0, 3.0, 3.5, 3.5, 3.5])


@each_kind
def test_chains_have_noise_and_rows_of_their_own(kind):
    method = kind(draws=2, warmup=1, chains=3, batch_size=6, thin=1, step_size=1e-4)
    joint = regression(FLOAT64)
    q, trace = po.infer(method, joint, numbers(FLOAT64), start=joint.initial())
    first = trace["loss"][0]  # all from one start: batches differ
    assert len(set(first.tolist())) == 3
    assert q.theta.shape == (3, 2, joint.size)
    batches = list(method.batches(po.as_data(numbers(FLOAT64)), Key(0)).from_step(0))
    assert batches[0].per_member
    assert batches[0].targets.shape == (3, 6, 1)
    on_all, trace = po.infer(
        dataclasses.replace(method, batch_size=None), joint, numbers(FLOAT64), start=joint.initial()
    )
    assert len(set(trace["loss"][0].tolist())) == 1
    assert not torch.equal(on_all.theta[0], on_all.theta[1])


def test_chains_begin_at_weights_of_their_own_unless_told():
    joint = regression(FLOAT64)
    theta = SGLD(chains=3).initial(joint, Key(2))
    assert theta.shape == (3, joint.size)
    assert not torch.equal(theta[0], theta[1])
    with pytest.raises(ValueError, match=r"SGLD\.chains is 4, .* Got 3 rows\. Use chains=3\."):
        po.infer(SGLD(), joint, numbers(FLOAT64), start=theta)


def normed() -> po.Joint:
    torch.manual_seed(0)
    layers = nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 1)
    return po.Joint(nn.Sequential(*layers).double(), Gaussian(0.3), Normal(1.0), num_data=20)


@each_kind
@pytest.mark.parametrize("chains", [1, 3])
def test_every_draw_has_its_batch_norm_statistics(kind, chains):
    method = kind(draws=3, warmup=1, chains=chains, batch_size=6, thin=2, step_size=1e-3)
    q, _ = po.infer(method, normed(), numbers(FLOAT64))
    mean = q.buffers["1.running_mean"]
    assert mean.shape == (chains, 3, 4)
    assert len({tuple(row.tolist()) for row in mean.reshape(-1, 4)}) == 3 * chains
    x = inputs(FLOAT64, 5)
    wanted = [
        q.joint.outputs(q.theta[c, d].to(x.device), x, {name: b[c, d].to(x.device) for name, b in q.buffers.items()})
        for c in range(chains)
        for d in range(3)
    ]
    torch.testing.assert_close(q.outputs(x, 3 * chains, Key(0)), torch.stack(wanted))


def test_one_chain_alone_is_one_of_many():
    joint = normed()
    batch = joint.check(Batch(*numbers(FLOAT64)))
    theta = joint.initial().unsqueeze(0)
    buffers = {name: b.unsqueeze(0) for name, b in joint.network.buffers.items()}
    alone = chain_gradients(joint, theta, batch, buffers)
    among = joint.value_and_grad(theta, batch, buffers)
    torch.testing.assert_close(alone[:2], among[:2])
    for name in among[2]:
        torch.testing.assert_close(alone[2][name], among[2][name])


@each_kind
@each_rule
def test_a_step_size_too_large_names_chain_step_and_tensor(kind, rule, tmp_path):
    density = po.Density(lambda a, b: -(a.cosh() + b.cosh()), {"a": (), "b": ()}, dtype=FLOAT64)
    method = kind(draws=50, warmup=1, chains=3, step_size=10.0, thin=1, preconditioner=rule)
    with pytest.raises(Diverged, match=r"step \d+ \(first seen in (a|b) of chain [012]\)") as caught:
        po.infer(method, density, None, checkpoint=Checkpoint(tmp_path, steps=1))
    error = caught.value
    assert error.tensor in ("a", "b")
    assert error.stored == error.step - 1  # what was drawn until then is in the folder


def test_the_chain_that_breaks_is_named():
    density = po.Density(lambda x: -0.5 * x.square().sum(), {"x": (2,)}, dtype=FLOAT64)
    start = torch.zeros(4, 2, dtype=FLOAT64)
    start[2, 1] = 1e200  # finite, but its log density is not
    with pytest.raises(Diverged, match=r"step 1 \(first seen in the log-likelihood of the batch of chain 2\)"):
        po.infer(SGLD(chains=4, step_size=0.1), density, None, start=start)
    steep = po.Density(lambda x, y: -(x**4 + y**4).sum(), {"x": (), "y": ()}, dtype=FLOAT64)
    start[2, 1] = 0.0
    start[1:, 1] = torch.tensor([1e120, 0.0, 0.0], dtype=FLOAT64)
    with pytest.raises(Diverged, match=r"step 1 \(first seen in y of chain 1\)"):
        po.infer(SGLD(chains=4, step_size=0.1), steep, None, start=start)


def test_weights_that_are_points_are_refused():
    joint = classification(FLOAT64).with_weights(random="2.*")
    with pytest.raises(ValueError, match=r"SGHMC samples all weights, but the joint has some as points.*with_weights"):
        po.infer(SGHMC(), joint, labels(FLOAT64))


@each_kind
def test_an_ensemble_of_chains_is_refused(kind):
    with pytest.raises(
        TypeError, match=r"Ensemble\.method must be one that fits\. Got \w+, whose chains .* more chains"
    ):
        Ensemble(kind(chains=2), size=3)


def test_memory_counts_chains_and_draws():
    joint, data = regression(FLOAT64), po.as_data(numbers(FLOAT64))
    method = SGLD(draws=10, chains=3)
    kept = kept_bytes(joint, 3, 9, statistics=0)  # the last draw is the state
    assert list(kept.values()) == [9 * 3 * joint.size * 8]
    assert kept.items() <= method.footprint(joint, data).parts.items()
    assert "SGLD over" in method.footprint(joint, data).words
    assert "3 chains of 10 draws" in method.footprint(joint, data).words


@each_kind
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"draws": 0}, r"draws must be a positive whole number\. Got 0"),
        ({"chains": 1.5}, r"chains must be a positive whole number\. Got 1\.5"),
        ({"thin": -1}, r"thin must be a positive whole number\. Got -1"),
        ({"warmup": -1}, r"warmup must be a whole number of at least 0\. Got -1"),
        ({"step_size": -0.1}, r"step_size must be a positive number or None\. Got -0\.1"),
        ({"step_size": math.inf}, r"step_size must be a positive number or None\. Got inf"),
        ({"step_size": torch.ones(2)}, r"step_size must be a positive number or None\. Got tensor"),
        ({"batch_size": 0}, r"batch_size must be a positive whole number of rows"),
        ({"schedule": 3}, r"schedule must be of kind Schedule\. Got 3"),
        ({"preconditioner": RMSprop}, r"preconditioner must be of kind Preconditioner\. .* Call it: RMSprop\(\)"),
        (
            {"schedule": Cycles(length=20), "thin": 6},
            r"thin must be at most the 5 steps of a cycle that sample\. Got 6",
        ),
    ],
)
def test_bad_settings_are_refused(kind, settings, message):
    with pytest.raises((ValueError, TypeError), match=rf"{kind.__name__}\.{message}"):
        kind(**settings)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: SGHMC(momentum=1.0), r"SGHMC\.momentum must be at least 0 and below 1"),
        (lambda: SGLD(warmup=0, preconditioner=RMSprop()), r"SGLD\.warmup must be .*: RMSprop is learnt in it\. Got 0"),
        (lambda: RMSprop(decay=1.0), r"RMSprop\.decay must be at least 0 and below 1"),
        (lambda: RMSprop(damping=0.0), r"RMSprop\.damping must be a positive number"),
        (lambda: Cycles(length=0), r"Cycles\.length must be a positive whole number of steps"),
        (lambda: Cycles(length=5, explore=1.0), r"Cycles\.explore must be at least 0 and below 1"),
        (lambda: Cycles(length=5, final=-0.1), r"Cycles\.final must be at least 0 and below 1"),
    ],
)
def test_other_bad_settings_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@each_kind
@pytest.mark.parametrize("batch_size", [None, 5])
def test_chain_by_chain_data_are_problems_by_chain(kind, batch_size):
    """The mean of ones, twos and threes: each chain goes to that of its own rows."""
    y = torch.tensor([1.0, 2.0, 3.0], dtype=FLOAT64).reshape(3, 1, 1).expand(3, 20, 1)
    joint = po.Joint(nn.Linear(1, 1, bias=False).double(), Gaussian(0.05), Normal(100.0), num_data=20)
    data = po.as_data((torch.ones_like(y), y), per_member=True)
    method = kind(
        draws=20, warmup=200, chains=3, batch_size=batch_size, thin=5, step_size=kind.step_size_for(1e-3, joint)
    )
    q, _ = po.infer(method, joint, data)
    torch.testing.assert_close(
        q.theta.mean((1, 2)), torch.tensor([1.0, 2.0, 3.0], dtype=FLOAT64, device="cpu"), atol=0.05, rtol=0.0
    )
    with pytest.raises(ValueError, match=r"one row of theta for each of the 3 members of the data\. Got 2"):
        po.infer(dataclasses.replace(method, chains=2), joint, data)
