"""Samplers at densities, starts, settings and data that cannot work: they stop, and say where."""

import dataclasses
import logging
import math
import sys

import pytest
import torch
from contracts.cases import inputs, numbers, regression
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import posterity as po
from posterity.errors import BadData, Diverged
from posterity.inference import Checkpoint
from posterity.kernels.adaptation import DenseMass, DiagonalMass
from posterity.likelihoods import Gaussian
from posterity.methods import HMC, MALA, MAMS, MCLMC, NUTS, ChEES, Langevin, Metropolis
from posterity.methods.parts.chains import warn_of_doubtful
from posterity.priors import Normal

FLOAT64 = torch.float64
NUMBERS = {"draws": 12, "warmup": 20, "chains": 3, "thin": 1}
EACH = {
    "NUTS": NUTS(**NUMBERS, max_depth=6),
    "HMC": HMC(**NUMBERS, steps=5),
    "ChEES": ChEES(**NUMBERS, max_steps=8),
    "MAMS": MAMS(**NUMBERS, max_steps=4),
    "MCLMC": MCLMC(**NUMBERS),
    "MALA": MALA(**NUMBERS),
    "Langevin": Langevin(**NUMBERS, step_size=0.05),
    "Metropolis": Metropolis(**NUMBERS),
}
each = pytest.mark.parametrize("method", EACH.values(), ids=EACH)
exact = pytest.mark.parametrize("name", [name for name in EACH if name not in ("Langevin", "MCLMC")])


def density(function, **shapes):
    return po.Density(function, shapes or {"x": (2,)}, dtype=FLOAT64)


def normal(x):
    return -0.5 * x.square().sum()


def beyond(value, edge=0.5):
    """A normal density whose logarithm is `value` where the first number exceeds the edge."""
    return density(lambda x: torch.where(x[0] > edge, value, normal(x)))


def run(method, problem, data=None, **settings):
    return po.infer(method, problem, data, accelerate="off", progress=False, **settings)


@each
@pytest.mark.parametrize(
    ("value", "said"), [(math.nan, "a log density of nan"), (math.inf, "of inf"), (-math.inf, "zero density")]
)
def test_a_start_without_a_density_is_named_by_chain(method, value, said):
    start = torch.zeros(3, 2, dtype=FLOAT64)
    start[1, 0] = 1.0
    with pytest.raises(Diverged, match=rf"Chain 1 starts at .*{said}.*step 1") as caught:
        run(method, beyond(value), start=start)
    assert (caught.value.step, caught.value.tensor) == (1, "the log density")
    assert caught.value.posterior is None
    assert "\n" not in str(caught.value)


def test_a_gradient_that_is_not_finite_is_named_by_chain_and_tensor():
    problem = density(lambda a, b: normal(a) + b.abs().sqrt().sum() - b.abs().sum(), a=(2,), b=(3,))
    start = torch.ones(3, 5, dtype=FLOAT64)
    start[2, 4] = 0.0
    with pytest.raises(Diverged, match="in 'b' is not finite where chain 2 starts, at step 1") as caught:
        run(EACH["HMC"], problem, start=start)
    assert (caught.value.step, caught.value.tensor) == (1, "b")


@exact
@pytest.mark.parametrize("value", [math.nan, -math.inf])
def test_proposals_without_a_density_are_rejected_and_counted(name, value):
    method = dataclasses.replace(EACH[name], draws=60)
    q, _ = run(method, beyond(value), start=torch.zeros(2, dtype=FLOAT64))
    assert bool(torch.isfinite(q.theta).all())
    assert float(q.theta[..., 0].max()) <= 0.5
    assert bool(q.statistics["divergent"].any())
    assert bool(torch.isfinite(q.statistics["log_density"]).all())


@exact
def test_a_thinned_run_forgets_no_divergence(name):
    start, problem = torch.zeros(2, dtype=FLOAT64), beyond(math.nan)
    every, trace = run(dataclasses.replace(EACH[name], draws=60), problem, start=start)
    fifth, _ = run(dataclasses.replace(EACH[name], draws=12, thin=5), problem, start=start)
    whole = every.statistics["divergent"]
    assert int(whole[:, 4::5].sum()) < int(whole.unflatten(1, (-1, 5)).any(-1).sum())  # some came in between
    assert torch.equal(fifth.statistics["divergent"], whole.unflatten(1, (-1, 5)).any(-1))
    thinned = every.thinned(5)
    assert torch.equal(thinned.theta, fifth.theta)
    assert thinned.statistics.keys() == fifth.statistics.keys()
    for key, values in thinned.statistics.items():
        assert torch.equal(values, fifth.statistics[key]), key
    assert torch.equal(trace["divergent"][-60:].T.bool(), whole)  # the trace has every transition for itself


@each
def test_an_infinite_density_stops_the_chain_that_comes_there(method):
    method = dataclasses.replace(method, draws=300)
    with pytest.raises(Diverged, match=r"Chain \d came to a log density of inf at step \d+") as caught:
        run(method, beyond(math.inf), start=torch.zeros(2, dtype=FLOAT64))
    assert caught.value.tensor == "the log density"
    kept = caught.value.posterior
    if caught.value.step > method.warmup + 1:
        assert kept.num_draws == caught.value.step - method.warmup - 1
        assert float(kept.theta[..., 0].max()) <= 0.5
    else:
        assert kept is None


def test_nothing_accepted_langevin_stops_where_the_density_is_no_number():
    with pytest.raises(Diverged, match="came to a log density of nan at step"):
        run(EACH["Langevin"], beyond(math.nan), start=torch.zeros(2, dtype=FLOAT64))


@exact
@pytest.mark.parametrize("slope", [0.0, 1.0], ids=["flat", "rising"])
def test_a_chain_of_an_improper_density_runs_off_by_name(name, slope):
    method = dataclasses.replace(EACH[name], draws=200, warmup=200)
    with pytest.raises(Diverged, match=r"Chain \d ran off at step \d+: '[ab]' is .*may be improper") as caught:
        run(method, density(lambda a, b: slope * (a.sum() + b.sum()), a=(1,), b=(2,)))
    assert caught.value.tensor in ("a", "b")
    assert "\n" not in str(caught.value)


def test_draws_before_a_chain_ran_off_are_in_the_error(tmp_path):
    """A drift of s a step: beyond 1e15 at a step that can be told beforehand."""
    problem = density(lambda x: 1e14 * x.sum())
    method = Langevin(draws=20, warmup=2, chains=3, thin=2, step_size=1.0)
    with pytest.raises(Diverged, match="ran off at step 10: 'x' is 1e") as caught:
        run(method, problem, start=torch.zeros(2, dtype=FLOAT64), checkpoint=Checkpoint(tmp_path / "run", steps=1))
    assert (caught.value.step, caught.value.stored) == (10, 9)
    assert caught.value.posterior.theta.shape == (3, 3, 2)  # steps 4, 6 and 8
    assert caught.value.posterior.theta[0, :, 0].tolist() == pytest.approx([4e14, 6e14, 8e14], rel=1e-9)


def test_draws_after_the_step_that_is_named_are_left_out_where_looks_are_rare(monkeypatch):
    """As on a GPU, where a run has gone on for some steps."""
    loop = sys.modules["posterity.inference.infer"]  # the function of this name hides the module
    looked = loop.check_loss

    def rarely(joint, trace, state, count, row):
        if len(trace["loss"]) % 8 == 0:
            looked(joint, trace, state, len(trace["loss"]), row)

    monkeypatch.setattr(loop, "check_loss", rarely)
    method = Langevin(draws=30, warmup=2, chains=3, thin=1, step_size=1.0)
    with pytest.raises(Diverged, match="ran off at step 10") as caught:
        run(method, density(lambda x: 1e14 * x.sum()), start=torch.zeros(2, dtype=FLOAT64))
    assert caught.value.posterior.num_draws == 7  # steps 3 to 9


def test_langevin_finds_its_step_size_where_scales_differ(caplog):
    """Standard deviations of 0.01, 1 and 30, the last two correlated: no one step size would do."""
    covariance = torch.tensor([[1e-4, 0.0, 0.0], [0.0, 1.0, 15.0], [0.0, 15.0, 900.0]], dtype=FLOAT64)
    precision = torch.linalg.inv(covariance)
    problem = density(lambda x: -0.5 * (x @ precision * x).sum(-1), x=(3,))
    with caplog.at_level("WARNING", "posterity"):
        q, trace = run(Langevin(draws=40, warmup=500, chains=60, thin=15), problem)
    deviations = q.theta.flatten(0, 1).std(0) / covariance.diagonal().sqrt().cpu()
    assert float((deviations - 1.0).abs().max()) < 0.06  # a bias of at most 0.026, and the noise of 2,400 draws
    assert not caplog.text
    sizes = trace["step_size"][-1]
    assert bool((sizes == sizes[0]).all())
    assert float(sizes[0]) == pytest.approx(0.1 * (1.0 - 0.5), rel=0.2)  # inverse of the largest curvature


def test_chains_that_have_not_mixed_are_said(caplog):
    wells = density(lambda x: torch.logaddexp(normal(x - 20.0), normal(x + 20.0)), x=(1,))
    start = torch.tensor([[-20.0], [20.0]], dtype=FLOAT64)
    with caplog.at_level("WARNING", "posterity"):
        run(Langevin(draws=50, warmup=0, chains=2, thin=2, step_size=0.3), wells, start=start)
    assert "chains have not mixed: the largest R-hat of a weight is" in caplog.text
    caplog.clear()
    with caplog.at_level("WARNING", "posterity"):
        run(Langevin(draws=40, warmup=0, chains=2, thin=10, step_size=0.6), density(normal, x=(1,)))
    assert not caplog.text


def test_langevin_with_too_large_a_step_stops_at_the_step_that_leaves():
    problem = density(lambda a, b: normal(a) + 1e4 * normal(b), a=(1,), b=(1,))
    with pytest.raises(Diverged, match=r"Chain \d ran off at step (\d): 'b' is") as caught:
        run(Langevin(draws=100, warmup=0, chains=2, thin=1, step_size=1.0), problem)
    # b is multiplied by 1 - 1e4 in each step, from a number near 1.
    assert caught.value.step == 4
    assert caught.value.posterior.num_draws == 3


@exact
@pytest.mark.parametrize(("step_size", "change"), [(1e6, "lower step_size"), (1e-40, "raise step_size")])
def test_chains_that_never_move_are_told(name, step_size, change, caplog):
    settings = {"max_depth": 2} if name == "NUTS" else {}
    method = dataclasses.replace(EACH[name], step_size=step_size, warmup=2, **settings)
    with caplog.at_level(logging.WARNING, "posterity"):
        q, _ = run(method, density(normal))
    assert bool((q.theta == q.theta[:, :1]).all())
    assert f"{name}: all 3 chains never moved" in caplog.text
    assert change in caplog.text


@exact
def test_a_uniform_number_of_0_takes_no_proposal_that_is_much_worse(name, monkeypatch):
    """One of 2^24 numbers in float32 is 0, whose logarithm is below every ratio."""
    settings = {"NUTS": {"max_depth": 1, "step_size": 6.0}, "HMC": {"steps": 1, "step_size": 6.0}}
    settings["ChEES"] = {"max_steps": 1, "step_size": 6.0}
    sizes = settings.get(name, {"step_size": 20.0})
    method = dataclasses.replace(EACH[name], draws=1, warmup=0, chains=100, **sizes)
    monkeypatch.setattr(torch, "rand", lambda *shape, generator=None, **kind: torch.zeros(*shape, **kind))
    q, _ = run(method, density(normal), start=torch.zeros(2, dtype=FLOAT64))
    moved = (q.theta[:, 0] != 0.0).any(-1)
    accept = q.statistics["accept"][:, 0]
    assert bool(moved.any())
    assert bool((accept < 1e-9).any())
    assert torch.equal(moved, accept > 2.0**-25)


def test_nobody_is_told_to_raise_a_step_size_at_which_proposals_are_refused(caplog):
    no = torch.zeros(2, 10)
    told = {"accept": no + 0.3, "divergent": no.bool(), "leapfrogs": no + 3, "log_density": no}
    with caplog.at_level(logging.WARNING, "posterity"):
        warn_of_doubtful("HMC", torch.zeros(2, 10, 1), told)
    assert "lower step_size" in caplog.text


def test_divergences_and_single_chains_are_told(caplog):
    theta, no = torch.randn(3, 10, 2), torch.zeros(3, 10)
    theta[1] = theta[1, :1]
    told = {"accept": no + 0.5, "divergent": no.bool(), "leapfrogs": no + 3, "log_density": no}
    told["divergent"][2, 4:] = True
    with caplog.at_level(logging.WARNING, "posterity"):
        warn_of_doubtful("HMC", theta, told)
    first, second = caplog.messages
    assert "chains 1 never moved" in first
    assert "6 of 30 transitions diverged" in second


def test_good_chains_are_told_nothing_of(caplog):
    with caplog.at_level(logging.WARNING, "posterity"):
        run(NUTS(draws=150, warmup=100, chains=4), density(normal))
    assert not caplog.messages


@pytest.mark.parametrize("name", ["NUTS", "HMC"])
def test_a_density_that_rises_without_end_is_told(name, caplog):
    method = dataclasses.replace(EACH[name], draws=100, warmup=30)
    with caplog.at_level(logging.WARNING, "posterity"):
        run(method, density(lambda x: x.square().sum()))
    assert "3 of 3 chains has not come to rest" in caplog.text


@exact
def test_no_warmup_and_no_step_size_is_told_with_the_size(name, caplog):
    with caplog.at_level(logging.WARNING, "posterity"):
        q, _ = run(dataclasses.replace(EACH[name], warmup=0), density(normal))
    size = float(q.statistics["step_size"][0, 0])
    assert f"{name} has no warm-up to learn its step size in: it stays at the first guess, {size:.3g}" in caplog.text
    caplog.clear()
    run(dataclasses.replace(EACH[name], warmup=0, step_size=0.5), density(normal))
    assert "warm-up" not in caplog.text


@each
@pytest.mark.parametrize(
    "settings",
    [{"draws": -1}, {"draws": 2.5}, {"chains": 0}, {"thin": 0}]
    + [{"step_size": size} for size in (0.0, -0.1, math.nan, math.inf, "small")],
    ids=str,
)
def test_settings_that_cannot_be_are_named(method, settings):
    (name,) = settings
    with pytest.raises(ValueError, match=rf"{type(method).__name__}\.{name} must be a positive .* Got"):
        dataclasses.replace(method, **settings)


@exact
@pytest.mark.parametrize("rate", [0.0, 1.0, -0.5, math.nan, None])
def test_an_acceptance_that_cannot_be_is_named(name, rate):
    with pytest.raises(ValueError, match=rf"{name}\.target_accept must be .* below 1\. Got"):
        dataclasses.replace(EACH[name], target_accept=rate)


def test_other_settings_of_one_sampler_are_named():
    with pytest.raises(ValueError, match=r"NUTS\.max_depth must be a positive whole number\. Got 0"):
        NUTS(max_depth=0)
    with pytest.raises(ValueError, match=r"HMC\.steps must be a positive whole number\. Got 0"):
        HMC(steps=0)
    with pytest.raises(ValueError, match=r"HMC\.jitter must be"):
        HMC(jitter=1.0)
    for kind in (NUTS, HMC, MALA, Metropolis):
        with pytest.raises(TypeError, match=rf"{kind.__name__}\.mass must be .*DiagonalMass.* Call it: DenseMass\(\)"):
            kind(mass=DenseMass)
        with pytest.raises(TypeError, match=rf"{kind.__name__}\.mass must be .* Got 'dense'"):
            kind(mass="dense")


@pytest.mark.parametrize(
    ("start", "said"),
    [
        (torch.zeros(5, dtype=FLOAT64), r"start must have 2 entries"),
        (torch.zeros(2, 2, dtype=FLOAT64), r"NUTS\.chains is 3, so start must be .* Got 2 rows\. Use chains=2"),
        (torch.zeros(3, 3, 2, dtype=FLOAT64), r"start must have 2 entries"),
        (torch.zeros(2), r"dtype"),
        (torch.full((2,), math.nan, dtype=FLOAT64), r"finite.* 'x'"),
    ],
)
def test_a_start_that_does_not_fit_is_refused(start, said):
    with pytest.raises(ValueError, match=said):
        run(EACH["NUTS"], density(normal), start=start)


def test_problems_that_do_not_fit_the_data_are_refused():
    with pytest.raises(ValueError, match="data"):
        run(EACH["NUTS"], regression(FLOAT64), None)
    with pytest.raises(ValueError, match="data"):
        run(EACH["NUTS"], density(normal), numbers(FLOAT64))


def test_batch_norm_is_refused_with_advice():
    module = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)).to(FLOAT64)
    joint = po.Joint(module, Gaussian(0.3), Normal(), num_data=len(inputs(FLOAT64)))
    with pytest.raises(ValueError, match=r"HMC needs .* batch norm.* Use group or layer norm, .*or use SGHMC"):
        run(EACH["HMC"], joint, numbers(FLOAT64))


def test_members_and_chains_must_be_as_many():
    joint = dataclasses.replace(regression(FLOAT64), prior=Normal(torch.tensor([1.0, 2.0], dtype=FLOAT64)))
    with pytest.raises(ValueError, match=r"NUTS.chains is 3, and the joint has 2 members.* chains=2\."):
        run(EACH["NUTS"], joint, numbers(FLOAT64))
    q, _ = run(dataclasses.replace(EACH["MALA"], chains=2), joint, numbers(FLOAT64))
    assert q.theta.shape == (2, 12, joint.size)


@pytest.mark.parametrize("source", ["loader", "dataset"])
def test_rows_of_a_loader_are_all_in_every_transition(source):
    x, y = numbers(FLOAT64)
    rows = Listed(x, y) if source == "dataset" else DataLoader(TensorDataset(x, y), batch_size=3)
    whole, _ = run(EACH["HMC"], regression(FLOAT64), (x, y))
    streamed, _ = run(EACH["HMC"], regression(FLOAT64), rows)
    torch.testing.assert_close(streamed.theta, whole.theta, rtol=0, atol=0)


def test_a_loader_that_leaves_rows_out_is_refused():
    x, y = numbers(FLOAT64)
    size = next(size for size in range(2, len(x)) if len(x) % size)
    with pytest.raises(BadData, match="drop_last"):
        run(EACH["HMC"], regression(FLOAT64), DataLoader(TensorDataset(x, y), batch_size=size, drop_last=True))


class Listed(torch.utils.data.Dataset):
    """Rows that must be asked for one by one."""

    def __init__(self, x, y):
        self.x, self.y = x, y

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        return self.x[index], self.y[index]


class Stop(po.inference.Callback):
    """The user interrupts after a step."""

    def __init__(self, step):
        self.step = step

    def after_step(self, run):
        if run.step == self.step:
            raise KeyboardInterrupt


def interrupted_equals_whole(tmp_path, method, problem, data, stop, accelerate="off"):
    whole, trace = po.infer(method, problem, data, accelerate=accelerate)
    settings = {"checkpoint": Checkpoint(tmp_path / "run", steps=1), "accelerate": accelerate}
    with pytest.raises(KeyboardInterrupt):
        po.infer(method, problem, data, callbacks=[Stop(stop)], **settings)
    again, said = po.infer(method, problem, data, **settings)
    assert torch.equal(whole.theta, again.theta)
    assert all(torch.equal(whole.statistics[name], again.statistics[name]) for name in whole.statistics)
    assert torch.equal(trace["loss"], said["loss"])


@pytest.mark.parametrize("stop", [7, 20, 21, 25])  # within the warm-up, at its end, and after it
@pytest.mark.parametrize("mass", [DiagonalMass(), DenseMass()], ids=repr)
def test_an_interrupted_run_ends_with_the_same_bits(tmp_path, mass, stop):
    method = dataclasses.replace(EACH["NUTS"], mass=mass, draws=6, max_depth=4)
    interrupted_equals_whole(tmp_path, method, density(normal), None, stop)


@pytest.mark.parametrize(("number", "value"), [("LONG", 1), ("MUCH", 0)])
def test_a_compiled_run_ends_with_the_same_bits(tmp_path, monkeypatch, number, value):
    monkeypatch.setattr(f"posterity.methods.parts.sampler.{number}", value)
    method = HMC(draws=6, warmup=20, chains=2, steps=4)
    interrupted_equals_whole(tmp_path, method, regression(FLOAT64), numbers(FLOAT64), 15, accelerate="auto")


@pytest.mark.parametrize(
    ("name", "step", "effort"), [("ChEES", 150, "recorded"), ("ChEES", 500, "compiled"), ("NUTS", 150, "compiled")]
)
def test_chains_in_step_are_not_compiled_for_the_length_of_their_first_trajectories(name, step, effort):
    method = dataclasses.replace(EACH[name], draws=1000, warmup=1000, chains=4)
    problem = density(normal)
    state = method.init(problem, torch.zeros(2, dtype=FLOAT64), po.Key(0))
    state = state._replace(step=step, leapfrogs=50 * step)  # 50 a transition, if that went on
    assert method.traits.effort(problem, state) == effort
