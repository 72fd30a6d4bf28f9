"""The score-function estimator (REINFORCE), with the baseline that is best for each weight."""

from dataclasses import dataclass

import torch
from torch import Tensor

from posterity.errors import positive_whole
from posterity.methods.parts.gradients.estimator import DataTerm, Estimator, Factorised, Memory, Out
from posterity.model import Batch, Buffers, Joint, Problem
from posterity.numerics.random import Key


@dataclass(frozen=True)
class ScoreFunction(Estimator):
    """Gradients from values of the log-likelihood alone, which need not be differentiable.

    **Math**: with f = lp log p(D | w) at w = mean + scale * eps, d/dmean = E[(f - b) eps / scale] and d/dscale =
    E[(f - b) (eps^2 - 1) / scale]. `baseline` takes b = E[f g^2] / E[g^2], the constant of least variance, where g is
    eps or eps^2 - 1, for each weight, from the other draws; else b = 0. Weights that are points and the
    likelihood's learnt parameters have their ordinary gradient, if there are any.

    **Limit**: unbiased. The variance grows with the number of weights and with f itself: for comparison, for very few
    weights, or for likelihoods without gradients.

    **Cost**: `draws` forward passes (backward too where there are points), and all draws of the noise in memory.

    **References**: Williams (1992); Mohamed et al. (2020), Monte Carlo gradient estimation in machine learning.

    **Example**:

    >>> import posterity as po
    >>> density = po.Density(lambda w: w.square().sum(), {"w": (1,)})
    >>> q = Factorised(torch.tensor([0.7]), torch.tensor([0.4]), None)
    >>> term = ScoreFunction(draws=20_000).data_term(density, q, None, {}, {}, po.Key(0))
    >>> bool((term.grad_mean - 1.4).abs() < 0.1)
    True
    """

    draws: int = 8
    baseline: bool = True

    def __post_init__(self) -> None:
        positive_whole("ScoreFunction.draws", self.draws)
        if self.baseline and self.draws < 2:
            raise ValueError(
                f"ScoreFunction.draws must be at least 2 with a baseline, which comes from the other draws. "
                f"Got {self.draws}. Take more draws, or baseline=False."
            )

    def data_term(
        self, joint: Problem, q: Factorised, batch: Batch, buffers: Buffers, memory: Memory, key: Key, out: Out = None
    ) -> DataTerm:
        values, noises, points = [], [], torch.zeros_like(q.mean)
        for draw in range(self.draws):
            noise = q.noise(key.fold(draw))
            theta = q.moved(noise)
            if q.scale.shape[-1] == q.mean.shape[-1]:
                value, buffers = _value(joint, theta, batch, buffers)
            else:
                value, grad, buffers = joint.data_value_and_grad(theta, batch, buffers)
                points.add_(grad, alpha=1.0 / self.draws)
            values.append(value)
            noises.append(noise)
        value, noise = torch.stack(values), torch.stack(noises)  # (K, ...) and (K, R)
        grad_mean, grad_scale = (
            score_gradients(value, scores, self.baseline).mean(0) / q.scale for scores in (noise, noise.square() - 1.0)
        )
        if q.places is None:
            points[..., : grad_mean.shape[-1]] = grad_mean
        else:
            points.index_copy_(-1, q.places, grad_mean)
        return DataTerm(value.mean(0), points, grad_scale, buffers, {})


def score_gradients(values: Tensor, scores: Tensor, baseline: bool) -> Tensor:
    """(f - b) g for each draw: values (K, ...) and scores (K, R) -> (K, ..., R), b from the other draws."""
    values = values.unsqueeze(-1)  # (K, ..., 1)
    scores = scores.reshape(len(scores), *[1] * (values.dim() - 2), -1)  # (K, ..., R)
    if not baseline:
        return values * scores
    squares = scores.square()
    weighted = values * squares
    others = weighted.sum(0) - weighted, squares.sum(0) - squares
    return (values - others[0] / others[1].clamp_min(torch.finfo(squares.dtype).tiny)) * scores


def _value(joint: Problem, theta: Tensor, batch: Batch, buffers: Buffers) -> tuple[Tensor, Buffers]:
    """The tempered log-likelihood at theta, without a graph."""
    if not isinstance(joint, Joint):
        with torch.no_grad():
            return joint.log_density(theta, batch), buffers
    weights, raw = joint.split(theta)
    views = joint.network.views(weights)
    value, buffers = joint.data_value(views, raw, batch, buffers, members=theta.dim() > 1)
    return value.detach(), buffers
