"""Binary labels from logits."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from posterity.errors import BadData
from posterity.likelihoods.likelihood import IGNORED, Entrywise, diagonal_information, first_row
from posterity.numerics.random import Key


@dataclass(frozen=True)
class Bernoulli(Entrywise):
    """A label 0 or 1 whose log odds are a network output.

    **Math**: p(y = 1 | f) = sigmoid(f), log p = y f - softplus(f), summed over the event. Outputs are (..., N, 1) or
    (..., N) for one label in each row, (..., N, *event) for several (many labels, a mask of pixels). Labels that are
    missing, NaN or -100 among integers, are left out. The Hessian of -log p in f is p (1 - p), whatever y is, so it
    equals the Fisher information.

    **Limit**: exact; equal to `Categorical` on logits (0, f).

    **Cost**: one pass over the outputs.

    **References**: Bishop (2006), Pattern Recognition and Machine Learning, eq. 4.90 and 4.97.

    **Example**:

    >>> likelihood = Bernoulli()
    >>> likelihood.log_prob(torch.zeros(2, 1), torch.tensor([[0.0], [1.0]])).exp()
    tensor([0.5000, 0.5000])
    """

    link = "sigmoid"

    def check(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return targets 0/1 or NaN with the shape and dtype of outputs (N, *event); (N,) and (N, 1) are the same."""
        return binary_labels("Bernoulli", outputs, targets)

    def _entries(self, outputs: Tensor, targets: Tensor) -> Tensor:
        # y f - softplus(f) for y in {0, 1}, written so that neither label cancels at large |f|.
        return F.logsigmoid((2.0 * targets - 1.0) * outputs)

    def sample(self, outputs: Tensor, key: Key) -> Tensor:
        return torch.bernoulli(outputs.sigmoid(), generator=key.generator(outputs.device))

    def mean(self, outputs: Tensor) -> Tensor:
        return outputs.sigmoid()

    def variance(self, outputs: Tensor) -> Tensor:
        return outputs.sigmoid() * (-outputs).sigmoid()  # 1 - p, without cancelling

    def class_log_probs(self, outputs: Tensor) -> Tensor:
        logits = labels_only(outputs.double(), leading=2)
        return torch.stack([F.logsigmoid(-logits), F.logsigmoid(logits)], dim=2)

    def _hessian(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return self.output_fisher(outputs, targets.dim() - 1)

    def output_fisher(self, outputs: Tensor, event_dims: int | None = None) -> Tensor:
        return diagonal_information("Bernoulli", self.variance(outputs), 1 if event_dims is None else event_dims)


def binary_labels(name: str, outputs: Tensor, targets: Tensor) -> Tensor:
    """Return labels 0/1, NaN where missing, with the shape and dtype of outputs (N, *event); else raise BadData."""
    rows = outputs.shape[:1]
    one_each = outputs.shape in (rows, (*rows, 1)) and targets.shape in (rows, (*rows, 1))
    if not outputs.dim() or not (one_each or targets.shape == outputs.shape):
        if outputs.dim() == 2 and targets.shape in (rows, (*rows, 1)):
            raise BadData(
                f"{name}: outputs must have 1 column. Got {outputs.shape[-1]}. For several classes use "
                f"Categorical; for several labels give targets {tuple(outputs.shape)}."
            )
        raise BadData(
            f"{name}: targets must have the shape of the outputs, (N,), (N, 1) or (N, *event). Got outputs "
            f"{tuple(outputs.shape)} and targets {tuple(targets.shape)}. Give one label for each output."
        )
    missing = targets.isnan() if targets.is_floating_point() else targets.long() == IGNORED
    bad = (targets != 0) & (targets != 1) & ~missing
    if bad.any():
        raise BadData(
            f"{name}: targets must be 0 or 1. Got {targets[bad][0].item()} in row {first_row(bad)}. "
            f"Labels -1/+1 must be recoded, (y + 1) / 2; give NaN, or {IGNORED} among integers, where one is missing."
        )
    return targets.to(outputs.dtype).masked_fill(missing, torch.nan).reshape(outputs.shape)


def labels_only(values: Tensor, leading: int) -> Tensor:
    """Drop the event axis of values (*leading axes, *event) where the event is one label."""
    return values.squeeze(-1) if values.shape[leading:] == (1,) else values
