"""A likelihood made of functions."""

import math

import pytest
import torch
from hyperbolic import hyperbolic, log_density
from torch import Tensor

from posterity.likelihoods import Categorical, Custom, Gaussian
from posterity.model import Joint
from posterity.model.batch import Batch
from posterity.numerics.random import Key
from posterity.priors import Normal


def gaussian(outputs: Tensor, targets: Tensor) -> Tensor:
    return (-0.5 * (targets - outputs).square() - 0.5 * math.log(2.0 * math.pi)).flatten(1).sum(-1)


def classes(outputs: Tensor, targets: Tensor) -> Tensor:
    return outputs.log_softmax(-1).gather(-1, targets.unsqueeze(-1)).squeeze(-1)


def test_is_what_its_function_says() -> None:
    outputs, targets = (
        Key(0).normal((4, 5, 3), torch.float64, torch.get_default_device()),
        Key(1).normal((5, 3), torch.float64, torch.get_default_device()),
    )
    torch.testing.assert_close(Custom(gaussian).log_prob(outputs, targets), Gaussian().log_prob(outputs, targets))
    torch.testing.assert_close(
        Custom(gaussian).output_hessian(outputs, targets), Gaussian().output_hessian(outputs, targets)
    )


def test_hessian_of_coupled_outputs() -> None:
    outputs, targets = (
        Key(0).normal((2, 5, 3), torch.float64, torch.get_default_device()),
        torch.tensor([0, 2, 1, 1, 0]),
    )
    value = Custom(classes).output_hessian(outputs, targets)
    torch.testing.assert_close(value, Categorical().output_hessian(outputs, targets))


def test_an_event_of_several_axes() -> None:
    outputs, targets = (
        Key(0).normal((4, 5, 3, 2), torch.float64, torch.get_default_device()),
        Key(1).normal((5, 3, 2), torch.float64, torch.get_default_device()),
    )
    image = Custom(gaussian, event_dims=2)
    torch.testing.assert_close(image.log_prob(outputs, targets), Gaussian().log_prob(outputs, targets))
    assert image.output_hessian(outputs, targets).shape == (4, 5, 6, 6)
    with pytest.raises(ValueError, match=r"2 axes\. Got event_dims 1"):
        image.output_fisher(outputs, 1)


def test_trains_in_a_joint_as_the_built_in_one_does() -> None:
    net = torch.nn.Linear(2, 1).double()
    batch = Batch(
        Key(0).normal((6, 2), torch.float64, torch.get_default_device()),
        Key(1).normal((6, 1), torch.float64, torch.get_default_device()),
    )
    theta = Key(2).normal((3, 3), torch.float64, torch.get_default_device())
    values = [
        Joint(net, likelihood, Normal(), num_data=6).value_and_grad(theta, batch)[:2]
        for likelihood in (Custom(gaussian), Gaussian())
    ]
    torch.testing.assert_close(values[0], values[1])


@pytest.mark.parametrize(
    ("method", "function"), [("mean", "mean_function"), ("variance", "variance_function"), ("output_fisher", "sampler")]
)
def test_what_is_missing_is_named(method: str, function: str) -> None:
    with pytest.raises(TypeError, match=rf"Custom\.{method} needs {function}\. Got none\. Give Custom\("):
        getattr(Custom(log_density), method)(torch.zeros(2, 1))
    with pytest.raises(TypeError, match=r"Custom\.sample needs sampler"):
        Custom(log_density).sample(torch.zeros(2, 1), Key(0))
    with pytest.raises(TypeError, match="Custom has no distribution function"):
        Custom(log_density).cdf(torch.zeros(2, 1), torch.zeros(2, 1))


def test_fisher_is_the_same_at_every_call_and_positive() -> None:
    outputs = Key(0).normal((4, 3), torch.float64, torch.get_default_device())
    likelihood = hyperbolic(20)
    assert torch.equal(likelihood.output_fisher(outputs), likelihood.output_fisher(outputs))
    assert torch.linalg.eigvalsh(likelihood.output_fisher(outputs)).min() >= -1e-12


def test_a_density_that_does_not_sum_over_the_event_is_refused() -> None:
    wrong = Custom(lambda outputs, targets: -(targets - outputs).abs())
    with pytest.raises(ValueError, match=r"one number for each row, \(2,\)\. Got \(2, 3\)\. Sum"):
        wrong.check(torch.zeros(4, 3), torch.zeros(4, 3))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"log_density": None}, r"Custom\.log_density must be a function\. Got None"),
        ({"log_density": log_density, "sampler": 3}, r"Custom\.sampler must be a function\. Got 3"),
        (
            {"log_density": log_density, "event_dims": -1},
            r"Custom\.event_dims must be a whole number from 0 up\. Got -1",
        ),
        ({"log_density": log_density, "fisher_draws": 0}, r"fisher_draws must be a whole number from 1 up"),
        ({"log_density": log_density, "fisher_draws": True}, "Got True"),
    ],
)
def test_bad_arguments_are_refused(arguments: dict[str, object], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        Custom(**arguments)
