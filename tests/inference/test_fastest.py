"""The choice between plain and compiled steps: measured on copies, logged, stored, and given up with a reason."""

import dataclasses
import logging
from collections import Counter
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import posterity as po
from posterity.inference import Run
from posterity.inference.acceleration import Stepper
from posterity.inference.fastest import _TIMED, _WARM, Fastest, fastest
from posterity.methods import MAP, MeanField
from posterity.numerics import Key
from posterity.optim import Adam

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning")  # torch.compile's own


class State(NamedTuple):
    theta: Tensor
    step: int


class Ways:
    """Stand-ins of both ways: they write into their state as methods do, and move a clock of their own."""

    def __init__(self, plain: float, compiled: float, error: str = "") -> None:
        self.time, self.calls, self.error = 0.0, Counter[str](), error
        self.steps = Fastest(
            lambda *given: self.taken("plain", plain, *given),
            lambda *given: self.taken("compiled", compiled, *given),
            torch.device("cpu"),
            ready=lambda state: state.step >= 1,
            clock=lambda: self.time,
        )

    def taken(self, way: str, seconds: float, state: State, batch: Any, key: Key) -> tuple[State, dict[str, float]]:
        self.calls[way] += 1
        if way == "compiled" and self.error:
            raise RuntimeError(self.error)
        slow = 20.0 if self.calls[way] <= 4 else 1.0  # compiling, recording
        self.time += slow * seconds
        noise = key.fold("noise").normal((2,))
        return State(state.theta.add_(noise + batch), state.step + 1), {"loss": 0.0}

    def run(self, steps: int, state: State) -> State:
        for _ in range(steps):
            state, _ = self.steps(state, 0.5, Key(3).fold(state.step))  # type: ignore[arg-type]
        return state


def start() -> State:
    return State(torch.zeros(2), 0)


@pytest.mark.parametrize(
    ("compiled", "error", "choice"),
    [(0.5, "", "compiled"), (2.0, "", "plain"), (0.97, "", "plain"), (0.5, "no", "plain")],
)
def test_the_faster_way_is_taken_and_no_number_depends_on_the_measurement(compiled, error, choice, caplog):
    ways = Ways(1.0, compiled, error)
    with caplog.at_level(logging.INFO, logger="posterity"):
        state = ways.run(9, start())
    expected = sum(Key(3).fold(step).fold("noise").normal((2,)) + 0.5 for step in range(9))
    torch.testing.assert_close(state.theta, expected)
    assert state.step == 9
    assert ways.steps.state() == {"choice": choice}
    measured = _WARM + _TIMED
    if error:
        assert "the network is not compiled: no" in caplog.text
        assert ways.calls == {"plain": 9, "compiled": 1}
    else:
        assert f"a step takes {1e3 * compiled:.3g} ms compiled, and 1e+03 ms as it is" in caplog.text
        own = {"plain": 1, "compiled": 8} if choice == "compiled" else {"plain": 9, "compiled": 0}
        assert ways.calls == {way: count + measured for way, count in own.items()}


@pytest.mark.parametrize("choice", ["plain", "compiled"])
def test_a_resumed_run_keeps_to_its_choice(choice):
    ways = Ways(1.0, 2.0 if choice == "compiled" else 0.5)  # now the other one would be faster
    ways.steps.restore({"choice": choice})
    ways.run(5, start())
    other = "plain" if choice == "compiled" else "compiled"
    assert ways.calls[other] == (1 if other == "plain" else 0)  # the step that is not measured
    assert ways.steps.state() == {"choice": choice}


def test_a_resumed_run_that_cannot_compile_says_so(caplog):
    ways = Ways(1.0, 0.5, error="no compiler")
    ways.steps.restore({"choice": "compiled"})
    ways.run(5, start())
    assert "no compiler. The run goes on with other roundings" in caplog.text
    assert ways.steps.state() == {"choice": "plain"}


def problem() -> tuple[po.Joint, tuple[Tensor, Tensor]]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.ReLU(), nn.Flatten(), nn.Linear(32, 3))
    x = Key(0).normal((24, 1, 6, 6))
    rows = x, (x.mean((1, 2, 3)) > 0).long()
    return po.Joint(net, po.likelihoods.Categorical(), po.priors.Normal(1.0), num_data=24), rows


METHODS = {"map": MAP(8, 8, Adam(0.01)), "mean field": MeanField(8, 8, Adam(0.01))}


@pytest.fixture
def compiles(monkeypatch: pytest.MonkeyPatch) -> Any:
    """torch.compile with forward and backward graphs that no compiler takes further, and what it compiled."""
    compiled: list[nn.Module] = []
    own = torch.compile

    def compile_(module: nn.Module, **settings: Any) -> Any:
        compiled.append(module)
        return own(module, backend="aot_eager", **settings)

    monkeypatch.setattr(torch, "compile", compile_)
    yield compiled
    torch.compiler.reset()


def forced(monkeypatch: pytest.MonkeyPatch, choice: str) -> None:
    """Let compiled steps win or lose, whatever they take."""
    own = Fastest._seconds
    weight = {"compiled": 1e-9, "plain": 1e9}[choice]

    def seconds(self: Fastest, step: Any, *given: Any) -> float:
        return own(self, step, *given) * (weight if step is self._compiled else 1.0)

    monkeypatch.setattr(Fastest, "_seconds", seconds)


@pytest.mark.cpu
@pytest.mark.parametrize(("name", "choice"), [("map", "plain"), ("map", "compiled"), ("mean field", "compiled")])
def test_runs_are_those_without_a_choice(name, choice, compiles, monkeypatch, tmp_path, caplog):
    """Bit for bit where the network runs as it is, to rounding where it is compiled; resumed by the choice stored."""
    forced(monkeypatch, choice)
    (joint, rows), method = problem(), METHODS[name]
    expected, trace = po.infer(method, joint, rows)
    with caplog.at_level(logging.INFO, logger="posterity"):
        q, own = po.infer(method, joint, rows, accelerate="fastest")
    assert ("the network is compiled: " if choice == "compiled" else "the network runs as it is: ") in caplog.text
    assert len(compiles) == 1
    tolerance = {"rtol": 1e-4, "atol": 1e-5} if choice == "compiled" else {"rtol": 0.0, "atol": 0.0}
    torch.testing.assert_close(q.start().point(), expected.start().point(), **tolerance)
    torch.testing.assert_close(own["loss"], trace["loss"], **tolerance)
    for buffer, value in expected.buffers.items():
        torch.testing.assert_close(q.buffers[buffer], value, **tolerance)

    def interrupted(run: Run) -> None:
        if run.step == 4:
            raise KeyboardInterrupt

    checkpoint = po.inference.Checkpoint(tmp_path, steps=3)
    with pytest.raises(KeyboardInterrupt):
        po.infer(method, joint, rows, accelerate="fastest", checkpoint=checkpoint, callbacks=[interrupted])
    forced(monkeypatch, "plain" if choice == "compiled" else "compiled")
    resumed, _ = po.infer(method, joint, rows, accelerate="fastest", checkpoint=checkpoint)
    assert torch.equal(resumed.start().point(), q.start().point())


def test_where_there_is_no_choice_the_log_says_why(caplog):
    joint, rows = problem()
    compiled = dataclasses.replace(joint, network=torch.compile(joint.network.module, backend="eager"))
    density = po.Density(lambda x: -0.5 * x.square().sum(), {"x": (2,)})
    chains = po.methods.NUTS(draws=2)
    cases = {
        "a Density has none": (chains, density),
        "torch.compile has done so already": (METHODS["map"], compiled),
        "NUTS with these settings does not follow gradients of batches alone": (chains, joint),
    }
    for reason, (method, given) in cases.items():
        caplog.clear()
        with caplog.at_level(logging.INFO, logger="posterity"):
            steps = Stepper(method, given, "fastest")
            assert fastest(method, given, po.as_data(rows), steps, None, None) is None
        assert f"the network is not compiled: {reason}" in caplog.text
