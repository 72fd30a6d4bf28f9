"""Weights that follow a Dirichlet distribution."""

from dataclasses import dataclass

import torch
from torch import Tensor

from posterity.mixtures.mixture_weights import MixtureWeights


@dataclass(frozen=True)
class Dirichlet(MixtureWeights):
    """weights ~ Dir(a), with density C(a) prod_k weights_k^(a_k - 1); concentrations a (R, K), a0 in the prior."""

    @property
    def ordered(self) -> bool:
        """No."""
        return False

    def prior(self, concentration: Tensor, components: int) -> Tensor:
        """The same for each component, (1, K)."""
        return concentration.expand(1, components)

    def updated(self, prior: Tensor, counts: Tensor) -> Tensor:
        """a_k = a0 + N_k."""
        return prior + counts

    def expected_logs(self, concentration: Tensor) -> Tensor:
        """See `expected_logs`."""
        return expected_logs(concentration)

    def means(self, concentration: Tensor) -> Tensor:
        """a_k / sum a."""
        return concentration / concentration.sum(-1, keepdim=True)

    def divergence(self, concentration: Tensor, prior: Tensor) -> Tensor:
        """See `divergence`."""
        return divergence(concentration, prior)


def log_normaliser(concentration: Tensor) -> Tensor:
    """log C(a) = log Gamma(sum a) - sum log Gamma(a), (..., K) -> (...,).

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
