"""What a Bayesian Gaussian mixture predicts for a new row: a mixture of Student-t distributions."""

import math

import torch
from torch import Tensor

from posterity.mixtures.normal_wishart import Beliefs, Family, covariances
from posterity.numerics.random import Key

CHUNK_NUMBERS = 1 << 20  # whitened coordinates of the rows that are looked at together


@torch.no_grad()
def log_joint(family: Family, beliefs: Beliefs, points: Tensor, centre: Tensor) -> Tensor:
    """log E_q p(x_n, z_n = k) of rows (N, D), (N, K) in float64; beliefs of one restart, about the `centre`.

    E_q p(x) = sum_k E weight_k St(x; m_k, Sigma_k, t_k) with Sigma_k = (1 + beta_k) / (beta_k t_k) W_k^-1 and
    t_k = nu_k + 1 - p degrees of freedom, for Wishart matrices p by p; where a component's precision is made of several
    that are independent, St is a product of as many.
    """
    only = Beliefs(*(tensor[0] for tensor in beliefs))
    components, dimensions = only.means.shape
    precisions = family.precisions
    copies = precisions.block(dimensions)[1]
    factors = precisions.covariance.factors(covariances(family, beliefs))
    degrees = _degrees(family, beliefs)[0].expand(components)
    event = dimensions // copies  # of each independent Student-t
    shrunk = only.mean_precision / ((1 + only.mean_precision) * only.degrees)  # Sigma^-1 = shrunk t_k A A^T
    log_det = (
        family.precisions.multiplicity(dimensions) * family.precisions.log_det(factors)[0] + dimensions * shrunk.log()
    )
    gammas = torch.lgamma((degrees + event) / 2) - torch.lgamma(degrees / 2) - event / 2 * math.log(math.pi)
    weights = family.weights.means(beliefs.concentration)[0].log()
    offsets = weights + copies * gammas + log_det / 2  # t^(-d/2) of the density and t^(d/2) of the determinant cancel
    found = []
    for chunk in torch.split(points, max(1, CHUNK_NUMBERS // (components * dimensions))):
        squares = precisions.squares(chunk.to(torch.float64) - centre, only.means, factors[0])  # (n, K, copies)
        tails = torch.log1p(shrunk[:, None] * squares).sum(-1)
        found.append(offsets - (degrees + event) / 2 * tails)
    return torch.cat(found)


@torch.no_grad()
def scale_matrices(family: Family, beliefs: Beliefs) -> Tensor:
    """Sigma_k of that mixture as matrices (K, D, D)."""
    components, dimensions = beliefs.means.shape[1:]
    matrices = family.precisions.covariance.dense(covariances(family, beliefs), components, dimensions)[0]
    widening = (1 + 1 / beliefs.mean_precision) * beliefs.degrees / _degrees(family, beliefs)
    return matrices * widening[0, :, None, None]


@torch.no_grad()
def noise(family: Family, beliefs: Beliefs, chosen: Tensor, key: Key) -> Tensor:
    """Student-t numbers (n, D) of unit scale, as the components `chosen` (n,) have them, in float64."""
    dimensions = beliefs.means.shape[-1]
    copies = family.precisions.block(dimensions)[1]
    degrees = _degrees(family, beliefs).expand(1, beliefs.means.shape[1])[0, chosen, None].expand(-1, copies)
    normal = key.fold("normal").normal((len(chosen), dimensions), torch.float64, chosen.device)
    # What torch.distributions.Gamma draws by; that takes no generator.
    gammas = torch._standard_gamma(degrees.contiguous() / 2, generator=key.fold("scale").generator(chosen.device))
    return normal * (degrees / (2 * gammas)).sqrt()


def _degrees(family: Family, beliefs: Beliefs) -> Tensor:
    """t = nu + 1 - p, (1, K) or (1, 1)."""
    return beliefs.degrees + 1 - family.precisions.block(beliefs.means.shape[-1])[0]
