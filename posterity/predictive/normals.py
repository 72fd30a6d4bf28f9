"""Predictives that are mixtures of normals with weights."""

from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor

from posterity.errors import shown
from posterity.likelihoods.scaled import HALF_LOG_TWO_PI
from posterity.numerics.random import Key
from posterity.predictive.mixture import checked_weights
from posterity.predictive.predictive import (
    UNSHARED,
    Predictive,
    aligned,
    between_zero_and_one,
    chosen_rows,
    quantiles_of_normals,
)


@final
class NormalsPredictive(Predictive):
    """A mixture of S normals for each entry of y, whose epistemic part is known.

    **Math**: p(y) = product over the entries of sum_s w_s N(y; means_s, scales_s^2), with `weights` (S,) for all rows
    and `means`, `scales` (S, N, *event). variance = sum_s w_s (scales_s^2 + (means_s - mean)^2); `epistemic` (N,
    *event) is given and at most the variance, aleatoric is the rest. expected_log_prob is the average of the normals'
    own log densities.

    **Limit**: exact for the mixture. Components describe the shape of the noise, so that a spread of their means is not
    taken for a spread over weights: what is epistemic must be said. There is no joint density of rows.

    **Cost**: O(S N D), some 10 times that for a quantile.

    **References**: Bishop (2006), section 5.6.

    **Example**:

    >>> means, scales = torch.tensor([[[-1.0]], [[1.0]]]), torch.ones(2, 1, 1)
    >>> pred = NormalsPredictive(means, scales, torch.tensor([0.5, 0.5]), torch.tensor([[0.5]]))
    >>> pred.variance.item(), pred.aleatoric.item()
    (2.0, 1.5)
    """

    classifies = False

    def __init__(self, means: Tensor, scales: Tensor, weights: Tensor, epistemic: Tensor) -> None:
        """Take means and scales (S, N, *event), weights (S,) that sum to 1, and the epistemic variance (N, *event)."""
        if means.shape != scales.shape or means.shape[:1] != weights.shape or epistemic.shape != means.shape[1:]:
            shapes = [tuple(tensor.shape) for tensor in (means, scales, weights, epistemic)]
            raise ValueError(
                "NormalsPredictive needs means and scales (S, N, *event), weights (S,) and epistemic (N, *event). "
                f"Got {shapes}."
            )
        if not bool((scales > 0).all()):
            raise ValueError(f"NormalsPredictive.scales must be positive. Got {shown(scales)}.")
        self._means, self._scales, self._given = means, scales, epistemic
        self._weights = checked_weights("NormalsPredictive.weights", weights, len(means)).to(means.device)

    @property
    def mean(self) -> Tensor:
        return self._average(self._means)

    @property
    def variance(self) -> Tensor:
        return self._average(self._scales.square() + (self._means - self.mean).square())

    @property
    def aleatoric(self) -> Tensor:
        return self.variance - self.epistemic

    @property
    def epistemic(self) -> Tensor:
        return torch.minimum(self._given, self.variance)

    def check(self, y: Tensor) -> Tensor:
        return aligned(y, self._means[0])

    def log_prob(self, y: Tensor) -> Tensor:
        each = self._each(y)
        shares = self._weights.log().to(each.dtype).reshape(-1, *(1,) * (each.dim() - 1))
        return (each + shares).logsumexp(0).flatten(1).sum(1)

    def expected_log_prob(self, y: Tensor) -> Tensor:
        return self._average(self._each(y)).flatten(1).sum(1)

    def joint_log_prob(self, y: Tensor) -> Tensor:
        raise ValueError(UNSHARED)

    def sample(self, draws: int, key: Key | None = None) -> Tensor:
        """Draw a component for each entry, then a target from it, (draws, N, *event)."""
        key, entries = key or Key(0), self._means.flatten(1)  # (S, E)
        generator = key.fold("component").generator(entries.device)
        count = draws * entries.shape[1]
        chosen = torch.multinomial(self._weights, count, replacement=True, generator=generator).view(draws, -1)
        noise = key.fold("noise").normal(chosen.shape, entries.dtype, entries.device)
        drawn = entries.gather(0, chosen) + self._scales.flatten(1).gather(0, chosen) * noise
        return drawn.reshape(draws, *self._means.shape[1:])

    def quantile(self, p: float) -> Tensor:
        between_zero_and_one("quantile: p", p)
        quantiles = quantiles_of_normals(self._means, self._scales, self.mean, self.std, [p], self._weights)
        return quantiles[0].to(self._means.dtype)

    def rows(self, index: Tensor | slice) -> "NormalsPredictive":
        index = chosen_rows(index, self._means.device)
        return NormalsPredictive(self._means[:, index], self._scales[:, index], self._weights, self._given[index])

    def _each(self, y: Tensor) -> Tensor:
        """Log densities of the normals, (S, N, *event); 0 where the target is missing."""
        targets = self.check(y)
        away = (targets - self._means) / self._scales
        return (-0.5 * away.square() - self._scales.log() - HALF_LOG_TWO_PI).masked_fill(targets.isnan(), 0.0)

    def _average(self, values: Tensor) -> Tensor:
        return torch.einsum("s,s...->...", self._weights.to(values.dtype), values)

    def _joined(self, parts: Sequence["NormalsPredictive"]) -> "NormalsPredictive":
        if any(not torch.equal(part._weights, self._weights) for part in parts):
            raise ValueError("Predictive.concatenate: all parts must have the same components and weights.")
        means, scales = (torch.cat(columns, 1) for columns in zip(*((p._means, p._scales) for p in parts), strict=True))
        return NormalsPredictive(means, scales, self._weights, torch.cat([part._given for part in parts]))
