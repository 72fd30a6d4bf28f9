"""The cross-entropy of classes."""

from dataclasses import dataclass

import torch
from torch import Tensor

from posterity.errors import shown
from posterity.evidence.wide.loss import Loss
from posterity.evidence.wide.output_law import OutputLaw


@dataclass(frozen=True)
class Softmax(Loss):
    """l = log sum over c of exp(f_c) - f_y for classes y = 0 .. C - 1.

    **Math**: the excess to second order, 1/2 tr((diag p - p p^T) Cov f) with p = softmax(E f).

    **Limit**: the error is O(1/N^2), beside an excess of O(1/N). `sampled_excess` has the rest, with its standard
    error.

    >>> Softmax().value(torch.zeros(1, 4), torch.tensor([2]))
    tensor([1.3863])
    """

    @property
    def smoothness(self) -> float:
        """1/2."""
        return 0.5

    def checked(self, targets: Tensor, outputs: int) -> Tensor:
        """Class numbers (P,)."""
        labels = targets.to(torch.int64)
        if outputs < 2 or targets.dim() != 1 or not bool((labels == targets).all()):
            raise ValueError(
                f"Softmax takes 2 outputs or more and class numbers (P,). Got {outputs} outputs, {shown(targets)}."
            )
        if not bool(((labels >= 0) & (labels < outputs)).all()):
            raise ValueError(f"Softmax: targets must lie in 0..{outputs - 1}. Got {shown(targets)}.")
        return labels

    def value(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """log sum exp(f) - f_y."""
        chosen = outputs.gather(-1, targets.unsqueeze(-1).expand(*outputs.shape[:-1], 1)).squeeze(-1)
        return outputs.logsumexp(-1) - chosen

    def slope(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """softmax(f) minus the indicator of y."""
        indicator = torch.nn.functional.one_hot(targets, outputs.shape[-1])
        return torch.softmax(outputs, -1) - indicator.to(outputs.dtype)

    def curvature(self, outputs: Tensor) -> Tensor:
        """diag p - p p^T."""
        probabilities = torch.softmax(outputs, -1)
        return torch.diag_embed(probabilities) - probabilities.unsqueeze(-1) * probabilities.unsqueeze(-2)

    def excess(self, law: OutputLaw) -> Tensor:
        """To second order."""
        return self.second_order(law)

    def log_normaliser(self, outputs: int) -> float:
        """0."""
        return 0.0
