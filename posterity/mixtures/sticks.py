"""Weights of a Dirichlet process, truncated: pieces broken off a stick."""

from dataclasses import dataclass

import torch
from torch import Tensor

from posterity.mixtures import dirichlet
from posterity.mixtures.mixture_weights import MixtureWeights


@dataclass(frozen=True)
class Sticks(MixtureWeights):
    """weights_k = v_k prod_{j<k} (1 - v_j) with v_k ~ Beta(1, gamma), and v_K = 1: a Dirichlet process cut at K.

    Concentrations (R, K, 2) are the parameters of the Beta distributions; those of the last are not used.

    **References**: Blei and Jordan (2006), Variational inference for Dirichlet process mixtures, (18) and (19).
    """

    @property
    def ordered(self) -> bool:
        """Yes: what is left of the stick gets shorter."""
        return True

    def prior(self, concentration: Tensor, components: int) -> Tensor:
        """(1, gamma) for each, (1, K, 2)."""
        return torch.stack([torch.ones_like(concentration), concentration]).expand(1, components, 2)

    def updated(self, prior: Tensor, counts: Tensor) -> Tensor:
        """1 + N_k, and gamma + the sum of N_j over j > k."""
        after = counts.flip(-1).cumsum(-1).flip(-1) - counts
        return prior + torch.stack([counts, after], -1)

    def expected_logs(self, concentration: Tensor) -> Tensor:
        """E log v_k, where that is not 1, and E log(1 - v_j) of all before."""
        taken, left = self._last_is_one(dirichlet.expected_logs(concentration), 0.0).unbind(-1)
        return taken + left.cumsum(-1) - left

    def means(self, concentration: Tensor) -> Tensor:
        """E v_k times E(1 - v_j) of all before."""
        shares = concentration / concentration.sum(-1, keepdim=True)
        taken, left = self._last_is_one(shares, 1.0).unbind(-1)
        before = torch.cat([torch.ones_like(left[..., :1]), left[..., :-1].cumprod(-1)], -1)
        return taken * before

    def divergence(self, concentration: Tensor, prior: Tensor) -> Tensor:
        """The sum of KL of Beta distributions, all but the last."""
        return dirichlet.divergence(concentration[..., :-1, :], prior[..., :-1, :]).sum(-1)

    @staticmethod
    def _last_is_one(pairs: Tensor, value: float) -> Tensor:
        """The numbers of sticks (..., K, 2) with `value` at the last."""
        return torch.cat([pairs[..., :-1, :], torch.full_like(pairs[..., -1:, :], value)], -2)
