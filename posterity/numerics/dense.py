"""Dense precision matrices through one Cholesky factor."""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from posterity.errors import NotPositiveDefinite
from posterity.numerics.precision import Precision


@dataclass(frozen=True, eq=False)
class Dense(Precision):
    """Lambda (..., R, R), factored as L L^T in float64.

    Takes the symmetric matrix; refuses one that is not positive definite with `NotPositiveDefinite`, never a NaN.

    >>> matrix = Dense(torch.tensor([[4.0, 0.0], [0.0, 1.0]]))
    >>> matrix.variance()
    tensor([0.2500, 1.0000], dtype=torch.float64)
    """

    matrix: Tensor

    def __post_init__(self) -> None:
        object.__setattr__(self, "matrix", self.matrix.to(torch.float64))
        self.cholesky  # noqa: B018  refuse now

    @cached_property
    def cholesky(self) -> Tensor:
        """The lower factor L."""
        factor: Tensor
        factor, info = torch.linalg.cholesky_ex(self.matrix)
        if bool((info != 0).any()) or not bool(torch.isfinite(factor).all()):
            if not bool(torch.isfinite(self.matrix).all()):
                raise NotPositiveDefinite(
                    "The precision matrix has entries that are not finite. Look for NaN or infinite weights or data."
                )
            lowest = float(torch.linalg.eigvalsh(self.matrix).min())
            raise NotPositiveDefinite(
                f"The precision matrix is not positive definite: its smallest eigenvalue is {lowest:.3g}. The weights "
                "are not at a mode: train longer, use the Gauss-Newton curvature, or a prior that is curved there, "
                "such as a Normal of smaller scale."
            )
        # The share of each weight's precision that the weights before it leave: below this, rounding decides its sign.
        left = factor.diagonal(dim1=-2, dim2=-1).square() / self.matrix.diagonal(dim1=-2, dim2=-1)
        if bool((left <= 4 * self.size * torch.finfo(torch.float64).eps).any()):
            raise NotPositiveDefinite(
                "The precision matrix is singular: data and prior leave some direction of the weights free. Use a "
                "prior that is curved at the mode, such as Normal; Laplace and group lasso priors are flat there."
            )
        return factor

    @property
    def size(self) -> int:
        """R."""
        return self.matrix.shape[-1]

    @property
    def logdet(self) -> Tensor:
        """Twice the sum of the logs of the factor's diagonal."""
        return 2.0 * self.cholesky.diagonal(dim1=-2, dim2=-1).log().sum(-1)

    def matvec(self, vector: Tensor) -> Tensor:
        """Lambda v."""
        return (self.matrix @ vector.to(torch.float64).unsqueeze(-1)).squeeze(-1)

    def solve(self, vector: Tensor) -> Tensor:
        """Two triangular solves."""
        return torch.cholesky_solve(vector.to(torch.float64).unsqueeze(-1), self.cholesky).squeeze(-1)

    def colour(self, noise: Tensor) -> Tensor:
        """L^-T noise."""
        columns = noise.to(torch.float64).transpose(-2, -1)
        solved: Tensor = torch.linalg.solve_triangular(self.cholesky.transpose(-2, -1), columns, upper=True)
        return solved.transpose(-2, -1)

    def covariance(self) -> Tensor:
        """The inverse, symmetric to the last bit."""
        inverse = torch.cholesky_inverse(self.cholesky)
        return 0.5 * (inverse + inverse.transpose(-2, -1))

    def variance(self) -> Tensor:
        """Diagonal of the inverse."""
        return self.covariance().diagonal(dim1=-2, dim2=-1)

    def quadratic(self, jacobian: Tensor) -> Tensor:
        """(L^-1 J^T)^T (L^-1 J^T)."""
        columns = jacobian.to(torch.float64).flatten(0, 1).transpose(-2, -1)  # (R, N D)
        half: Tensor = torch.linalg.solve_triangular(self.cholesky, columns, upper=False)
        half = half.transpose(-2, -1).reshape(*half.shape[:-2], *jacobian.shape)  # (..., N, D, R)
        return half @ half.transpose(-2, -1)

    def member(self, index: int) -> "Dense":
        """One member's matrix."""
        return Dense(self.matrix[index])
