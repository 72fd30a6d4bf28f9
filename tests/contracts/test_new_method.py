"""A method as a user adds one: a file, a line in `posterity.methods` and a row of cases. The whole contract holds."""

import importlib.util
import inspect
import json
import subprocess
import sys
from collections.abc import Callable
from itertools import product
from pathlib import Path

import pytest
import torch
from contracts import test_methods
from contracts.cases import Case, numbers, regression
from contracts.test_methods import drawing_cases

import posterity as po
from posterity.inference import Method

FLOAT64 = torch.float64

SOURCE = '''
"""Gradient ascent on all rows with a step size that is given."""

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from posterity.errors import positive, positive_whole
from posterity.inference.method import Method
from posterity.posteriors.point import Point


class DescentState(NamedTuple):
    """theta (P,) or (M, P), and batch-norm statistics."""

    theta: Tensor
    buffers: dict[str, Tensor]


@dataclass(frozen=True)
class Descent(Method):
    """Steps along the gradient of the log density."""

    steps: int = 7
    step_size: float = 1e-3

    def __post_init__(self) -> None:
        positive_whole("Descent.steps", self.steps)
        positive("Descent.step_size", self.step_size)

    def batches(self, data, key):
        return data.minibatches(None, self.steps, key)

    def init(self, joint, theta, key):
        return DescentState(theta.clone(), joint.starting_buffers(theta))

    def step(self, joint, state, batch, key):
        value, grad, buffers = joint.value_and_grad(state.theta, batch, state.buffers)
        return DescentState(state.theta + self.step_size * grad, buffers), {"loss": -value / joint.num_data}

    def keep(self, state):
        return state

    def posterior(self, joint, kept):
        theta = kept[-1].theta.clone()
        return Point(joint.fitted(theta), joint.split(theta)[0], kept[-1].buffers)
'''


def applies(function: object) -> bool:
    """Whether a test is one of the contract that a method which draws nothing must pass on a CPU."""
    marks = getattr(function, "pytestmark", [])
    cases = [mark for mark in marks if mark.name == "parametrize" and mark.args[0] == "case"]
    return bool(cases) and drawing_cases.mark not in cases and "cuda" not in {mark.name for mark in marks}


CONTRACT = {name: function for name, function in vars(test_methods).items() if applies(function)}


@pytest.fixture
def descent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], Method]:
    """The class, in a module of `posterity.methods` and exported there."""
    path = tmp_path / "descent.py"
    path.write_text(SOURCE)
    spec = importlib.util.spec_from_file_location("posterity.methods.descent", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    monkeypatch.setattr(po.methods, "Descent", module.Descent, raising=False)
    return module.Descent


def test_five_functions_are_all_that_a_method_must_state() -> None:
    assert Method.__abstractmethods__ == {"batches", "init", "step", "keep", "posterior"}
    assert {"prepared", "footprint", "initial", "finished", "traits"} < set(vars(Method))


def test_the_library_takes_it(descent: Callable[[], Method]) -> None:
    joint, rows = regression(FLOAT64), numbers(FLOAT64)
    _, trace = po.infer(descent(), joint, rows)
    assert trace["loss"].shape == (7,)
    assert trace["loss"][-1] < trace["loss"][0]
    assert po.plan(descent(), joint, rows).method == f"Descent over {joint.num_weights} weights"
    ensemble, _ = po.infer(po.methods.Ensemble(descent(), size=2), joint, rows)
    assert len(ensemble.posteriors) == 2
    density = po.Density(lambda x: -x.square().sum(), {"x": (2,)})
    assert po.infer(descent(), density, None)[0].point().shape == (2,)


@pytest.mark.parametrize("name", CONTRACT)
def test_it_passes_the_contract(descent: Callable[[], Method], name: str, tmp_path: Path) -> None:
    function = CONTRACT[name]
    given = {"case": [Case("descent", descent(), regression, numbers)]}
    for mark in function.pytestmark:
        if mark.name == "parametrize" and mark.args[0] != "case":
            given[mark.args[0]] = mark.args[1]
    for number, values in enumerate(product(*given.values())):
        arguments = dict(zip(given, values, strict=True))
        if "tmp_path" in inspect.signature(function).parameters:
            arguments["tmp_path"] = tmp_path / str(number)
        function(**arguments)


COMMAND = """
import importlib.util, sys
from pathlib import Path

import posterity.methods, posterity.recipes

table = Path(posterity.recipes.__file__).with_name("methods.py")
row = 'Recipe("descent", "Descent", lambda settings, joint: _method("Descent", steps=settings.steps)),'
text = table.read_text().replace("for recipe in (", "for recipe in (" + row, 1)
for name, path, source in (
    ("posterity.methods.descent", "descent.py", Path(sys.argv[1], "descent.py").read_text()),
    ("posterity.recipes.methods", str(table), text),
):
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader(name, None))
    sys.modules[name] = module
    exec(compile(source, path, "exec"), vars(module))
posterity.methods.Descent = sys.modules["posterity.methods.descent"].Descent
from posterity.cli.main import main

run = str(Path(sys.argv[1], "run"))
raise SystemExit(main(["fit", "line", "--method", "descent", "--steps", "5", "--out", run, "--json"]))
"""


@pytest.mark.cpu
def test_a_row_of_the_table_brings_it_to_the_command_line(tmp_path: Path) -> None:
    (tmp_path / "descent.py").write_text(SOURCE)
    done = subprocess.run([sys.executable, "-c", COMMAND, str(tmp_path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["method"] == "descent"
