"""The careful way through a chunk of rows: whitened distances from each mean, however far apart components are."""

import torch
from torch import Tensor

from posterity.mixtures.covariance import Sweep
from posterity.mixtures.rows import Components, chunk_rows, taken


class ScaleSweep(Sweep):
    """Distances over scales, their squares, and the weighted sums of both; one scale for a component and dimension.

    Rows are the last axis everywhere: sums over components and dimensions then run along contiguous memory.
    """

    def __init__(self, components: Components, num_data: int) -> None:
        """Takes components with factors (R, K, D)."""
        offsets, means, self.factors = components
        self.shape = means.shape
        count, dimensions = offsets.numel(), means.shape[2]
        self.offsets = offsets.reshape(count, 1)
        self.means, self.scales = means.reshape(count, dimensions, 1), self.factors.reshape(count, dimensions, 1)
        self.rows = chunk_rows((2 * count + 1) * dimensions, offsets, num_data)
        self.workspace = means.new_empty(2 * count * dimensions * self.rows)
        self.centred = means.new_empty(dimensions * self.rows)
        self.first, self.second = (torch.zeros_like(self.means[..., 0]) for _ in range(2))

    def scores(self, points: Tensor, centre: Tensor) -> Tensor:
        """Squares of whitened coordinates, added over the dimensions."""
        self.z, self.squares = taken(self.workspace, 2, *self.first.shape, len(points))
        torch.sub(centred(points, centre, self.centred), self.means, out=self.z)
        self.z *= self.scales
        torch.mul(self.z, self.z, out=self.squares)
        return torch.add(self.offsets, self.squares.sum(1), alpha=-0.5)

    def add(self, weights: Tensor) -> None:
        """Whitened coordinates and their squares, weighted."""
        self.z *= weights[:, None]
        self.first += self.z.sum(2)
        self.squares *= weights[:, None]
        self.second += self.squares.sum(2)

    def sums(self, counts: Tensor) -> tuple[Tensor, Tensor]:
        """The sums taken back by the scales: (R, K, D) both."""
        return self.first.view(self.shape) / self.factors, self.second.view(self.shape) / self.factors.square()


class MatrixSweep(Sweep):
    """Whitened coordinates of all components by one product, and moments in those coordinates."""

    def __init__(self, components: Components, num_data: int) -> None:
        """Takes components with factors (R, K, D, D)."""
        offsets, means, self.factors = components
        self.shape = means.shape
        count, dimensions = offsets.numel(), means.shape[2]
        self.offsets = offsets.reshape(count, 1)
        self.whitening = self.factors.mT.reshape(count * dimensions, dimensions)
        self.bias = -(means[..., None, :] @ self.factors).reshape(count * dimensions, 1)
        self.rows = chunk_rows((2 * count + 1) * dimensions, offsets, num_data)
        self.workspace = means.new_empty(2 * count * dimensions * self.rows)
        self.centred = means.new_empty(dimensions * self.rows)
        self.first = means.new_zeros(count, dimensions)
        self.second = means.new_zeros(count, dimensions, dimensions)

    def scores(self, points: Tensor, centre: Tensor) -> Tensor:
        """One product (M D, D) (D, n), then squares added over the dimensions."""
        self.z, self.scaled = taken(self.workspace, 2, *self.first.shape, len(points))
        rows = centred(points, centre, self.centred)
        torch.addmm(self.bias, self.whitening, rows, out=self.z.view(len(self.bias), -1))
        torch.mul(self.z, self.z, out=self.scaled)
        return torch.add(self.offsets, self.scaled.sum(1), alpha=-0.5)

    def add(self, weights: Tensor) -> None:
        """Products of the whitened rows with themselves, weighted, by component."""
        torch.mul(self.z, weights[:, None], out=self.scaled)
        self.first += self.scaled.sum(2)
        self.second.baddbmm_(self.scaled, self.z.mT)

    def sums(self, counts: Tensor) -> tuple[Tensor, Tensor]:
        """The moments taken back by A^-1: (R, K, D) and (R, K, D, D)."""
        first = self.first.view(*self.shape[:2], 1, -1)
        second = self.second.view(*self.shape, -1)
        first = torch.linalg.solve_triangular(self.factors, first, upper=True, left=False)[..., 0, :]
        second = torch.linalg.solve_triangular(self.factors, second, upper=True, left=False)
        second = torch.linalg.solve_triangular(self.factors, second.mT, upper=True, left=False)
        return first, (second + second.mT) / 2


def centred(points: Tensor, centre: Tensor, workspace: Tensor) -> Tensor:
    """Points (n, D) less the centre, one dimension after the other (D, n), at the beginning of the workspace (W,)."""
    return torch.sub(points.mT, centre[:, None], out=taken(workspace, points.shape[1], len(points)))
