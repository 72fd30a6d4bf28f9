"""Variational inference with a Gaussian of full covariance."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from posterity.errors import positive_whole
from posterity.inference.memory import fit_bytes
from posterity.inference.method import BatchSize, Footprint, Info, theta_bytes
from posterity.methods.parts.gradients.estimator import initial_log_scales, shifted
from posterity.methods.parts.variational_fit import DIAGONAL, Start, VariationalFit, mean_units
from posterity.model import Batch, Buffers, Data, Problem
from posterity.numerics.random import Key
from posterity.optim import Optimizer, ScaledAdam, Schedule
from posterity.posteriors.gaussian import Gaussian
from posterity.precisions.dense import Dense

_SHARES = (0.0, 1.0)  # of the diagonal, in the curvature of a start
_BELOW = 5.0  # R times the unit of entries below the diagonal
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
class FullRank(VariationalFit):
    """Variational inference with a Gaussian of full covariance: for few weights, or a last layer.

    **Math**: q(w) = N(mean, L L^T) with L lower triangular, exp on its diagonal. At draws w = mean + L eps, ascent on
    lp log p(D | w) + pp log p(w) - log q(w) along pathwise gradients that leave out the score of q ("sticking the
    landing"): with h = d/dw of that sum, where -d log q / dw = L^-T eps, the gradients are h for the mean and the lower
    triangle of h eps^T for L. The trace is as in `MeanField`, with a "kl" from the same draws.

    `ScaledAdam`, the optimiser if none is given, steps in whitened coordinates: in M of L <- L (I + M), whose gradient
    is the lower triangle of E[L^T h eps^T]; entries below the diagonal have units of 5 / R, and rest in the first half
    of the run, which is mean-field. Draws come in mirrored pairs. With `AtMode` the covariance begins at the curvature
    of the mode or at its diagonal, whichever has the higher ELBO. Settings left out (None, "auto") are chosen as
    `VariationalFit` says.

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

    steps: int | None = None
    batch_size: BatchSize = "auto"
    draws: int | None = None
    optimizer: Optimizer | None = None
    schedule: Schedule | None = None
    initial_scales: Start | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.draws is not None:
            positive_whole("FullRank.draws", self.draws)

    def _companions(self) -> dict[str, Any]:
        return {"draws": 1}

    @property
    def _waits(self) -> bool:
        return isinstance(self.optimizer, ScaledAdam)

    def _choices(self, joint: Problem, draws: int) -> dict[str, Any]:
        return {"draws": draws if self.draws is None else self.draws}

    def footprint(self, joint: Problem, data: Data) -> Footprint:
        count = joint.num_random
        size = joint.size + count * (count + 1) // 2
        matrix, members = theta_bytes(joint, count**2), joint.num_members or 1
        fit = fit_bytes(self.chosen("optimizer"), joint, data, self._rows, size)
        activations = {"activations of a batch": fit.pop("activations of a batch")}
        held = {"means and factor": theta_bytes(joint, size), **fit}
        indices = members * 8 * count**2  # of the entries below the diagonal
        if isinstance(self.optimizer, ScaledAdam):  # products of each draw, moves and units
            step = {"gradient": (2 + self.chosen("draws")) * matrix + 3 * theta_bytes(joint, size) + indices}
        else:
            step = {"gradient": 5 * matrix // 2 + theta_bytes(joint, size) + indices}
        end = {
            "copy": theta_bytes(joint, size + joint.size),
            "factor, precision and its factor": 3 * members * 8 * count**2,
        }
        return Footprint.at_peak(self.words(joint), held, activations, step, end)

    def init(self, joint: Problem, theta: Tensor, key: Key) -> FullRankState:
        diagonal = initial_log_scales(joint, self.scale_rule, theta)
        below = diagonal.new_zeros(len(diagonal) * (len(diagonal) - 1) // 2)
        factor = torch.cat([diagonal, below]).expand(*theta.shape[:-1], -1)
        parameters = torch.cat([theta, factor], dim=-1)
        return FullRankState(parameters, self._moments(theta, parameters), joint.starting_buffers(theta), 0)

    def step(self, joint: Problem, state: FullRankState, batch: Batch, key: Key) -> tuple[FullRankState, Info]:
        if state.step < self.search:
            return self._search_step(joint, state, batch, key)
        parameters, size, count = state.parameters, joint.size, joint.num_random
        mean, log_diagonal = parameters[..., :size], parameters[..., size : size + count]
        factor = _factor(parameters[..., size:], count)
        noise = self._noise(key, count, mean)  # (S, R)
        thetas, values, ascents, buffers = self._at_draws(joint, mean, factor, noise, batch, state.buffers)
        value = values.mean(0)
        log_prior = torch.stack([joint.log_prior(theta) for theta in thetas]).mean(0)
        volume = log_diagonal.sum(-1)
        log_densities = [-0.5 * eps.square().sum() - volume - count * _HALF_LOG_TWO_PI for eps in noise]
        log_density = torch.stack(log_densities).mean(0)
        data_fit = (value - joint.powers[1] * log_prior) / (joint.powers[0] * joint.num_data)
        kl = (log_density - log_prior) / joint.num_data
        info = {"loss": (log_density - value) / joint.num_data, "data_fit": data_fit, "kl": kl, "elbo": data_fit - kl}
        if isinstance(self.optimizer, ScaledAdam):
            moments = self._whitened_step(joint, parameters, factor, noise, ascents, state)
        else:
            moments = self._plain_step(joint, parameters, factor, noise, ascents, state)
        return FullRankState(parameters, moments, buffers, state.step + 1), info

    def _noise(self, key: Key, count: int, mean: Tensor) -> Tensor:
        """Standard normal numbers (S, R), the same for all members; for natural steps in mirrored pairs."""
        draws: int = self.chosen("draws")
        pairs = draws // 2 if isinstance(self.optimizer, ScaledAdam) else 0
        each = [key.fold(i).normal((count,), torch.float32, mean.device).to(mean.dtype) for i in range(draws - pairs)]
        return torch.stack([*each, *(-noise for noise in each[:pairs])])

    def _at_draws(
        self, joint: Problem, mean: Tensor, factor: Tensor, noise: Tensor, batch: Batch, buffers: Buffers
    ) -> tuple[Tensor, Tensor, Tensor, Buffers]:
        """theta (S, ..., T) at the draws, the log densities (S, ...), their gradients, and the buffers."""
        indices = joint.random_indices
        if isinstance(self.optimizer, ScaledAdam) and mean.dim() == 1 and len(noise) > 1 and not buffers:
            together = shifted(mean, noise @ factor.mT, indices)
            values, ascents, _ = joint.value_and_grad(together, batch, buffers)
            return together, values, ascents, buffers
        thetas = [shifted(mean, factor @ eps, indices) for eps in noise]
        results = []
        for theta in thetas:
            value, ascent, buffers = joint.value_and_grad(theta, batch, buffers)
            results.append((value, ascent))
        values, ascents = (torch.stack(parts) for parts in zip(*results, strict=True))
        return torch.stack(thetas), values, ascents, buffers

    def _plain_step(
        self, joint: Problem, parameters: Tensor, factor: Tensor, noise: Tensor, ascents: Tensor, state: FullRankState
    ) -> Any:
        """Step along the gradient in the parameters themselves."""
        size, count, indices = joint.size, joint.num_random, joint.random_indices
        wide = torch.promote_types(parameters.dtype, torch.float32)  # there are no triangular solves in half precision
        grad, grad_factor = torch.zeros_like(parameters), torch.zeros_like(factor)
        for eps, ascent in zip(noise, ascents, strict=True):
            column = eps.expand(*parameters.shape[:-1], -1).unsqueeze(-1)
            score = torch.linalg.solve_triangular(factor.mT.to(wide), column.to(wide), upper=True)  # -d log q / dw
            ascent = shifted(ascent, score.squeeze(-1).to(parameters.dtype), indices)
            random = ascent[..., :count] if indices is None else ascent.index_select(-1, indices)
            grad[..., :size].add_(ascent, alpha=1.0 / len(noise))
            grad_factor.add_(random.unsqueeze(-1) * eps, alpha=1.0 / len(noise))
        rows, columns = torch.tril_indices(count, count, offset=-1, device=parameters.device)
        diagonal = factor.diagonal(dim1=-2, dim2=-1)
        grad[..., size : size + count] = grad_factor.diagonal(dim1=-2, dim2=-1) * diagonal
        grad[..., size + count :] = grad_factor[..., rows, columns]
        return self._ascended(joint, parameters, grad, state)

    def _whitened_step(
        self, joint: Problem, parameters: Tensor, factor: Tensor, noise: Tensor, ascents: Tensor, state: FullRankState
    ) -> Any:
        """Step in the mean, and in M of L <- L (I + M) with M at zero."""
        size, count, indices = joint.size, joint.num_random, joint.random_indices
        random = ascents[..., :count] if indices is None else ascents.index_select(-1, indices)  # (S, ..., R)
        eps = noise.view(len(noise), *[1] * (parameters.dim() - 1), count)
        white = (random.unsqueeze(-2) @ factor).squeeze(-2) + eps  # L^T h, with h as above
        product = (white.unsqueeze(-1) * eps.unsqueeze(-2)).mean(0)
        rows, columns = torch.tril_indices(count, count, offset=-1, device=parameters.device)
        spread = mean_units(torch.linalg.vector_norm(factor, dim=-1))
        wide = torch.promote_types(parameters.dtype, torch.float32)  # there are no triangular solves in half precision
        column = noise.mean(0).expand_as(spread).unsqueeze(-1)  # zero where all draws come in pairs
        score = torch.linalg.solve_triangular(factor.mT.to(wide), column.to(wide), upper=True)
        slope = shifted(ascents.mean(0), score.squeeze(-1).to(parameters.dtype), indices)
        grad = torch.cat([slope, product.diagonal(dim1=-2, dim2=-1), product[..., rows, columns]], dim=-1)
        units = torch.ones_like(parameters)
        if indices is None:
            units[..., :count] = spread
        else:
            units[..., indices] = spread
        units[..., size + count :] = min(1.0, _BELOW / count) if state.step >= DIAGONAL * self.chosen("steps") else 0.0
        move = torch.zeros_like(parameters)
        moments = self._ascended(joint, move, grad, state, units)
        parameters[..., :size] += move[..., :size]
        _write(parameters[..., size:], factor @ _factor(move[..., size:], count))
        return moments

    def _search_step(self, joint: Problem, state: FullRankState, batch: Batch, key: Key) -> tuple[FullRankState, Info]:
        """Look for the mode; the last step also takes the covariance from the curvature there.

        In directions that the data leave wide the Gaussian of the whole curvature may reach far beyond where it holds:
        then that of its diagonal has the higher ELBO.
        """
        parameters, size = state.parameters, joint.size
        result, moments, info = self._searched(joint, parameters[..., :size], batch, state)
        parameters[..., :size] = result.theta
        if state.step + 1 == self.search and result.curvature is not None:
            factors = torch.stack([_covariance_factor(result.curvature, share) for share in _SHARES])
            best = self._best_factor(joint, result.theta, factors.to(parameters.dtype), batch, state.buffers, key)
            _write(parameters[..., size:], best)
        return FullRankState(parameters, moments, state.buffers, state.step + 1), info

    def _best_factor(
        self, joint: Problem, mean: Tensor, factors: Tensor, batch: Batch, buffers: Buffers, key: Key
    ) -> Tensor:
        """The factor (..., R, R) among `factors` (C, ..., R, R) with the highest ELBO at some draws."""
        noise, bounds = self._noise(key, joint.num_random, mean), []
        for factor in factors:
            values = self._at_draws(joint, mean, factor, noise, batch, buffers)[1]
            bounds.append(values.mean(0) + factor.diagonal(dim1=-2, dim2=-1).log().sum(-1))
        best = torch.stack(bounds).nan_to_num(-torch.inf).argmax(0)  # (...)
        return factors.gather(0, best[None, ..., None, None].expand_as(factors[:1])).squeeze(0)

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


def _write(entries: Tensor, factor: Tensor) -> None:
    """Write L (..., R, R) to its entries, as `_factor` reads them."""
    count = factor.shape[-1]
    rows, columns = torch.tril_indices(count, count, offset=-1, device=entries.device)
    entries[..., :count] = factor.diagonal(dim1=-2, dim2=-1).log()
    entries[..., count:] = factor[..., rows, columns]


def _covariance_factor(curvature: Tensor, share: float) -> Tensor:
    """L of the covariance of a precision (..., R, R), of whose entries beside the diagonal a `share` is left out."""
    mixed = (1.0 - share) * curvature + share * torch.diag_embed(curvature.diagonal(dim1=-2, dim2=-1))
    factor: Tensor = torch.linalg.cholesky(torch.cholesky_inverse(torch.linalg.cholesky(mixed)))
    return factor
