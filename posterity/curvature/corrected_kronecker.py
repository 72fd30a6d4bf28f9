"""Kronecker factors with exact variances along their eigenvectors."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from posterity.curvature.kronecker import Kronecker, add_factors, block_precision, check_outer_products, whole_factors
from posterity.curvature.rows import Rows
from posterity.curvature.structure import Structure, Sums, added
from posterity.curvature.survey import Place, Survey, survey
from posterity.model.joint import Joint
from posterity.numerics.block_diagonal import BlockDiagonal
from posterity.numerics.convolution_jacobian import Convolution
from posterity.numerics.jacobian import Stacked
from posterity.numerics.kronecker import Kronecker as KroneckerPrecision
from posterity.numerics.layer_jacobians import Lookup, Matrix
from posterity.numerics.precision import Precision
from posterity.numerics.thin_jacobian import Thin


@dataclass(frozen=True)
class CorrectedKronecker(Structure):
    """Kronecker eigenvectors with the exact curvature along each of them (EKFAC).

    **Math**: with B = B_G (x) B_A the eigenvectors of the Kronecker factors, the block of a layer is
    B^-T diag(s) B^-1, s = the diagonal of B^T C B for the exact block C.

    **Limit**: of all matrices with these eigenvectors the nearest to C in the Frobenius norm, so never worse than
    `Kronecker`; layers without factors are as there.

    **Cost**: two passes over the data: that of `Kronecker` and one as dear as an exact diagonal.

    **References**: George et al. (2018), Fast approximate natural gradient descent in a Kronecker-factored eigenbasis.

    **Example**:

    >>> CorrectedKronecker().passes
    2
    """

    @property
    def passes(self) -> int:
        """One for the eigenvectors, one for the variances along them."""
        return 2

    @property
    def needs_columns(self) -> bool:
        """As `Kronecker`."""
        return True

    def add(self, sums: Sums, rows: Rows, number: int) -> Sums:
        """The factors, then the squares along their eigenvectors."""
        if number == 0:
            return add_factors(sums, rows)
        assert isinstance(rows.joint, Joint)
        assert rows.batch is not None
        places = survey(rows.joint, rows.batch.inputs).places
        for piece in rows.jacobians():
            assert isinstance(piece.jacobian, Stacked)
            for index, place in enumerate(places):
                if f"{index}.inner_basis" not in sums:
                    continue
                part, inner = piece.jacobian.part(place.block), sums[f"{index}.inner_basis"]
                if isinstance(part, (Matrix, Thin, Convolution)):
                    squares = part.rotated(sums[f"{index}.outer_basis"], inner).squares()
                else:
                    assert isinstance(part, Lookup)
                    squares = part.rotated(inner[0]).squares()
                added(sums, **{f"{index}.values": squares.to(inner)})
        return sums

    def check_prior(self, places: Sequence[Place], prior: Tensor) -> None:
        """As `Kronecker`."""
        check_outer_products(places, prior)

    def end(self, sums: Sums, rows: Rows, number: int, prior: Tensor) -> Sums:
        """After the first pass: the eigenvectors, for a prior of this pattern."""
        if number > 0:
            return sums
        sums = whole_factors(sums)
        assert isinstance(rows.joint, Joint)
        assert rows.batch is not None
        for index, place in enumerate(survey(rows.joint, rows.batch.inputs).places):
            found = block_precision(sums, index, place, 1.0, place.block.gather(prior), factored_damping=False)
            if isinstance(found, KroneckerPrecision):
                # In one order in memory, so that a run that is taken up again multiplies alike.
                sums[f"{index}.outer_basis"] = found.outer.basis.contiguous()
                sums[f"{index}.inner_basis"] = found.inner.basis.contiguous()
        return sums

    def precision(self, sums: Sums, places: Sequence[Place], scale: float | Tensor, prior: Tensor) -> Precision:
        """Block diagonal, corrected Kronecker in most blocks."""
        parts = []
        for index, place in enumerate(places):
            found = block_precision(sums, index, place, scale, place.block.gather(prior), factored_damping=False)
            if isinstance(found, KroneckerPrecision):
                values = sums[f"{index}.values"].view(found.shape)
                if place.kind == "table":  # rows of a table are scaled, not turned
                    values = values / found.outer.pattern.unsqueeze(-1)
                found = found.corrected(values / sums["count"])
            parts.append(found)
        return BlockDiagonal(tuple(place.block for place in places), tuple(parts), prior.shape[-1])

    def bytes(self, survey: Survey, num_data: int, columns: int) -> int:
        """As `Kronecker`, with the eigenvectors in the sums."""
        return 2 * Kronecker().bytes(survey, num_data, columns)
