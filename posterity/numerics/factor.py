"""One factor of a Kronecker product, in eigenvalues and eigenvectors."""

from dataclasses import dataclass

import torch
from torch import Tensor

from posterity.errors import NotPositiveDefinite

_ROUNDING = 1e-5  # a negative eigenvalue smaller than this share of the largest is rounding, of float32 sums at most


@dataclass(frozen=True, eq=False)
class Factor:
    """A = P^1/2 V diag(values) V^T P^1/2, positive semi-definite (..., G, n, n), with P = diag(pattern).

    `pattern` (..., G, n) is the factor's share of a prior; `vectors` (..., G, n, n) are orthogonal, None where A is
    diagonal; `values` (..., G, n). With B = P^-1/2 V it is B^T A B = diag(values).

    >>> factor = Factor.of(torch.tensor([[[4.0, 0.0], [0.0, 9.0]]]), pattern=torch.tensor([[1.0, 4.0]]))
    >>> factor.values
    tensor([[2.2500, 4.0000]], dtype=torch.float64)
    """

    vectors: Tensor | None
    values: Tensor
    pattern: Tensor

    @classmethod
    def of(cls, matrix: Tensor, pattern: Tensor) -> "Factor":
        """The factor of a symmetric matrix (..., G, n, n) that is positive semi-definite up to rounding."""
        root = pattern.to(torch.float64).rsqrt()
        white = matrix.to(torch.float64) * root.unsqueeze(-1) * root.unsqueeze(-2)
        _finite(white)
        values, vectors = torch.linalg.eigh(0.5 * (white + white.mT))
        # In one order in memory, whether they come from here or from a file: the same bits come out of products.
        return cls(vectors.contiguous(), _semidefinite(values), pattern.to(torch.float64))

    @classmethod
    def diagonal(cls, entries: Tensor, pattern: Tensor) -> "Factor":
        """The factor of diag(entries), (..., G, n)."""
        pattern = pattern.to(torch.float64)
        values = entries.to(torch.float64) / pattern
        _finite(values)
        return cls(None, _semidefinite(values), pattern)

    @property
    def size(self) -> int:
        """The number n."""
        return self.values.shape[-1]

    @property
    def matrix(self) -> Tensor:
        """A, dense."""
        if self.vectors is None:
            return torch.diag_embed(self.values * self.pattern)
        lifted = self.vectors * self.pattern.sqrt().unsqueeze(-1)
        return (lifted * self.values.unsqueeze(-2)) @ lifted.mT

    @property
    def basis(self) -> Tensor:
        """B = P^-1/2 V, dense."""
        root = self.pattern.rsqrt()
        return torch.diag_embed(root) if self.vectors is None else self.vectors * root.unsqueeze(-1)

    def repatterned(self, pattern: Tensor) -> "Factor":
        """The same A with another pattern, decomposed anew."""
        if self.vectors is None:
            return Factor(None, self.values * self.pattern / pattern, pattern)
        return Factor.of(self.matrix, pattern)

    def into(self, rows: Tensor, power: int) -> Tensor:
        """x P^(power/2) V for rows x (..., G, m, n)."""
        scaled = rows * self.pattern.pow(0.5 * power).unsqueeze(-2)
        return scaled if self.vectors is None else scaled @ self.vectors

    def out_of(self, rows: Tensor, power: int) -> Tensor:
        """y V^T P^(power/2) for rows y (..., G, m, n)."""
        turned = rows if self.vectors is None else rows @ self.vectors.mT
        return turned * self.pattern.pow(0.5 * power).unsqueeze(-2)

    def averaged(self, rows: Tensor) -> Tensor:
        """x V^2: means of entries x (..., G, m, n) over each eigenvector."""
        return rows if self.vectors is None else rows @ self.vectors.square()

    def marginal(self, rows: Tensor) -> Tensor:
        """y (V^2)^T P^-1: variances of entries from variances y (..., G, m, n) along the eigenvectors."""
        turned = rows if self.vectors is None else rows @ self.vectors.square().mT
        return turned / self.pattern.unsqueeze(-2)

    def lifted(self, rows: Tensor) -> Tensor:
        """y (V^2)^T P: precisions of entries from precisions y (..., G, m, n) along the eigenvectors."""
        turned = rows if self.vectors is None else rows @ self.vectors.square().mT
        return turned * self.pattern.unsqueeze(-2)

    def spread(self) -> "Factor":
        """With an axis for draws before G."""
        vectors = None if self.vectors is None else self.vectors.unsqueeze(-4)
        return Factor(vectors, self.values.unsqueeze(-3), self.pattern.unsqueeze(-3))

    def member(self, lead: tuple[int, ...], index: int) -> "Factor":
        """The factor of one member, of those in `lead`."""
        vectors = None if self.vectors is None else self.vectors.expand(*lead, *self.vectors.shape[-3:])[index]
        last = self.values.shape[-2:]
        return Factor(vectors, self.values.expand(*lead, *last)[index], self.pattern.expand(*lead, *last)[index])


def _finite(values: Tensor) -> None:
    if not bool(torch.isfinite(values).all()):
        raise NotPositiveDefinite(
            "A Kronecker factor has entries that are not finite. Look for NaN or infinite weights or data."
        )


def _semidefinite(values: Tensor) -> Tensor:
    """Eigenvalues, those within rounding of zero made zero; others that are negative are refused."""
    largest = values.abs().amax(-1, keepdim=True)
    if bool((values < -_ROUNDING * largest).any()):
        raise NotPositiveDefinite(
            f"A Kronecker factor must be positive semi-definite. Its smallest eigenvalue is {float(values.min()):.3g}. "
            "Build it from sums of squares, such as those of a Gauss-Newton or Fisher curvature."
        )
    rounding = values.shape[-1] * torch.finfo(torch.float64).eps * largest
    return torch.where(values <= rounding, 0.0, values)
