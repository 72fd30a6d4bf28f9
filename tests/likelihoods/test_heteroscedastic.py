"""Noise from the network against noise that is known."""

import pytest
import torch

from posterity.likelihoods import Gaussian, Heteroscedastic
from posterity.numerics.random import Key


def test_equals_a_gaussian_of_that_scale() -> None:
    scale = torch.tensor([0.5, 2.0], dtype=torch.float64)
    means, targets = (
        Key(0).normal((6, 2), torch.float64, torch.get_default_device()),
        Key(1).normal((6, 2), torch.float64, torch.get_default_device()),
    )
    outputs = torch.cat([means, scale.log().expand(6, 2)], dim=-1)
    known, learnt = Gaussian((0.5, 2.0)), Heteroscedastic()
    for function in ("log_prob", "cdf"):
        torch.testing.assert_close(
            getattr(learnt, function)(outputs, targets), getattr(known, function)(means, targets)
        )
    torch.testing.assert_close(learnt.output_hessian(outputs, targets)[:, :2, :2], known.output_hessian(means, targets))
    torch.testing.assert_close(learnt.variance(outputs), known.variance(means))


def test_hessian_is_indefinite_and_fisher_is_not() -> None:
    outputs, targets = torch.tensor([[0.0, 0.3]]).double(), torch.tensor([[1.0]]).double()
    values = torch.linalg.eigvalsh(Heteroscedastic().output_hessian(outputs, targets)[0])
    assert float(values[0]) < 0.0 < float(values[1])
    assert torch.linalg.eigvalsh(Heteroscedastic().output_fisher(outputs)[0]).min() > 0.0


def test_a_vector_of_targets_becomes_a_column() -> None:
    assert Heteroscedastic().check(torch.zeros(3, 2), torch.zeros(3)).shape == (3, 1)
    assert Heteroscedastic().check(torch.zeros(3, 4), torch.zeros(3, 2)).shape == (3, 2)


def test_fisher_has_one_event_axis() -> None:
    with pytest.raises(ValueError, match="Got event_dims 2"):
        Heteroscedastic().output_fisher(torch.zeros(3, 2, 2), 2)
