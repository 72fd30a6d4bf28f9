"""Binary labels from one logit."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from posterity.errors import BadData
from posterity.likelihoods.likelihood import Likelihood
from posterity.numerics.random import Key


@dataclass(frozen=True)
class Bernoulli(Likelihood):
    """A label 0 or 1 whose log odds are the network's one output.

    **Math**: p(y = 1 | f) = sigmoid(f), log p = y f - softplus(f). Outputs are (..., N, 1) or (..., N). The Hessian
    of -log p in f is p (1 - p), whatever y is, so it equals the Fisher information.

    **Limit**: exact; equal to `Categorical` on logits (0, f).

    **Cost**: one pass over the outputs.

    **References**: Bishop (2006), Pattern Recognition and Machine Learning, eq. 4.90 and 4.97.

    **Example**:

    >>> likelihood = Bernoulli()
    >>> likelihood.log_prob(torch.zeros(2, 1), torch.tensor([[0.0], [1.0]])).exp()
    tensor([0.5000, 0.5000])
    """

    def check(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Targets 0/1 of any dtype, (N,) or (N, 1), with the shape and dtype of outputs (N, 1) or (N,)."""
        if outputs.dim() == 2 and outputs.shape[-1] > 1:
            raise BadData(
                f"Bernoulli: outputs must have 1 column. Got {outputs.shape[-1]}. For several classes use Categorical."
            )
        rows = outputs.shape[:1]
        if outputs.shape not in (rows, (*rows, 1)) or targets.shape not in (rows, (*rows, 1)) or not outputs.dim():
            raise BadData(
                "Bernoulli: outputs and targets must be (N,) or (N, 1). Got outputs "
                f"{tuple(outputs.shape)} and targets {tuple(targets.shape)}. Give one label for each row."
            )
        flat = targets.reshape(-1)
        bad = (flat != 0) & (flat != 1)  # nan is neither
        if bad.any():
            row = int(bad.nonzero()[0])
            raise BadData(
                f"Bernoulli: targets must be 0 or 1. Got {flat[row].item()} in row {row}. "
                "Labels -1/+1 must be recoded: (y + 1) / 2."
            )
        return targets.reshape(outputs.shape).to(outputs.dtype)

    def log_prob(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Log probability of each label, (..., N) or (..., N, 1) -> (..., N)."""
        # y f - softplus(f) for y in {0, 1}, written so that neither label cancels at large |f|.
        entries = F.logsigmoid((2.0 * targets - 1.0) * outputs)
        return entries.squeeze(-1) if targets.dim() == 2 else entries

    def sample(self, outputs: Tensor, key: Key) -> Tensor:
        """Labels 0 or 1, with the shape and dtype of outputs."""
        return torch.bernoulli(outputs.sigmoid(), generator=key.generator(outputs.device))

    def mean(self, outputs: Tensor) -> Tensor:
        """p(y = 1 | f), shaped as outputs."""
        return outputs.sigmoid()

    def variance(self, outputs: Tensor) -> Tensor:
        """p (1 - p), shaped as outputs."""
        return outputs.sigmoid() * (-outputs).sigmoid()  # 1 - p, without cancelling

    def output_hessian(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """p (1 - p) for each row, (..., N, 1, 1)."""
        return self._information(outputs, targets.dim() - 1)

    def output_fisher(self, outputs: Tensor) -> Tensor:
        """p (1 - p) for each row, (..., N, 1, 1); a last axis of size 1 is the event, but that of outputs (N,)."""
        return self._information(outputs, 1 if outputs.dim() > 1 and outputs.shape[-1] == 1 else 0)

    def _information(self, outputs: Tensor, event_dims: int) -> Tensor:
        variance = self.variance(outputs)
        return variance.unsqueeze(-1) if event_dims else variance[..., None, None]
