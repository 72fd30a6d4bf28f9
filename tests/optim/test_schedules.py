"""Step sizes over a run."""

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from posterity.optim import Constant, Cosine, Cyclic, Steps


@given(st.integers(2, 500), st.floats(0.0, 0.9), st.floats(0.0, 0.9))
@example(2, 0.75, 0.0)  # the warm-up ends within the last step
@settings(deadline=None, max_examples=50)
def test_cosine_rises_then_falls_to_its_final_factor(steps, warmup, final):
    schedule = Cosine(warmup=warmup, final=final)
    factors = [schedule.factor(step, steps) for step in range(steps + 1)]
    top = math.ceil(warmup * steps)
    assert all(0.0 < factor <= 1.0 + 1e-12 for factor in factors[:-1])
    assert all(a < b for a, b in pairwise(factors[:top]))
    assert all(a >= b for a, b in pairwise(factors[top:]))
    assert factors[-1] == pytest.approx(final, abs=1e-12)


def test_cosine_by_hand():
    assert Cosine().factor(25, 100) == pytest.approx(0.5 * (1 + math.cos(math.pi / 4)))
    assert Cosine(final=0.2).factor(50, 100) == pytest.approx(0.6)
    assert Cosine(warmup=0.1).factor(0, 100) == pytest.approx(1 / 11)
    assert Cosine(warmup=0.1).factor(10, 100) == 1.0
    assert Cosine().factor(200, 100) == 0.0  # past the end


def test_steps_fall_at_their_shares():
    schedule = Steps(at=(0.5, 0.75), decay=0.1)
    assert [schedule.factor(step, 100) for step in (0, 49)] == [1.0, 1.0]
    assert schedule.factor(50, 100) == pytest.approx(0.1)
    assert schedule.factor(74, 100) == pytest.approx(0.1)
    assert schedule.factor(75, 100) == pytest.approx(0.01)
    assert Constant().factor(3, 4) == 1.0


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Cosine(warmup=1.0), r"Cosine\.warmup must be at least 0 and below 1\. Got 1\.0"),
        (lambda: Cosine(final=-0.1), r"Cosine\.final"),
        (lambda: Steps(at=(1.5,)), r"Steps\.at must be shares"),
        (lambda: Steps(decay=0.0), r"Steps\.decay must be above 0"),
    ],
)
def test_bad_settings_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@given(st.integers(1, 50), st.integers(0, 500), st.floats(0.0, 1.0))
@settings(deadline=None, max_examples=50)
def test_cycles_repeat(length, step, final):
    schedule = Cyclic(length, final)
    assert schedule.factor(step, 10) == schedule.factor(step + length, 1000)
    assert schedule.factor(step - step % length, 10) == 1.0
    assert final - 1e-12 <= schedule.factor(step, 10) <= 1.0 + 1e-12
    if length > 1:
        assert schedule.factor(length - 1, 10) == pytest.approx(final, abs=1e-12)
    as_tensor = schedule.factor(torch.tensor(step), 10)
    assert float(as_tensor) == pytest.approx(schedule.factor(step, 10), abs=1e-6)


@pytest.mark.parametrize(
    ("settings", "message"),
    [((0,), "Cyclic.length must be a positive whole number of steps"), ((5, 1.5), "Cyclic.final must be between")],
)
def test_cycles_that_are_none_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        Cyclic(*settings)
