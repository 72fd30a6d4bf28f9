"""The record of a run."""

import pytest
import torch
from contracts.cases import numbers, regression

import posterity as po
from posterity.inference import Checkpoint, Trace
from posterity.inference.run import BLOCK
from posterity.methods import MAP


def filled(count, members=None, every=1):
    trace = Trace()
    for step in range(1, count + 1):
        value = float(step) if members is None else torch.full((members,), float(step))
        trace.record(step, {"loss": value} if step % every else {"loss": value, "other": -float(step)})
    return trace


@pytest.mark.parametrize("count", [1, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK + 3])
@pytest.mark.parametrize("members", [None, 3])
def test_columns_hold_every_value_across_blocks(count, members):
    trace = filled(count, members)
    expected = torch.arange(1.0, count + 1, dtype=torch.float64, device="cpu")
    if members is not None:
        expected = expected.unsqueeze(1).expand(-1, members)
    assert torch.equal(trace["loss"], expected)
    assert trace["loss"].dtype == torch.float64
    assert trace.steps("loss").tolist() == list(range(1, count + 1))
    trace.record(count + 1, {"loss": expected[-1].float()})
    assert len(trace["loss"]) == count + 1


@pytest.mark.parametrize("count", [1, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK + 3])
@pytest.mark.parametrize("last", [1, 2, 5, BLOCK, BLOCK + 2, 3 * BLOCK])
def test_recent_is_the_tail_of_the_column(count, last):
    trace = filled(count)
    assert torch.equal(
        trace.recent("loss", last).double().cpu(),
        torch.arange(1.0, count + 1, dtype=torch.float64, device="cpu")[-last:],
    )
    assert torch.equal(trace["loss"], torch.arange(1.0, count + 1, dtype=torch.float64, device="cpu"))


def test_columns_may_be_recorded_at_other_steps():
    trace = filled(10, every=4)
    assert trace.names == ("loss", "other")
    assert list(trace) == ["loss", "other"]
    assert trace.steps("other").tolist() == [4, 8]
    assert trace["other"].tolist() == [-4.0, -8.0]
    assert trace.last_step("other") == 8
    assert trace.last_step("never") == 0
    assert "other" in trace
    assert "never" not in trace


def test_an_unknown_column_is_named_with_the_nearest_known_one():
    trace = filled(3)
    for ask in (lambda: trace["los"], lambda: trace.steps("los"), lambda: trace.recent("los", 1)):
        with pytest.raises(KeyError, match="Did you mean 'loss'"):
            ask()


@pytest.mark.parametrize("members", [None, 2])
def test_stored_columns_go_on_where_they_were(members):
    count = BLOCK + 7
    trace = Trace.from_tensors(filled(count, members, every=50).tensors())
    whole = filled(count + BLOCK, members, every=50)
    for step in range(count + 1, count + BLOCK + 1):
        value = float(step) if members is None else torch.full((members,), float(step))
        trace.record(step, {"loss": value} if step % 50 else {"loss": value, "other": -float(step)})
    assert trace.names == whole.names
    for name in whole:
        assert torch.equal(trace[name], whole[name])
        assert torch.equal(trace.steps(name), whole.steps(name))


def test_an_empty_trace_is_stored_as_such():
    assert Trace.from_tensors(Trace().tensors()).names == ()


def test_a_run_records_every_step_past_a_block_and_its_time(tmp_path):
    joint, rows = regression(torch.float64), numbers(torch.float64)
    method = MAP(steps=BLOCK + 20)
    _, trace = po.infer(method, joint, rows, checkpoint=Checkpoint(tmp_path, steps=BLOCK + 5))
    assert trace.steps("loss").tolist() == list(range(1, BLOCK + 21))
    assert trace.seconds > 0
    _, again = po.infer(method, joint, rows, checkpoint=tmp_path)
    assert torch.equal(again["loss"], trace["loss"])
    assert again.seconds == trace.seconds  # a finished run adds no time
