"""Posteriors of mixture weights: Dirichlet, and stick-breaking."""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor


class MixtureWeights(ABC):
    """A conjugate family for the weights of K components, by concentrations (R, *shape)."""

    @property
    @abstractmethod
    def ordered(self) -> bool:
        """Whether the order of the components matters, large ones first."""

    @abstractmethod
    def prior(self, concentration: Tensor, components: int) -> Tensor:
        """The concentrations (1, *shape) of the prior, from its one number as a tensor ()."""

    @abstractmethod
    def updated(self, prior: Tensor, counts: Tensor) -> Tensor:
        """The posterior (R, *shape) when components have counts (R, K) of rows."""

    @abstractmethod
    def expected_logs(self, concentration: Tensor) -> Tensor:
        """E log weight_k, (R, K)."""

    @abstractmethod
    def means(self, concentration: Tensor) -> Tensor:
        """E weight_k, (R, K), with sum 1."""

    @abstractmethod
    def divergence(self, concentration: Tensor, prior: Tensor) -> Tensor:
        """KL(posterior || prior) in nats, (R,)."""


@dataclass(frozen=True)
class Dirichlet(MixtureWeights):
    """weights ~ Dir(a), with density C(a) prod_k weights_k^(a_k - 1); concentrations a (R, K), a0 in the prior."""

    @property
    def ordered(self) -> bool:
        return False

    def prior(self, concentration: Tensor, components: int) -> Tensor:
        return concentration.expand(1, components)

    def updated(self, prior: Tensor, counts: Tensor) -> Tensor:
        return prior + counts

    def expected_logs(self, concentration: Tensor) -> Tensor:
        return expected_logs(concentration)

    def means(self, concentration: Tensor) -> Tensor:
        return concentration / concentration.sum(-1, keepdim=True)

    def divergence(self, concentration: Tensor, prior: Tensor) -> Tensor:
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


@dataclass(frozen=True)
class Sticks(MixtureWeights):
    """weights_k = v_k prod_{j<k} (1 - v_j) with v_k ~ Beta(1, gamma), and v_K = 1: a Dirichlet process cut at K.

    Concentrations (R, K, 2) are the parameters of the Beta distributions; those of the last are not used.

    **References**: Blei and Jordan (2006), Variational inference for Dirichlet process mixtures, (18) and (19).
    """

    @property
    def ordered(self) -> bool:
        return True

    def prior(self, concentration: Tensor, components: int) -> Tensor:
        return torch.stack([torch.ones_like(concentration), concentration]).expand(1, components, 2)

    def updated(self, prior: Tensor, counts: Tensor) -> Tensor:
        after = counts.flip(-1).cumsum(-1).flip(-1) - counts
        return prior + torch.stack([counts, after], -1)

    def expected_logs(self, concentration: Tensor) -> Tensor:
        """E log v_k, where that is not 1, and E log(1 - v_j) of all before."""
        taken, left = self._last_is_one(expected_logs(concentration), 0.0).unbind(-1)
        return taken + left.cumsum(-1) - left

    def means(self, concentration: Tensor) -> Tensor:
        shares = concentration / concentration.sum(-1, keepdim=True)
        taken, left = self._last_is_one(shares, 1.0).unbind(-1)
        before = torch.cat([torch.ones_like(left[..., :1]), left[..., :-1].cumprod(-1)], -1)
        return taken * before

    def divergence(self, concentration: Tensor, prior: Tensor) -> Tensor:
        """The sum of KL of Beta distributions, all but the last."""
        return divergence(concentration[..., :-1, :], prior[..., :-1, :]).sum(-1)

    @staticmethod
    def _last_is_one(pairs: Tensor, value: float) -> Tensor:
        """The numbers of sticks (..., K, 2) with `value` at the last."""
        return torch.cat([pairs[..., :-1, :], torch.full_like(pairs[..., -1:, :], value)], -2)
