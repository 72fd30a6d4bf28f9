"""One precision matrix for each member of a batched run."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from posterity.numerics.jacobian import Jacobian
from posterity.numerics.precision import Precision


@dataclass(frozen=True, eq=False)
class PerMember(Precision):
    """M precision matrices of any structure, as one with a leading member axis.

    >>> from posterity.numerics.diagonal import Diagonal
    >>> PerMember((Diagonal(torch.ones(2)), Diagonal(torch.full((2,), 4.0)))).variance()
    tensor([[1.0000, 1.0000],
            [0.2500, 0.2500]], dtype=torch.float64)
    """

    parts: tuple[Precision, ...]

    @property
    def size(self) -> int:
        """R."""
        return self.parts[0].size

    @property
    def logdet(self) -> Tensor:
        """(M,)."""
        return torch.stack([part.logdet for part in self.parts])

    def rescaled(self, scale: Tensor | float, prior: Tensor) -> "PerMember":
        """Each with its own scale, where they are (M,), and its own prior (M, R)."""
        scales = scale if isinstance(scale, Tensor) and scale.dim() else [scale] * len(self.parts)
        priors = prior if prior.dim() > 1 else [prior] * len(self.parts)
        return PerMember(tuple(p.rescaled(s, d) for p, s, d in zip(self.parts, scales, priors, strict=True)))

    def diagonal(self) -> Tensor:
        """(M, R)."""
        return self._stacked(lambda part: part.diagonal())

    def matvec(self, vector: Tensor) -> Tensor:
        """(M, R) of (M, R)."""
        return self._each(Precision.matvec.__name__, vector)

    def solve(self, vector: Tensor) -> Tensor:
        """(M, R) of (M, R)."""
        return self._each(Precision.solve.__name__, vector)

    def colour(self, noise: Tensor) -> Tensor:
        """(M, S, R) of (M, S, R)."""
        return self._each(Precision.colour.__name__, noise)

    def _each(self, name: str, values: Tensor) -> Tensor:
        rows = values.expand(len(self.parts), *values.shape[-1:]) if values.dim() == 1 else values
        return torch.stack([getattr(part, name)(row) for part, row in zip(self.parts, rows, strict=True)])

    def variance(self) -> Tensor:
        """(M, R)."""
        return self._stacked(lambda part: part.variance())

    def covariance(self) -> Tensor:
        """(M, R, R)."""
        return self._stacked(lambda part: part.covariance())

    def quadratic(self, jacobian: Tensor | Jacobian) -> Tensor:
        """(M, N, D, D)."""
        return self._stacked(lambda part: part.quadratic(jacobian))

    def marginal(self, jacobian: Tensor | Jacobian) -> Tensor:
        """(M, N, D)."""
        return self._stacked(lambda part: part.marginal(jacobian))

    def joint_quadratic(self, jacobian: Tensor | Jacobian) -> Tensor:
        """(M, N D, N D)."""
        return self._stacked(lambda part: part.joint_quadratic(jacobian))

    def _stacked(self, of: Callable[[Precision], Tensor]) -> Tensor:
        return torch.stack([of(part) for part in self.parts])

    def member(self, index: int) -> Precision:
        """One of them."""
        return self.parts[index]
