"""The conjugate half of a Bayesian Gaussian mixture: q(weights, means, precisions) from sums, and the ELBO."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from posterity.mixtures import wishart
from posterity.mixtures.mixture_weights import MixtureWeights
from posterity.mixtures.precisions import Precisions
from posterity.mixtures.rows import Components, Statistics


class Family(NamedTuple):
    """Which distributions weights and precisions have."""

    weights: MixtureWeights
    precisions: Precisions


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
    """What rows with responsibilities come down to; all that the conjugate update and the bound need of them."""

    counts: Tensor  # (R, K) sum_n w_n r_nk
    averages: Tensor  # (R, K, D) the rows' mean in each component (anything where its count is 0)
    moments: Tensor  # (R, *shape) sum_n w_n r_nk (x_n - average_k)(x_n - average_k)^T in the kind's storage
    entropy: Tensor  # (R,) -sum_n w_n sum_k r_nk log r_nk


def updated(family: Family, prior: Beliefs, sums: Sums) -> Beliefs:
    """The optimal q(pi, mu, Lambda) at given responsibilities (Bishop 10.58 to 10.63, with nu_k = nu_0 + N_k)."""
    mean_precision = prior.mean_precision + sums.counts
    share = sums.counts / mean_precision  # (R, K), what the rows weigh against the prior mean
    apart = sums.averages - prior.means
    pull = family.precisions.outer(prior.mean_precision * share, apart)
    gained = family.precisions.gained_degrees(sums.counts, sums.averages.shape[-1])
    return Beliefs(
        concentration=family.weights.updated(prior.concentration, sums.counts),
        mean_precision=mean_precision,
        means=prior.means + share[..., None] * apart,
        inverse_scales=prior.inverse_scales + sums.moments + pull,
        degrees=prior.degrees + gained,
    )


def covariances(family: Family, beliefs: Beliefs) -> Tensor:
    """(E Lambda)^-1 = W^-1 / nu in the kind's storage, (R, *shape)."""
    return beliefs.inverse_scales / family.precisions.broadcast(beliefs.degrees)


def components(family: Family, beliefs: Beliefs) -> Components:
    """What gives the scores of rows: score_nk = E_q log p(x_n, z_n = k | pi, mu, Lambda)."""
    dimensions = beliefs.means.shape[-1]
    factors = family.precisions.covariance.factors(covariances(family, beliefs))
    size, copies = family.precisions.block(dimensions)
    log_det = wishart.expected_log_det(family.precisions.log_det(factors), beliefs.degrees, size, copies)
    offsets = (
        family.weights.expected_logs(beliefs.concentration)
        + (family.precisions.multiplicity(dimensions) * log_det - dimensions * math.log(2 * math.pi)) / 2
        - dimensions / (2 * beliefs.mean_precision)
    )
    return Components(offsets, beliefs.means, factors)


def bound(family: Family, prior: Beliefs, beliefs: Beliefs, sums: Sums) -> Tensor:
    """The ELBO (R,) in nats, all constants kept, of any q(pi, mu, Lambda) with the responsibilities behind `sums`.

    E_q log p(X, Z | theta) - E_q log q(Z) - KL(q(theta) || p(theta)), the first two terms from the sums alone.
    """
    made = components(family, beliefs)
    moments = sums.moments + family.precisions.outer(sums.counts, sums.averages - beliefs.means)
    expected = (sums.counts * made.offsets).sum(-1) - family.precisions.trace(made.factors, moments).sum(-1) / 2
    return expected + sums.entropy - divergence(family, prior, beliefs, made.factors)


def divergence(family: Family, prior: Beliefs, beliefs: Beliefs, factors: Tensor) -> Tensor:
    """KL(q(pi, mu, Lambda) || prior) in nats, (R,); `factors` are those of the beliefs' covariances."""
    dimensions = beliefs.means.shape[-1]
    precisions = family.precisions
    size, copies = precisions.block(dimensions)
    prior_factors = precisions.covariance.factors(covariances(family, prior))
    matrices = wishart.divergence(
        precisions.log_det(factors),
        beliefs.degrees,
        precisions.log_det(prior_factors),
        prior.degrees,
        precisions.trace(factors, prior.inverse_scales),
        size,
        copies,
    )
    ratio = prior.mean_precision / beliefs.mean_precision  # (R, K)
    drift = precisions.outer(prior.mean_precision.expand_as(ratio), beliefs.means - prior.means)
    means = dimensions / 2 * (ratio - 1 - torch.log(ratio)).sum(-1) + precisions.trace(factors, drift).sum(-1) / 2
    return family.weights.divergence(beliefs.concentration, prior.concentration) + matrices.sum(-1) + means


def sums_of(family: Family, means: Tensor, found: Statistics) -> Sums:
    """The sums that one pass over the rows found, which was about `means` (R, K, D)."""
    return Sums(found.counts, means + found.shifts, family.precisions.covariance.second_moments(found), found.entropy)
