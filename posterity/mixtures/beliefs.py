"""Conjugate beliefs about a mixture: weights, means and precisions; their update, bound and predictions."""

import math
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from posterity.mixtures.covariance import Covariance
from posterity.mixtures.sweeps import Components, Statistics
from posterity.numerics.random import Key


@dataclass(frozen=True)
class Dirichlet:
    """weights ~ Dir(a), with density C(a) prod_k weights_k^(a_k - 1); concentrations a (R, K), a0 in the prior."""

    ordered: ClassVar[bool] = False  # whether the order of the components matters, large ones first

    def prior(self, concentration: Tensor, components: int) -> Tensor:
        """The concentrations (1, *shape) of a prior with the concentration () for every component."""
        return concentration.expand(1, components)

    def updated(self, prior: Tensor, counts: Tensor) -> Tensor:
        """The posterior (R, *shape) when components have counts (R, K) of rows."""
        return prior + counts

    def expected_logs(self, concentration: Tensor) -> Tensor:
        """E log weight_k = psi(a_k) - psi(sum a), (R, K)."""
        return torch.digamma(concentration) - torch.digamma(concentration.sum(-1, keepdim=True))

    def means(self, concentration: Tensor) -> Tensor:
        """E weight_k, (R, K), with sum 1."""
        return concentration / concentration.sum(-1, keepdim=True)

    def divergence(self, concentration: Tensor, prior: Tensor) -> Tensor:
        """KL(posterior || prior) in nats, (R,)."""
        pull = ((concentration - prior) * self.expected_logs(concentration)).sum(-1)
        return dirichlet_log_normaliser(concentration) - dirichlet_log_normaliser(prior.expand_as(concentration)) + pull


def dirichlet_log_normaliser(concentration: Tensor) -> Tensor:
    """log C(a) = log Gamma(sum a) - sum log Gamma(a), (..., K) -> (...,).

    >>> float(dirichlet_log_normaliser(torch.tensor([1.0, 1.0, 1.0])).exp())  # the simplex has area 1/2
    2.0
    """
    return torch.lgamma(concentration.sum(-1)) - torch.lgamma(concentration).sum(-1)


@dataclass(frozen=True)
class Sticks:
    """weights_k = v_k prod_{j<k} (1 - v_j) with v_k ~ Beta(1, gamma), and v_K = 1: a Dirichlet process cut at K.

    Concentrations (R, K, 2) are the parameters of the Beta distributions, of which the last is not used. The methods
    are as in `Dirichlet`.

    **References**: Blei and Jordan (2006), Variational inference for Dirichlet process mixtures, (18) and (19).
    """

    ordered: ClassVar[bool] = True
    beta: ClassVar[Dirichlet] = Dirichlet()  # a Beta distribution is a Dirichlet distribution of two

    def prior(self, concentration: Tensor, components: int) -> Tensor:
        """Parameters (1, K, 2) of the prior Beta(1, gamma) of every stick, gamma the concentration ()."""
        return torch.stack([torch.ones_like(concentration), concentration]).expand(1, components, 2)

    def updated(self, prior: Tensor, counts: Tensor) -> Tensor:
        """The posterior (R, K, 2) when components have counts (R, K) of rows."""
        after = counts.flip(-1).cumsum(-1).flip(-1) - counts
        return prior + torch.stack([counts, after], -1)

    def expected_logs(self, concentration: Tensor) -> Tensor:
        """E log weight_k, (R, K)."""
        # E log v_k plus E log(1 - v_j) over j < k
        taken, left = self._last_is_one(self.beta.expected_logs(concentration), 0.0).unbind(-1)
        return taken + left.cumsum(-1) - left

    def means(self, concentration: Tensor) -> Tensor:
        """E weight_k, (R, K), with sum 1."""
        taken, left = self._last_is_one(self.beta.means(concentration), 1.0).unbind(-1)
        before = torch.cat([torch.ones_like(left[..., :1]), left[..., :-1].cumprod(-1)], -1)
        return taken * before

    def divergence(self, concentration: Tensor, prior: Tensor) -> Tensor:
        """KL(posterior || prior) in nats over all sticks but the last, (R,)."""
        return self.beta.divergence(concentration[..., :-1, :], prior[..., :-1, :]).sum(-1)

    @staticmethod
    def _last_is_one(pairs: Tensor, value: float) -> Tensor:
        """Pairs (..., K, 2) of the sticks with the last replaced by `value`."""
        return torch.cat([pairs[..., :-1, :], torch.full_like(pairs[..., -1:, :], value)], -2)


def log_normaliser(log_det: Tensor, degrees: Tensor, size: int, copies: int = 1) -> Tensor:
    """The sum of log B(W, nu) over the copies, from log|nu W|."""
    log_det_scale = log_det - copies * size * degrees.log()
    constant = degrees * size / 2 * math.log(2) + torch.mvlgamma(degrees / 2, size)
    return -degrees / 2 * log_det_scale - copies * constant


def expected_log_det(log_det: Tensor, degrees: Tensor, size: int, copies: int = 1) -> Tensor:
    """The sum of E log|Lambda| = sum_i psi((nu + 1 - i)/2) + p log 2 + log|W|, i = 1..p, over the copies."""
    steps = torch.arange(size, dtype=degrees.dtype, device=degrees.device)
    psi = torch.digamma((degrees[..., None] - steps) / 2).sum(-1)
    return log_det + copies * (psi - size * (degrees / 2).log())


class Family(NamedTuple):
    """The distributions of weights and precisions."""

    weights: Dirichlet | Sticks
    kind: Covariance


class Beliefs(NamedTuple):
    """pi by its concentration, mu_k | Lambda_k ~ N(means_k, (mean_precision_k Lambda_k)^-1), Lambda_k ~ Wishart.

    A prior has restart and component axes of length 1, but for its concentration.
    """

    concentration: Tensor  # (R, K), or as the family of weights has it
    mean_precision: Tensor  # (R, K)
    means: Tensor  # (R, K, D)
    inverse_scales: Tensor  # (R, *shape) W^-1
    degrees: Tensor  # (R, K), or (R, 1) where the components share their precision


class Sums(NamedTuple):
    """Sufficient statistics of rows with responsibilities, for the conjugate update and the bound."""

    counts: Tensor  # (R, K) sum_n w_n r_nk
    averages: Tensor  # (R, K, D) the rows' mean in each component (arbitrary where its count is 0)
    moments: Tensor  # (R, *shape) sum_n w_n r_nk (x_n - average_k)(x_n - average_k)^T in the kind's storage
    entropy: Tensor  # (R,) -sum_n w_n sum_k r_nk log r_nk


def updated(family: Family, prior: Beliefs, sums: Sums) -> Beliefs:
    """The optimal q(pi, mu, Lambda) at given responsibilities (Bishop 10.58 to 10.63, with nu_k = nu_0 + N_k)."""
    mean_precision = prior.mean_precision + sums.counts
    share = sums.counts / mean_precision  # (R, K), the weight of the rows against the prior mean
    apart = sums.averages - prior.means
    pull = family.kind.outer(prior.mean_precision * share, apart)
    return Beliefs(
        concentration=family.weights.updated(prior.concentration, sums.counts),
        mean_precision=mean_precision,
        means=prior.means + share[..., None] * apart,
        inverse_scales=prior.inverse_scales + sums.moments + pull,
        degrees=prior.degrees + family.kind.gained_degrees(sums.counts, sums.averages.shape[-1]),
    )


def covariances(family: Family, beliefs: Beliefs) -> Tensor:
    """(E Lambda)^-1 = W^-1 / nu in the kind's storage, (R, *shape)."""
    return beliefs.inverse_scales / family.kind.broadcast(beliefs.degrees)


def components(family: Family, beliefs: Beliefs) -> Components:
    """The components whose scores of rows are score_nk = E_q log p(x_n, z_n = k | pi, mu, Lambda)."""
    dimensions = beliefs.means.shape[-1]
    factors = family.kind.factors(covariances(family, beliefs))
    size, copies = family.kind.block(dimensions)
    log_det = expected_log_det(family.kind.log_det(factors), beliefs.degrees, size, copies)
    offsets = (
        family.weights.expected_logs(beliefs.concentration)
        + (family.kind.multiplicity(dimensions) * log_det - dimensions * math.log(2 * math.pi)) / 2
        - dimensions / (2 * beliefs.mean_precision)
    )
    return Components(offsets, beliefs.means, factors)


def bound(family: Family, prior: Beliefs, beliefs: Beliefs, sums: Sums) -> Tensor:
    """The ELBO (R,) in nats, all constants kept, of any q(pi, mu, Lambda) with the responsibilities behind `sums`.

    E_q log p(X, Z | theta) - E_q log q(Z) - KL(q(theta) || p(theta)), the first two terms from the sums alone.
    """
    made = components(family, beliefs)
    moments = sums.moments + family.kind.outer(sums.counts, sums.averages - beliefs.means)
    expected = (sums.counts * made.offsets).sum(-1) - family.kind.trace(made.factors, moments).sum(-1) / 2
    return expected + sums.entropy - divergence(family, prior, beliefs, made.factors)


def divergence(family: Family, prior: Beliefs, beliefs: Beliefs, factors: Tensor) -> Tensor:
    """KL(q(pi, mu, Lambda) || prior) in nats, (R,); `factors` are the whitening factors of the covariances."""
    dimensions, kind = beliefs.means.shape[-1], family.kind
    size, copies = kind.block(dimensions)
    log_det, prior_log_det = kind.log_det(factors), kind.log_det(kind.factors(covariances(family, prior)))
    matrices = (
        log_normaliser(log_det, beliefs.degrees, size, copies)
        - log_normaliser(prior_log_det, prior.degrees, size, copies)
        + (beliefs.degrees - prior.degrees) / 2 * expected_log_det(log_det, beliefs.degrees, size, copies)
        - copies * size * beliefs.degrees / 2
        + kind.trace(factors, prior.inverse_scales) / 2  # tr(W0^-1 nu W)
    )
    ratio = prior.mean_precision / beliefs.mean_precision  # (R, K)
    drift = kind.outer(prior.mean_precision.expand_as(ratio), beliefs.means - prior.means)
    means = dimensions / 2 * (ratio - 1 - torch.log(ratio)).sum(-1) + kind.trace(factors, drift).sum(-1) / 2
    return family.weights.divergence(beliefs.concentration, prior.concentration) + matrices.sum(-1) + means


def sums_of(family: Family, means: Tensor, statistics: Statistics) -> Sums:
    """Convert the sums of a pass over the rows about `means` (R, K, D)."""
    moments = family.kind.second_moments(statistics)
    return Sums(statistics.counts, means + statistics.shifts, moments, statistics.entropy)


CHUNK_NUMBERS = 1 << 20  # whitened coordinates of a chunk of rows


@torch.no_grad()
def log_joint(family: Family, beliefs: Beliefs, points: Tensor, centre: Tensor) -> Tensor:
    """log E_q p(x_n, z_n = k) of rows (N, D), (N, K) in float64; beliefs of one restart, about the `centre`.

    E_q p(x) = sum_k E weight_k St(x; m_k, Sigma_k, t_k) with Sigma_k = (1 + beta_k) / (beta_k t_k) W_k^-1 and
    t_k = nu_k + 1 - p degrees of freedom, for Wishart matrices p by p; where a component's precision consists of
    several independent ones, St is a product of as many.
    """
    only = Beliefs(*(tensor[0] for tensor in beliefs))
    (components, dimensions), kind = only.means.shape, family.kind
    copies = kind.block(dimensions)[1]
    factors = kind.factors(covariances(family, beliefs))
    degrees = _degrees(family, beliefs)[0].expand(components)
    event = dimensions // copies  # of each independent Student-t
    shrunk = only.mean_precision / ((1 + only.mean_precision) * only.degrees)  # Sigma^-1 = shrunk t_k A A^T
    log_det = kind.multiplicity(dimensions) * kind.log_det(factors)[0] + dimensions * shrunk.log()
    gammas = torch.lgamma((degrees + event) / 2) - torch.lgamma(degrees / 2) - event / 2 * math.log(math.pi)
    weights = family.weights.means(beliefs.concentration)[0].log()
    offsets = weights + copies * gammas + log_det / 2  # t^(-d/2) of the density and t^(d/2) of the determinant cancel
    logs = []
    for chunk in torch.split(points, max(1, CHUNK_NUMBERS // (components * dimensions))):
        squares = kind.squares(chunk.to(torch.float64) - centre, only.means, factors[0])  # (n, K, copies)
        tails = torch.log1p(shrunk[:, None] * squares).sum(-1)
        logs.append(offsets - (degrees + event) / 2 * tails)
    return torch.cat(logs)


@torch.no_grad()
def scale_matrices(family: Family, beliefs: Beliefs) -> Tensor:
    """Sigma_k of the mixture of Student-t in `log_joint`, as matrices (K, D, D)."""
    components, dimensions = beliefs.means.shape[1:]
    matrices = family.kind.dense(covariances(family, beliefs), components, dimensions)[0]
    widening = (1 + 1 / beliefs.mean_precision) * beliefs.degrees / _degrees(family, beliefs)
    return matrices * widening[0, :, None, None]


@torch.no_grad()
def noise(family: Family, beliefs: Beliefs, chosen: Tensor, key: Key) -> Tensor:
    """Draw Student-t numbers (n, D) of unit scale in float64, for rows of the components `chosen` (n,)."""
    dimensions = beliefs.means.shape[-1]
    copies = family.kind.block(dimensions)[1]
    degrees = _degrees(family, beliefs).expand(1, beliefs.means.shape[1])[0, chosen, None].expand(-1, copies)
    normal = key.fold("normal").normal((len(chosen), dimensions), torch.float64, chosen.device)
    # torch.distributions.Gamma draws by this function, but takes no generator.
    gammas = torch._standard_gamma(degrees.contiguous() / 2, generator=key.fold("scale").generator(chosen.device))
    return normal * (degrees / (2 * gammas)).sqrt()


def _degrees(family: Family, beliefs: Beliefs) -> Tensor:
    """t = nu + 1 - p, (1, K) or (1, 1)."""
    return beliefs.degrees + 1 - family.kind.block(beliefs.means.shape[-1])[0]
