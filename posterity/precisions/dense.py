"""Dense precision matrices with a Cholesky factor."""

from dataclasses import InitVar, dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from posterity.errors import shown
from posterity.jacobians.jacobian import Jacobian, as_jacobian, halves
from posterity.numerics.finite import all_finite
from posterity.precisions.precision import (
    Precision,
    Spectrum,
    check_finite,
    check_size,
    double,
    is_one_number,
    not_definite,
    number,
    pick,
    positive_base,
    singular,
)


@dataclass(frozen=True, eq=False)
class Dense(Precision):
    """Lambda = scale curvature + diag(prior), (..., R, R), factored as L L^T in float64.

    Takes a symmetric curvature; raises `NotPositiveDefinite` where Lambda is not positive definite, and never returns
    NaN. Under priors (..., R) with equal entries, the log determinants of all `rescaled` forms share the eigenvalues of
    the curvature, passed on as `spectrum`. `factor` is L where it is known more exactly than the matrix tells it.

    >>> matrix = Dense(torch.tensor([[3.0, 0.0], [0.0, 0.0]]), prior=torch.ones(2))
    >>> matrix.variance()
    tensor([0.2500, 1.0000], dtype=torch.float64)
    >>> matrix.rescaled(2.0, torch.ones(2)).variance()
    tensor([0.1429, 1.0000], dtype=torch.float64)
    """

    curvature: Tensor
    prior: Tensor | None = None
    scale: Tensor | float = 1.0
    spectrum: InitVar[Spectrum | None] = None
    factor: Tensor | None = field(default=None, metadata={"stored": "if set"})

    def __post_init__(self, spectrum: Spectrum | None) -> None:
        if self.factor is not None:
            if self.factor.shape != self.curvature.shape:
                wanted = tuple(self.curvature.shape)
                raise ValueError(f"Dense.factor must have the shape of the matrix, {wanted}. Got {shown(self.factor)}.")
            object.__setattr__(self, "factor", double(self.factor).contiguous())  # as it is stored
        object.__setattr__(self, "curvature", self.curvature.to(torch.float64))
        object.__setattr__(self, "scale", number(self.scale, self.curvature))
        if self.prior is not None:
            check_size("Dense.prior", self.prior, self.size)
            object.__setattr__(self, "prior", double(self.prior))
        if spectrum is not None:
            vars(self)["eigenvalues"] = spectrum
        fixed = not self.curvature.requires_grad  # eigenvalues have no derivatives in the curvature
        if fixed and spectrum is not None and self.prior is not None and is_one_number(self.prior):
            vars(self)["logdet"] = spectrum.logdet(number(self.scale, self.curvature), self.prior)
        else:
            self.cholesky  # noqa: B018  refuse a matrix that is not positive definite now

    @cached_property
    def matrix(self) -> Tensor:
        """Lambda."""
        scale = number(self.scale, self.curvature)
        plain = scale.dim() == 0 and not scale.requires_grad and float(scale) == 1.0  # no copy of a large matrix
        scaled = self.curvature if plain else self.curvature * scale[..., None, None]
        if self.prior is None:
            return scaled
        entries = scaled.diagonal(dim1=-2, dim2=-1) + self.prior  # (..., R), of all members
        return torch.diagonal_scatter(scaled.expand(*entries.shape, self.size), entries, dim1=-2, dim2=-1)

    @cached_property
    def cholesky(self) -> Tensor:
        """The lower factor L."""
        if self.factor is not None:
            return self.factor
        factor: Tensor
        factor, info = torch.linalg.cholesky_ex(self.matrix)
        if bool((info != 0).any()) or not bool(all_finite(factor)):
            check_finite("The precision matrix", self.matrix)
            raise not_definite(float(torch.linalg.eigvalsh(self.matrix.detach()).min()))
        # Share of each weight's precision given the weights before it: below this, rounding decides its sign.
        left = factor.diagonal(dim1=-2, dim2=-1).square() / self.matrix.diagonal(dim1=-2, dim2=-1)
        if bool((left <= 4 * self.size * torch.finfo(torch.float64).eps).any()):
            raise singular()
        return factor

    @cached_property
    def eigenvalues(self) -> Spectrum:
        """Spectrum of the curvature alone, shared with the rescaled forms."""
        return Spectrum(self.curvature)

    @property
    def size(self) -> int:
        return self.curvature.shape[-1]

    @cached_property
    def logdet(self) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return 2.0 * self.cholesky.diagonal(dim1=-2, dim2=-1).log().sum(-1)

    def rescaled(self, scale: Tensor | float, prior: Tensor) -> "Dense":
        return Dense(self.curvature, prior, self.scale * number(scale, self.curvature), self.eigenvalues)

    def diagonal(self) -> Tensor:
        return self.matrix.diagonal(dim1=-2, dim2=-1)

    def matvec(self, vector: Tensor) -> Tensor:
        return (self.matrix @ vector.to(torch.float64).unsqueeze(-1)).squeeze(-1)

    def solve(self, vector: Tensor) -> Tensor:
        return torch.cholesky_solve(vector.to(torch.float64).unsqueeze(-1), self.cholesky).squeeze(-1)

    def colour(self, noise: Tensor) -> Tensor:
        solved: Tensor = torch.linalg.solve_triangular(self.cholesky.mT, noise.to(torch.float64).mT, upper=True)
        return solved.mT

    def covariance(self) -> Tensor:
        inverse = torch.cholesky_inverse(self.cholesky)
        return 0.5 * (inverse + inverse.mT)

    def variance(self) -> Tensor:
        return self.covariance().diagonal(dim1=-2, dim2=-1)

    def quadratic(self, jacobian: Tensor | Jacobian) -> Tensor:
        return torch.cat([half @ half.mT for half in halves(jacobian, self._half)], -3)

    def marginal(self, jacobian: Tensor | Jacobian) -> Tensor:
        return torch.cat([half.square().sum(-1) for half in halves(jacobian, self._half)], -2)

    def joint_quadratic(self, jacobian: Tensor | Jacobian) -> Tensor:
        half = self._half(as_jacobian(jacobian).rows())
        return half @ half.mT

    def _half(self, rows: Tensor) -> Tensor:
        """J L^-T, (..., N D, R), for J (N, D, R)."""
        columns = rows.to(torch.float64).flatten(0, 1).mT  # (R, N D)
        half: Tensor = torch.linalg.solve_triangular(self.cholesky, columns, upper=False)
        return half.mT

    @property
    def base(self) -> Tensor:
        return positive_base(self.prior, self.diagonal())

    def _excess(self) -> Tensor:
        return torch.diagonal_scatter(self.matrix, self.diagonal() - self.base, dim1=-2, dim2=-1)

    def _sum(self, other: Precision, scale: Tensor | float) -> "Dense | None":
        excess = other._excess()
        if excess is None:
            return None
        own = self.curvature * number(self.scale, self.curvature)[..., None, None]
        return Dense(own + number(scale, excess)[..., None, None] * excess, self.prior)

    def member(self, index: int) -> "Dense":
        lead = self.matrix.shape[:-2]
        prior = None if self.prior is None else pick(self.prior, lead, 1, index)
        return Dense(
            pick(self.curvature, lead, 2, index), prior, pick(number(self.scale, self.curvature), lead, 0, index)
        )
