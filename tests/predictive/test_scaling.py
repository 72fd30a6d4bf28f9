"""One temperature: the minimum it claims, and what it leaves alone."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import minimize_scalar
from torch import Tensor

from posterity.errors import BadData
from posterity.metrics import expected_calibration_error, negative_log_likelihood
from posterity.numerics.random import Key
from posterity.predictive import TemperatureScaling


def noisy(rows: int, classes: int, temperature: float, seed: int) -> tuple[Tensor, Tensor]:
    """Logits that are `temperature` times too large, and labels from the right ones."""
    logits = 2.0 * Key(seed).normal((rows, classes), torch.float64, torch.get_default_device())
    labels = torch.multinomial(logits.softmax(-1), 1, generator=Key(seed).fold(1).generator(logits.device)).squeeze(1)
    return temperature * logits, labels


def loss(logits: Tensor, labels: Tensor, inverse: float) -> float:
    return float(torch.nn.functional.cross_entropy(inverse * logits, labels))


@settings(max_examples=30, deadline=None)
@given(classes=st.integers(2, 5), temperature=st.sampled_from([0.05, 0.5, 1.0, 3.0, 40.0]), seed=st.integers(0, 10_000))
def test_no_other_temperature_is_better(classes: int, temperature: float, seed: int) -> None:
    logits, labels = noisy(40, classes, temperature, seed)
    found = TemperatureScaling.fit(logits, labels).temperature
    other = minimize_scalar(lambda u: loss(logits, labels, math.exp(u)), bounds=(-6.9, 6.9), method="bounded").fun
    assert loss(logits, labels, 1.0 / found) <= other + 1e-12
    assert 1e-3 <= found <= 1e3
    if 1e-3 < found < 1e3:
        for near in (0.99, 1.01):
            assert loss(logits, labels, near / found) > loss(logits, labels, 1.0 / found)


def test_it_finds_the_temperature_that_was_put_in() -> None:
    logits, labels = noisy(20_000, 3, 4.0, 0)
    scaling = TemperatureScaling.fit(logits, labels)
    assert scaling.temperature == pytest.approx(4.0, rel=0.06)  # 5 standard errors are 0.055 of it
    before, after = (TemperatureScaling(t).apply(logits) for t in (1.0, scaling.temperature))
    assert torch.equal(before.probs.argmax(-1), after.probs.argmax(-1))
    assert negative_log_likelihood(after, labels) < negative_log_likelihood(before, labels)
    assert expected_calibration_error(after, labels) < 0.2 * expected_calibration_error(before, labels)


def test_units_of_the_logits_do_not_matter() -> None:
    logits, labels = noisy(100, 3, 1.0, 1)
    one, five = TemperatureScaling.fit(logits, labels), TemperatureScaling.fit(5.0 * logits, labels)
    assert five.temperature == pytest.approx(5.0 * one.temperature, rel=1e-10)


@pytest.mark.parametrize("shape", [(50,), (50, 1)])
def test_one_binary_logit_is_two_with_a_zero(shape: tuple[int, ...]) -> None:
    logits, labels = noisy(50, 2, 3.0, 2)
    gap = logits[:, 1] - logits[:, 0]
    single = TemperatureScaling.fit(gap.reshape(shape), labels)
    assert single.temperature == pytest.approx(TemperatureScaling.fit(logits, labels).temperature, rel=1e-10)
    torch.testing.assert_close(single.apply(gap.reshape(shape)).probs, single.apply(logits).probs)


def test_at_the_ends() -> None:
    logits = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    assert TemperatureScaling.fit(logits, torch.tensor([0, 1])).temperature == pytest.approx(1e-3)  # always right
    assert TemperatureScaling.fit(logits, torch.tensor([1, 0])).temperature == pytest.approx(1e3)  # always wrong
    assert TemperatureScaling.fit(torch.zeros(2, 3), torch.tensor([1, 0])).temperature == pytest.approx(1e3)


@pytest.mark.parametrize(
    ("logits", "labels", "message"),
    [
        (torch.zeros(2, 3, 4), torch.tensor([0, 1]), r"\(N, C\).*Got \(2, 3, 4\)"),
        (torch.tensor([[0.0, -torch.inf]]), torch.tensor([0]), "finite"),
        (torch.zeros(2, 3), torch.tensor([0, 3]), "labels from 0 to 2"),
        (torch.zeros(2, 3), torch.tensor([0]), "one row"),
        (torch.zeros(0, 3), torch.zeros(0, dtype=torch.long), "at least one row"),
    ],
)
def test_what_cannot_be_fitted_is_refused(logits: Tensor, labels: Tensor, message: str) -> None:
    with pytest.raises(BadData, match=message):
        TemperatureScaling.fit(logits, labels)


@pytest.mark.parametrize("temperature", [0.0, -1.0, math.nan])
def test_temperatures_are_positive(temperature: float) -> None:
    with pytest.raises(ValueError, match=r"TemperatureScaling\.temperature must be a positive number"):
        TemperatureScaling(temperature)
