"""States that a run keeps: in memory, in a file, in blocks from a GPU; taken up again, and saved from a wreck."""

import logging
import math
import os
from dataclasses import dataclass
from typing import NamedTuple

import pytest
import torch
from contracts.cases import linear_regression, numbers
from torch import Tensor

import posterity as po
from posterity.errors import Diverged
from posterity.inference import Checkpoint, Method, Traits, kept
from posterity.inference.kept import Kept, kept_bytes, memory_for_kept, stacked
from posterity.posteriors import Samples

FLOAT64 = torch.float64


class Draw(NamedTuple):
    theta: Tensor
    log_density: Tensor
    divergent: Tensor
    steps: int
    nothing: None = None
    buffers: dict = {}  # noqa: RUF012  never written


def draw(number, chains=2, size=3):
    theta = torch.arange(float(chains * size), dtype=FLOAT64, device="cpu").reshape(chains, size) + 100.0 * number
    return Draw(theta, theta.sum(-1), theta[:, 0] > 250.0, number)


class At(po.inference.Callback):
    """Do something after one step."""

    def __init__(self, step, action):
        self.step, self.action = step, action

    def after_step(self, run):
        if run.step == self.step:
            self.action(run)


class StoppedError(Exception):
    """Stands for a kill."""


@dataclass(frozen=True)
class Wander(Method):
    """Draws around zero; breaks at a step if told."""

    draws: int = 20
    warmup: int = 5
    chains: int = 3
    breaks: int = 0
    silent: bool = False

    def batches(self, data, key):
        return data.minibatches(None, self.warmup + self.draws, key)

    def init(self, joint, theta, key):
        theta = theta.expand(self.chains, -1).clone()
        return Draw(theta, theta.sum(-1), theta[:, 0] > 0.0, 0)

    def step(self, joint, state, batch, key):
        theta = state.theta.copy_(0.5 * state.theta + key.normal(tuple(state.theta.shape), FLOAT64))
        broken = state.steps + 1 == self.breaks
        if broken:
            theta[1, 2] = math.nan
        info = {} if self.silent else {"loss": math.nan if broken else 1.0}
        return Draw(theta, -theta.square().sum(-1), theta[:, 0] > 0.0, state.steps + 1), info

    @property
    def traits(self):
        return Traits(kept_steps=range(self.warmup + 1, self.warmup + self.draws + 1))

    def keep(self, state):
        return state

    def posterior(self, joint, kept):
        together = stacked(kept)
        theta, value = together.theta.transpose(0, 1), together.log_density.transpose(0, 1)
        return Samples(joint, theta, {"log_density": value, "steps": together.steps.expand(theta.shape[:2])})


def wander(method=None, **options):
    return po.infer(method or Wander(), linear_regression(FLOAT64), numbers(FLOAT64), **options)[0]


@pytest.fixture
def streams(monkeypatch):
    """A machine on which no state is small enough for memory."""
    monkeypatch.setattr(kept, "memory_for_kept", lambda: 0)


def equal(one, other):
    assert type(one) is type(other)
    for left, right in zip(one, other, strict=True):
        assert torch.equal(left, right) if isinstance(left, Tensor) else left == right


# The list


def filled(count, **options):
    states = Kept(**options)
    for number in range(count):
        states.append(draw(number))
    return states


@pytest.mark.parametrize("expected", [0, 3, 40, 100])
def test_states_come_back_in_order(expected):
    states = filled(40, expected=expected)
    assert len(states) == 40
    for number, state in enumerate(states):
        equal(state, draw(number))
    equal(states[-1], draw(39))
    assert [state.steps for state in states[37:]] == [37, 38, 39]
    with pytest.raises(IndexError):
        states[40]
    assert not Kept()


def test_states_are_copies():
    state, states = draw(1), Kept(2)
    states.append(state)
    state.theta.zero_()
    states.append(draw(2))
    equal(states[0], draw(1))


def test_stacked_states_are_those_of_the_list_without_a_copy():
    states = filled(20, expected=20)
    together, plain = stacked(states), stacked(list(states))
    equal(together, plain)
    assert together.theta.shape == (20, 2, 3)
    assert together.steps.tolist() == list(range(20))
    assert together.divergent.dtype == torch.bool
    assert together.nothing is None
    assert together.theta.data_ptr() == states[0].theta.data_ptr() == stacked(states.first(5)).theta.data_ptr()
    assert plain.theta.data_ptr() != together.theta.data_ptr()
    assert len(states.first(5)) == 5


def test_states_that_change_their_shape_are_refused():
    states = filled(2)
    for odd in (draw(3, chains=3), draw(3)._replace(theta=draw(3).theta.float()), draw(3)._replace(theta=None)):
        with pytest.raises(TypeError, match=r"same tensors each time.*'theta'"):
            states.append(odd)
    assert len(states) == 2


@pytest.mark.parametrize("block", [1, 7, 64])
def test_states_of_a_gpu_wait_and_move_in_blocks(block, monkeypatch):
    monkeypatch.setattr(kept, "_on_cpu", lambda tensors: False)
    monkeypatch.setattr(kept, "BLOCK", block)
    states = Kept(20)
    for number in range(20):
        states.append(draw(number))
        assert len(states) == number + 1
    assert len(states._waiting) == 20 % block
    for number, state in enumerate(states):
        equal(state, draw(number))
    assert not states._waiting
    states.append(draw(20))
    assert stacked(states).steps.tolist() == list(range(21))


def test_few_large_states_wait(monkeypatch):
    monkeypatch.setattr(kept, "_on_cpu", lambda tensors: False)
    monkeypatch.setattr(kept, "WAITING", 3 * (6 * 8 + 2 * 8 + 2))
    states = filled(8)
    assert len(states._waiting) == 2
    assert [state.steps for state in states] == list(range(8))


def test_the_finite_ones_are_counted(monkeypatch):
    monkeypatch.setattr(kept, "LOOK", 16)  # two states at a time
    states = filled(9)
    assert states.num_finite() == 9
    for place in (5, 3):
        states[place].theta[0, 1] = math.inf
        assert states.num_finite() == place
    assert Kept().num_finite() == 0


# In a file


@pytest.mark.usefixtures("streams")
@pytest.mark.parametrize("expected", [0, 20])
def test_states_in_a_file_are_the_same(expected, tmp_path, caplog):
    caplog.set_level(logging.INFO, "posterity")
    states = filled(20, expected=expected, folder=tmp_path)
    assert "they go to a file in" in caplog.text
    for number, state in enumerate(states):
        equal(state, draw(number))
    equal(stacked(states), stacked([draw(number) for number in range(20)]))
    assert not list(tmp_path.iterdir())  # it has no name any more


@pytest.mark.cpu
@pytest.mark.usefixtures("streams")
@pytest.mark.skipif(not os.path.exists("/proc/self/maps"), reason="needs a system that lists its mapped files")
def test_the_file_goes_with_the_last_tensor_on_it(tmp_path):
    def is_mapped():
        with open("/proc/self/maps") as lines:
            return str(tmp_path) in lines.read()

    states = filled(20, folder=tmp_path)
    theta = stacked(states).theta.transpose(0, 1)
    assert is_mapped()
    del states
    assert is_mapped()
    assert float(theta[1, 19, 2]) == 1905.0
    del theta
    assert not is_mapped()


@pytest.mark.cpu
def test_a_run_that_streams_gives_the_same_bits(monkeypatch, tmp_path):
    plain = wander()
    monkeypatch.setattr(kept, "memory_for_kept", lambda: 0)
    streamed = wander()
    stored = wander(checkpoint=Checkpoint(tmp_path / "run", steps=4))
    for q in (streamed, stored):
        assert torch.equal(q.theta, plain.theta)
        assert torch.equal(q.statistics["log_density"], plain.statistics["log_density"])
    streamed.save(tmp_path / "q")
    assert torch.equal(po.load(tmp_path / "q", linear_regression(FLOAT64).network.module).theta, plain.theta)


@pytest.mark.parametrize("kills", [[3], [5], [6], [14, 15, 22]], ids=str)
@pytest.mark.usefixtures("streams")
def test_a_killed_run_that_streams_goes_on_exactly(kills, tmp_path):
    def kill(run):
        raise StoppedError

    whole = wander()
    for step in kills:
        with pytest.raises(StoppedError):
            wander(checkpoint=Checkpoint(tmp_path, steps=3), callbacks=[At(step, kill)])
    resumed = wander(checkpoint=Checkpoint(tmp_path, steps=3))
    assert torch.equal(resumed.theta, whole.theta)
    assert torch.equal(resumed.statistics["steps"], whole.statistics["steps"])
    assert not [name for name in os.listdir(tmp_path) if name.startswith(".tmp")]


@pytest.mark.usefixtures("streams")
def test_more_states_than_the_disk_holds_are_refused_before_the_first_step(monkeypatch, tmp_path):
    monkeypatch.setattr(kept.shutil, "disk_usage", lambda path: type("Usage", (), {"free": 100}))
    message = r"20 kept states take \d.* free in '.*run'.*Keep fewer \(draws=, thin=\), or give checkpoint= a folder"
    with pytest.raises(ValueError, match=message):
        wander(checkpoint=tmp_path / "new" / "run", callbacks=[At(1, lambda run: pytest.fail("a step was made"))])
    assert len(wander(Wander(draws=0)).theta) == 3  # nothing is kept but the last state


@pytest.mark.cpu
def test_bytes_of_draws_are_at_most_what_memory_has_for_them(monkeypatch):
    joint = linear_regression(FLOAT64)
    assert kept_bytes(joint, 4, 1000, statistics=2) == {"draws": 4 * 1000 * (joint.size * 8 + 16)}
    monkeypatch.setattr(kept, "memory_for_kept", lambda: 5000)
    assert kept_bytes(joint, 4, 1000) == {"draws": 5000}
    assert memory_for_kept() > 1 << 28


# What a run that breaks has kept


@pytest.mark.parametrize("silent", [False, True])
def test_a_run_that_breaks_hands_over_what_it_kept(silent):
    whole = wander()
    with pytest.raises(Diverged, match=r"is in the error \(error\.posterior\)\.$") as caught:
        wander(Wander(breaks=17, silent=silent))
    posterior = caught.value.posterior
    assert posterior.num_draws == 17 - 5 - 1  # neither the warm-up nor the draw that broke it
    assert torch.equal(posterior.theta, whole.theta[:, :11])
    assert bool(torch.isfinite(posterior.predict(numbers(FLOAT64)[0]).mean).all())


def test_a_run_that_breaks_before_it_kept_anything_has_nothing_to_hand_over():
    with pytest.raises(Diverged, match=r"the last good one would be\.$") as caught:
        wander(Wander(breaks=4))
    assert caught.value.posterior is None


def test_a_stored_run_that_breaks_hands_over_all_it_kept(tmp_path):
    for _ in range(2):  # taken up, it breaks in the same place
        with pytest.raises(Diverged, match=r"after step 16, is in .*error\.posterior") as caught:
            wander(Wander(breaks=17), checkpoint=Checkpoint(tmp_path, steps=8))
        assert caught.value.posterior.num_draws == 11
