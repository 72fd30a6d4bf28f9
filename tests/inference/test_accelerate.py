"""Steps that are recorded and played: the same numbers as plain ones, and a word where it cannot be done."""

import dataclasses
import logging
import math
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import posterity as po
from posterity.inference import Callback, Checkpoint, Method, Run
from posterity.inference import acceleration as graph
from posterity.inference.acceleration import Stepper
from posterity.methods import (
    MAP,
    SGHMC,
    SGLD,
    SWAG,
    Ensemble,
    Flipout,
    LocalReparameterisation,
    LowRankGaussian,
    MCDropout,
    MeanField,
    NaturalGradient,
    RMSprop,
    ScoreFunction,
    StickTheLanding,
    WeightSampling,
)
from posterity.networks import MLP, ConcreteDropout
from posterity.numerics import Key, Layout
from posterity.numerics.random import Streams, seed
from posterity.optim import SGD, Adam, Constant, Cosine, Cycles, ScaledAdam, Schedule, StationarySGD, Steps, Warmup
from posterity.posteriors import Posterior
from posterity.priors.fan import FanIn
from posterity.storage import leaves, mapped

RECORDED = "recorded as a CUDA graph"


def problem(module: nn.Module | None = None, tempering: po.Tempering | None = None, **settings: object) -> po.Joint:
    module = module or MLP([2, 16, 3])
    return po.Joint(
        module.cuda(),
        po.likelihoods.Categorical(),
        po.priors.Normal(0.8),
        num_data=96,
        tempering=tempering or po.Tempering.bayes(),
        **settings,  # type: ignore[arg-type]
    )


def rows(device: str = "cuda") -> tuple[Tensor, Tensor]:
    x = Key(0).normal((96, 2), device="cpu")
    return x.to(device), (x[:, 0] > 0).long().to(device)


def norms() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3))


ADAM, RATES = Adam(0.01), {"schedule": Cosine(warmup=0.2), "kl_schedule": Warmup(0.5)}
METHODS = {
    "map": MAP(40, 16, ADAM),
    "map, nesterov, falling": MAP(40, 16, SGD(0.05, nesterov=True), Steps((0.3, 0.6))),
    "map, cosine": MAP(40, 16, ADAM, Cosine(warmup=0.1)),
    "map, all rows": MAP(40, None, ADAM),
    "mean field": MeanField(40, 16, ADAM),
    "mean field, schedules": MeanField(40, 16, ADAM, **RATES),  # type: ignore[arg-type]
    "mean field, mirrored": MeanField(40, 16, ADAM, estimator=WeightSampling(antithetic=True)),
    "mean field, three draws": MeanField(40, 16, ADAM, estimator=WeightSampling(draws=3)),
    "mean field, local": MeanField(40, 16, ADAM, estimator=LocalReparameterisation(draws=2)),
    "mean field, flipout": MeanField(40, 16, ADAM, estimator=Flipout()),
    "mean field, landing": MeanField(40, 16, ADAM, estimator=StickTheLanding(), **RATES),  # type: ignore[arg-type]
    "mean field, scores": MeanField(40, 16, ADAM, estimator=ScoreFunction(draws=4)),
    "natural gradient": NaturalGradient(40, 16, 0.02, optimizer=ADAM),
    "natural gradient, schedules": NaturalGradient(40, 16, 0.02, Cosine(warmup=0.2), beta2=None, radius=0.3),
    "natural gradient, mirrored": NaturalGradient(40, 16, 0.02, estimator=WeightSampling(antithetic=True)),
    "low rank": LowRankGaussian(3, 40, 16, optimizer=ADAM),
    "low rank, scaled": LowRankGaussian(3, 40, 16, optimizer=ScaledAdam(0.01), initial_scales=FanIn(0.1)),
    "swag": SWAG(MAP(40, 16, SGD(0.02)), every=3, rank=4, warmup=9),
    "swag, diagonal, stationary": SWAG(MAP(40, 16, StationarySGD(warmup=5)), every=5, rank=0, warmup=5),
    "ensemble of swag": Ensemble(SWAG(MAP(40, 16, SGD(0.02)), every=3, rank=4, warmup=9), size=2),
    "sgld": SGLD(10, 20, 3, batch_size=16, thin=2),
    "sgld, one chain in cycles": SGLD(10, 0, 1, batch_size=16, thin=2, schedule=Cycles(20, 0.5)),
    "sgld by rmsprop": SGLD(10, 20, 3, None, 16, 2, Cosine(), RMSprop()),
    "sghmc": SGHMC(10, 20, 3, batch_size=16, thin=2),
    "sghmc in cycles on all rows": SGHMC(10, 0, 3, batch_size=None, thin=2, schedule=Cycles(20, 0.5)),
}


DROPPING = {
    "dropout": (MCDropout(40, 16, ADAM), nn.Dropout(0.3)),
    "dropout, one mask a batch": (MCDropout(40, 16, ADAM, one_mask_a_batch=True), nn.Dropout(0.3)),
    "learnt rates": (MCDropout(40, 16, ADAM, Cosine()), None),
}


def dropping(drop: nn.Module | None) -> nn.Module:
    """A network that drops units, at a rate that is learnt for None."""
    first, last = nn.Linear(2, 16), nn.Linear(16, 3)
    if drop is None:
        return nn.Sequential(first, nn.ReLU(), ConcreteDropout(last))
    return nn.Sequential(first, nn.ReLU(), drop, last)


def both(
    method: Method, joint: po.Joint, caplog: pytest.LogCaptureFixture, **settings: object
) -> tuple[Posterior, Posterior]:
    """Posteriors of the recorded and of the plain run, after their traces have been compared."""
    with caplog.at_level(logging.INFO, "posterity"):
        played, trace = po.infer(method, joint, rows(), **settings)  # type: ignore[arg-type]
    assert RECORDED in caplog.text
    assert "not recorded" not in caplog.text
    plain, plain_trace = po.infer(method, joint, rows(), accelerate="off", **settings)  # type: ignore[arg-type]
    assert trace.names == plain_trace.names
    for name in trace:
        torch.testing.assert_close(trace[name], plain_trace[name], rtol=1e-4, atol=1e-5)
    return played, plain


@pytest.mark.cuda
@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
def test_recorded_steps_are_plain_ones(method: Method, caplog: pytest.LogCaptureFixture) -> None:
    played, plain = both(method, problem(), caplog)
    torch.testing.assert_close(played.point(), plain.point(), rtol=1e-4, atol=1e-5)
    x = rows()[0]
    torch.testing.assert_close(played.predict(x).mean, plain.predict(x).mean, rtol=1e-3, atol=1e-4)


@pytest.mark.cuda
@pytest.mark.parametrize("name", DROPPING)
def test_recorded_masks_are_plain_ones(name: str, caplog: pytest.LogCaptureFixture) -> None:
    method, drop = DROPPING[name]
    played, plain = both(method, problem(dropping(drop)), caplog)
    torch.testing.assert_close(played.point(), plain.point(), rtol=1e-4, atol=1e-5)


PARTS = ("map", "mean field", "natural gradient", "natural gradient, schedules", "low rank", "swag")


@pytest.mark.cuda
@pytest.mark.parametrize("method", [METHODS[name] for name in PARTS], ids=PARTS)
@pytest.mark.parametrize("kind", ["batch norm", "members", "part"])
def test_recorded_actual_step_size_other_problems(method: Method, kind: str, caplog: pytest.LogCaptureFixture) -> None:
    members = po.Tempering(1.0, torch.tensor([1.0, 0.3], device="cuda"))
    joint = {
        "batch norm": lambda: problem(norms()),
        "members": lambda: problem(tempering=members),
        "part": lambda: problem(random="2.*"),
    }[kind]()
    start = joint.initial().expand(2, -1) if kind == "members" else None
    played, plain = both(method, joint, caplog, start=start)
    torch.testing.assert_close(played.point(), plain.point(), rtol=1e-4, atol=1e-5)
    x = rows()[0]
    if kind == "members":
        played, plain = played.member(1), plain.member(1)
    torch.testing.assert_close(played.predict(x).mean, plain.predict(x).mean, rtol=1e-3, atol=1e-4)


@pytest.mark.cuda
def test_the_first_replay_on_a_busy_device_draws_its_own_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    joint, synchronize = problem(), torch.cuda.synchronize
    whole, _ = po.infer(METHODS["mean field"], joint, rows())

    def then_busy() -> None:
        """What is queued on the stream of recordings from here on runs late."""
        synchronize()
        with torch.cuda.stream(torch.cuda.graph.default_capture_stream):
            torch.cuda._sleep(200_000_000)

    monkeypatch.setattr(torch.cuda, "synchronize", then_busy)
    late, _ = po.infer(METHODS["mean field"], joint, rows())
    torch.testing.assert_close(late.point(), whole.point(), rtol=1e-4, atol=1e-5)


@pytest.mark.cuda
def test_a_run_that_is_taken_up_again_is_recorded_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Stop(Callback):
        def after_step(self, run: Run) -> None:
            if run.step == 21:
                raise RuntimeError("stop here")

    method, joint = METHODS["mean field, mirrored"], problem()
    with pytest.raises(RuntimeError, match="stop here"):
        po.infer(method, joint, rows(), checkpoint=Checkpoint(tmp_path / "run", steps=7), callbacks=[Stop()])
    again, _ = po.infer(method, joint, rows(), checkpoint=Checkpoint(tmp_path / "run", steps=7))
    whole, _ = po.infer(method, joint, rows())
    torch.testing.assert_close(again.point(), whole.point(), rtol=1e-4, atol=1e-5)


class Looks(nn.Module):
    """A module whose path depends on its numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * (2.0 if float(x.sum()) > 0 else 1.0)


@pytest.mark.cuda
def test_a_module_that_looks_at_its_numbers_runs_plainly(caplog: pytest.LogCaptureFixture) -> None:
    joint = problem(Looks())
    with caplog.at_level(logging.INFO, "posterity"):
        found, _ = po.infer(METHODS["map"], joint, rows())
    assert caplog.text.count("not recorded") == 1
    plain, _ = po.infer(METHODS["map"], joint, rows(), accelerate="off")
    torch.testing.assert_close(found.point(), plain.point(), rtol=1e-4, atol=1e-5)


@pytest.mark.cuda
def test_a_schedule_of_the_user_that_looks_at_the_step_runs_plainly(caplog: pytest.LogCaptureFixture) -> None:
    class Halves(Schedule):
        def factor(self, step: int | Tensor, steps: int) -> float | Tensor:
            return 1.0 if step < steps / 2 else 0.5

    with caplog.at_level(logging.INFO, "posterity"):
        found, _ = po.infer(MAP(40, 16, ADAM, Halves()), problem(MLP([2, 16, 3])), rows())
    assert caplog.text.count("not recorded") == 1
    assert bool(torch.isfinite(found.point()).all())


@pytest.mark.cuda
def test_torch_is_well_after_a_recording_that_failed(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Also where nothing was noticed before it began."""
    monkeypatch.setattr(graph, "nothing_read", nullcontext)

    po.infer(METHODS["map"], problem(Looks()), rows())
    assert caplog.text.count("not recorded") == 1
    assert torch.randn(3, device="cuda").isfinite().all()
    held = torch.cuda.memory_reserved()
    for _ in range(20):
        torch.empty(2**24, device="cuda")
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() <= held + 2**27  # memory is used again
    caplog.clear()
    with caplog.at_level(logging.INFO, "posterity"):
        po.infer(METHODS["map"], problem(), rows())
    assert RECORDED in caplog.text
    assert "not recorded" not in caplog.text


@pytest.mark.cuda
def test_random_numbers_of_torch_are_untouched() -> None:
    joint = problem()
    before = torch.cuda.get_rng_state()
    po.infer(METHODS["mean field"], joint, rows())
    assert torch.equal(before, torch.cuda.get_rng_state())


@pytest.mark.cpu
def test_on_a_cpu_nothing_is_recorded() -> None:
    joint = po.Joint(MLP([2, 3]), po.likelihoods.Categorical(), po.priors.Normal(1.0), num_data=96)
    method = METHODS["map"].settled(joint, po.as_data(rows("cpu")))
    step, state = Stepper(method, joint, "auto"), method.init(joint, joint.initial(), Key(0))
    batch = joint.check(po.model.Batch(*rows("cpu")))
    for index in range(6):
        state, info = step(state, batch, Key(1).fold(index))
    assert state.step == 6
    assert not step._graphs
    assert math.isfinite(float(info["loss"]))


def test_other_words_are_refused() -> None:
    joint = po.Joint(MLP([2, 3]), po.likelihoods.Categorical(), po.priors.Normal(1.0), num_data=96)
    with pytest.raises(ValueError, match="accelerate must be 'auto', 'fastest' or 'off'"):
        po.infer(METHODS["map"], joint, rows("cpu"), accelerate="always")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "schedule", [Constant(), Warmup(0.3), Warmup(0.0), Cosine(), Cosine(0.25, 0.1), Steps((0.2, 0.8), 0.3)], ids=repr
)
def test_schedules_of_tensors_are_those_of_numbers(schedule: Schedule) -> None:
    for step in (0, 1, 9, 10, 25, 39, 40):
        given = torch.tensor(float(step), dtype=torch.float64)
        assert float(schedule.factor(given, 40)) == pytest.approx(float(schedule.factor(step, 40)), rel=1e-6)


@pytest.mark.parametrize("optimizer", [SGD(0.1), SGD(0.1, nesterov=True), Adam(0.1)], ids=repr)
def test_step_sizes_may_be_tensors(optimizer: po.optim.Optimizer) -> None:
    moved = []
    for size in (0.05, torch.tensor(0.05, dtype=torch.float64)):
        theta = torch.ones(3)
        state = optimizer.init(theta)
        for _ in range(2):
            state = optimizer.ascend(theta, torch.tensor([1.0, -2.0, 3.0]), state, size, 2.0)
        moved.append(theta)
    torch.testing.assert_close(moved[0], moved[1])


@pytest.mark.cuda
@pytest.mark.parametrize("optimizer", [ADAM, SGD(0.01), SGD(0.01, nesterov=True)], ids=repr)
@pytest.mark.parametrize("kind", ["laplace", "group lasso", "members"])
def test_recorded_proximal_steps(optimizer: po.optim.Optimizer, kind: str, caplog: pytest.LogCaptureFixture) -> None:
    rates = torch.tensor([2.0, 9.0], device="cuda")
    prior = {
        "laplace": po.priors.Laplace(0.1),
        "group lasso": po.priors.Layerwise({"*.weight": po.priors.GroupLasso(9.0), "*": po.priors.Normal(1.0)}),
        "members": po.priors.GroupLasso(rates),
    }[kind]
    joint = dataclasses.replace(problem(), prior=prior)
    start = joint.initial().expand(2, -1) if kind == "members" else None
    played, plain = both(MAP(40, 16, optimizer, Cosine(), proximal=True), joint, caplog, start=start)
    torch.testing.assert_close(played.point(), plain.point(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("optimizer", [SGD(0.1), SGD(0.1, nesterov=True), Adam(0.1)], ids=repr)
@pytest.mark.parametrize("prior", [po.priors.Laplace(0.1), po.priors.GroupLasso(5.0)], ids=["laplace", "groups"])
def test_step_sizes_of_proximal_steps_may_be_tensors(optimizer: po.optim.Optimizer, prior: po.priors.Prior) -> None:
    proximal, moved = prior.bound(Layout.of({"weight": (2, 2)})).proximal, []
    for size in (0.05, torch.tensor(0.05, dtype=torch.float64)):
        theta = torch.ones(4)
        state = optimizer.init(theta)
        for _ in range(4):
            grad = torch.tensor([1.0, -2.0, 3.0, -9.0])
            state = optimizer.ascend_proximal(theta, grad, state, size, 2.0, proximal)
        moved.append((theta, *state))
    for one, other in zip(*moved, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("optimizer", [SGD(0.1), Adam(0.1)], ids=repr)
def test_a_proximal_step_of_size_zero_moves_nothing(optimizer: po.optim.Optimizer) -> None:
    for size in (0.0, torch.tensor(0.0)):
        theta = torch.tensor([1.0, -2.0, 0.0, 4.0])
        state = optimizer.init(theta)
        state = optimizer.ascend_proximal(theta, torch.ones(4), state, size, 1.0, po.priors.Laplace(0.1).proximal)
        assert theta.tolist() == [1.0, -2.0, 0.0, 4.0]
        assert all(bool(torch.isfinite(part).all()) for part in state)


def test_streams_are_seeded_as_the_work_would() -> None:
    def work(key: Key) -> Tensor:
        return torch.cat([key.normal((2,)), key.fold("a").fold(3).uniform((2,)), key.fold("a").fold(3).normal((1,))])

    first = Key(5)
    with Streams(first) as streams:
        assert torch.equal(work(first), torch.cat([work(first)]))
    own = [torch.Generator(device=stream.device) for stream in streams.asked]
    seed(streams.asked, own, Key(6))
    with Streams(first, streams.asked, own):
        found = torch.cat([work(first), work(first)])
    assert torch.equal(found, torch.cat([work(Key(6))] * 2))


def test_streams_refuse_other_draws() -> None:
    key = Key(5)
    with Streams(key) as streams:
        key.fold("a").normal((1,))
    own = [torch.Generator(device=stream.device) for stream in streams.asked]
    with Streams(key, streams.asked, own), pytest.raises(RuntimeError, match="other random numbers"):
        key.fold("b").normal((1,))
    with Streams(key), pytest.raises(RuntimeError, match="not its own"):
        Key(6).normal((1,))
    assert torch.equal(key.normal((1,)), Key(5).normal((1,)))


def test_leaves_and_mapped_have_one_order() -> None:
    state = {"b": (1, [torch.ones(1), None]), "a": Key(2), "c": po.methods.maximum_a_posteriori.MAPState(1, (), {}, 4)}  # type: ignore[arg-type]
    found: list[object] = []
    mapped(lambda leaf: found.append(leaf), state)
    assert [id(leaf) for leaf in leaves(state).values()] == [id(leaf) for leaf in found]
    assert list(leaves(state)) == ["b.0", "b.1.0", "b.1.1", "a", "c.theta", "c.step"]
