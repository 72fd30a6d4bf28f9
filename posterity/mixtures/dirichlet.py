"""The Dirichlet distribution of mixture weights, by its concentrations (..., K)."""

import torch
from torch import Tensor


def log_normaliser(concentration: Tensor) -> Tensor:
    """log C(a) = log Gamma(sum a) - sum log Gamma(a): the density is C(a) prod_k pi_k^(a_k - 1). (..., K) -> (...,).

    >>> float(log_normaliser(torch.tensor([1.0, 1.0, 1.0])).exp())  # the simplex has area 1/2 in two coordinates
    2.0
    """
    return torch.lgamma(concentration.sum(-1)) - torch.lgamma(concentration).sum(-1)


def expected_logs(concentration: Tensor) -> Tensor:
    """E log pi_k = psi(a_k) - psi(sum a), (..., K)."""
    return torch.digamma(concentration) - torch.digamma(concentration.sum(-1, keepdim=True))


def divergence(concentration: Tensor, prior: Tensor) -> Tensor:
    """KL(Dir(concentration) || Dir(prior)) in nats, (...,)."""
    pull = ((concentration - prior) * expected_logs(concentration)).sum(-1)
    return log_normaliser(concentration) - log_normaliser(prior.expand_as(concentration)) + pull
