"""Information of numbers: Gaussian forms, from covariances of the function and the noise of the targets."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from posterity.acquisition.labels import ENTRIES, Chosen
from posterity.errors import positive_whole


@dataclass(frozen=True, eq=False)
class Normals:
    """Rows whose D targets are normal given the function, all in float64.

    `within` (N, D, D) is the covariance of the function at each row, `noise` (N, D) the variance of the targets given
    the function, and `column(n)` returns the covariances (N, D, D) of all rows with row n.
    """

    within: Tensor
    noise: Tensor
    column: Callable[[int], Tensor]

    def information(self) -> Tensor:
        """log det(I + noise^-1 within) / 2 of each row, (N,)."""
        return information(self.within, self.noise)

    def batch(self, size: int) -> Chosen:
        """Choose rows one after the other by `information`, given the targets of those before: pivoted Cholesky."""
        positive_whole("batch_bald: size", size)
        count = len(self.within)
        if size > count:
            raise ValueError(f"batch_bald: size must be at most the {count} rows of the pool. Got {size}.")
        left = self.within.clone()
        taken = torch.zeros(count, dtype=torch.bool, device=left.device)
        rows, gains, roots = list[int](), list[Tensor](), list[Tensor]()
        for _ in range(size):
            gain = information(left, self.noise).masked_fill(taken, -torch.inf)
            best = int(gain.argmax())
            rows.append(best)
            gains.append(gain[best])
            taken[best] = True
            column = self.column(best)
            for root in roots:
                column = column - root @ root[best].mT
            root = whitened(column.mT, left[best], self.noise[best]).mT  # (N, D, D)
            roots.append(root)
            left = left - root @ root.mT
        return Chosen(torch.tensor(rows, device=left.device), torch.stack(gains).cumsum(0))


def information(within: Tensor, noise: Tensor) -> Tensor:
    """Mutual information (N,) of targets and function; rounding may have left eigenvalues below 0."""
    root = noise.rsqrt()
    values = torch.linalg.eigvalsh(root.unsqueeze(-1) * within * root.unsqueeze(-2))
    nats: Tensor = 0.5 * values.clamp_min(0.0).log1p().sum(-1)
    return nats


def whitened(values: Tensor, within: Tensor, noise: Tensor) -> Tensor:
    """L^-1 values (..., D, K), with L the Cholesky factor of within + noise."""
    factor: Tensor = torch.linalg.cholesky(within + torch.diag_embed(noise))
    solved: Tensor = torch.linalg.solve_triangular(factor, values, upper=False)
    return solved


def shared_information(across: Tensor, pool: Normals, targets: Normals) -> Tensor:
    """Mutual information (N,) between the targets of each pool row and of a target row, averaged over the latter.

    `across` (N, D, T, D') is the covariance of the function between them. With W = L_n^-1 across L_t^-T it is
    -log det(I - W W^T) / 2 for each pair.
    """
    reduced = whitened(across.flatten(2), pool.within, pool.noise).reshape(across.shape)  # (N, D, T, D')
    total = across.shape[2]
    step = max(1, ENTRIES // max(1, across[0].numel()))
    parts = []
    for low in range(0, len(across), step):
        pairs = reduced[low : low + step].permute(0, 2, 3, 1)  # (n, T, D', D)
        pairs = whitened(pairs, targets.within, targets.noise)
        if pairs.shape[-1] == pairs.shape[-2] == 1:
            squares = pairs.reshape(len(pairs), total, 1).square()
        else:
            squares = torch.linalg.svdvals(pairs).square()
        parts.append(-0.5 * torch.log1p(-squares.clamp_max(1.0 - 1e-15)).sum(-1).mean(1))
    return torch.cat(parts)


def reduced_variance(across: Tensor, pool: Normals) -> Tensor:
    """Return the reduction of variance by each pool row's targets, summed over outputs, mean over target rows (N,)."""
    return whitened(across.flatten(2), pool.within, pool.noise).square().sum((1, 2)) / across.shape[2]


def of_draws(means: Tensor, noise: Tensor) -> tuple[Normals, Tensor]:
    """Rows from the means (S, N, D) of S draws of the function, and the centred draws over sqrt(S - 1)."""
    centred = (means - means.mean(0)) / math.sqrt(len(means) - 1)
    within = torch.einsum("snd,sne->nde", centred, centred)
    return Normals(within, noise, lambda row: torch.einsum("snd,se->nde", centred, centred[:, row])), centred


def of_covariance(covariance: Tensor, noise: Tensor) -> Normals:
    """Rows from the covariance (N D, N D) of the function within and across them."""
    count, outputs = noise.shape
    blocks = covariance.reshape(count, outputs, count, outputs)
    return Normals(blocks.diagonal(dim1=0, dim2=2).movedim(-1, 0), noise, lambda row: blocks[:, :, row])
