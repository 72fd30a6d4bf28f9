"""Class labels from logits."""

from dataclasses import dataclass

import torch
from torch import Tensor

from posterity.errors import BadData
from posterity.likelihoods.likelihood import Likelihood
from posterity.numerics.random import Key


@dataclass(frozen=True)
class Categorical(Likelihood):
    """One of C classes with probabilities softmax(f).

    **Math**: p(y = c | f) = exp(f_c) / sum_k exp(f_k), with logits f (..., N, C) and class indices y (N,) in
    0 .. C - 1. The Hessian of -log p in f is diag(p) - p p^T, whatever y is, so it equals the Fisher information.

    **Limit**: exact; adding a constant to all logits of a row changes nothing, so the Hessian has rank C - 1.

    **Cost**: one log-softmax; the Hessian is (..., N, C, C).

    **References**: Bishop (2006), Pattern Recognition and Machine Learning, eq. 4.104 to 4.110.

    **Example**:

    >>> likelihood = Categorical()
    >>> likelihood.log_prob(torch.zeros(1, 4), torch.tensor([2])).exp()
    tensor([0.2500])
    """

    def check(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Targets as int64 class indices (N,) for outputs (N, C)."""
        if outputs.dim() != 2 or targets.shape != outputs.shape[:1]:
            remedy = "Give logits (N, C) and one class index for each row."
            if outputs.dim() == 2 and targets.shape == outputs.shape:
                remedy = "For one-hot rows give y.argmax(-1)."
            elif targets.shape == (*outputs.shape[:1], 1):
                remedy = "Give y.squeeze(-1)."
            raise BadData(
                "Categorical: outputs must be (N, C) and targets (N,). "
                f"Got outputs {tuple(outputs.shape)} and targets {tuple(targets.shape)}. {remedy}"
            )
        classes = outputs.shape[-1]
        if classes < 2:
            raise BadData(
                f"Categorical: outputs must have at least 2 columns, one for each class. Got {classes}. "
                "For one logit use Bernoulli."
            )
        if targets.is_floating_point() or targets.is_complex() or targets.dtype == torch.bool:
            raise BadData(f"Categorical: targets must be integers. Got {targets.dtype}. Convert with y.long().")
        labels = targets.long()
        bad = (labels < 0) | (labels >= classes)
        if bad.any():
            row = int(bad.nonzero()[0])
            raise BadData(
                f"Categorical: targets must lie in 0..{classes - 1} for {classes} classes. Got {int(labels[row])} in "
                f"row {row}. Number the classes from 0, or give the network more outputs."
            )
        return labels

    def log_prob(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Log probability of each label, (..., N, C) and (N,) -> (..., N)."""
        labels = targets.expand(outputs.shape[:-1]).unsqueeze(-1)  # (..., N, 1)
        return outputs.log_softmax(-1).gather(-1, labels).squeeze(-1)

    def sample(self, outputs: Tensor, key: Key) -> Tensor:
        """Labels drawn from softmax(f), int64 (..., N)."""
        probabilities = outputs.softmax(-1).reshape(-1, outputs.shape[-1])
        labels = torch.multinomial(probabilities, 1, replacement=True, generator=key.generator(outputs.device))
        return labels.reshape(outputs.shape[:-1])

    def mean(self, outputs: Tensor) -> Tensor:
        """Class probabilities, (..., N, C)."""
        return outputs.softmax(-1)

    def variance(self, outputs: Tensor) -> Tensor:
        """p (1 - p), the variance of each class indicator, (..., N, C)."""
        probabilities = outputs.softmax(-1)
        return probabilities * (1.0 - probabilities)

    def output_hessian(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """diag(p) - p p^T, (..., N, C, C)."""
        return self.output_fisher(outputs)

    def output_fisher(self, outputs: Tensor) -> Tensor:
        """diag(p) - p p^T, (..., N, C, C)."""
        probabilities = outputs.softmax(-1)
        return torch.diag_embed(probabilities) - probabilities.unsqueeze(-1) * probabilities.unsqueeze(-2)
