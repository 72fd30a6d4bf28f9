"""Variational inference with a Gaussian whose covariance is low rank plus diagonal."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from posterity.errors import positive_whole
from posterity.inference.memory import fit_bytes
from posterity.inference.method import BatchSize, Footprint, Info, Traits, theta_bytes
from posterity.jacobians.jacobian import CACHED, chunk_size
from posterity.methods.parts.gradients.estimator import Factorised, Gradients, divergence, initial_log_scales, shifted
from posterity.methods.parts.variational_fit import DIAGONAL, Start, VariationalFit, mean_units
from posterity.model import Batch, Buffers, Data, Joint, Problem
from posterity.numerics.random import Key
from posterity.numerics.workspace import workspace
from posterity.optim import Optimizer, ScaledAdam, Schedule
from posterity.posteriors.gaussian import Gaussian
from posterity.precisions.low_rank import LowRankCovariance

_RANK = 10  # or fewer weights
_SMALL = 1e-2  # the first factor under `ScaledAdam`, relative to `initial_scales`
_HALF_LOG_TWO_PI_E = 0.5 * math.log(2.0 * math.pi * math.e)


class LowRankGaussianState(NamedTuple):
    """`parameters`: means (T,) of theta, log-scales (R,) of the random weights, then the K rows (R,) of the factor.

    These are one vector, or (M, ...) for members; `optimizer` holds the moments, `buffers` batch-norm statistics.
    """

    parameters: Tensor
    optimizer: Any
    buffers: Buffers
    step: int


@dataclass(frozen=True)
class LowRankGaussian(VariationalFit):
    """Variational inference with a Gaussian of low rank plus diagonal covariance: between `MeanField` and `FullRank`.

    **Math**: q(w) = N(mean, diag(scale^2) + F F^T) with F (R, `rank`); ascent on lp E_q log p(D | w) - pp
    E_q[-log p(w)] + H(q) in (mean, log scale, F). The first term by pathwise gradients at `draws` of w = mean +
    scale * eps + F z; with g = d/dw they are g, g * eps and g z^T. The entropy is in closed form, H = sum log scale +
    log det A / 2 + const with A = I + F^T diag(scale^-2) F, whose gradient in F is diag(scale^-2) F A^-1. The
    cross-entropy is in closed form over the marginals for priors of independent weights, else from the same draws.
    The trace is as in `MeanField`. F begins at random entries that double the variances of `initial_scales`; under
    `ScaledAdam`, the optimiser if none is given, at small ones, and it rests in the first half of the run. Settings
    left out (None, "auto") are chosen as `VariationalFit` says, the rank as 10 or the number of weights.

    **Limit**: a local optimum of a bound, no lower than mean-field's at its best; the posterior itself where that is
    Gaussian with such a covariance, as it is at rank R. Members that train together draw the same noise.

    **Cost**: `draws` forward and backward passes, some products of (`rank`, R) by (R, `rank`) in float64; R (`rank` +
    1) numbers beside the means, with two moments for each.

    **References**: Ong, Nott and Smith (2018), Gaussian variational approximation with a factor covariance structure,
    section 3; Tomczak et al. (2020), Efficient low rank Gaussian variational inference for neural networks.

    **Example**:

    >>> import torch, posterity as po
    >>> covariance = 0.5 * torch.eye(3) + torch.ones(3, 3)
    >>> density = po.Density(lambda w: -0.5 * w @ torch.linalg.solve(covariance, w), {"w": (3,)})
    >>> method = po.methods.LowRankGaussian(
    ...     rank=1, steps=1500, draws=4, optimizer=po.optim.Adam(0.03), schedule=po.optim.Cosine()
    ... )
    >>> q, trace = po.infer(method, density, None)
    >>> bool((q.precision.covariance() - covariance).abs().max() < 0.1)
    True
    """

    rank: int | None = None
    steps: int | None = None
    batch_size: BatchSize = "auto"
    draws: int | None = None
    optimizer: Optimizer | None = None
    schedule: Schedule | None = None
    initial_scales: Start | None = None

    def __post_init__(self) -> None:
        if self.rank is not None:
            positive_whole("LowRankGaussian.rank", self.rank, "(of rank 0 it is MeanField)")
        super().__post_init__()
        if self.draws is not None:
            positive_whole("LowRankGaussian.draws", self.draws)

    def _companions(self) -> dict[str, Any]:
        return {"draws": 1}

    @property
    def _waits(self) -> bool:
        return isinstance(self.optimizer, ScaledAdam)

    def _choices(self, joint: Problem, draws: int) -> dict[str, Any]:
        rank = min(_RANK, joint.num_random) if self.rank is None else self.rank
        return {"rank": rank, "draws": draws if self.draws is None else self.draws}

    def prepared(self, joint: Problem, data: Data) -> Problem:
        """Check that the joint has enough weights for the rank."""
        if self.chosen("rank") > joint.num_random:
            raise ValueError(
                f"LowRankGaussian.rank must be at most the number of random weights, {joint.num_random}. "
                f"Got {self.rank}. Use a smaller rank, or FullRank()."
            )
        return joint

    @property
    def traits(self) -> Traits:
        return replace(super().traits, recordable=not self.search)

    def footprint(self, joint: Problem, data: Data) -> Footprint:
        count, rank = joint.num_random, self.chosen("rank")
        size = joint.size + (rank + 1) * count
        fit = fit_bytes(self.chosen("optimizer"), joint, data, self._rows, size)
        activations = fit.pop("activations of a batch")
        held = {"means, scales and factor": theta_bytes(joint, size), "gradient": theta_bytes(joint, size), **fit}
        step = {"draw": theta_bytes(joint, 6 * joint.size), "activations of a batch": activations}
        products = {"products of the factor": theta_bytes(joint, 2 * rank * count + 6 * joint.size)}
        covariance = (joint.num_members or 1) * 8 * count * (rank + 2)
        end = {"copy": theta_bytes(joint, size + joint.size), "covariance": covariance}
        words = f"LowRankGaussian of rank {self.rank} over {joint.num_weights:,} weights"
        return Footprint.at_peak(words, held, step, products, end)

    def init(self, joint: Problem, theta: Tensor, key: Key) -> LowRankGaussianState:
        """Means at theta and a random factor, since the gradient in the factor vanishes at zero."""
        log_scales, rank = initial_log_scales(joint, self.scale_rule, theta), self.chosen("rank")
        noise = key.normal((rank, len(log_scales)), torch.float32, theta.device).to(theta.dtype)
        factor = log_scales.exp() * noise / math.sqrt(rank)
        if isinstance(self.optimizer, ScaledAdam):
            factor = factor * _SMALL
        spread = torch.cat([log_scales, factor.flatten()]).expand(*theta.shape[:-1], -1)
        parameters = torch.cat([theta, spread], dim=-1)
        return LowRankGaussianState(parameters, self._moments(theta, parameters), joint.starting_buffers(theta), 0)

    def step(
        self, joint: Problem, state: LowRankGaussianState, batch: Batch, key: Key
    ) -> tuple[LowRankGaussianState, Info]:
        parameters = state.parameters
        if self.search and state.step < self.search:  # a recorded step is a tensor, whose value must not be read
            return self._search_step(joint, state, batch)
        grad, terms, buffers = self._ascent(joint, parameters, batch, state.buffers, key)
        moments = self._ascended(joint, parameters, grad, state, self._units(joint, state))
        data_fit, kl = terms.data_fit / joint.num_data, terms.kl / joint.num_data
        info = {"loss": -terms.bound / joint.num_data, "data_fit": data_fit, "kl": kl, "elbo": data_fit - kl}
        return LowRankGaussianState(parameters, moments, buffers, state.step + 1), info

    def _units(self, joint: Problem, state: LowRankGaussianState) -> Tensor | None:
        """Units of the parameters for `ScaledAdam`; the factor is small, and at rest, in the first part of the run."""
        if not isinstance(self.optimizer, ScaledAdam):
            return None
        _, log_scale, factor = _split(state.parameters, joint.size, joint.num_random)
        marginal = (log_scale.exp().square() + factor.square().sum(-2)).sqrt()
        units = torch.ones_like(state.parameters)
        of_mean, _, of_factor = _split(units, joint.size, joint.num_random)
        if joint.random_indices is None:
            of_mean[..., : joint.num_random] = mean_units(marginal)
        else:
            of_mean[..., joint.random_indices] = mean_units(marginal)
        of_factor.copy_(marginal.unsqueeze(-2) * (state.step >= DIAGONAL * self.chosen("steps")))
        return units

    def _search_step(
        self, joint: Problem, state: LowRankGaussianState, batch: Batch
    ) -> tuple[LowRankGaussianState, Info]:
        """Look for the mode; the last step also takes the scales from the curvature there."""
        parameters = state.parameters
        mean, log_scale, factor = _split(parameters, joint.size, joint.num_random)
        result, moments, info = self._searched(joint, mean, batch, state)
        mean.copy_(result.theta)
        if state.step + 1 == self.search and result.curvature is not None:
            now = -0.5 * result.curvature.diagonal(dim1=-2, dim2=-1).log().to(log_scale.dtype)
            factor.mul_((now - log_scale).exp().unsqueeze(-2))
            log_scale.copy_(now)
        return LowRankGaussianState(parameters, moments, state.buffers, state.step + 1), info

    def _at_draws(
        self, joint: Problem, parameters: Tensor, batch: Batch, buffers: Buffers, key: Key, closed: bool
    ) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Buffers]]:
        """For each draw eps, z, theta, the log density (of the data alone if `closed`), its gradient, the buffers."""
        mean, log_scale, factor = _split(parameters, joint.size, joint.num_random)
        scale, draws = log_scale.exp(), self.chosen("draws")
        value_and_grad = joint.data_value_and_grad if closed else joint.value_and_grad
        pairs = draws // 2 if isinstance(self.optimizer, ScaledAdam) else 0
        each = [_noise(key.fold(draw), joint.num_random, factor.shape[-2], mean) for draw in range(draws - pairs)]
        each += [(-eps, -z) for eps, z in each[:pairs]]
        if pairs and mean.dim() == 1 and not buffers:
            noise, spread = (torch.stack(parts) for parts in zip(*each, strict=True))
            thetas = shifted(mean, scale * noise + spread @ factor, joint.random_indices)
            values, ascents, _ = value_and_grad(thetas, batch, buffers)
            for (eps, z), theta, value, ascent in zip(each, thetas, values, ascents, strict=True):
                yield eps, z, theta, value, ascent, buffers
            return
        for eps, z in each:
            theta = shifted(mean, scale * eps + z @ factor, joint.random_indices)
            # The tempered log-likelihood alone where the prior's part is known, else with the tempered log prior.
            value, ascent, buffers = value_and_grad(theta, batch, buffers)
            yield eps, z, theta, value, ascent, buffers

    def _ascent(
        self, joint: Problem, parameters: Tensor, batch: Batch, buffers: Buffers, key: Key
    ) -> tuple[Tensor, "_Terms", Buffers]:
        """The gradient of the tempered ELBO in all parameters, its terms, and the buffers."""
        size, count, indices = joint.size, joint.num_random, joint.random_indices
        mean, log_scale, factor = _split(parameters, size, count)
        scale = log_scale.exp()
        closed = not isinstance(joint, Joint) or joint.bound_prior.factorises
        grad = workspace(joint, "parameters", parameters).zero_()
        grad_mean, grad_scale, grad_factor = _split(grad, size, count)
        values, log_priors = [], []
        share = 1.0 / self.chosen("draws")
        for eps, z, theta, value, ascent, after in self._at_draws(joint, parameters, batch, buffers, key, closed):
            buffers = after
            random = ascent[..., :count] if indices is None else ascent.index_select(-1, indices)
            grad_mean.add_(ascent, alpha=share)
            grad_scale.addcmul_(random, eps, value=share)
            grad_factor.addcmul_(random.unsqueeze(-2), z.unsqueeze(-1), value=share)
            values.append(value)
            if not closed:
                log_priors.append(joint.log_prior(theta))
        value = torch.stack(values).mean(0)
        inner, marginal = _inner(scale, factor)
        inverse, log_root = _inverse_root(inner)
        entropy = log_scale.double().sum(-1) + log_root
        entropy = (entropy + count * _HALF_LOG_TWO_PI_E).to(mean.dtype)
        likelihood_power, prior_power = joint.powers
        if closed:
            log_marginal = marginal.log()
            pull = torch.zeros_like(marginal)
            q = Factorised(mean, marginal, indices)
            prior = divergence(joint, q, log_marginal, key, Gradients(grad_mean, pull), -1.0)
            cross_entropy = prior.kl + (log_marginal.sum(-1) + count * _HALF_LOG_TWO_PI_E)
            pull.div_(marginal)  # d marginal = (scale d scale + F d F) / marginal
            grad_scale.addcmul_(pull, scale)
            grad_factor.addcmul_(pull.unsqueeze(-2), factor)
            data_value = value
        else:
            cross_entropy = -torch.stack(log_priors).mean(0)
            data_value = value + prior_power * cross_entropy
        grad_scale.mul_(scale)  # d scale / d log scale
        _add_entropy_grad(inverse, scale, factor, grad_scale, grad_factor)
        bound = data_value - prior_power * cross_entropy + entropy
        return grad, _Terms(data_value / likelihood_power, cross_entropy - entropy, bound), buffers

    def posterior(self, joint: Problem, kept: Sequence[LowRankGaussianState]) -> Gaussian:
        last = kept[-1]
        mean, log_scale, factor = _split(last.parameters, joint.size, joint.num_random)
        theta = mean.clone()
        precision = LowRankCovariance((2.0 * log_scale.double()).exp(), factor.double())
        return Gaussian(joint.fitted(theta), theta[..., : joint.num_weights], precision, last.buffers)


class _Terms(NamedTuple):
    """E log p(D | w) and the KL, untempered, and the tempered ELBO, in nats over all data."""

    data_fit: Tensor
    kl: Tensor
    bound: Tensor


def _noise(key: Key, count: int, rank: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """eps (R,) and z (K,), the same for all members, drawn in float32 for every dtype."""
    noise = key.normal((count + rank,), torch.float32, like.device).to(like.dtype)
    return noise[:count], noise[count:]


def _split(parameters: Tensor, size: int, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Views of means (..., T), log-scales (..., R) and factor (..., K, R)."""
    spread = parameters[..., size + count :]
    factor = spread.view(*spread.shape[:-1], -1, count)
    return parameters[..., :size], parameters[..., size : size + count], factor


def _whitened(scale: Tensor, factor: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Chunks of weights with their F^T / scale (..., K, r) in float64, each small enough for the caches of a CPU."""
    count = factor.shape[-1]
    step = max(1, chunk_size(factor.device, CACHED) * count // max(1, factor.numel()))
    for low in range(0, count, step):
        chunk = slice(low, low + step)
        yield chunk, factor[..., chunk].double() / scale[..., None, chunk]


def _inner(scale: Tensor, factor: Tensor) -> tuple[Tensor, Tensor]:
    """A = I + F^T diag(scale^-2) F, (..., K, K) in float64, and the marginal standard deviations (..., R) of q."""
    inner = torch.eye(factor.shape[-2], dtype=torch.float64, device=factor.device)
    marginal = torch.empty_like(scale)
    for chunk, white in _whitened(scale, factor):
        inner = inner + white @ white.mT
        marginal[..., chunk] = scale[..., chunk] * (1.0 + white.square().sum(-2)).sqrt()
    return inner, marginal


def _inverse_root(inner: Tensor) -> tuple[Tensor, Tensor]:
    """L^-1 (..., K, K) and log det L of A = L L^T, whose eigenvalues are at least one; a NaN stays, for the run to see.

    On a GPU by elimination: the solvers of its libraries read memory of the CPU, which a recording does not see.
    """
    if inner.is_cuda:
        return _eliminated(inner)
    root, _ = torch.linalg.cholesky_ex(inner)
    eye = torch.eye(inner.shape[-1], dtype=inner.dtype, device=inner.device)
    return torch.linalg.solve_triangular(root, eye, upper=False), root.diagonal(dim1=-2, dim2=-1).log().sum(-1)


def _eliminated(inner: Tensor) -> tuple[Tensor, Tensor]:
    """As `_inverse_root`, by K steps of Gauss's elimination on (A, I), of which each row is divided by its root."""
    size = inner.shape[-1]
    eye = torch.eye(size, dtype=inner.dtype, device=inner.device).expand_as(inner)
    table, rows, pivots = torch.cat([inner, eye], dim=-1), [], []
    for _ in range(size):
        pivots.append(table[..., 0, :1])
        row = table[..., :1, 1:] * pivots[-1].rsqrt().unsqueeze(-1)  # (..., 1, .)
        rows.append(row[..., -size:])
        column = table[..., 1:, :1] * pivots[-1].rsqrt().unsqueeze(-1)
        table = table[..., 1:, 1:] - column * row
    return torch.cat(rows, dim=-2), 0.5 * torch.cat(pivots, dim=-1).log().sum(-1)


def _add_entropy_grad(
    inverse: Tensor, scale: Tensor, factor: Tensor, grad_log_scale: Tensor, grad_factor: Tensor
) -> None:
    """Add the gradient of log det(diag(scale^2) + F F^T) / 2 in log scale and F, from L^-1, where A = L L^T."""
    for chunk, white in _whitened(scale, factor):
        half = inverse @ white  # L^-1 F^T / scale
        grad_log_scale[..., chunk] += 1.0 - half.square().sum(-2)
        grad_factor[..., chunk] += (inverse.mT @ half) / scale[..., None, chunk]
