"""Fisher information of outputs in closed form, position by position."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, eq=False)
class OutputFisher:
    """Fisher information of outputs (N, C, *positions): diag(p) - p p^T over the classes of each position.

    `probabilities` p are shaped as the outputs, with the classes on axis 1. Nothing larger is formed.

    >>> import torch
    >>> fisher = OutputFisher(torch.full((1, 2), 0.5))
    >>> fisher.product(torch.tensor([[1.0, 0.0]]))
    tensor([[ 0.2500, -0.2500]])
    """

    probabilities: Tensor

    def product(self, vectors: Tensor) -> Tensor:
        """Return F v for vectors v shaped as the outputs."""
        p = self.probabilities
        return p * (vectors - (p * vectors).sum(1, keepdim=True))

    def signed(self, signs: Tensor) -> Tensor:
        """Return S e for signs e (K, *outputs), where S = diag(p^1/2) - p (p^1/2)^T, so that S S^T = F.

        With independent signs the mean of (S e) (S e)^T is F, across positions too. The variance of v^T (S e) (S e)^T v
        is at most 2 (v^T F v)^2 for any v, where that of drawn labels grows without bound as p tends to 0 or 1.
        """
        root = self.probabilities.sqrt() * signs
        return root - self.probabilities * root.sum(2, keepdim=True)
