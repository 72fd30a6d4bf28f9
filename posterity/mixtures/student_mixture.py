"""What a Bayesian Gaussian mixture predicts for a new row: a mixture of Student-t distributions."""

import math

import torch
from torch import Tensor

from posterity.mixtures.normal_wishart import Beliefs, covariances
from posterity.mixtures.precisions import Precisions
from posterity.numerics.random import Key

CHUNK_NUMBERS = 1 << 20  # whitened coordinates of the rows that are looked at together


@torch.no_grad()
def log_joint(precisions: Precisions, beliefs: Beliefs, points: Tensor, centre: Tensor) -> Tensor:
    """log E_q p(x_n, z_n = k) of rows (N, D), (N, K) in float64; beliefs of one restart, about the `centre`.

    E_q p(x) = sum_k alpha_k / sum alpha St(x; m_k, Sigma_k, t_k) with Sigma_k = (1 + beta_k) / (beta_k t_k) W_k^-1 and
    t_k = nu_k + 1 - p degrees of freedom, for Wishart matrices p by p; where a component's precision is made of several
    that are independent, St is a product of as many.
    """
    only = Beliefs(*(tensor[0] for tensor in beliefs))
    components, dimensions = only.means.shape
    size, copies = precisions.block(dimensions)
    factors = precisions.covariance.factors(covariances(precisions, beliefs))
    degrees = (only.degrees + 1 - size).expand(components)  # t_k
    event = dimensions // copies  # of each independent Student-t
    shrunk = only.mean_precision / ((1 + only.mean_precision) * only.degrees)  # Sigma^-1 = shrunk t_k A A^T
    log_det = precisions.multiplicity(dimensions) * precisions.log_det(factors)[0] + dimensions * shrunk.log()
    gammas = torch.lgamma((degrees + event) / 2) - torch.lgamma(degrees / 2) - event / 2 * math.log(math.pi)
    weights = (only.concentration / only.concentration.sum()).log()
    offsets = weights + copies * gammas + log_det / 2  # t^(-d/2) of the density and t^(d/2) of the determinant cancel
    found = []
    for chunk in torch.split(points, max(1, CHUNK_NUMBERS // (components * dimensions))):
        squares = precisions.squares(chunk.to(torch.float64) - centre, only.means, factors[0])  # (n, K, copies)
        tails = torch.log1p(shrunk[:, None] * squares).sum(-1)
        found.append(offsets - (degrees + event) / 2 * tails)
    return torch.cat(found)


@torch.no_grad()
def draws(precisions: Precisions, beliefs: Beliefs, count: int, key: Key) -> tuple[Tensor, Tensor]:
    """Rows (count, D) relative to the means' origin from that mixture, and the component (count,) of each."""
    only = Beliefs(*(tensor[0] for tensor in beliefs))
    components, dimensions = only.means.shape
    size, copies = precisions.block(dimensions)
    degrees = (only.degrees + 1 - size).expand(components)
    matrices = precisions.covariance.dense(covariances(precisions, beliefs), components, dimensions)[0]
    widening = (1 + only.mean_precision) * only.degrees / (only.mean_precision * degrees)
    roots = torch.linalg.cholesky(matrices * widening[:, None, None])
    device = only.means.device
    weights = only.concentration / only.concentration.sum()
    chosen = torch.multinomial(weights, count, replacement=True, generator=key.fold("component").generator(device))
    normal = key.fold("normal").normal((count, dimensions), only.means.dtype, device)
    shapes = (degrees / 2)[chosen][:, None].expand(count, copies)
    # What torch.distributions.Gamma draws by; that takes no generator.
    gammas = torch._standard_gamma(shapes.contiguous(), generator=key.fold("scale").generator(device))
    scales = (degrees[chosen][:, None] / (2 * gammas)).sqrt()  # (count, copies)
    rows = (roots[chosen] @ normal[..., None])[..., 0]
    return only.means[chosen] + rows * scales, chosen
