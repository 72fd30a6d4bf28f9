"""The Laplace log evidence at a mode, as a function of the noise and of prior precisions by group of weights."""

import glob
import logging
import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from posterity.likelihoods import Gaussian, Heteroscedastic
from posterity.likelihoods.likelihood import Likelihood, event_sum
from posterity.likelihoods.scaled import Scaled
from posterity.model.data import Batch
from posterity.model.joint import Joint
from posterity.model.scales import random_log_prior
from posterity.model.weights import entry_weights
from posterity.numerics.layout import Layout, Slice
from posterity.options import LEFT_OUT
from posterity.precisions.precision import Precision
from posterity.priors import Correlated, Layerwise, Normal, Prior

logger = logging.getLogger("posterity")


class Groups(ABC):
    """A partition of the tensors of weights into groups with a prior precision each."""

    @abstractmethod
    def name(self, part: Slice) -> str:
        """Name of a tensor's group."""

    def names(self, layout: Layout) -> tuple[str, ...]:
        """Names of the groups, in the order of the weights."""
        return tuple(dict.fromkeys(self.name(part) for part in layout))

    def index(self, layout: Layout) -> Tensor:
        """Index of each weight's group, (P,), on the CPU."""
        names = self.names(layout)
        groups = torch.tensor([names.index(self.name(part)) for part in layout], device="cpu")
        return groups.repeat_interleave(torch.tensor([part.size for part in layout], device="cpu"))


@dataclass(frozen=True)
class Shared(Groups):
    """One prior precision for all weights.

    >>> Shared().names(Layout.of({"0.weight": (2, 1), "0.bias": (2,)}))
    ('all weights',)
    """

    def name(self, part: Slice) -> str:
        return "all weights"


@dataclass(frozen=True)
class PerLayer(Groups):
    """One prior precision for each layer, its bias included.

    >>> PerLayer().names(Layout.of({"0.weight": (2, 1), "0.bias": (2,), "2.weight": (1, 2)}))
    ('0', '2')
    """

    def name(self, part: Slice) -> str:
        return part.name.rpartition(".")[0] or "the module"


@dataclass(frozen=True)
class PerTensor(Groups):
    """One prior precision for each named tensor.

    >>> PerTensor().names(Layout.of({"0.weight": (2, 1), "0.bias": (2,)}))
    ('0.weight', '0.bias')
    """

    def name(self, part: Slice) -> str:
        return part.name


GIVEN = "weights whose prior was given"


@dataclass(frozen=True)
class LeftOut(Groups):
    """Groups of the tensors whose prior scale was left out; tensors with a given scale form one fixed group.

    >>> LeftOut(PerLayer(), ("0.weight",)).names(Layout.of({"0.weight": (2, 1), "0.bias": (2,)}))
    ('0', 'weights whose prior was given')
    """

    groups: Groups
    tensors: tuple[str, ...]

    @classmethod
    def of(cls, joint: Joint, groups: Groups) -> Groups:
        """Return `LeftOut` groups, or `groups` itself if every scale was left out."""
        layout = joint.network.layout
        named = [
            p.name for p, prior in zip(layout, joint.prior.by_tensor(layout), strict=True) if prior.chosen == LEFT_OUT
        ]
        return groups if len(named) == len(layout.names) else cls(groups, tuple(named))

    def name(self, part: Slice) -> str:
        return self.groups.name(part) if part.name in self.tensors else GIVEN


def left_out(joint: Joint) -> tuple[bool, bool]:
    """Return whether a scale of the prior was left out, and whether the noise was, or is learnt with the weights."""
    noise = joint.likelihood.chosen == LEFT_OUT or joint.likelihood.num_free > 0
    return joint.bound_prior.chosen == LEFT_OUT, noise


def grouped(joint: Joint, groups: Groups) -> tuple[tuple[str, ...], Tensor]:
    """Return the names of the groups of random weights, and the index of each random weight's group, (R,)."""
    layout = Layout.of({part.name: part.shape for part in joint.random_slices})
    names, index = groups.names(layout), groups.index(layout).to(joint.device)
    if isinstance(joint.random, Tensor):  # single weights of these tensors
        weights = torch.cat([torch.arange(part.offset, part.offset + part.size) for part in joint.random_slices])
        index = index[torch.searchsorted(weights.to(joint.device), joint.random.to(joint.device))]
    return names, index


def rescaled_prior(joint: Joint, groups: Groups, factors: Tensor) -> Prior:
    """Multiply the prior's scales in each group of random weights by its factor, (G,).

    Ratios of scales inside a group, means, and the priors of weights that are points are kept. One group of all weights
    keeps the class of prior (a `Layerwise` its rules); several make a `Layerwise` with a prior for each tensor.
    """
    if len(factors) == 1 and joint.random_indices is None:
        return joint.prior.rescaled(float(factors))
    layout = joint.network.layout
    random = torch.arange(layout.size, device=factors.device) if joint.random_indices is None else joint.random_indices
    each = factors.new_ones(layout.size).index_copy(0, random, factors[grouped(joint, groups)[1]])  # (P,)
    tensors = zip(joint.prior.by_tensor(layout), layout, strict=True)
    return Layerwise({glob.escape(p.name): own.rescaled_each(each[p.offset : p.offset + p.size]) for own, p in tensors})


def laplace_evidence(log_joint: Tensor, precision: Precision) -> Tensor:
    """log Z = log_joint + R/2 log 2 pi - 1/2 logdet: the Laplace approximation of the log normaliser.

    Takes the log density at the mode, all constants in, and the precision there; exact for linear-Gaussian models.
    Under tempering it is the log normaliser of the tempered density, not comparable across temperatures.

    >>> import torch
    >>> from posterity.precisions import Dense
    >>> peak = torch.tensor(-0.5 * math.log(2 * math.pi), dtype=torch.float64)  # of N(0, 1)
    >>> round(float(laplace_evidence(peak, Dense(torch.eye(1)))), 12)
    0.0
    """
    return log_joint + 0.5 * precision.size * math.log(2.0 * math.pi) - 0.5 * precision.logdet


@dataclass(frozen=True, eq=False)
class Noise:
    """The noise of a Gaussian likelihood with one scale, and the residuals at the mode.

    `squares` is sum_n w_n |y_n - f_n|^2, `count` the number of observed entries sum_n w_n D; `log_scale_prior` as in
    the likelihood that learns the scale.
    """

    scale: float
    squares: float
    count: float
    log_scale_prior: tuple[float, float] | None = None

    def log_likelihood_gain(self, scale: Tensor) -> Tensor:
        """log p(D | theta*, scale) - log p(D | theta*, present scale)."""
        return self.count * (math.log(self.scale) - scale.log()) - 0.5 * self.squares * (scale**-2 - self.scale**-2)

    def log_prior(self, scale: Tensor) -> Tensor:
        """Log density of log(scale) under its prior; zero for a flat prior."""
        if self.log_scale_prior is None:
            return torch.zeros_like(scale)
        mean, deviation = self.log_scale_prior
        return -0.5 * ((scale.log() - mean) / deviation).square() - math.log(deviation) - 0.5 * math.log(2.0 * math.pi)


@dataclass(frozen=True, eq=False)
class Marginal:
    """The Laplace log marginal likelihood as a function of the hyper-parameters, at a fixed mode.

    With a prior precision alpha_g for each group g of weights, and noise of scale s, it is

        lp log p(D | theta*, s) + pp log p(theta* | alpha) + R/2 log 2 pi - 1/2 logdet(lp C(s) + pp diag(prior)),

    C(s) = C (scale / s)^2. The prior precision of weight i is alpha_g pattern_i, where the pattern, of geometric
    mean one in each group, comes from the present prior. Groups and the determinant are of the R random weights;
    points keep their prior. For positive semi-definite C it is concave in log alpha and log s together: a determinant
    of sums of such matrices is a polynomial of positive coefficients, whose log is convex in the logs.

    `precision` is a matrix with the curvature C of the UNTEMPERED likelihood, summed over all data, at the present
    noise. A prior that is not normal has no groups; its precision and log density are constants.
    """

    precision: Precision
    log_likelihood: Tensor  # () untempered, at the mode and the present noise
    names: tuple[str, ...]  # of the groups
    prior_precision: Tensor  # (G,) the present one
    sizes: Tensor  # (G,) number of weights
    squares: Tensor  # (G,) sum of pattern (theta* - mean)^2
    pattern: Tensor  # (R,) of the random weights
    group: Tensor  # (R,) of the random weights
    constant: Tensor  # () the part of the log prior that no hyper-parameter changes
    noise: Noise | None = None
    likelihood_power: float = 1.0
    prior_power: float = 1.0
    earlier: Precision | None = None  # the matrix of a `Correlated` prior, whose diagonal part is the pattern

    @classmethod
    def of(
        cls,
        joint: Joint,
        theta: Tensor,
        precision: Precision,
        log_likelihood: Tensor,
        residuals: Tensor | None = None,
        groups: Groups | None = None,
    ) -> "Marginal":
        """Build it at the mode theta (P,) of a joint, whose last entries are learnt parameters of the likelihood.

        `residuals` is the sum of `residual_sums` over all rows; None leaves the noise out.
        """
        if theta.dim() != 1:
            raise ValueError(f"Marginal.of takes one theta (P,). Got {tuple(theta.shape)}. Use joint.member(i).")
        weights, raw = joint.split(theta.detach().to(torch.float64))
        prior, index = joint.bound_prior, joint.random_indices
        noise = None if residuals is None else _noise(joint.likelihood, joint.fitted(theta).likelihood, residuals)
        learnt_noise = noise is not None and joint.likelihood.num_free > 0
        free = weights.new_zeros(()) if learnt_noise else joint.likelihood.free_log_prior(raw)
        log_prior = random_log_prior(joint.fitted(theta), weights)
        earlier = prior.matrix if isinstance(prior, Correlated) else None
        present = prior.precision(weights) if earlier is None else earlier.base  # (P,)
        random = present if index is None else present[index]  # (R,)
        if isinstance(prior, Normal):
            names, group = grouped(joint, Shared() if groups is None else groups)
            alpha, pattern = parted(random, group, len(names))
            mean = prior.mean.to(weights) if isinstance(prior.mean, Tensor) else prior.mean
            away = (weights - mean).reshape(-1).square()
            squares = pattern * (away if index is None else away[index])
            constant = log_prior - 0.5 * (alpha[group].log() - alpha[group] * squares).sum()
        else:
            names, group = (), torch.zeros_like(random, dtype=torch.long)
            alpha, pattern, squares = present.new_zeros(0), random, torch.zeros_like(random)
            constant = log_prior
        return cls(
            precision,
            log_likelihood.detach().to(torch.float64),
            names,
            alpha,
            torch.bincount(group, minlength=len(names))[: len(names)].to(torch.float64),
            alpha.new_zeros(max(len(names), 1)).index_add(0, group, squares)[: len(names)],
            pattern,
            group,
            constant + free,
            noise,
            float(joint.tempering.likelihood_power),
            float(joint.tempering.prior_power),
            earlier,
        )

    def log_evidence(self, prior_precision: Tensor | None = None, noise_scale: Tensor | None = None) -> Tensor:
        """Log evidence (), differentiable in prior_precision (G,) and noise_scale (); None: the present value."""
        alpha = self.prior_precision if prior_precision is None else prior_precision
        log_likelihood = self.log_likelihood
        log_prior = self.constant + 0.5 * (self.sizes * alpha.log() - alpha * self.squares).sum()
        if self.noise is not None:
            noise = log_likelihood.new_tensor(self.noise.scale) if noise_scale is None else noise_scale
            log_likelihood = log_likelihood + self.noise.log_likelihood_gain(noise)
            log_prior = log_prior + self.noise.log_prior(noise)
        log_joint = self.likelihood_power * log_likelihood + self.prior_power * log_prior
        return laplace_evidence(log_joint, self.precision_at(alpha, noise_scale))

    def precision_at(self, prior_precision: Tensor | None = None, noise_scale: Tensor | None = None) -> Precision:
        """Tempered precision matrix of the Gaussian under these hyper-parameters; None: the present value."""
        alpha = self.prior_precision if prior_precision is None else prior_precision
        scale = self.likelihood_power * torch.ones_like(self.log_likelihood)
        if noise_scale is not None:
            if self.noise is None:
                raise ValueError("Marginal: this likelihood has no noise of one scale. Give noise_scale=None.")
            scale = scale * (self.noise.scale / noise_scale) ** 2
        precision = self.precision.rescaled(scale, self._prior(alpha))
        return precision if self.earlier is None else precision.plus(self.earlier, self.prior_power)

    def data_terms(self, noise_scale: Tensor | None = None) -> Tensor:
        """Log-likelihood under this noise, followed by the noise's squared residuals and their number, if any."""
        if self.noise is None:
            return self.log_likelihood.reshape(1)
        gain = 0.0 if noise_scale is None else self.noise.log_likelihood_gain(noise_scale)
        squares, count = self.noise.squares, self.noise.count
        return torch.cat([(self.log_likelihood + gain).reshape(1), self.log_likelihood.new_tensor([squares, count])])

    def _prior(self, prior_precision: Tensor) -> Tensor:
        """Prior precision of each random weight times the prior's power, (R,)."""
        if not self.names:
            return self.prior_power * self.pattern
        tempered = self.prior_power * prior_precision
        if len(self.names) == 1 and self._is_plain:
            return tempered.expand(self.pattern.numel())  # structured matrices recognise one number by its stride
        return tempered[self.group] * self.pattern

    @cached_property
    def _is_plain(self) -> bool:
        return bool((self.pattern == 1.0).all())


def residual_sums(likelihood: Likelihood, outputs: Tensor, batch: Batch) -> Tensor:
    """(sum_n w_n |y_n - f_n|^2, sum_n w_n D), (2,) or (M, 2) in float64, for outputs (n, *event) or (M, n, *event).

    Zeros for a likelihood that is not Gaussian.

    >>> batch = Batch(torch.zeros(2, 1), torch.ones(2, 3), torch.tensor([1.0, 2.0]))
    >>> residual_sums(Gaussian(), torch.zeros(2, 3), batch)
    tensor([9., 9.], dtype=torch.float64)
    """
    if not isinstance(likelihood, Gaussian):
        return outputs.new_zeros(2, dtype=torch.float64)
    targets, weights = batch.targets, entry_weights(likelihood, batch, torch.float64)
    event_dims = targets.dim() - (2 if batch.per_member else 1)
    squares = (targets.to(torch.float64) - outputs.to(torch.float64)).square()
    squares = squares if batch.complete else torch.where(likelihood.observed(targets), squares, 0.0)
    if weights is not None and weights.dim() == targets.dim():
        entries = torch.stack([squares * weights, weights.expand(squares.shape)])
        return event_sum(entries, event_dims).sum(-1).movedim(0, -1)
    rows = squares.flatten(-event_dims) if event_dims else squares.unsqueeze(-1)  # (..., n, D)
    entries = torch.stack([rows.sum(-1), torch.full_like(rows[..., 0], rows.shape[-1])])  # (2, ..., n)
    return (entries if weights is None else entries * weights).sum(-1).movedim(0, -1)


def _noise(declared: Likelihood, fitted: Likelihood, residuals: Tensor) -> Noise | None:
    """The noise of a Gaussian likelihood with one scale, else None."""
    if not isinstance(fitted, Gaussian) or not isinstance(declared, Gaussian):
        if isinstance(fitted, (Scaled, Heteroscedastic)):
            logger.info("The noise is left as it is: only that of a Gaussian likelihood is tuned. Got %s.", fitted)
        return None
    scale = torch.as_tensor(fitted.scale, dtype=torch.float64)
    if scale.numel() > 1:
        logger.info("The noise is left as it is: only one scale for all outputs is tuned. Got %d.", scale.numel())
        return None
    squares, count = residuals.tolist()
    return Noise(float(scale), squares, count, declared.log_scale_prior)


def parted(precision: Tensor, group: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Split precisions into geometric means alpha (G,), exact for groups of equal values, and a pattern (P,)."""
    log = precision.log()
    mean = log.new_zeros(count).index_add(0, group, log) / torch.bincount(group, minlength=count)
    members = [precision[group == index] for index in range(count)]
    first = torch.stack([values[0] for values in members])
    plain = torch.stack([(values == values[0]).all() for values in members])
    alpha = torch.where(plain, first, mean.exp())
    return alpha, precision / alpha[group]
