"""Low-rank matrices plus a diagonal, as precisions and as covariances."""

from collections.abc import Callable
from dataclasses import InitVar, dataclass
from functools import cached_property
from math import prod

import torch
from torch import Tensor

from posterity.errors import NotPositiveDefinite, shown
from posterity.jacobians.jacobian import Jacobian, Stacked, added, as_jacobian, halves, taken
from posterity.numerics.finite import all_finite
from posterity.numerics.layout import Block
from posterity.precisions.dense import Dense
from posterity.precisions.diagonal import in_factors
from posterity.precisions.precision import (
    Precision,
    Spectrum,
    check_finite,
    check_size,
    double,
    is_one_number,
    number,
    pick,
)

LARGE = 1 << 20  # numbers of a factor beyond which J is not formed, if it comes in factors
CANCELLED = 1e-6  # share of the prior's variance below which differences from it lose digits, and J is formed


@dataclass(frozen=True, eq=False)
class LowRank(Precision):
    """Lambda = scale factor^T factor + diag(prior) for a factor (..., K, R) and a positive prior (..., R), in float64.

    All is computed with K x K matrices: with X = scale^1/2 factor prior^-1/2, Sigma = prior^-1/2 S S prior^-1/2 and
    S = I - X^T U diag(1 / (r (r + 1))) U^T X, where X X^T = U diag(e) U^T and r = (1 + e)^1/2. Under priors with equal
    entries, the log determinants of all `rescaled` forms share the eigenvalues of factor factor^T, passed on as
    `spectrum`. With the columns of the data as factor, this is the kernel (function space) form of the posterior:
    J Sigma J^T = J prior^-1 J^T - k (I + X X^T)^-1 k^T with k = J prior^-1/2 X^T.

    >>> LowRank(torch.tensor([[3.0, 0.0, 0.0]]), torch.ones(3)).variance()
    tensor([0.1000, 1.0000, 1.0000], dtype=torch.float64)
    """

    factor: Tensor
    prior: Tensor
    scale: Tensor | float = 1.0
    spectrum: InitVar[Spectrum | None] = None

    def __post_init__(self, spectrum: Spectrum | None) -> None:
        object.__setattr__(self, "factor", self.factor.to(torch.float64))
        check_size("LowRank.prior", self.prior, self.size)
        object.__setattr__(self, "prior", double(self.prior))
        object.__setattr__(self, "scale", number(self.scale, self.factor))
        shown = self.prior[..., :1] if self.prior.stride(-1) == 0 else self.prior
        if not bool(((shown > 0) & torch.isfinite(shown)).all()):
            raise NotPositiveDefinite(
                f"LowRank.prior must be positive and finite (smallest {float(shown.detach().min()):.3g}). "
                "Use a prior that is curved at the mode, such as Normal."
            )
        if not bool(((self.scale >= 0) & torch.isfinite(number(self.scale, self.factor))).all()):
            raise NotPositiveDefinite(f"LowRank.scale must be finite and not negative. Got {self.scale}.")
        if spectrum is None:
            check_finite("LowRank.factor", self.factor)
            return
        vars(self)["eigenvalues"] = spectrum
        if not self.factor.requires_grad and is_one_number(self.prior):  # a spectrum is constant in the factor
            vars(self)["logdet"] = spectrum.logdet(number(self.scale, self.factor), self.prior)

    @cached_property
    def eigenvalues(self) -> Spectrum:
        """Spectrum of the curvature alone, shared with the rescaled forms."""
        return Spectrum(self.factor, factored=True)

    @property
    def _white(self) -> Tensor:
        """X, (..., K, R): as large as the factor, so it is not kept."""
        return self._scaled_factor * self.prior.rsqrt().unsqueeze(-2)

    @cached_property
    def _inner(self) -> Tensor:
        """X X^T, (..., K, K)."""
        white = self._white
        return white @ white.mT

    @cached_property
    def _turned(self) -> tuple[Tensor, Tensor]:
        """U^T X, whose rows are orthogonal, and e."""
        values, vectors = torch.linalg.eigh(self._inner.detach())
        return vectors.mT @ self._white.detach(), values.clamp(min=0.0)

    @property
    def size(self) -> int:
        return self.factor.shape[-1]

    @cached_property
    def logdet(self) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        inner = self._inner
        root: Tensor = torch.linalg.cholesky(inner + torch.eye(inner.shape[-1], dtype=inner.dtype, device=inner.device))
        return self.prior.log().sum(-1) + 2.0 * root.diagonal(dim1=-2, dim2=-1).log().sum(-1)

    def rescaled(self, scale: Tensor | float, prior: Tensor) -> "LowRank":
        return LowRank(self.factor, prior, self.scale * number(scale, self.factor), self.eigenvalues)

    def diagonal(self) -> Tensor:
        return self.prior + number(self.scale, self.factor).unsqueeze(-1) * self.factor.square().sum(-2)

    def matvec(self, vector: Tensor) -> Tensor:
        column = vector.to(torch.float64).unsqueeze(-1)
        product = (self.factor.mT @ (self.factor @ column)).squeeze(-1)
        return self.prior * vector + number(self.scale, self.factor).unsqueeze(-1) * product

    def solve(self, vector: Tensor) -> Tensor:
        """prior^-1/2 (I - X^T (I + X X^T)^-1 X) prior^-1/2 v."""
        turned, values = self._turned
        root = self.prior.rsqrt()
        column = (root * vector).unsqueeze(-1)
        inside = (turned @ column) / (1.0 + values).unsqueeze(-1)
        return root * (column - turned.mT @ inside).squeeze(-1)

    def colour(self, noise: Tensor) -> Tensor:
        return self._shrunk(noise.to(torch.float64)) * self.prior.rsqrt().unsqueeze(-2)

    def root(self, noise: Tensor) -> Tensor:
        """Draws of N(0, Lambda) (..., S, R), from noise (..., S, R): Lambda = prior^1/2 S^-1 S^-1 prior^1/2."""
        turned, values = self._turned
        grown = ((noise @ turned.mT) / (1.0 + (1.0 + values).sqrt()).unsqueeze(-2)) @ turned
        return (noise + grown) * self.prior.sqrt().unsqueeze(-2)

    def variance(self) -> Tensor:
        turned, values = self._turned
        share = 1.0 - (turned.square() / (1.0 + values).unsqueeze(-1)).sum(-2)
        # Rounding may leave less than this, the least share that any direction keeps.
        least = 1.0 / (1.0 + values.sum(-1, keepdim=True))
        return torch.maximum(share, least) / self.prior

    def quadratic(self, jacobian: Tensor | Jacobian) -> Tensor:
        if (factors := self._in_factors(jacobian)) is not None:
            shared = self._shared(factors).permute(1, 2, 0)  # (N, D, K)
            if (spread := _difference(factors.weighted_gram(1.0 / self.prior), shared @ shared.mT)) is not None:
                return spread
        return torch.cat([half @ half.mT for half in halves(jacobian, self._half)], -3)

    def marginal(self, jacobian: Tensor | Jacobian) -> Tensor:
        if (factors := self._in_factors(jacobian)) is not None:
            whole, shared = factors.weighted_squares(1.0 / self.prior), self._shared(factors).square().sum(0)
            if bool((whole - shared >= CANCELLED * whole).all()):
                return whole - shared
        return torch.cat([half.square().sum(-1) for half in halves(jacobian, self._half)], -2)

    def _in_factors(self, jacobian: Tensor | Jacobian) -> Jacobian | None:
        """The Jacobian in float64, where it has factors and these are many columns; None for members."""
        large = self.factor.dim() == 2 and self.factor.numel() > LARGE and self.prior.dim() == 1
        return jacobian.double() if large and isinstance(jacobian, Stacked) else None

    def _shared(self, factors: Jacobian) -> Tensor:
        """J prior^-1 X^T U (I + diag(e))^-1/2, (K, N, D): the kernel between these rows and those of the factor."""
        turned, values = self._turned
        root = self.prior.rsqrt()
        shrink = (1.0 + values).rsqrt()
        if is_one_number(self.prior):
            return factors.products(turned) * (root[0] * shrink).view(-1, 1, 1)
        return factors.products(turned * root) * shrink.view(-1, 1, 1)

    def joint_quadratic(self, jacobian: Tensor | Jacobian) -> Tensor:
        """(J prior^-1/2 S) (J prior^-1/2 S)^T, block by block for a `Stacked`."""
        if (factors := self._in_factors(jacobian)) is not None:
            shared = self._shared(factors).flatten(1)  # (K, N D)
            if (spread := _difference(factors.joint_gram(1.0 / self.prior), shared.mT @ shared)) is not None:
                return spread
        if not isinstance(jacobian, Stacked):
            half = self._half(as_jacobian(jacobian).rows())
            return half @ half.mT
        turned, values = self._turned
        root = self.prior.rsqrt()
        pieces = jacobian.pieces
        inside = added(  # J prior^-1/2 X^T U, (..., N D, K)
            self._scaled(piece, taken(root, where)) @ taken(turned, where).mT for where, piece in pieces
        )
        shrink = inside / ((1.0 + values).sqrt() * ((1.0 + values).sqrt() + 1.0)).unsqueeze(-2)
        total, left = torch.zeros_like(inside @ inside.mT), turned.new_ones(self.size, dtype=torch.bool)
        for where, piece in pieces:
            half = self._scaled(piece, taken(root, where)) - shrink @ taken(turned, where)
            total = total + half @ half.mT
            left[where.index if isinstance(where, Block) else where] = False
        rest = shrink @ turned[..., left]  # the columns in which J is zero
        return total + rest @ rest.mT

    def _scaled(self, piece: Jacobian, root: Tensor) -> Tensor:
        return piece.rows().to(torch.float64).flatten(0, 1) * root.unsqueeze(-2)

    def member(self, index: int) -> "LowRank":
        lead = tuple(self._white.shape[:-2])
        scale = pick(number(self.scale, self.factor), lead, 0, index)
        return LowRank(pick(self.factor, lead, 2, index), pick(self.prior, lead, 1, index), scale)

    @property
    def base(self) -> Tensor:
        return self.prior

    def _excess(self) -> Tensor:
        return self._scaled_factor.mT @ self._scaled_factor

    def _sum(self, other: Precision, scale: Tensor | float) -> "LowRank | Dense | None":
        if isinstance(other, LowRank):
            more = number(scale, other.factor).sqrt()[..., None, None] * other._scaled_factor
            return LowRank(torch.cat((self._scaled_factor, more), -2), self.prior)
        excess = other._excess()
        if excess is None:
            return None
        own = self.factor.mT @ self.factor * number(self.scale, self.factor)[..., None, None]
        return Dense(own + number(scale, excess)[..., None, None] * excess, self.prior)

    @property
    def _scaled_factor(self) -> Tensor:
        """scale^1/2 factor."""
        return number(self.scale, self.factor).sqrt()[..., None, None] * self.factor

    def _half(self, rows: Tensor) -> Tensor:
        """J prior^-1/2 S, (..., N D, R), for J (N, D, R)."""
        return self._shrunk(rows.to(torch.float64).flatten(0, 1) * self.prior.rsqrt().unsqueeze(-2))

    def _shrunk(self, rows: Tensor) -> Tensor:
        """x S for rows x (..., m, R)."""
        turned, values = self._turned
        root = (1.0 + values).sqrt()
        return rows - ((rows @ turned.mT) / (root * (root + 1.0)).unsqueeze(-2)) @ turned


def _difference(whole: Tensor, shared: Tensor) -> Tensor | None:
    """whole - shared (..., D, D), symmetric; None where too many digits cancel on the diagonal."""
    spread = whole - shared
    left, before = (each.diagonal(dim1=-2, dim2=-1) for each in (spread, whole))
    return 0.5 * (spread + spread.mT) if bool((left >= CANCELLED * before).all()) else None


@dataclass(frozen=True, eq=False)
class LowRankCovariance(Precision):
    """Lambda = Sigma^-1 of Sigma = diag(own) + factor^T factor, own (..., R) positive, factor (..., K, R), in float64.

    Sigma is held as a `LowRank` matrix, with products and solves exchanged, by Woodbury's identity in K x K matrices.
    With X = factor own^-1/2 and X X^T = U diag(e) U^T, Sigma^1/2 is (I + X^T U diag(1 / (1 + (1 + e)^1/2)) U^T X)
    own^1/2. A factored J stays factored: J Sigma J^T = J diag(own) J^T + (J factor^T) (J factor^T)^T.

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
            if not bool(all_finite(values)):
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
        return self.factor.shape[-1]

    @property
    def logdet(self) -> Tensor:
        return -self._sigma.logdet

    def rescaled(self, scale: Tensor | float, prior: Tensor) -> "LowRankCovariance":
        raise TypeError(
            "A LowRankCovariance does not tell the curvature of the data from the prior, so neither can be rescaled. "
            "For tuning, use the posterior of Laplace, with the structure LowRank() if it must be small."
        )

    def diagonal(self) -> Tensor:
        return self._sigma.variance()

    def matvec(self, vector: Tensor) -> Tensor:
        return self._sigma.solve(vector)

    def solve(self, vector: Tensor) -> Tensor:
        return self._sigma.matvec(vector)

    def colour(self, noise: Tensor) -> Tensor:
        return self._sigma.root(noise.to(torch.float64))

    def variance(self) -> Tensor:
        return self._sigma.diagonal()

    def quadratic(self, jacobian: Tensor | Jacobian) -> Tensor:
        def whole(factors: Jacobian, own: Tensor, factor: Tensor) -> Tensor:
            shared = factors.products(factor).permute(1, 2, 0)  # (N, D, K)
            return factors.weighted_gram(own) + shared @ shared.mT

        return self._each(in_factors(jacobian), whole)

    def marginal(self, jacobian: Tensor | Jacobian) -> Tensor:
        return self._each(
            in_factors(jacobian),
            lambda factors, own, factor: factors.weighted_squares(own) + factors.products(factor).square().sum(0),
        )

    def joint_quadratic(self, jacobian: Tensor | Jacobian) -> Tensor:
        def whole(factors: Jacobian, own: Tensor, factor: Tensor) -> Tensor:
            shared = factors.products(factor).flatten(1)  # (K, N D)
            return factors.joint_gram(own) + shared.mT @ shared

        return self._each(in_factors(jacobian), whole)

    @cached_property
    def _lead(self) -> tuple[int, ...]:
        return tuple(torch.broadcast_shapes(self.own.shape[:-1], self.factor.shape[:-2]))  # type: ignore[no-untyped-call]

    def _each(self, jacobian: Jacobian, function: Callable[[Jacobian, Tensor, Tensor], Tensor]) -> Tensor:
        """A function of own variances and factor of each member, computed in the dtype of the Jacobian."""
        if jacobian.dtype not in self._members:  # called for many chunks of rows of large networks
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
        shared = self.factor.mT @ self.factor
        return 0.5 * (shared + shared.mT) + torch.diag_embed(self.own)

    def member(self, index: int) -> "LowRankCovariance":
        return LowRankCovariance(pick(self.own, self._lead, 1, index), pick(self.factor, self._lead, 2, index))
