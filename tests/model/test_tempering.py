"""Powers of likelihood and prior."""

import math
import pickle
from collections.abc import Callable

import pytest
import torch
from goldcases import load
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from posterity.model.tempering import Tempering

GOLD = load("linear_tempered_posterior")
positives = st.floats(1e-3, 1e3)


def powers(tempering: Tempering) -> tuple[float | Tensor, float | Tensor]:
    return tempering.likelihood_power, tempering.prior_power


def test_named_temperings() -> None:
    assert powers(Tempering()) == powers(Tempering.bayes()) == (1.0, 1.0)
    assert powers(Tempering.tempered(4.0)) == (0.25, 1.0)
    assert powers(Tempering.cold(0.5)) == (2.0, 2.0)
    assert powers(Tempering.balanced(0.5, num_data=100, units=20)) == (1.0 / 2.5, 1.0)


@given(positives)
@settings(deadline=None, max_examples=40)
def test_eta_is_the_weight_of_the_kl(eta: float) -> None:
    assert Tempering.tempered(eta).eta == pytest.approx(eta, rel=1e-14)
    assert Tempering.cold(eta).eta == 1.0


@given(positives, st.integers(1, 10_000), st.integers(1, 10_000), st.integers(1, 50))
@settings(deadline=None, max_examples=40)
def test_balanced_counts_neurons_or_parameters(tau: float, num_data: int, neurons: int, per_neuron: int) -> None:
    by_neurons = Tempering.balanced(tau, num_data, neurons)
    by_parameters = Tempering.balanced(tau * per_neuron, num_data, neurons * per_neuron)
    assert by_neurons.eta == pytest.approx(tau * num_data / neurons, rel=1e-12)
    assert by_parameters.eta == pytest.approx(by_neurons.eta, rel=1e-12)


def linear_precision(tempering: Tempering, prior_precision: float) -> Tensor:
    """Precision of the tempered posterior of the gold's linear model."""
    features = GOLD.inputs["X"]
    data = tempering.likelihood_power * GOLD.inputs["beta"] * features.T @ features
    return data + tempering.prior_power * prior_precision * torch.eye(features.shape[1], dtype=torch.float64)


@pytest.mark.parametrize("row", range(4))
def test_gold_linear_model(row: int) -> None:
    temperature, alpha = GOLD.at(f"rows.{row}.T"), GOLD.inputs["alpha"]
    GOLD.check(f"rows.{row}.lik_precision", linear_precision(Tempering.tempered(temperature), alpha))
    GOLD.check(f"rows.{row}.full_precision", linear_precision(Tempering.cold(temperature), alpha))


@given(positives, positives)
@settings(deadline=None, max_examples=20)
def test_cold_is_tempered_with_a_wider_prior(temperature: float, prior_variance: float) -> None:
    cold = linear_precision(Tempering.cold(temperature), 1.0 / prior_variance)
    tempered = linear_precision(Tempering.tempered(temperature), 1.0 / (temperature * prior_variance))
    torch.testing.assert_close(cold, tempered, rtol=1e-10, atol=0.0)


BAD = [0.0, -1.0, math.nan, math.inf, True, "1", None, torch.tensor([1.0, -2.0]), torch.tensor([math.nan])]


@pytest.mark.parametrize("value", BAD, ids=str)
@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda value: Tempering(value, 1.0), r"Tempering\.likelihood_power"),
        (lambda value: Tempering(1.0, value), r"Tempering\.prior_power"),
        (Tempering.tempered, r"Tempering\.tempered: eta"),
        (Tempering.cold, r"Tempering\.cold: temperature"),
        (lambda value: Tempering.balanced(value, 10, 10), r"Tempering\.balanced: tau"),
        (lambda value: Tempering.balanced(1.0, value, 10), r"Tempering\.balanced: num_data"),
        (lambda value: Tempering.balanced(1.0, 10, value), r"Tempering\.balanced: units"),
    ],
    ids=["likelihood_power", "prior_power", "eta", "temperature", "tau", "num_data", "units"],
)
def test_refuses_what_is_not_positive(make: Callable[[object], Tempering], name: str, value: object) -> None:
    with pytest.raises(ValueError, match=rf"{name} must be a positive number.* Got "):
        make(value)


def test_members() -> None:
    tempering = Tempering.tempered(torch.tensor([1.0, 2.0, 4.0], dtype=torch.float64))
    assert tempering.num_members == 3
    assert tempering.eta.tolist() == [1.0, 2.0, 4.0]
    assert [tempering.member(index) for index in range(3)] == [Tempering.tempered(eta) for eta in (1.0, 2.0, 4.0)]
    assert isinstance(tempering.member(1).likelihood_power, float)
    assert tempering.member(1).num_members is None
    assert Tempering.bayes().num_members is None
    assert Tempering.bayes().member(5) == Tempering.bayes()
    assert Tempering.cold(torch.tensor([1.0, 2.0])).num_members == 2


def test_members_of_balanced() -> None:
    tempering = Tempering.balanced(torch.tensor([0.5, 1.0]), num_data=10, units=5)
    assert tempering.eta.tolist() == [1.0, 2.0]


def test_powers_must_agree_on_the_members() -> None:
    with pytest.raises(ValueError, match=r"Got \[2, 3\] values"):
        Tempering(torch.ones(2), torch.ones(3))


def test_is_a_value() -> None:
    for tempering in (Tempering.cold(0.3), Tempering.tempered(torch.tensor([1.0, 3.0]))):
        twin = pickle.loads(pickle.dumps(tempering))
        assert twin == tempering
        assert hash(twin) == hash(tempering)
    assert Tempering.tempered(2.0) != Tempering.cold(2.0)
    assert Tempering.bayes() != (1.0, 1.0)
    assert repr(Tempering.bayes()) == "Tempering(likelihood_power=1.0, prior_power=1.0)"
