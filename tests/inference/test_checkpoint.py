"""When runs are stored, which folders are refused, and samplers that keep draws."""

import signal
from dataclasses import dataclass, replace
from importlib import import_module
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
from contracts.cases import classification, labels, linear_regression, numbers, regression
from killedruns import KilledError
from torch import Tensor

import posterity as po
from posterity.errors import BadFolder
from posterity.inference import Callback, Checkpoint, EarlyStopping, Method, Traits
from posterity.methods import MAP, Laplace
from posterity.posteriors import Posterior
from posterity.storage import RunFolder

FLOAT64 = torch.float64
module = import_module("posterity.inference.checkpoint")


class At(Callback):
    """Calls `act` after one step."""

    def __init__(self, step, act):
        self.step, self.act = step, act

    def after_step(self, run):
        if run.step == self.step:
            self.act()


def kill():
    raise KilledError


@pytest.fixture
def writes(monkeypatch):
    """The steps at which a run was written."""
    steps, write = [], module.Checkpointer.write

    def noting(self, run):
        steps.append(run.step)
        write(self, run)

    monkeypatch.setattr(module.Checkpointer, "write", noting)
    return steps


@pytest.mark.parametrize(
    ("checkpoint", "expected"),
    [
        ({"steps": 3, "seconds": None}, [3, 6, 9, 10]),
        ({"steps": 5, "seconds": None}, [5, 10]),
        ({"steps": None, "seconds": None}, [10]),
        ({"steps": None, "seconds": 1e6}, [10]),
        ({}, [10]),
        ({"least": 1e-9}, [10]),
        ({"least": 1e6}, []),
        ({"least": 1e6, "steps": 4}, [4, 8]),
    ],
    ids=str,
)
def test_written_every_so_many_steps_and_at_the_end(checkpoint, expected, writes, tmp_path):
    po.infer(MAP(steps=10), regression(FLOAT64), numbers(FLOAT64), checkpoint=Checkpoint(tmp_path, **checkpoint))
    assert writes == expected


@pytest.mark.parametrize(("steps", "expected"), [(None, [4, 8, 10]), (3, [3, 6, 9, 10])])
def test_written_when_time_has_passed(steps, expected, writes, monkeypatch, tmp_path):
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: clock.now))

    class Tick(Callback):
        def after_step(self, run):
            clock.now += 15.0

    po.infer(
        MAP(steps=10),
        regression(FLOAT64),
        numbers(FLOAT64),
        checkpoint=Checkpoint(tmp_path, seconds=60.0, steps=steps),
        callbacks=[Tick()],
    )
    assert writes == expected


def test_a_resumed_run_keeps_the_cadence(writes, tmp_path):
    checkpoint = Checkpoint(tmp_path, steps=3, seconds=None)
    with pytest.raises(KilledError):
        po.infer(MAP(steps=10), regression(FLOAT64), numbers(FLOAT64), checkpoint=checkpoint, callbacks=[At(8, kill)])
    po.infer(MAP(steps=10), regression(FLOAT64), numbers(FLOAT64), checkpoint=checkpoint)
    assert writes == [3, 6, 9, 10]


def test_a_run_that_stops_early_is_written_then(writes, tmp_path):
    class Stop(Callback):
        def after_step(self, run):
            run.stopped = "enough" if run.step == 4 else ""

    checkpoint = Checkpoint(tmp_path, seconds=None)
    q, _ = po.infer(MAP(steps=9), regression(FLOAT64), numbers(FLOAT64), checkpoint=checkpoint, callbacks=[Stop()])
    assert writes == [4]
    again, _ = po.infer(MAP(steps=9), regression(FLOAT64), numbers(FLOAT64), checkpoint=checkpoint)
    assert torch.equal(again.point(), q.point())  # it stays stopped


def test_a_path_is_a_checkpoint(writes, tmp_path):
    po.infer(MAP(steps=2), regression(FLOAT64), numbers(FLOAT64), checkpoint=str(tmp_path / "run"))
    assert writes == [2]
    assert RunFolder(tmp_path / "run").parts() == ("run", "state", "trace")


@pytest.mark.parametrize("options", [{"steps": 0}, {"steps": 2.0}, {"seconds": -1.0}, {"least": 0.0}], ids=str)
def test_bad_cadence_is_refused(options):
    (name,) = options
    with pytest.raises(ValueError, match=rf"Checkpoint\.{name} must be a positive (whole )?number or None"):
        Checkpoint("run", **options)


def test_a_finished_run_is_not_run_again(monkeypatch, tmp_path):
    q, trace = po.infer(MAP(steps=4), regression(FLOAT64), numbers(FLOAT64), checkpoint=tmp_path)
    monkeypatch.setattr(MAP, "step", lambda *_: kill())
    again, again_trace = po.infer(MAP(steps=4), regression(FLOAT64), numbers(FLOAT64), checkpoint=tmp_path)
    assert torch.equal(again.point(), q.point())
    assert again.joint.likelihood == q.joint.likelihood
    assert torch.equal(again_trace["loss"], trace["loss"])


def other(**changes):
    """The arguments of a run with some of them changed."""
    arguments = {
        "method": MAP(steps=4),
        "joint": regression(FLOAT64),
        "data": numbers(FLOAT64),
        "seed": 0,
        "start": None,
        "validation": None,
        "callbacks": (),
    }
    arguments.update(changes)
    return arguments


def shifted(rows):
    return rows[0] + 1.0, rows[1]


OTHER_RUNS = {
    "method": other(method=MAP(steps=4, batch_size=6)),
    "seed": other(seed=1),
    "data": other(data=shifted(numbers(FLOAT64))),
    "model": other(joint=replace(regression(FLOAT64), prior=po.priors.Normal(0.9))),
    "start": other(start=torch.zeros(regression(FLOAT64).size, dtype=FLOAT64)),
    "validation": other(validation=numbers(FLOAT64)),
    "callbacks": other(validation=numbers(FLOAT64), callbacks=[EarlyStopping()]),
}


@pytest.mark.parametrize("name", OTHER_RUNS)
def test_a_folder_of_another_run_is_refused(name, tmp_path):
    def fit(method, joint, data, **options):
        return po.infer(method, joint, data, checkpoint=tmp_path, **options)

    fit(**other(validation=numbers(FLOAT64) if name == "callbacks" else None))
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    with pytest.raises(BadFolder, match=f"holds another run: its {name}.*Use another folder, or delete") as caught:
        fit(**OTHER_RUNS[name])
    assert "\n" not in str(caught.value)
    assert before == {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}


@pytest.mark.parametrize(
    ("joint", "message"),
    [
        (classification(FLOAT64), "its model"),
        (regression(FLOAT64).with_weights("2.*"), "its model"),
        (replace(regression(FLOAT64), random="2.*"), "its model"),
    ],
    ids=["network", "weights", "random"],
)
def test_a_folder_of_another_model_is_refused(joint, message, tmp_path):
    po.infer(MAP(steps=2), regression(FLOAT64), numbers(FLOAT64), checkpoint=tmp_path)
    data = labels(FLOAT64) if joint.likelihood.num_free == 0 else numbers(FLOAT64)
    with pytest.raises(BadFolder, match=rf"holds another run: its (data|{message[4:]})"):
        po.infer(MAP(steps=2), joint, data, checkpoint=tmp_path)


def test_methods_are_shown_when_they_differ(tmp_path):
    po.infer(Laplace(tuning=None), linear_regression(FLOAT64), numbers(FLOAT64), checkpoint=tmp_path)
    with pytest.raises(BadFolder, match=r"its method differs: 'Laplace\(.*, now 'MAP\(steps=2"):
        po.infer(MAP(steps=2), linear_regression(FLOAT64), numbers(FLOAT64), checkpoint=tmp_path)


def test_a_posterior_may_be_saved_beside_its_checkpoint(tmp_path):
    q, _ = po.infer(MAP(steps=4), regression(FLOAT64), numbers(FLOAT64), checkpoint=tmp_path)
    q.save(tmp_path)
    assert torch.equal(po.load(tmp_path, regression(FLOAT64).network._module).point(), q.point())
    again, _ = po.infer(MAP(steps=4), regression(FLOAT64), numbers(FLOAT64), checkpoint=tmp_path)
    assert torch.equal(again.point(), q.point())
    assert "posterior" in RunFolder(tmp_path).parts()


def interrupt():
    signal.raise_signal(signal.SIGINT)


@pytest.fixture
def keyboard():
    """Ctrl-C as a terminal has it; a job in the background may have begun with it ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("keyboard")
def test_ctrl_c_finishes_the_step_and_stores_the_run(writes, tmp_path):
    whole, whole_trace = po.infer(MAP(steps=9), regression(FLOAT64), numbers(FLOAT64))
    with pytest.raises(KeyboardInterrupt):
        po.infer(MAP(steps=9), regression(FLOAT64), numbers(FLOAT64), checkpoint=tmp_path, callbacks=[At(4, interrupt)])
    assert writes == [4]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    resumed, trace = po.infer(MAP(steps=9), regression(FLOAT64), numbers(FLOAT64), checkpoint=tmp_path)
    assert torch.equal(resumed.point(), whole.point())
    assert torch.equal(trace["loss"], whole_trace["loss"])


@pytest.mark.usefixtures("keyboard")
def test_ctrl_c_in_the_middle_of_a_step_stores_no_half_of_it(writes, monkeypatch, tmp_path):
    adam, calls = po.optim.Adam, []
    ascend = adam.ascend

    def interrupted(self, theta, grad, state, step_size, divisor):
        calls.append(None)
        if len(calls) == 3:
            interrupt()
        return ascend(self, theta, grad, state, step_size, divisor)

    whole, _ = po.infer(MAP(steps=6), regression(FLOAT64), numbers(FLOAT64))
    monkeypatch.setattr(adam, "ascend", interrupted)
    with pytest.raises(KeyboardInterrupt):
        po.infer(MAP(steps=6), regression(FLOAT64), numbers(FLOAT64), checkpoint=tmp_path)
    assert writes == [3]
    resumed, _ = po.infer(MAP(steps=6), regression(FLOAT64), numbers(FLOAT64), checkpoint=tmp_path)
    assert torch.equal(resumed.point(), whole.point())


@pytest.mark.usefixtures("keyboard")
def test_a_second_ctrl_c_does_not_wait(writes, tmp_path):
    def twice():
        interrupt()
        interrupt()

    with pytest.raises(KeyboardInterrupt):
        po.infer(MAP(steps=6), regression(FLOAT64), numbers(FLOAT64), checkpoint=tmp_path, callbacks=[At(2, twice)])
    assert writes == []
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.usefixtures("keyboard")
def test_ctrl_c_without_a_checkpoint_stops_at_once():
    seen = []
    with pytest.raises(KeyboardInterrupt):
        po.infer(
            MAP(steps=6),
            regression(FLOAT64),
            numbers(FLOAT64),
            callbacks=[At(2, interrupt), At(2, lambda: seen.append("after"))],
        )
    assert seen == []


@pytest.mark.usefixtures("keyboard")
def test_a_handler_of_somebody_else_is_left_alone(tmp_path):
    caught = []
    signal.signal(signal.SIGINT, lambda *_: caught.append("theirs"))
    po.infer(MAP(steps=3), regression(FLOAT64), numbers(FLOAT64), checkpoint=tmp_path, callbacks=[At(2, interrupt)])
    assert caught == ["theirs"]


# A sampler from outside the library: it needs nothing of the core but Method and Posterior.


class Walk(NamedTuple):
    theta: Tensor  # (chains, P)
    log_density: Tensor  # (chains,)
    accepted: int


@dataclass(frozen=True, eq=False)
class Draws(Posterior):
    joint: po.Joint
    theta: Tensor  # (S, P)

    @property
    def buffers(self):
        return {}

    def point(self):
        return self.theta.mean(0)

    def sample(self, draws, key):
        return self.theta[torch.randint(len(self.theta), (draws,), generator=key.generator())]

    def outputs(self, inputs, draws, key):
        return self.joint.outputs(self.sample(draws, key), inputs)


@dataclass(frozen=True)
class RandomWalk(Method):
    """Random-walk Metropolis; chains are members, warm-up is thrown away."""

    draws: int = 40
    warmup: int = 10
    chains: int = 3
    scale: float = 0.05

    def batches(self, data, key):
        return data.minibatches(None, self.warmup + self.draws, key)

    def initial(self, joint, key):
        return torch.stack([joint.network.fresh(key.fold(chain)) for chain in range(self.chains)])

    def init(self, joint, theta, key):
        theta = theta.expand(self.chains, -1).clone()
        return Walk(theta, torch.full((self.chains,), -torch.inf, dtype=theta.dtype), 0)

    def step(self, joint, state, batch, key):
        proposal = state.theta + self.scale * key.fold("move").normal(tuple(state.theta.shape), state.theta.dtype)
        value = joint.log_density(proposal, batch).detach()
        chance = key.fold("accept").uniform((self.chains,), state.theta.dtype).log()
        accept = chance < value - state.log_density
        state.theta[accept] = proposal[accept]  # in place, as a step may
        log_density = torch.where(accept, value, state.log_density)
        after = Walk(state.theta, log_density, state.accepted + int(accept.sum()))
        return after, {"accept": accept.double().mean(), "log_density": log_density}

    @property
    def traits(self):
        return Traits(kept_steps=range(self.warmup + 1, self.warmup + self.draws + 1))

    def keep(self, state):
        return state._replace(log_density=None)

    def posterior(self, joint, kept):
        return Draws(joint, torch.cat([state.theta for state in kept]).to(joint.device))  # kept on the CPU


def sample(**options):
    return po.infer(RandomWalk(), linear_regression(FLOAT64), numbers(FLOAT64), **options)


def test_a_sampler_keeps_its_draws_in_order():
    q, trace = sample()
    assert q.theta.shape == (40 * 3, 4)
    assert trace["accept"].shape == (50,)
    assert trace["log_density"].shape == (50, 3)
    last, _ = po.infer(RandomWalk(draws=1, warmup=49), linear_regression(FLOAT64), numbers(FLOAT64))
    assert torch.equal(q.theta[-3:], last.theta)
    first, _ = po.infer(RandomWalk(draws=1, warmup=10), linear_regression(FLOAT64), numbers(FLOAT64))
    assert torch.equal(q.theta[:3], first.theta)
    assert 0.05 < float(trace["accept"].mean()) < 1.0


def test_every_step_draws_anew():
    @dataclass(frozen=True)
    class Dice(RandomWalk):
        def step(self, joint, state, batch, key):
            return state, {"draw": key.normal((), FLOAT64)}

    _, trace = po.infer(Dice(), linear_regression(FLOAT64), numbers(FLOAT64))
    assert len(set(trace["draw"].tolist())) == 50
    _, other = po.infer(Dice(), linear_regression(FLOAT64), numbers(FLOAT64), seed=1)
    assert not set(trace["draw"].tolist()) & set(other["draw"].tolist())


def test_chains_begin_at_fresh_weights_of_their_own_and_elsewhere_when_told():
    q, _ = po.infer(RandomWalk(draws=1, warmup=0, scale=1e-9), linear_regression(FLOAT64), numbers(FLOAT64))
    assert (q.theta[0] - q.theta[1]).abs().min() > 1e-3
    start = linear_regression(FLOAT64).initial()
    told, _ = po.infer(
        RandomWalk(draws=1, warmup=0, scale=1e-9), linear_regression(FLOAT64), numbers(FLOAT64), start=start
    )
    torch.testing.assert_close(told.theta, start.expand(3, -1), rtol=0.0, atol=1e-7)


@pytest.mark.parametrize("kills", [[5], [10], [11], [24], [7, 13, 14, 37]], ids=str)
def test_a_killed_sampler_goes_on_exactly(kills, tmp_path):
    whole, whole_trace = sample()
    checkpoint = Checkpoint(tmp_path, steps=3)
    for step in kills:
        with pytest.raises(KilledError):
            sample(checkpoint=checkpoint, callbacks=[At(step, kill)])
    resumed, trace = sample(checkpoint=checkpoint)
    assert torch.equal(resumed.theta, whole.theta)
    for name in whole_trace:
        assert torch.equal(trace[name], whole_trace[name])
    finished, _ = sample(checkpoint=tmp_path)
    assert torch.equal(finished.theta, whole.theta)


def test_each_draw_is_written_once(tmp_path):
    sample(checkpoint=Checkpoint(tmp_path, steps=20, seconds=None))
    folder = RunFolder(tmp_path)
    shards = [name for name in folder.parts() if name.startswith("kept-")]
    assert shards == ["kept-000000000", "kept-000000010", "kept-000000030"]
    assert [len(folder.read(name).tensors) for name in shards] == [10, 20, 10]


def test_a_run_without_kept_draws_yet_gives_the_last_state():
    class Stop(Callback):
        def after_step(self, run):
            run.stopped = "during warm-up" if run.step == 4 else ""

    q, _ = sample(callbacks=[Stop()])
    assert q.theta.shape == (3, 4)


def test_a_sampler_predicts_like_any_other():
    q, _ = sample()
    pred = q.predict(numbers(FLOAT64)[0], draws=10)
    assert pred.mean.shape == (20, 1)
    assert bool((pred.epistemic > 0).all())
