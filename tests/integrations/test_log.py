"""Log: what is handed to a logger, and TensorBoard's own files."""

import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from contracts.cases import numbers, regression

import posterity as po
from posterity.inference import Validation
from posterity.integrations import HuggingFaceIVON, LightningSWAG, Log
from posterity.methods import MAP, Ensemble

FIT = MAP(steps=25, batch_size=8)


def test_values_are_those_of_the_trace_at_their_steps() -> None:
    rows: list[tuple[int, dict[str, float]]] = []
    joint, data = regression(torch.float64), numbers(torch.float64)
    callbacks = [Log(lambda values, step: rows.append((step, values)), every=10), Validation(every=4)]
    _, trace = po.infer(FIT, joint, data, validation=data, callbacks=callbacks)
    losses = {step: values["loss"] for step, values in rows if "loss" in values}
    assert losses == {step: float(trace["loss"][step - 1]) for step in (1, 10, 20, 25)}
    validations = {step: values["validation_nll"] for step, values in rows if "validation_nll" in values}
    assert [*validations] == [4, 8, 12, 16, 20, 24, 25]  # however rare the rest is handed over
    assert [*validations.values()] == trace["validation_nll"].tolist()
    assert [step for step, _ in rows] == sorted({step for step, _ in rows})  # each step once


def test_members_have_columns_of_their_own_and_a_stopped_run_its_last_step() -> None:
    rows: list[tuple[int, dict[str, float]]] = []

    class Stop(po.inference.Callback):
        def after_step(self, run: po.inference.Run) -> None:
            run.stopped = "enough" if run.step == 13 else ""

    log = Log(lambda values, step: rows.append((step, values)), every=10)
    _, trace = po.infer(
        Ensemble(FIT, size=2), regression(torch.float64), numbers(torch.float64), callbacks=[log, Stop()]
    )
    assert [step for step, _ in rows] == [1, 10, 13]
    assert rows[1][1] == {"loss/0": float(trace["loss"][9, 0]), "loss/1": float(trace["loss"][9, 1])}


def test_doors() -> None:
    with pytest.raises(TypeError, match=r"Log.write must be a function of a dictionary and a step. Got"):
        Log({})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"Log.every must be"):
        Log(print, every=0)


@pytest.mark.parametrize(("kind", "package"), [(HuggingFaceIVON, "transformers"), (LightningSWAG, "lightning")])
def test_what_is_not_installed_is_named(kind: Any, package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (package, f"{package}.pytorch"):
        monkeypatch.setitem(sys.modules, name, None)
    words = f"{kind.__name__} needs {package}. Install it with: pip install 'posterity[{package}]'."
    with pytest.raises(po.errors.PosterityError, match=re.escape(words)):
        kind(lambda net: None)


def test_tensorboard_reads_what_was_written(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter

    def write(values: dict[str, float], step: int) -> Any:
        for name, value in values.items():
            writer.add_scalar(name, value, step)

    with SummaryWriter(tmp_path) as writer:
        _, trace = po.infer(FIT, regression(torch.float64), numbers(torch.float64), callbacks=[Log(write, every=5)])
    events = EventAccumulator(str(tmp_path)).Reload()
    losses = {event.step: event.value for event in events.Scalars("loss")}
    assert [*losses] == [1, 5, 10, 15, 20, 25]
    wanted = trace["loss"][[step - 1 for step in losses]]
    torch.testing.assert_close(
        torch.tensor([*losses.values()], dtype=torch.float64, device="cpu"), wanted, rtol=1e-6, atol=0.0
    )
