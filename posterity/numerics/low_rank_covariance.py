"""Precision matrices whose inverses, the covariances, are of low rank plus a diagonal."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from math import prod

import torch
from torch import Tensor

from posterity.errors import NotPositiveDefinite, shown
from posterity.numerics.diagonal import in_factors
from posterity.numerics.jacobian import Jacobian
from posterity.numerics.low_rank import LowRank
from posterity.numerics.precision import Precision
from posterity.numerics.spectrum import double, pick


@dataclass(frozen=True, eq=False)
class LowRankCovariance(Precision):
    """Lambda = Sigma^-1 of Sigma = diag(own) + factor^T factor, own (..., R) positive, factor (..., K, R), in float64.

    The mirror image of `LowRank`, which holds Sigma here, as a matrix: what is a product for one is a solve for the
    other, all by Woodbury's identity in K x K matrices. With X = factor own^-1/2 and X X^T = U diag(e) U^T,
    Sigma^1/2 may be taken as (I + X^T U diag(1 / (1 + (1 + e)^1/2)) U^T X) own^1/2. Of derivatives in factors nothing
    dense is formed: J Sigma J^T = J diag(own) J^T + (J factor^T) (J factor^T)^T.

    >>> LowRankCovariance(torch.ones(3), torch.tensor([[3.0, 0.0, 0.0]])).variance()
    tensor([10.,  1.,  1.], dtype=torch.float64)
    """

    own: Tensor
    factor: Tensor

    def __post_init__(self) -> None:
        if self.factor.dim() < 2 or self.own.shape[-1:] != self.factor.shape[-1:]:
            raise ValueError(
                "LowRankCovariance.factor must be (..., K, R) for own variances (..., R). "
                f"Got {shown(self.factor)} and {shown(self.own)}."
            )
        object.__setattr__(self, "own", double(self.own))
        object.__setattr__(self, "factor", self.factor.to(torch.float64))
        for name, values in (("own", self.own), ("factor", self.factor)):
            if not bool(torch.isfinite(values).all()):
                raise NotPositiveDefinite(
                    f"LowRankCovariance.{name} has entries that are not finite. Look for NaN or infinite weights."
                )
        if not bool((self.own > 0).all()):
            raise NotPositiveDefinite(
                f"LowRankCovariance.own must be positive (smallest {float(self.own.detach().min()):.3g}): "
                "it is a variance that each weight has to itself. Put a floor under it."
            )

    @cached_property
    def _sigma(self) -> LowRank:
        return LowRank(self.factor, self.own)

    @property
    def size(self) -> int:
        """R."""
        return self.factor.shape[-1]

    @property
    def logdet(self) -> Tensor:
        """Minus log det Sigma, by the matrix determinant lemma."""
        return -self._sigma.logdet

    def rescaled(self, scale: Tensor | float, prior: Tensor) -> "LowRankCovariance":
        """There is no such form: a covariance does not tell the curvature of the data from the prior."""
        raise TypeError(
            "A LowRankCovariance does not tell the curvature of the data from the prior, so neither can be rescaled. "
            "For tuning, use the posterior of Laplace, with the structure LowRank() if it must be small."
        )

    def diagonal(self) -> Tensor:
        """Diagonal of Sigma^-1."""
        return self._sigma.variance()

    def matvec(self, vector: Tensor) -> Tensor:
        """Sigma^-1 v, by Woodbury's identity."""
        return self._sigma.solve(vector)

    def solve(self, vector: Tensor) -> Tensor:
        """own v + factor^T (factor v)."""
        return self._sigma.matvec(vector)

    def colour(self, noise: Tensor) -> Tensor:
        """own^1/2 (I + X^T U diag(1 / (1 + (1 + e)^1/2)) U^T X) noise."""
        return self._sigma.root(noise.to(torch.float64))

    def variance(self) -> Tensor:
        """own + sums of squares of the factor's columns."""
        return self._sigma.diagonal()

    def quadratic(self, jacobian: Tensor | Jacobian) -> Tensor:
        """J diag(own) J^T + (J factor^T) (J factor^T)^T, in the number type of a factored J."""

        def whole(factors: Jacobian, own: Tensor, factor: Tensor) -> Tensor:
            shared = factors.products(factor).permute(1, 2, 0)  # (N, D, K)
            return factors.weighted_gram(own) + shared @ shared.mT

        return self._each(in_factors(jacobian), whole)

    def marginal(self, jacobian: Tensor | Jacobian) -> Tensor:
        """J^2 own + sums of squares of J factor^T."""
        return self._each(
            in_factors(jacobian),
            lambda factors, own, factor: factors.weighted_squares(own) + factors.products(factor).square().sum(0),
        )

    def joint_quadratic(self, jacobian: Tensor | Jacobian) -> Tensor:
        """J diag(own) J^T + (J factor^T) (J factor^T)^T between all rows."""

        def whole(factors: Jacobian, own: Tensor, factor: Tensor) -> Tensor:
            shared = factors.products(factor).flatten(1)  # (K, N D)
            return factors.joint_gram(own) + shared.mT @ shared

        return self._each(in_factors(jacobian), whole)

    @cached_property
    def _lead(self) -> tuple[int, ...]:
        return tuple(torch.broadcast_shapes(self.own.shape[:-1], self.factor.shape[:-2]))  # type: ignore[no-untyped-call]

    def _each(self, jacobian: Jacobian, function: Callable[[Jacobian, Tensor, Tensor], Tensor]) -> Tensor:
        """The function of own variances and factor of each member, in the number type of the Jacobian."""
        if jacobian.dtype not in self._members:  # of large networks it is called for many chunks of rows
            count = prod(self._lead)
            self._members[jacobian.dtype] = (
                self.own.expand(*self._lead, -1).to(jacobian.dtype).reshape(count, -1),
                self.factor.expand(*self._lead, -1, -1).to(jacobian.dtype).reshape(count, *self.factor.shape[-2:]),
            )
        pairs = zip(*self._members[jacobian.dtype], strict=True)
        values = [function(jacobian, own, factor) for own, factor in pairs]
        return torch.stack(values).to(torch.float64).reshape(*self._lead, *values[0].shape)

    @cached_property
    def _members(self) -> dict[torch.dtype, tuple[Tensor, Tensor]]:
        return {}

    def covariance(self) -> Tensor:
        """diag(own) + factor^T factor, symmetric to the last bit."""
        shared = self.factor.mT @ self.factor
        return 0.5 * (shared + shared.mT) + torch.diag_embed(self.own)

    def member(self, index: int) -> "LowRankCovariance":
        """One member's matrix."""
        return LowRankCovariance(pick(self.own, self._lead, 1, index), pick(self.factor, self._lead, 2, index))
