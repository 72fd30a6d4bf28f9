"""Counts from log rates."""

from dataclasses import dataclass

import torch
from torch import Tensor

from posterity.errors import BadData
from posterity.likelihoods.likelihood import Entrywise, diagonal_information, first_row, shaped
from posterity.numerics.random import Key


@dataclass(frozen=True)
class Poisson(Entrywise):
    """Counts 0, 1, 2, ... whose log rate is the network's output.

    **Math**: y ~ Poisson(rate) with rate = exp(f), log p = sum over the event of y f - exp(f) - log y!. Outputs and
    targets are (N,), (N, D) or any (N, *event); mean and variance are exp(f). The Hessian of -log p in f is exp(f),
    whatever y is, so it equals the Fisher information.

    **Limit**: exact; the variance equals the mean, so overdispersed counts look like outliers.
    An exposure enters as its log, added to the output by the network.

    **Cost**: one pass over the outputs.

    **References**: McCullagh and Nelder (1989), Generalized Linear Models, section 6.2.

    **Example**:

    >>> likelihood = Poisson()
    >>> likelihood.log_prob(torch.zeros(2, 1), torch.tensor([[0.0], [2.0]]))  # -1, -1 - log 2
    tensor([-1.0000, -1.6931])
    """

    def check(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return counts with the shape and dtype of outputs (N, *event); (N,) becomes (N, 1)."""
        targets = shaped("Poisson", targets, outputs.shape)
        if targets.is_complex():
            raise BadData(f"Poisson: targets must be counts. Got {targets.dtype}. Give integers.")
        counts = targets.to(outputs.dtype)
        bad = ~((counts >= 0) & (counts == counts.floor()) & torch.isfinite(counts)) & ~counts.isnan()
        if bad.any():
            raise BadData(
                f"Poisson: targets must be counts 0, 1, 2, ... Got {counts[bad][0].item():g} in row {first_row(bad)}. "
                "For real numbers use Gaussian or StudentT; give NaN where a count is missing."
            )
        return counts

    def _entries(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return targets * outputs - outputs.exp() - torch.lgamma(targets + 1.0)

    def sample(self, outputs: Tensor, key: Key) -> Tensor:
        return torch.poisson(outputs.exp(), generator=key.generator(outputs.device))

    def mean(self, outputs: Tensor) -> Tensor:
        return outputs.exp()

    def variance(self, outputs: Tensor) -> Tensor:
        return outputs.exp()

    def _hessian(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return self.output_fisher(outputs, targets.dim() - 1)

    def output_fisher(self, outputs: Tensor, event_dims: int | None = None) -> Tensor:
        return diagonal_information("Poisson", outputs.exp(), 1 if event_dims is None else event_dims)

    def cdf(self, outputs: Tensor, targets: Tensor) -> Tensor:
        count = targets.floor()
        # P(Y <= k) is the upper incomplete gamma function of k + 1 at the rate.
        value: Tensor = torch.special.gammaincc((count + 1.0).clamp_min(1.0), outputs.exp())
        return torch.where(count < 0, 0.0, value)
