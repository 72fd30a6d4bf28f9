"""Variational inference under a prior, and under what its penalty is converted to."""

import pytest
import torch
from torch import Tensor, nn

import posterity as po
from posterity.methods import MeanField
from posterity.optim import Adam
from posterity.penalties import Dirac, Divergence, Function, Gaussian, from_prior, to_prior
from posterity.priors import Laplace, Logistic, Normal, Prior, Tabulated


def unnamed(prior: Prior) -> Function:
    """The KL to a prior, from an object that does not know the prior."""
    return Function(Divergence(prior, Gaussian()).each, "a KL")


def fitted(prior: Prior) -> tuple[Tensor, Tensor, Tensor]:
    """Means and variances of a mean-field fit to a small regression, and the bound along the way."""
    net = nn.Linear(2, 1, bias=False).to(torch.float64)
    nn.init.zeros_(net.weight)
    x = torch.tensor([[1.0, 0.2], [-0.5, 1.1], [0.3, -0.8], [1.4, 0.6], [-1.0, -0.1]], dtype=torch.float64)
    y = x @ torch.tensor([[0.8], [-0.3]], dtype=torch.float64)
    joint = po.Joint(net, po.likelihoods.Gaussian(0.5), prior, num_data=len(x))
    method = MeanField(steps=60, batch_size=None, optimizer=Adam(0.05))
    q, trace = po.infer(method, joint, (x, y), seed=3)
    return q.mean, q.variance, trace["elbo"]


@pytest.mark.parametrize("prior", [Normal(0.7), Laplace(0.4)], ids=["normal", "laplace"])
def test_variational_inference_does_not_tell_the_penalty_from_the_prior(prior: Prior) -> None:
    converted = to_prior(from_prior(prior, Gaussian()), Gaussian()).prior
    assert converted is not None
    torch.testing.assert_close(fitted(converted), fitted(prior), rtol=0.0, atol=1e-6)
    table = from_prior(prior, Dirac())
    by_points = Function(table.each, "the same without a name").prior()
    assert isinstance(by_points, Tabulated)
    torch.testing.assert_close(fitted(by_points), fitted(prior), rtol=0.0, atol=1e-6)


def test_variational_inference_with_an_unnamed_penalty() -> None:
    prior = Normal(0.7)
    converted = to_prior(unnamed(prior), Gaussian()).prior
    assert converted is not None
    torch.testing.assert_close(fitted(converted), fitted(prior), rtol=0.0, atol=1e-6)


def test_variational_inference_with_a_penalty_that_was_inverted_numerically() -> None:
    prior = Logistic(0.4)
    converted = to_prior(unnamed(prior), Gaussian((0.2, 0.4))).prior
    assert isinstance(converted, Tabulated)
    torch.testing.assert_close(fitted(converted), fitted(prior), rtol=0.0, atol=1e-4)
