"""The generalised Pareto distribution of excesses over a high threshold."""

from typing import NamedTuple

import torch
from torch import Tensor


class GeneralizedPareto(NamedTuple):
    """P(X > x) = (1 + shape x / scale)^(-1 / shape) for x >= 0; exponential at shape 0.

    Moments of order below 1 / shape exist; at a negative shape X is at most -scale / shape.

    >>> GeneralizedPareto(shape=0.0, scale=2.0).quantile(torch.tensor([0.5]))
    tensor([1.3863])
    """

    shape: float
    scale: float

    @classmethod
    def fit(cls, excesses: Tensor) -> "GeneralizedPareto":
        """From positive excesses (n,), n >= 2, by the empirical Bayes estimate of Zhang and Stephens (2009).

        With b = -shape / scale, the profile likelihood of b is averaged over a grid of about 30 + sqrt(n) values that
        covers its prior (30 where they have 20, as Vehtari et al., 2024, do).
        """
        values = excesses.to(torch.float64).sort().values
        count = len(values)
        points = 30 + int(count**0.5)
        grid = torch.arange(1, points + 1, dtype=torch.float64, device=values.device) - 0.5
        quartile = values[max(0, int(count / 4 + 0.5) - 1)]
        rates = 1.0 / values[-1] + (1.0 - (points / grid).sqrt()) / (3.0 * quartile)  # b, (points,)
        shapes = torch.log1p(-rates.unsqueeze(-1) * values).mean(-1)
        log_likelihood = count * ((-rates / shapes).log() - shapes - 1.0)
        rate = (rates * log_likelihood.softmax(0)).sum()
        shape = torch.log1p(-rate * values).mean()
        return cls(float(shape), float(-shape / rate))

    def quantile(self, probability: Tensor) -> Tensor:
        """The value below which X lies with these probabilities."""
        log_tail = torch.log1p(-probability)
        if self.shape == 0.0:
            return -self.scale * log_tail
        return self.scale * torch.expm1(-self.shape * log_tail) / self.shape
