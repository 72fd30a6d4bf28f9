"""Variational inference with a Gaussian of full covariance."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from posterity.errors import of_kinds, positive_whole
from posterity.inference.memory import fit_bytes
from posterity.inference.method import Footprint, GradientFit, Info, theta_bytes
from posterity.methods.parts.gradients.estimator import initial_log_scales, shifted
from posterity.model import Batch, Buffers, Data, Problem
from posterity.numerics.random import Key
from posterity.optim import Adam, Constant, Optimizer, Schedule
from posterity.posteriors.gaussian import Gaussian
from posterity.precisions.dense import Dense
from posterity.priors.fan import FanIn, ScaleRule

_HALF_LOG_TWO_PI = 0.5 * math.log(2.0 * math.pi)


class FullRankState(NamedTuple):
    """`parameters`: means (T,), the factor's log diagonal (R,) and its entries below by rows, (R (R - 1) / 2,).

    These are one vector, or (M, ...) for members; `optimizer` holds the moments, `buffers` batch-norm statistics.
    """

    parameters: Tensor
    optimizer: Any
    buffers: Buffers
    step: int


@dataclass(frozen=True)
class FullRank(GradientFit):
    """Variational inference with a Gaussian of full covariance: for few weights, or a last layer.

    **Math**: q(w) = N(mean, L L^T) with L lower triangular, exp on its diagonal. At draws w = mean + L eps, ascent on
    lp log p(D | w) + pp log p(w) - log q(w) along pathwise gradients that leave out the score of q ("sticking the
    landing"): with h = d/dw of that sum, where -d log q / dw = L^-T eps, the gradients are h for the mean and the lower
    triangle of h eps^T for L. The trace is as in `MeanField`, with a "kl" from the same draws.

    **Limit**: reaches the posterior itself where that is Gaussian, and then without noise; otherwise a local optimum.
    Members that train together draw the same noise.

    **Cost**: `draws` forward and backward passes and R^2 numbers for R random weights, with two moments for each.

    **References**: Challis and Barber (2013), Gaussian Kullback-Leibler approximate inference; Roeder et al. (2017),
    Sticking the landing.

    **Example**:

    >>> import torch, posterity as po
    >>> precision = torch.tensor([[2.0, 1.2], [1.2, 3.0]])
    >>> density = po.Density(lambda w: -0.5 * w @ precision @ w, {"w": (2,)})
    >>> method = po.methods.FullRank(steps=1000, optimizer=po.optim.Adam(0.03), schedule=po.optim.Cosine())
    >>> q, trace = po.infer(method, density, None)
    >>> bool((q.precision.matrix - precision).abs().max() < 0.01)
    True
    """

    steps: int = 5000
    batch_size: int | None = 128
    draws: int = 1
    optimizer: Optimizer = field(default_factory=Adam)
    schedule: Schedule = field(default_factory=Constant)
    initial_scales: ScaleRule = field(default_factory=lambda: FanIn(gain=0.1))

    def __post_init__(self) -> None:
        super().__post_init__()
        positive_whole("FullRank.draws", self.draws)
        of_kinds(self, initial_scales=ScaleRule)

    def footprint(self, joint: Problem, data: Data) -> Footprint:
        count = joint.num_random
        size = joint.size + count * (count + 1) // 2
        own = {
            "means and factor": theta_bytes(joint, 2 * size + count**2),
            "gradient": theta_bytes(joint, size + 2 * count**2),
        }
        fit = fit_bytes(self.optimizer, joint, data, self.batch_size, size)
        return replace(super().footprint(joint, data), parts={**own, **fit})

    def init(self, joint: Problem, theta: Tensor, key: Key) -> FullRankState:
        diagonal = initial_log_scales(joint, self.initial_scales, theta)
        below = diagonal.new_zeros(len(diagonal) * (len(diagonal) - 1) // 2)
        factor = torch.cat([diagonal, below]).expand(*theta.shape[:-1], -1)
        parameters = torch.cat([theta, factor], dim=-1)
        return FullRankState(parameters, self.optimizer.init(parameters), joint.starting_buffers(theta), 0)

    def step(self, joint: Problem, state: FullRankState, batch: Batch, key: Key) -> tuple[FullRankState, Info]:
        parameters, buffers, size, count = state.parameters, state.buffers, joint.size, joint.num_random
        mean, log_diagonal = parameters[..., :size], parameters[..., size : size + count]
        factor = _factor(parameters[..., size:], count)
        indices = joint.random_indices
        wide = torch.promote_types(mean.dtype, torch.float32)  # there are no triangular solves in half precision
        grad, grad_factor = torch.zeros_like(parameters), torch.zeros_like(factor)
        values, log_priors, log_densities = [], [], []
        for draw in range(self.draws):
            noise = key.fold(draw).normal((count,), torch.float32, mean.device).to(mean.dtype)
            theta = shifted(mean, factor @ noise, indices)
            value, ascent, buffers = joint.value_and_grad(theta, batch, buffers)
            eps = noise.expand(*mean.shape[:-1], -1).unsqueeze(-1)
            score = torch.linalg.solve_triangular(factor.mT.to(wide), eps.to(wide), upper=True)  # -d log q / dw
            ascent = shifted(ascent, score.squeeze(-1).to(mean.dtype), indices)
            random = ascent[..., :count] if indices is None else ascent.index_select(-1, indices)
            grad[..., :size].add_(ascent, alpha=1.0 / self.draws)
            grad_factor.add_(random.unsqueeze(-1) * noise, alpha=1.0 / self.draws)
            values.append(value)
            log_priors.append(joint.log_prior(theta))
            log_densities.append(-0.5 * noise.square().sum() - log_diagonal.sum(-1) - count * _HALF_LOG_TWO_PI)
        rows, columns = torch.tril_indices(count, count, offset=-1, device=mean.device)
        diagonal = factor.diagonal(dim1=-2, dim2=-1)
        grad[..., size : size + count] = grad_factor.diagonal(dim1=-2, dim2=-1) * diagonal
        grad[..., size + count :] = grad_factor[..., rows, columns]
        value, log_prior, log_density = (torch.stack(each).mean(0) for each in (values, log_priors, log_densities))
        data_fit = (value - joint.powers[1] * log_prior) / (joint.powers[0] * joint.num_data)
        kl = (log_density - log_prior) / joint.num_data
        info = {"loss": (log_density - value) / joint.num_data, "data_fit": data_fit, "kl": kl, "elbo": data_fit - kl}
        moments = self._ascended(joint, parameters, grad, state)
        return FullRankState(parameters, moments, buffers, state.step + 1), info

    def posterior(self, joint: Problem, kept: Sequence[FullRankState]) -> Gaussian:
        last = kept[-1]
        theta = last.parameters[..., : joint.size].clone()
        factor = _factor(last.parameters[..., joint.size :].double(), joint.num_random)
        precision = Dense(torch.cholesky_inverse(factor))
        return Gaussian(joint.fitted(theta), theta[..., : joint.num_weights], precision, last.buffers)


def _factor(entries: Tensor, count: int) -> Tensor:
    """L (..., R, R) from its log diagonal and its entries below."""
    factor = torch.diag_embed(entries[..., :count].exp())
    rows, columns = torch.tril_indices(count, count, offset=-1, device=entries.device)
    factor[..., rows, columns] = entries[..., count:]
    return factor
