"""Precision matrices of low rank plus a diagonal."""

from dataclasses import InitVar, dataclass
from functools import cached_property

import torch
from torch import Tensor

from posterity.errors import NotPositiveDefinite
from posterity.numerics.block import Block
from posterity.numerics.jacobian import Jacobian, Stacked, as_jacobian, halves, taken
from posterity.numerics.precision import Precision
from posterity.numerics.spectrum import Spectrum, check_size, double, is_one_number, number, pick


@dataclass(frozen=True, eq=False)
class LowRank(Precision):
    """Lambda = scale factor^T factor + diag(prior) for a factor (..., K, R) and a positive prior (..., R), in float64.

    Everything goes through K x K matrices: with X = scale^1/2 factor prior^-1/2, whose rows span K directions,
    Sigma = prior^-1/2 S S prior^-1/2 and S = I - X^T U diag(1 / (r (r + 1))) U^T X, where X X^T = U diag(e) U^T and
    r = (1 + e)^1/2. Under priors of one number the log determinants of all `rescaled` forms share the eigenvalues of
    factor factor^T, which they hand on as `spectrum`.

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
            lowest = float(shown.detach().min())
            raise NotPositiveDefinite(
                f"LowRank.prior must be positive and finite (smallest {lowest:.3g}). Use a prior that is "
                "curved at the mode, such as Normal."
            )
        if not bool(((self.scale >= 0) & torch.isfinite(number(self.scale, self.factor))).all()):
            raise NotPositiveDefinite(f"LowRank.scale must be finite and not negative. Got {self.scale}.")
        if spectrum is None:
            if not bool(torch.isfinite(self.factor).all()):
                raise NotPositiveDefinite(
                    "LowRank.factor has entries that are not finite. Look for NaN or infinite weights or data."
                )
            return
        vars(self)["eigenvalues"] = spectrum
        if not self.factor.requires_grad and is_one_number(self.prior):  # else derivatives in the factor, too
            vars(self)["logdet"] = spectrum.logdet(number(self.scale, self.factor), self.prior)

    @cached_property
    def eigenvalues(self) -> Spectrum:
        """Those of the curvature alone, shared with the rescaled forms."""
        return Spectrum(self.factor, factored=True)

    @cached_property
    def _white(self) -> Tensor:
        """X, (..., K, R)."""
        scale = number(self.scale, self.factor)[..., None, None]
        return scale.sqrt() * self.factor * self.prior.rsqrt().unsqueeze(-2)

    @cached_property
    def _turned(self) -> tuple[Tensor, Tensor]:
        """U^T X, whose rows are orthogonal, and e."""
        white = self._white.detach()
        values, vectors = torch.linalg.eigh(white @ white.mT)
        return vectors.mT @ white, values.clamp(min=0.0)

    @property
    def size(self) -> int:
        """R."""
        return self.factor.shape[-1]

    @cached_property
    def logdet(self) -> Tensor:
        """log det prior + log det(I + X X^T)."""
        inner = self._white @ self._white.mT
        root: Tensor = torch.linalg.cholesky(inner + torch.eye(inner.shape[-1], dtype=inner.dtype, device=inner.device))
        return self.prior.log().sum(-1) + 2.0 * root.diagonal(dim1=-2, dim2=-1).log().sum(-1)

    def rescaled(self, scale: Tensor | float, prior: Tensor) -> "LowRank":
        """The same factor, not copied."""
        return LowRank(self.factor, prior, self.scale * number(scale, self.factor), self.eigenvalues)

    def diagonal(self) -> Tensor:
        """prior + scale times the sums of squares of the factor's columns."""
        return self.prior + number(self.scale, self.factor).unsqueeze(-1) * self.factor.square().sum(-2)

    def matvec(self, vector: Tensor) -> Tensor:
        """prior v + scale factor^T (factor v)."""
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
        """prior^-1/2 S noise."""
        return self._shrunk(noise.to(torch.float64)) * self.prior.rsqrt().unsqueeze(-2)

    def root(self, noise: Tensor) -> Tensor:
        """Draws of N(0, Lambda) (..., S, R), from noise (..., S, R): Lambda = prior^1/2 S^-1 S^-1 prior^1/2."""
        turned, values = self._turned
        grown = ((noise @ turned.mT) / (1.0 + (1.0 + values).sqrt()).unsqueeze(-2)) @ turned
        return (noise + grown) * self.prior.sqrt().unsqueeze(-2)

    def variance(self) -> Tensor:
        """prior^-1 (1 - diag(X^T (I + X X^T)^-1 X))."""
        turned, values = self._turned
        share = 1.0 - (turned.square() / (1.0 + values).unsqueeze(-1)).sum(-2)
        # Rounding may leave less than what even the best determined direction keeps, which is at least this.
        least = 1.0 / (1.0 + values.sum(-1, keepdim=True))
        return torch.maximum(share, least) / self.prior

    def covariance(self) -> Tensor:
        """From the coloured identity."""
        half = self.colour(torch.eye(self.size, dtype=torch.float64, device=self.factor.device))
        whole = half.mT @ half
        return 0.5 * (whole + whole.mT)

    def quadratic(self, jacobian: Tensor | Jacobian) -> Tensor:
        """(J prior^-1/2 S)(...)^T, some rows after the other."""
        return torch.cat([half @ half.mT for half in halves(jacobian, self._half)], -3)

    def marginal(self, jacobian: Tensor | Jacobian) -> Tensor:
        """Sums of squares of J prior^-1/2 S, some rows after the other."""
        return torch.cat([half.square().sum(-1) for half in halves(jacobian, self._half)], -2)

    def joint_quadratic(self, jacobian: Tensor | Jacobian) -> Tensor:
        """(J prior^-1/2 S)(...)^T of all rows, block after block of a `Stacked`."""
        if not isinstance(jacobian, Stacked):
            half = self._half(as_jacobian(jacobian).rows())
            return half @ half.mT
        turned, values = self._turned
        root = self.prior.rsqrt()
        inside: Tensor | None = None  # J prior^-1/2 X^T U, (..., N D, K)
        for places, piece in jacobian.pieces:
            value = self._scaled(piece, taken(root, places)) @ taken(turned, places).mT
            inside = value if inside is None else inside + value
        assert inside is not None
        shrink = inside / ((1.0 + values).sqrt() * ((1.0 + values).sqrt() + 1.0)).unsqueeze(-2)
        total, left = torch.zeros_like(inside @ inside.mT), turned.new_ones(self.size, dtype=torch.bool)
        for places, piece in jacobian.pieces:
            half = self._scaled(piece, taken(root, places)) - shrink @ taken(turned, places)
            total = total + half @ half.mT
            left[places.index if isinstance(places, Block) else places] = False
        rest = shrink @ turned[..., left]  # where J is zero
        return total + rest @ rest.mT

    def _scaled(self, piece: Jacobian, root: Tensor) -> Tensor:
        return piece.rows().to(torch.float64).flatten(0, 1) * root.unsqueeze(-2)

    def member(self, index: int) -> "LowRank":
        """One member's matrix."""
        lead = tuple(self._white.shape[:-2])
        scale = pick(number(self.scale, self.factor), lead, 0, index)
        return LowRank(pick(self.factor, lead, 2, index), pick(self.prior, lead, 1, index), scale)

    def _half(self, rows: Tensor) -> Tensor:
        """J prior^-1/2 S, (..., N D, R), of J (N, D, R)."""
        return self._shrunk(rows.to(torch.float64).flatten(0, 1) * self.prior.rsqrt().unsqueeze(-2))

    def _shrunk(self, rows: Tensor) -> Tensor:
        """x S for rows x (..., m, R)."""
        turned, values = self._turned
        root = (1.0 + values).sqrt()
        return rows - ((rows @ turned.mT) / (root * (root + 1.0)).unsqueeze(-2)) @ turned
