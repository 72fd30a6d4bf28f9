"""Gaussian observation noise: known, learnt, or an output of the network."""

import math
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from posterity.errors import BadData
from posterity.likelihoods.likelihood import Entrywise, event_sum, real
from posterity.likelihoods.scaled import HALF_LOG_TWO_PI, Scaled
from posterity.numerics.brief import repr_of_set
from posterity.numerics.random import Key
from posterity.options import LEFT_OUT


@dataclass(frozen=True, eq=False)
class Gaussian(Scaled):
    """Independent normal noise around each network output.

    **Math**: y ~ N(f, scale^2), log p = sum over the event of -(y - f)^2 / (2 scale^2) - log scale - log(2 pi) / 2.
    Outputs and targets are (N,), (N, D) or any (N, *event), such as images. `scale` is one standard deviation for
    all outputs or one for each, (D,). One that is given is known, and no method moves it by itself. `Gaussian()`
    leaves it to the method to choose (docs/scales.md); until then it is 1. With `learn=True` it is the starting value
    of a parameter beside the weights whose raw form is log(scale), with 1 or D entries; members of a batched run each
    have their own, (M, 1, 1) or (M, 1, D) against outputs (M, N, D).

    `log_scale_prior = (mean, standard deviation)` puts a normal prior on each entry of log(scale). None is a flat
    prior on log(scale). It is improper: fine for a mode, a Laplace or a variational fit, but a sampler needs a
    proper one.

    **Limit**: exact for Gaussian noise; one outlier at distance d costs d^2 / (2 scale^2) nats. Hessian and Fisher
    information in f are equal and constant.

    **Cost**: one pass over the outputs.

    **References**: Bishop (2006), Pattern Recognition and Machine Learning, eq. 5.12.

    **Example**:

    >>> likelihood = Gaussian(scale=2.0)
    >>> likelihood.log_prob(torch.tensor([[1.0]]), torch.tensor([[3.0]]))
    tensor([-2.1121])
    >>> Gaussian(scale=0.5, learn=True).free(torch.zeros(1))
    tensor([-0.6931])
    """

    scale: float | tuple[float, ...] | Tensor = None  # type: ignore[assignment]  # left out: 1
    learn: bool = False
    log_scale_prior: tuple[float, float] | None = None
    chosen: str = field(default="", metadata={"stored": "if set"})

    link = "identity"
    normal_targets = True

    def __post_init__(self) -> None:
        given: object = self.scale
        if given is None:
            object.__setattr__(self, "scale", 1.0)
            object.__setattr__(self, "chosen", "" if self.learn else LEFT_OUT)
        super().__post_init__()

    def __repr__(self) -> str:
        return repr_of_set(self)

    def as_chosen(self, way: str) -> "Gaussian":
        return replace(self, chosen=way) if self.chosen else self

    @property
    def _unit_fisher(self) -> float:
        return 1.0

    def _entries(self, outputs: Tensor, targets: Tensor) -> Tensor:
        scale = self._aligned(outputs)
        log_scale = scale.log() if isinstance(scale, Tensor) else math.log(scale)
        entries: Tensor = -0.5 * ((targets - outputs) / scale).square() - (log_scale + HALF_LOG_TWO_PI)
        return entries

    def tilted_moments(self, mean: Tensor, variance: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        noise = torch.as_tensor(self.scale, dtype=mean.dtype, device=mean.device).reshape(()).square()
        residual, total = targets.reshape(mean.shape) - mean, variance + noise
        log_normaliser = -0.5 * (residual.square() / total + total.log()) - HALF_LOG_TWO_PI
        return log_normaliser, mean + variance * residual / total, variance * noise / total

    def expected_log_prob(self, mean: Tensor, variance: Tensor, targets: Tensor) -> Tensor:
        """Return log p(y | mean) - sum over the event of variance / (2 scale^2)."""
        return self.log_prob(mean, targets) - event_sum(self._lost(mean, variance, targets), targets.dim() - 1)

    def expected_entry_log_prob(self, mean: Tensor, variance: Tensor, targets: Tensor) -> Tensor:
        return self.entry_log_prob(mean, targets) - self._lost(mean, variance, targets)

    def _lost(self, mean: Tensor, variance: Tensor, targets: Tensor) -> Tensor:
        """Return variance / (2 scale^2), (N, *event); 0 where the target is missing."""
        lost = 0.5 * (variance.reshape(mean.shape) / self.variance(mean))
        return torch.where(self.observed(targets), lost, 0.0)

    def sample(self, outputs: Tensor, key: Key) -> Tensor:
        return outputs + self._aligned(outputs) * key.normal(outputs.shape, outputs.dtype, outputs.device)

    def variance(self, outputs: Tensor) -> Tensor:
        return torch.zeros_like(outputs) + self._aligned(outputs) ** 2

    def _hessian(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return self.output_fisher(outputs, targets.dim() - 1)

    def cdf(self, outputs: Tensor, targets: Tensor) -> Tensor:
        value: Tensor = torch.special.ndtr((targets - outputs) / self._aligned(outputs))
        return value


@dataclass(frozen=True)
class Heteroscedastic(Entrywise):
    """Normal noise whose mean and log scale are both network outputs.

    **Math**: outputs (..., N, 2 D) are D means a followed by D log scales r, for targets (N, D):
    y ~ N(a, exp(r)^2), log p = sum over D of -z^2 / 2 - r - log(2 pi) / 2 with z = (y - a) / exp(r). Hessian of
    -log p in (a, r): [[exp(-2 r), 2 z exp(-r)], [2 z exp(-r), 2 z^2]], with determinant -2 z^2 exp(-2 r): indefinite
    unless z = 0. Fisher information: diag(exp(-2 r), 2).

    **Limit**: exact for such noise. Maximum likelihood can overfit it: log p has no upper bound where a passes through
    a target and r falls. Mean and log scale of a new network start near 0: standardise the targets.

    **Cost**: one pass over the outputs.

    **References**: Nix and Weigend (1994), Estimating the mean and variance of the target probability distribution;
    Kendall and Gal (2017), What uncertainties do we need in Bayesian deep learning?

    **Example**:

    >>> likelihood = Heteroscedastic()
    >>> outputs = torch.tensor([[1.0, 0.0], [1.0, 2.0]])  # mean 1 with scale 1, then with scale exp(2)
    >>> likelihood.log_prob(outputs, torch.tensor([[5.0], [5.0]]))
    tensor([-8.9189, -3.0655])
    """

    normal_targets = True

    def check(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return targets (N, D) for outputs (N, 2 D); targets (N,) become (N, 1) for outputs (N, 2)."""
        if outputs.dim() != 2 or outputs.shape[1] % 2 or not outputs.shape[1]:
            raise BadData(
                "Heteroscedastic: outputs must be (N, 2 D), D means and D log scales. "
                f"Got {tuple(outputs.shape)}. Give the network two outputs for each target."
            )
        shape = torch.Size((outputs.shape[0], outputs.shape[1] // 2))
        remedy = f"The network has {outputs.shape[1]} outputs: it must have two for each target."
        return real("Heteroscedastic", targets, shape, outputs.dtype, remedy)

    def over_outputs(self, entries: Tensor) -> Tensor:
        return torch.cat([entries, entries], dim=-1)

    def _entries(self, outputs: Tensor, targets: Tensor) -> Tensor:
        mean, log_scale = outputs.chunk(2, dim=-1)
        entries: Tensor = -0.5 * ((targets - mean) * (-log_scale).exp()).square() - (log_scale + HALF_LOG_TWO_PI)
        return entries

    def sample(self, outputs: Tensor, key: Key) -> Tensor:
        mean, log_scale = outputs.chunk(2, dim=-1)
        return mean + log_scale.exp() * key.normal(mean.shape, mean.dtype, mean.device)

    def mean(self, outputs: Tensor) -> Tensor:
        return outputs.chunk(2, dim=-1)[0]

    def variance(self, outputs: Tensor) -> Tensor:
        return (2.0 * outputs.chunk(2, dim=-1)[1]).exp()

    def _hessian(self, outputs: Tensor, targets: Tensor) -> Tensor:
        mean, log_scale = outputs.chunk(2, dim=-1)
        inverse = (-log_scale).exp()
        z = (targets - mean) * inverse
        means, mixed, scales = (torch.diag_embed(t) for t in (inverse.square(), 2.0 * z * inverse, 2.0 * z.square()))
        return torch.cat([torch.cat([means, mixed], dim=-1), torch.cat([mixed, scales], dim=-1)], dim=-2)

    def output_fisher(self, outputs: Tensor, event_dims: int | None = None) -> Tensor:
        """Return diag(exp(-2 r), 2), (..., N, 2 D, 2 D); the event is the last axis."""
        if event_dims not in (None, 1):
            raise ValueError(f"Heteroscedastic.output_fisher: the event has 1 axis. Got event_dims {event_dims}.")
        log_scale = outputs.chunk(2, dim=-1)[1]
        return torch.diag_embed(torch.cat([(-2.0 * log_scale).exp(), torch.full_like(log_scale, 2.0)], dim=-1))

    def cdf(self, outputs: Tensor, targets: Tensor) -> Tensor:
        mean, log_scale = outputs.chunk(2, dim=-1)
        value: Tensor = torch.special.ndtr((targets - mean) * (-log_scale).exp())
        return value
