"""Precision matrices with a Kronecker product as curvature, for one layer."""

from dataclasses import dataclass
from functools import cached_property
from math import prod

import torch
from torch import Tensor

from posterity.errors import NotPositiveDefinite
from posterity.jacobians.convolution import Convolution
from posterity.jacobians.head import Head
from posterity.jacobians.jacobian import Jacobian, Outline, as_jacobian
from posterity.jacobians.linear import Lookup, Matrix, Thin
from posterity.numerics.finite import all_finite
from posterity.precisions.precision import (
    Precision,
    check_finite,
    check_positive,
    check_size,
    double,
    not_definite,
    number,
    pick,
)

_ROUNDING = 1e-4  # negative eigenvalues below this share of the largest are rounding of long float32 sums
_SAME = 1e-6  # relative difference at which two prior precisions count as equal: rounding of float32


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
        check_finite("A Kronecker factor", white)
        values, vectors = torch.linalg.eigh(0.5 * (white + white.mT))
        # Contiguous, as from a file, so that products give the same bits.
        return cls(vectors.contiguous(), _semidefinite(values), pattern.to(torch.float64))

    @classmethod
    def diagonal(cls, entries: Tensor, pattern: Tensor) -> "Factor":
        """The factor of diag(entries), (..., G, n)."""
        pattern = pattern.to(torch.float64)
        values = entries.to(torch.float64) / pattern
        check_finite("A Kronecker factor", values)
        return cls(None, _semidefinite(values), pattern)

    @property
    def size(self) -> int:
        """Number of rows n."""
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
        """The factor with an axis for draws before G."""
        vectors = None if self.vectors is None else self.vectors.unsqueeze(-4)
        return Factor(vectors, self.values.unsqueeze(-3), self.pattern.unsqueeze(-3))

    def member(self, lead: tuple[int, ...], index: int) -> "Factor":
        """The factor of one member, of those in `lead`."""
        vectors = None if self.vectors is None else pick(self.vectors, lead, 3, index)
        return Factor(vectors, pick(self.values, lead, 2, index), pick(self.pattern, lead, 2, index))


def _semidefinite(values: Tensor) -> Tensor:
    """Eigenvalues with those within rounding of zero set to zero; negative ones are refused."""
    largest = values.abs().amax(-1, keepdim=True)
    if bool((values < -(_ROUNDING * largest).clamp(min=torch.finfo(values.dtype).tiny)).any()):
        raise NotPositiveDefinite(
            f"A Kronecker factor must be positive semi-definite. Its smallest eigenvalue is {float(values.min()):.3g}. "
            "Build it from sums of squares, such as those of a Gauss-Newton or Fisher curvature."
        )
    rounding = values.shape[-1] * torch.finfo(torch.float64).eps * largest
    return torch.where(values <= rounding, 0.0, values)


@dataclass(frozen=True, eq=False)
class Kronecker(Precision):
    """Lambda = scale outer (x) inner + diag(prior) over weights (..., G, O, I), for each group g of G, in float64.

    Weights are row-major matrices O x I, a bias being the last column. The prior (..., G O I) must be a multiple m of
    the outer product of the factors' patterns. Then Lambda = B^-T diag(scale values + m) B^-1 with B the Kronecker
    product of the factors' bases, where `values` (..., G, O, I) are the products of the factors' eigenvalues, or
    given: those of an eigenvalue-corrected approximation in that basis. With `factored_damping` it is instead
    (sqrt(scale) outer + sqrt(m) P) (x) (sqrt(scale) inner + sqrt(m) P), Ritter's approximation, which depends on
    how the curvature is divided among the factors: means over data in both and scale = number of data are his.

    >>> outer, inner = torch.tensor([[[2.0]]]), torch.tensor([[[3.0, 0.0], [0.0, 0.5]]])
    >>> Kronecker.of(outer, inner, prior=torch.ones(2)).variance()
    tensor([0.1429, 0.5000], dtype=torch.float64)
    """

    outer: Factor
    inner: Factor
    prior: Tensor
    values: Tensor | None = None
    scale: Tensor | float = 1.0
    factored_damping: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "prior", double(self.prior))
        object.__setattr__(self, "scale", number(self.scale, self.prior))
        if self.values is not None:
            object.__setattr__(self, "values", self.values.to(torch.float64))
            if self.factored_damping:
                raise ValueError(
                    "Kronecker: factored_damping needs the factors' own eigenvalues. Got corrected ones. "
                    "Leave one of the two out."
                )
        if not _is_multiple(self._ratio):
            raise ValueError(
                "Kronecker.prior must be a multiple of the outer product of the factors' patterns. Got another. "
                "Use Kronecker.of or rescaled, which fit the patterns to the prior."
            )
        check_positive(self.eigenvalues)

    @classmethod
    def of(
        cls, outer: Tensor, inner: Tensor, prior: Tensor, scale: Tensor | float = 1.0, factored_damping: bool = False
    ) -> "Kronecker":
        """From the matrices outer (..., G, O, O) and inner (..., G, I, I), and a prior (..., G O I).

        The prior must be an outer product, such as one number, one for weights and one for the bias, or one for each
        row or column.
        """
        rows, columns = prior_patterns(prior.detach(), (outer.shape[-3], outer.shape[-2], inner.shape[-1]))
        return cls(Factor.of(outer, rows), Factor.of(inner, columns), prior, None, scale, factored_damping)

    @classmethod
    def table(
        cls, counts: Tensor, inner: Tensor, prior: Tensor, scale: Tensor | float = 1.0, factored_damping: bool = False
    ) -> "Kronecker":
        """diag(counts) (x) inner over a table of weights (V, E), for counts (..., V) and inner (..., E, E).

        >>> Kronecker.table(torch.tensor([2.0, 0.0]), torch.eye(1), prior=torch.ones(2)).variance()
        tensor([0.3333, 1.0000], dtype=torch.float64)
        """
        rows, columns = prior_patterns(prior.detach(), (1, counts.shape[-1], inner.shape[-1]))
        outer = Factor.diagonal(counts.unsqueeze(-2), rows)
        return cls(outer, Factor.of(inner.unsqueeze(-3), columns), prior, None, scale, factored_damping)

    def corrected(self, values: Tensor) -> "Kronecker":
        """The same basis with the given eigenvalues (..., G, O, I) of the curvature: the diagonal of B^T C B."""
        return Kronecker(self.outer, self.inner, self.prior, values, self.scale, self.factored_damping)

    @property
    def shape(self) -> tuple[int, int, int]:
        """(G, O, I)."""
        return self.outer.values.shape[-2], self.outer.size, self.inner.size

    @property
    def lead(self) -> tuple[int, ...]:
        """Leading axes: the members."""
        return tuple(self.eigenvalues.shape[:-3])

    @property
    def size(self) -> int:
        return self.prior.shape[-1]

    @cached_property
    def _ratio(self) -> Tensor:
        """The prior over the patterns, (..., G, O, I)."""
        prior = self.prior.reshape(*self.prior.shape[:-1], *self.shape)
        return prior / (self.outer.pattern.unsqueeze(-1) * self.inner.pattern.unsqueeze(-2))

    @cached_property
    def eigenvalues(self) -> Tensor:
        """Eigenvalues of B^T Lambda B, (..., G, O, I)."""
        scale = number(self.scale, self.prior)[..., None, None, None]
        outer, inner = self.outer.values.unsqueeze(-1), self.inner.values.unsqueeze(-2)
        multiple = self._ratio.mean((-3, -2, -1), keepdim=True)
        if self.factored_damping:
            if bool((multiple < 0).any()):
                raise not_definite(float(multiple.detach().min()))
            rows = columns = multiple.sqrt()
            if self.prior.requires_grad and self.prior.stride(-1) != 0:
                # The same values, with the derivatives of the patterns that `prior_patterns` makes of the prior.
                root = self._ratio[..., :1, :1].sqrt()
                rows = self.outer.averaged((self._ratio[..., :1] / root).mT).mT
                columns = self.inner.averaged(self._ratio[..., :1, :] / root)
            return (scale.sqrt() * outer + rows) * (scale.sqrt() * inner + columns)
        if self.prior.requires_grad and self.prior.stride(-1) != 0:
            # The same value, with exact first derivatives in every entry of the prior.
            multiple = self.outer.averaged(self.inner.averaged(self._ratio).mT).mT
        return scale * (outer * inner if self.values is None else self.values) + multiple

    @cached_property
    def logdet(self) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        _, rows, columns = self.shape
        patterns = columns * self.outer.pattern.log().sum((-2, -1)) + rows * self.inner.pattern.log().sum((-2, -1))
        return self.eigenvalues.log().sum((-3, -2, -1)) + patterns

    def rescaled(self, scale: Tensor | float, prior: Tensor) -> "Kronecker":
        """Rescale; the factors are decomposed again only where the prior is no multiple of the old one."""
        total = self.scale * number(scale, self.prior)
        pattern = self.outer.pattern.unsqueeze(-1) * self.inner.pattern.unsqueeze(-2)
        fixed = double(prior.detach())
        check_size("Kronecker.prior", fixed, self.size)
        if _is_multiple(fixed.reshape(*fixed.shape[:-1], *self.shape) / pattern):
            return Kronecker(self.outer, self.inner, prior, self.values, total, self.factored_damping)
        if self.values is not None:
            raise ValueError(
                "Kronecker: corrected eigenvalues belong to one basis, and hence to multiples of one prior. Got a "
                "prior of other proportions. Use one prior precision for the layer, or plain Kronecker factors."
            )
        rows, columns = prior_patterns(fixed, self.shape)
        outer, inner = self.outer.repatterned(rows), self.inner.repatterned(columns)
        return Kronecker(outer, inner, prior, None, total, self.factored_damping)

    def diagonal(self) -> Tensor:
        return self.outer.lifted(self.inner.lifted(self.eigenvalues).mT).mT.flatten(-3)

    def matvec(self, vector: Tensor) -> Tensor:
        turned = self._into(vector, 1, self.outer, self.inner) * self.eigenvalues
        return self._out_of(turned, 1, self.outer, self.inner)

    def solve(self, vector: Tensor) -> Tensor:
        turned = self._into(vector, -1, self.outer, self.inner) / self.eigenvalues
        return self._out_of(turned, -1, self.outer, self.inner)

    def colour(self, noise: Tensor) -> Tensor:
        table = noise.to(torch.float64).reshape(*noise.shape[:-1], *self.shape)
        scaled = table * self.eigenvalues.rsqrt().unsqueeze(-4)
        return self._out_of(scaled, -1, self.outer.spread(), self.inner.spread())

    def variance(self) -> Tensor:
        return self.outer.marginal(self.inner.marginal(1.0 / self.eigenvalues).mT).mT.flatten(-3)

    def quadratic(self, jacobian: Tensor | Jacobian) -> Tensor:
        return self._each(jacobian, Jacobian.weighted_gram.__name__)

    def marginal(self, jacobian: Tensor | Jacobian) -> Tensor:
        return self._each(jacobian, Jacobian.weighted_squares.__name__)

    def row_draws(self, jacobian: Jacobian, noise: Tensor) -> Tensor | None:
        turned, variance = self._turned(jacobian)
        return turned.row_draws(variance, noise)

    def joint_quadratic(self, jacobian: Tensor | Jacobian) -> Tensor:
        return self._each(jacobian, Jacobian.joint_gram.__name__)

    @property
    def base(self) -> Tensor:
        return self.prior

    def _sum(self, other: Precision, scale: Tensor | float) -> "Kronecker | None":
        if not isinstance(other, Kronecker):
            return None
        if self.values is not None or other.values is not None:
            raise ValueError(
                "plus: corrected eigenvalues belong to the eigenvectors of their own data, so they cannot be added to "
                "those of other data. Use the structure Kronecker() for all of them."
            )
        if self.shape != other.shape:
            raise ValueError(f"plus: Kronecker factors must be of one shape. Got {self.shape} and {other.shape}.")
        # The factors are averaged with their scales, the numbers of data, as weights.
        counts = number(self.scale, self.prior), number(other.scale, other.prior) * number(scale, other.prior)
        total = counts[0] + counts[1]
        shares = [(count / total)[..., None, None, None] for count in counts]
        inner = shares[0] * self.inner.matrix + shares[1] * other.inner.matrix
        if self.outer.vectors is None and other.outer.vectors is None:
            entries = [factor.values * factor.pattern for factor in (self.outer, other.outer)]
            mixed = shares[0].squeeze(-1) * entries[0] + shares[1].squeeze(-1) * entries[1]
            outer = Factor.diagonal(mixed, self.outer.pattern)
        else:
            outer = Factor.of(shares[0] * self.outer.matrix + shares[1] * other.outer.matrix, self.outer.pattern)
        inner_factor = Factor.of(inner, self.inner.pattern)
        return Kronecker(outer, inner_factor, self.prior, None, total, self.factored_damping)

    def _each(self, jacobian: Tensor | Jacobian, name: str) -> Tensor:
        """Call the named method of J B with the variances in that basis, for each member.

        J B of a `Matrix` or a `Lookup` is as factored as J and has its dtype.
        """
        if self.lead:
            return torch.stack([self.member(index)._each(jacobian, name) for index in range(self.lead[0])])
        turned, variance = self._turned(jacobian)
        value: Tensor = getattr(turned, name)(variance)
        return value.to(torch.float64)

    def member(self, index: int) -> "Kronecker":
        lead = self.lead
        return Kronecker(
            self.outer.member(lead, index),
            self.inner.member(lead, index),
            pick(self.prior, lead, 1, index),
            None if self.values is None else pick(self.values, lead, 3, index),
            pick(number(self.scale, self.prior), lead, 0, index),
            self.factored_damping,
        )

    def whitened(self, rows: Tensor) -> Tensor:
        """J B, (..., R), for J (..., R), in float64."""
        return self._into(rows, -1, self.outer, self.inner).flatten(-3)

    def _turned(self, jacobian: Tensor | Jacobian) -> tuple[Jacobian, Tensor]:
        """(J in a basis where Sigma is diagonal, the diagonal (R,))."""
        if self.outer.vectors is None and isinstance(jacobian, (Matrix, Thin, Head, Lookup)):
            # A diagonal factor scales rows and mixes none.
            variance = (1.0 / self.eigenvalues / self.outer.pattern.unsqueeze(-1)).flatten()
            basis = self.inner.basis.contiguous()
            if isinstance(jacobian, Lookup):
                return jacobian.rotated(basis[0]), variance
            return jacobian.rotated(None, basis), variance.to(jacobian.dtype)
        if isinstance(jacobian, (Matrix, Thin, Convolution, Head)):
            outer, inner, variance = self._cast(jacobian.dtype)
            return jacobian.rotated(outer, inner), variance
        return _Turned(self, as_jacobian(jacobian)), 1.0 / self.eigenvalues.flatten()

    def _cast(self, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        """Bases (G, O, O) and (G, I, I) and variances (R,) in a dtype, computed once for all chunks of rows."""
        if dtype not in self._casts:
            # Contiguous, whether from a decomposition or a file, so that products give the same bits.
            outer, inner = (factor.basis.to(dtype).contiguous() for factor in (self.outer, self.inner))
            self._casts[dtype] = outer, inner, (1.0 / self.eigenvalues).flatten().to(dtype)
        return self._casts[dtype]

    @cached_property
    def _casts(self) -> dict[torch.dtype, tuple[Tensor, Tensor, Tensor]]:
        return {}

    def _into(self, vector: Tensor, power: int, outer: Factor, inner: Factor) -> Tensor:
        """B^T v (power -1) or B^-1 v (power 1), (..., G, O, I)."""
        table = vector.to(torch.float64).reshape(*vector.shape[:-1], *self.shape)
        return outer.into(inner.into(table, power).mT, power).mT

    def _out_of(self, table: Tensor, power: int, outer: Factor, inner: Factor) -> Tensor:
        """B y (power -1) or B^-T y (power 1), for y (..., G, O, I)."""
        return outer.out_of(inner.out_of(table, power).mT, power).mT.flatten(-3)


@dataclass(frozen=True, eq=False)
class _Turned(Jacobian):
    """J B for a Jacobian whose factors do not match the basis."""

    matrix: Kronecker
    whole: Jacobian

    @property
    def outline(self) -> Outline:
        return self.whole.outline._replace(dtype=torch.float64)

    def rows(self) -> Tensor:
        return self.matrix.whitened(self.whole.rows())

    def narrow(self, low: int, high: int) -> "_Turned":
        return _Turned(self.matrix, self.whole.narrow(low, high))


def _is_multiple(ratio: Tensor) -> bool:
    """Whether the ratio (..., G, O, I) of a prior to a pattern is constant up to rounding."""
    first = ratio[..., :1, :1, :1]
    return bool(((ratio - first).abs() <= _SAME * first.abs()).all())


def prior_patterns(prior: Tensor, shape: tuple[int, int, int]) -> tuple[Tensor, Tensor]:
    """rows (..., G, O) and columns (..., G, I) whose outer products are a multiple of the prior (..., G O I)."""
    check_size("Kronecker.prior", prior, prod(shape))
    table = double(prior).reshape(*prior.shape[:-1], *shape)
    if not bool(all_finite(table)):
        raise NotPositiveDefinite("The prior has precisions that are not finite. Look for NaN or infinite weights.")
    if _is_multiple(table):
        return torch.ones_like(table[..., 0]), torch.ones_like(table[..., 0, :])
    root = table[..., :1, :1].abs().sqrt()
    rows, columns = table[..., :1] / root, table[..., :1, :] / root
    if not bool((table > 0).all()) or bool(((table - rows * columns).abs() > _SAME * table).any()):
        raise ValueError(
            "Kronecker.prior must be positive and an outer product over the rows and columns of a layer: one number, "
            "one for weights and one for the bias, or one for each row or column. Got another. Use the structure "
            "Diagonal or Full with this prior, or a Normal prior with one scale for each layer."
        )
    return rows.squeeze(-1), columns.squeeze(-2)
