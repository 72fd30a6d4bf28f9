"""One temperature, or a scale and a bias for each class: the minimum they claim, and what they leave alone."""

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
from posterity.predictive import ClassPredictive, GaussianPredictive, TemperatureScaling, VectorScaling


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


def penalised(scale: Tensor, bias: Tensor, logits: Tensor, labels: Tensor, inverse: float, ridge: float) -> Tensor:
    loss = torch.nn.functional.cross_entropy(scale * logits + bias, labels, reduction="sum")
    return loss + 0.5 * ridge * ((scale - inverse).square().sum() + bias.square().sum())


@pytest.mark.parametrize(("classes", "temperature"), [(2, 1.0), (4, 3.0), (10, 0.3)])
def test_vectors_are_at_the_minimum(classes: int, temperature: float) -> None:
    logits, labels = noisy(60, classes, temperature, 5)
    scaling = VectorScaling.fit(logits, labels, ridge=0.1)
    inverse = 1.0 / TemperatureScaling.fit(logits, labels).temperature
    scale, bias = scaling.scale.clone().requires_grad_(), scaling.bias.clone().requires_grad_()
    grads = torch.autograd.grad(penalised(scale, bias, logits, labels, inverse, 0.1), (scale, bias))
    assert max(float(grad.abs().max()) for grad in grads) < 1e-6


def test_vectors_that_were_put_in_are_recovered() -> None:
    logits, _ = noisy(40_000, 3, 1.0, 6)
    scale, bias = torch.tensor([2.0, 0.5, 1.0]).double(), torch.tensor([0.5, -0.5, 0.0]).double()
    right = scale * logits + bias
    labels = torch.multinomial(right.softmax(-1), 1, generator=Key(7).generator(right.device)).squeeze(1)
    scaling = VectorScaling.fit(logits, labels)
    assert torch.allclose(scaling.scale, scale, atol=0.1)
    assert torch.allclose(scaling.bias - scaling.bias[2], bias, atol=0.1)  # a bias of all classes changes nothing
    before, after = ClassPredictive(logits.softmax(-1)), scaling.apply(logits)
    assert negative_log_likelihood(after, labels) < negative_log_likelihood(before, labels)
    assert negative_log_likelihood(after, labels) < negative_log_likelihood(
        TemperatureScaling.fit(logits, labels).apply(logits), labels
    )


def test_a_large_ridge_leaves_one_temperature() -> None:
    logits, labels = noisy(60, 4, 3.0, 8)
    scaling, temperature = VectorScaling.fit(logits, labels, ridge=1e12), TemperatureScaling.fit(logits, labels)
    assert torch.allclose(scaling.apply(logits).probs, temperature.apply(logits).probs, atol=1e-9)


def test_classes_without_labels_and_labels_that_are_all_right_have_a_minimum() -> None:
    logits, _ = noisy(30, 5, 2.0, 9)
    for labels in (torch.zeros(30, dtype=torch.int64), logits.argmax(1)):
        scaling = VectorScaling.fit(logits, labels)
        assert bool(scaling.apply(logits).probs.isfinite().all())
        assert torch.equal(scaling.apply(logits).probs.argmax(1), labels)


@pytest.mark.parametrize("kind", [TemperatureScaling, VectorScaling])
@pytest.mark.parametrize("positions", [(), (3,)])
def test_a_predictive_is_scaled_by_its_log_probabilities(kind: type, positions: tuple[int, ...]) -> None:
    draws = (3.0 * Key(1).normal((6, 20, 4, *positions), torch.float64, torch.get_default_device())).softmax(2)
    pred = ClassPredictive(draws.mean(0), draws)
    labels = (torch.arange(20 * math.prod(positions)) % 4).reshape(20, *positions)
    logs = pred.probs.log().movedim(1, -1).reshape(-1, 4)
    scaling, flat = kind.fit(pred, labels), kind.fit(logs, labels.flatten())
    after = scaling.apply(pred)
    assert after.probs.shape == pred.probs.shape
    assert torch.allclose(after.probs.movedim(1, -1).reshape(-1, 4), flat.apply(logs).probs, atol=1e-12)
    assert torch.allclose(after.epistemic, torch.minimum(pred.epistemic, after.entropy), atol=1e-12)
    assert torch.allclose(after.aleatoric + after.epistemic, after.entropy, atol=1e-12)
    assert after.draws is None


def test_a_probability_of_zero_and_averages_alone_are_taken() -> None:
    pred = ClassPredictive(torch.tensor([[1.0, 0.0, 0.0], [0.2, 0.8, 0.0], [0.5, 0.1, 0.4]]))
    for kind in (TemperatureScaling, VectorScaling):
        after = kind.fit(pred, torch.tensor([0, 1, 2])).apply(pred)
        assert bool(after.probs.isfinite().all())
        with pytest.raises(ValueError, match="aleatoric and epistemic need"):
            after.epistemic  # noqa: B018


def test_vectors_refuse_what_does_not_fit() -> None:
    logits, labels = noisy(10, 3, 1.0, 2)
    scaling = VectorScaling.fit(logits, labels)
    with pytest.raises(BadData, match=r"fitted for 3 classes\. Got 4"):
        scaling.apply(torch.zeros(2, 4))
    with pytest.raises(ValueError, match=r"VectorScaling\.bias must be finite, one number for each class"):
        VectorScaling(torch.ones(3), torch.ones(2))
    with pytest.raises(ValueError, match="ridge must be a positive number"):
        VectorScaling.fit(logits, labels, ridge=0.0)
    with pytest.raises(ValueError, match=r"up to 2,000 classes\. Got 2,001"):
        VectorScaling.fit(torch.zeros(1, 2001), torch.tensor([0]))
    numbers = GaussianPredictive(torch.zeros(2, 1), torch.ones(2, 1), torch.ones(1))
    with pytest.raises(TypeError, match="needs a predictive of classes"):
        TemperatureScaling.fit(numbers, torch.zeros(2))
