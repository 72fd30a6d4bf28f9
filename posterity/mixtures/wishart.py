"""Sums of log normalisers and expected log determinants over Wishart matrices that share their degrees of freedom.

A Wishart matrix Lambda (p, p) has density B(W, nu) |Lambda|^((nu - p - 1) / 2) exp(-tr(W^-1 Lambda) / 2), with
log B = -nu/2 log|W| - nu p/2 log 2 - log Gamma_p(nu/2), and E Lambda = nu W. At p = 1 it is a Gamma with shape nu/2 and
rate W^-1/2. The functions take `log_det` = log|nu W| summed over `copies` independent matrices of one nu.
"""

import math

import torch
from torch import Tensor


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


def divergence(
    log_det: Tensor,
    degrees: Tensor,
    prior_log_det: Tensor,
    prior_degrees: Tensor,
    trace: Tensor,
    size: int,
    copies: int,
) -> Tensor:
    """KL(q || p) of all copies in nats; `trace` = the sum of tr(W0^-1 nu W)."""
    expected = expected_log_det(log_det, degrees, size, copies)
    return (
        log_normaliser(log_det, degrees, size, copies)
        - log_normaliser(prior_log_det, prior_degrees, size, copies)
        + (degrees - prior_degrees) / 2 * expected
        - copies * size * degrees / 2
        + trace / 2
    )
