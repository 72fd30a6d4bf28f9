"""Predictives from posterior draws of the network's outputs."""

import math
from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import chain
from typing import final

import torch
from torch import Tensor

from posterity.errors import shown
from posterity.likelihoods.custom import Custom
from posterity.likelihoods.likelihood import Likelihood
from posterity.numerics.brief import brief
from posterity.numerics.random import Key
from posterity.predictive.classes import ClassPredictive
from posterity.predictive.predictive import (
    UNSHARED,
    Predictive,
    aligned,
    between_zero_and_one,
    bisected_quantile,
    chosen_rows,
    quantiles_of_normals,
    rows,
)


@final
class DrawsPredictive(Predictive):
    """The equal mixture of the likelihoods at S posterior draws of the outputs.

    **Math**: p(y) = (1/S) sum_s p(y | f_s) with f_s = `outputs[s]` (N, *event) and p = `likelihood`, so
    log_prob(y) = logsumexp_s log p(y | f_s) - log S. By the law of total variance, exact for the mixture,
    variance = aleatoric + epistemic with aleatoric = (1/S) sum_s Var[y | f_s] and epistemic = the variance
    over s of E[y | f_s] with divisor S. The p-quantile is the smallest y with (1/S) sum_s F(y | f_s) >= p, F the
    likelihood's `cdf`, found by bisection. joint_log_prob(y) = logsumexp_s sum_n log p(y_n | f_s) - log S. A
    likelihood may have its own noise for each draw.

    **Limit**: exact for the mixture of these S draws. As an estimate of the posterior's own variance the
    epistemic part is low by the factor (S - 1) / S. Quantiles need a likelihood with a `cdf`.

    **Cost**: O(S N D) for each call, some 70 times that for a quantile; memory O(S N D).

    **References**: Gal and Ghahramani (2016), Dropout as a Bayesian approximation, section 4.

    **Example**:

    >>> from posterity.likelihoods import Gaussian
    >>> pred = DrawsPredictive(Gaussian(scale=1.0), torch.tensor([[[-2.0]], [[2.0]]]))
    >>> pred.mean.item(), pred.aleatoric.item(), pred.epistemic.item()
    (0.0, 1.0, 4.0)
    >>> round(pred.log_prob(torch.tensor([0.0])).item(), 4)  # -2 - log(2 pi) / 2
    -2.9189
    """

    classifies = False
    likelihood: Likelihood
    outputs: Tensor

    def __init__(self, likelihood: Likelihood, outputs: Tensor, *, shared: bool = True) -> None:
        """Take the likelihood and the outputs of each draw, (S, N, *event); `shared` as in `ClassPredictive`."""
        _check_draws("DrawsPredictive.outputs", outputs)
        self.likelihood, self.outputs, self._shared = likelihood, outputs, shared

    @property
    def mean(self) -> Tensor:
        return self._mean

    @cached_property
    def _mean(self) -> Tensor:
        return self._means.mean(0)

    @property
    def aleatoric(self) -> Tensor:
        return self._parts[0]

    @property
    def epistemic(self) -> Tensor:
        """Variance of the draws' means, divisor S, (N, *event)."""
        return self._parts[1]

    @cached_property
    def _parts(self) -> tuple[Tensor, Tensor]:
        return self._variances.mean(0), (self._means - self.mean).square().mean(0)

    @property
    def normals(self) -> tuple[Tensor, Tensor] | None:
        """Means and scales (S, N, *event) of the draws, where their noise is normal."""
        return (self._means, self._variances.sqrt()) if self.likelihood.normal_targets else None

    def __len__(self) -> int:
        return self.outputs.shape[1]

    def __repr__(self) -> str:
        return f"DrawsPredictive({brief(self.likelihood)}, outputs {shown(self.outputs)})"

    def check(self, y: Tensor) -> Tensor:
        custom = isinstance(self.likelihood, Custom)  # whose targets may have any form
        y = rows(y, len(self)).to(self.outputs.device) if custom else aligned(y, self.mean)
        return self.likelihood.check(self.outputs[0], y)

    def log_prob(self, y: Tensor) -> Tensor:
        """Log density of each row under the mixture, (N,), joint over the event."""
        return self._each(y).logsumexp(0) - math.log(len(self.outputs))

    def expected_log_prob(self, y: Tensor) -> Tensor:
        return self._each(y).mean(0)

    def joint_log_prob(self, y: Tensor) -> Tensor:
        if not self._shared:
            raise ValueError(UNSHARED)
        return self._each(y).double().sum(-1).logsumexp(0) - math.log(len(self.outputs))

    def sample(self, draws: int, key: Key | None = None) -> Tensor:
        """Draw a component for each row, then a target from it, (draws, N, *event)."""
        key = key or Key(0)
        outputs, device, noise = self.outputs, self.outputs.device, key.fold("noise")
        generator = key.fold("component").generator(device)
        chosen = torch.randint(len(outputs), (draws, len(self)), generator=generator, device=device)
        row = torch.arange(len(self), device=device)
        normals = self.normals
        if normals is not None:  # each draw may have its own noise
            centre, scale = normals[0][chosen, row], normals[1][chosen, row]
            return centre + scale * noise.normal(centre.shape, centre.dtype, device)
        if self.likelihood.member(0) is self.likelihood:
            return self.likelihood.sample(outputs[chosen, row], noise)
        drawn = torch.empty_like(outputs[chosen, row])
        for component in range(len(outputs)):  # each with its own noise
            here = chosen == component
            own = outputs[component].expand(draws, *outputs.shape[1:])[here]
            drawn[here] = self.likelihood.member(component).sample(own, noise.fold(component))
        return drawn

    def quantile(self, p: float) -> Tensor:
        between_zero_and_one("quantile: p", p)
        if (known := self.normals) is not None:
            return quantiles_of_normals(*known, self.mean, self.std, [p])[0].to(self.outputs.dtype)
        outputs = self.outputs.double()
        cdf = self.likelihood.cdf
        cdf(outputs, outputs.new_zeros(()))  # raises where there is none
        quantile = bisected_quantile(lambda y: cdf(outputs, y).mean(0), self.mean, self.std, p)
        return quantile.to(self.outputs.dtype)

    def interval(self, level: float) -> tuple[Tensor, Tensor]:
        if (known := self.normals) is None:
            return super().interval(level)
        between_zero_and_one("interval: level", level)
        lower, upper = quantiles_of_normals(*known, self.mean, self.std, [(1.0 - level) / 2.0, (1.0 + level) / 2.0])
        return lower.to(self.outputs.dtype), upper.to(self.outputs.dtype)

    def rows(self, index: Tensor | slice) -> "DrawsPredictive":
        index = chosen_rows(index, self.outputs.device)
        return DrawsPredictive(self.likelihood, self.outputs[:, index], shared=self._shared)

    @property
    def _means(self) -> Tensor:
        return self.likelihood.mean(self.outputs)  # (S, N, *event)

    @property
    def _variances(self) -> Tensor:
        return self.likelihood.variance(self.outputs)  # (S, N, *event)

    def _each(self, y: Tensor) -> Tensor:
        return self.likelihood.log_prob(self.outputs, self.check(y))  # (S, N)

    def _joined(self, parts: Sequence["DrawsPredictive"]) -> "DrawsPredictive":
        sizes = sorted({len(part.outputs) for part in parts})
        if len(sizes) > 1 or any(part.likelihood != self.likelihood for part in parts):
            raise ValueError(
                "Predictive.concatenate: all parts must have the same likelihood and number of draws. "
                f"Got {sizes} draws. Predict every chunk with the same posterior."
            )
        outputs = torch.cat([part.outputs for part in parts], dim=1)
        return DrawsPredictive(self.likelihood, outputs, shared=all(part._shared for part in parts))


def from_outputs(likelihood: Likelihood, outputs: Tensor, *, shared: bool = True) -> Predictive:
    """The predictive (1/S) sum_s p(y | f_s) of outputs (S, N, *event) under a likelihood.

    A likelihood of classes gives a `ClassPredictive`, its probabilities averaged in float64 so that the log of a tiny
    one stays finite; any other likelihood gives a `DrawsPredictive`. `shared`: draw s has the same weights (or dropout
    mask) in all rows, as `joint_log_prob` needs.

    >>> from posterity.likelihoods import Categorical
    >>> from_outputs(Categorical(), torch.zeros(3, 2, 4)).probs[0].tolist()
    [0.25, 0.25, 0.25, 0.25]
    """
    _check_draws("outputs", outputs)
    log_draws = likelihood.class_log_probs(outputs)
    if log_draws is None:
        return DrawsPredictive(likelihood, outputs, shared=shared)
    return ClassPredictive.of_log_probs(log_draws, outputs.dtype, shared=shared)


def from_blocks(
    likelihood: Likelihood, blocks: Iterator[Tensor], count: int, *, kept: int | None = None, shared: bool = True
) -> Predictive:
    """The predictive of `count` draws of outputs that come in blocks (s, N, *event); see `from_outputs`.

    Class probabilities and entropies are averaged block by block over all draws, of which `kept` (None: all), evenly
    spaced, are kept for what depends on single draws. Other likelihoods keep all.

    >>> from posterity.likelihoods import Categorical
    >>> from_blocks(Categorical(), iter([torch.zeros(2, 1, 4), torch.ones(1, 1, 4)]), 3).probs[0].tolist()
    [0.25, 0.25, 0.25, 0.25]
    """
    first, kept = next(blocks), kept or count
    second = next(blocks, None)
    if second is None and len(first) <= kept:
        return from_outputs(likelihood, first, shared=shared)
    both = chain([first] if second is None else [first, second], blocks)
    if likelihood.class_log_probs(first[:1]) is None:
        return from_outputs(likelihood, torch.cat(list(both)), shared=shared)

    def log_probs() -> Iterator[Tensor]:
        for block in both:
            values = likelihood.class_log_probs(block)
            assert values is not None
            yield values

    return ClassPredictive.of_blocks(log_probs(), count, kept, first.dtype, shared=shared)


def _check_draws(name: str, outputs: Tensor) -> None:
    if outputs.dim() < 2 or not outputs.shape[0]:
        raise ValueError(
            f"{name} must be (S, N, *event) with S >= 1 draws. Got {tuple(outputs.shape)}. "
            "Give a single output as outputs.unsqueeze(0)."
        )
