"""Predictive of a regression from posterior draws of the network's outputs."""

import math
from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor

from posterity.likelihoods.gaussian import Gaussian
from posterity.likelihoods.likelihood import Likelihood
from posterity.numerics.random import Key
from posterity.predictive.predictive import Predictive, aligned, between_zero_and_one

_BISECTIONS = 64  # each halves the bracket: enough for every bit of a float64


@final
class DrawsPredictive(Predictive):
    """The equal mixture of the likelihoods at S posterior draws of the outputs.

    **Math**: p(y) = (1/S) sum_s p(y | f_s) with f_s = `outputs[s]` (N, *event) and p = `likelihood`, so
    log_prob(y) = logsumexp_s log p(y | f_s) - log S. By the law of total variance, exact for the mixture,
    variance = aleatoric + epistemic with aleatoric = (1/S) sum_s Var[y | f_s] and epistemic = the variance
    over s of E[y | f_s] with divisor S. Under a Gaussian likelihood the p-quantile solves
    (1/S) sum_s Phi((y - f_s) / scale_s) = p; it lies between the smallest and the largest p-quantile of the
    components, and is found there by bisection. A likelihood may have its own noise for each draw.

    **Limit**: exact for the mixture of these S draws. As an estimate of the posterior's own variance the
    epistemic part is low by the factor (S - 1) / S. Quantiles need a Gaussian likelihood.

    **Cost**: O(S N D) for each call, 64 times that for a quantile; memory O(S N D).

    **References**: Gal and Ghahramani (2016), Dropout as a Bayesian approximation, section 4.

    **Example**:

    >>> pred = DrawsPredictive(Gaussian(scale=1.0), torch.tensor([[[-2.0]], [[2.0]]]))
    >>> pred.mean.item(), pred.aleatoric.item(), pred.epistemic.item()
    (0.0, 1.0, 4.0)
    >>> round(pred.log_prob(torch.tensor([0.0])).item(), 4)  # -2 - log(2 pi) / 2
    -2.9189
    """

    classifies = False

    def __init__(self, likelihood: Likelihood, outputs: Tensor) -> None:
        """Take the likelihood and the outputs of each draw, (S, N, *event)."""
        if outputs.dim() < 2 or not outputs.shape[0]:
            raise ValueError(
                f"DrawsPredictive.outputs must be (S, N, *event) with S >= 1 draws. Got {tuple(outputs.shape)}. "
                "Give a single output as outputs.unsqueeze(0)."
            )
        self._likelihood = likelihood
        self._outputs = outputs
        self._mean = likelihood.mean(outputs).mean(0)

    @property
    def likelihood(self) -> Likelihood:
        """The likelihood of each draw."""
        return self._likelihood

    @property
    def outputs(self) -> Tensor:
        """Outputs of the network at each draw, (S, N, *event)."""
        return self._outputs

    @property
    def mean(self) -> Tensor:
        """Mean of the draws' means, (N, *event)."""
        return self._mean

    @property
    def variance(self) -> Tensor:
        """Variance of the mixture, (N, *event)."""
        return self.aleatoric + self.epistemic

    @property
    def aleatoric(self) -> Tensor:
        """Mean of the draws' variances, (N, *event)."""
        return self._variances.mean(0)

    @property
    def epistemic(self) -> Tensor:
        """Variance of the draws' means, divisor S, (N, *event)."""
        return self._means.var(0, correction=0)

    def check(self, y: Tensor) -> Tensor:
        """Targets shaped as `mean` and possible under the likelihood, or BadData."""
        return self._likelihood.check(self._outputs[0], aligned(y, self.mean))

    def log_prob(self, y: Tensor) -> Tensor:
        """Log density of each row under the mixture, (N,), joint over the event."""
        each = self._likelihood.log_prob(self._outputs, self.check(y))  # (S, N)
        return each.logsumexp(0) - math.log(len(self._outputs))

    def sample(self, draws: int, key: Key) -> Tensor:
        """Independent targets (draws, N, *event): a component for each row, then a target from it."""
        outputs, device = self._outputs, self._outputs.device
        generator = key.fold("component").generator(device)
        chosen = torch.randint(len(outputs), (draws, len(self)), generator=generator, device=device)
        row = torch.arange(len(self), device=device)
        if isinstance(self._likelihood, Gaussian):  # by moments: the noise may belong to the draw
            centre, scale = self._means[chosen, row], self._variances[chosen, row].sqrt()
            return centre + scale * key.fold("noise").normal(centre.shape, centre.dtype, device)
        return self._likelihood.sample(outputs[chosen, row], key.fold("noise"))

    def quantile(self, p: float) -> Tensor:
        """The p-quantile of each entry's mixture, (N, *event)."""
        between_zero_and_one("quantile: p", p)
        if not isinstance(self._likelihood, Gaussian):
            raise TypeError(
                "quantile of posterior draws needs a Gaussian likelihood. "
                f"Got {type(self._likelihood).__name__}. Use sample(draws, key).quantile(p, dim=0)."
            )
        means, scales = self._means.double(), self._variances.double().sqrt()  # (S, N, *event)
        ends: Tensor = means + scales * torch.special.ndtri(means.new_tensor(p))
        lower, upper = ends.amin(0), ends.amax(0)
        for _ in range(_BISECTIONS):
            middle = 0.5 * (lower + upper)
            below = torch.special.ndtr((middle - means) / scales).mean(0) < p
            lower, upper = torch.where(below, middle, lower), torch.where(below, upper, middle)
        return (0.5 * (lower + upper)).to(self._outputs.dtype)

    @property
    def _means(self) -> Tensor:
        return self._likelihood.mean(self._outputs)  # (S, N, *event)

    @property
    def _variances(self) -> Tensor:
        return self._likelihood.variance(self._outputs)  # (S, N, *event)

    def _joined(self, parts: Sequence["DrawsPredictive"]) -> "DrawsPredictive":
        sizes = sorted({len(part._outputs) for part in parts})
        if len(sizes) > 1 or any(part._likelihood != self._likelihood for part in parts):
            raise ValueError(
                "Predictive.concatenate: all parts must have the same likelihood and number of draws. "
                f"Got {sizes} draws. Predict every chunk with the same posterior."
            )
        return DrawsPredictive(self._likelihood, torch.cat([part._outputs for part in parts], dim=1))
