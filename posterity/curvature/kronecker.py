"""Kronecker-factored curvature (KFAC), and its correction in the eigenbasis (EKFAC)."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from posterity.curvature.curvature import Rows
from posterity.curvature.structure import RECENT, Structure, Sums, added, counted, settled
from posterity.curvature.survey import Place, Survey, survey
from posterity.jacobians.convolution import Convolution
from posterity.jacobians.jacobian import Jacobian, Stacked
from posterity.jacobians.linear import Lookup, Matrix, Thin, symmetric
from posterity.model.joint import Joint
from posterity.precisions.block import BlockDiagonal
from posterity.precisions.dense import Dense
from posterity.precisions.diagonal import Diagonal as DiagonalPrecision
from posterity.precisions.kronecker import Kronecker as KroneckerPrecision
from posterity.precisions.kronecker import prior_patterns
from posterity.precisions.precision import Precision

logger = logging.getLogger("posterity")

SMALL = 512  # weights of a layer without Kronecker factors up to which its block is kept whole


@dataclass(frozen=True)
class Kronecker(Structure):
    """Independent layers, each with a Kronecker product for its curvature (KFAC).

    **Math**: the block of a layer z = W a + b is N G (x) A over the row-major (W b), where A is the mean over rows of
    a a^T, a with a 1 for the bias, and G that of sum_k g_k g_k^T, g_k the gradient of column k in z. Layers that act at
    T positions (convolutions, sequences) take the mean over positions in A and their sum in G. `factored_damping` adds
    the prior t as (sqrt(N) G + sqrt(t) I) (x) (sqrt(N) A + sqrt(t) I) (Ritter et al.) in place of the exact t I.

    **Limit**: exact for one row, and when G does not depend on the row (linear networks with Gaussian noise). Norm
    layers, and tied or unknown weights, have whole blocks up to 512 weights, beyond that their exact diagonal.

    **Cost**: K backward passes, products a a^T and g g^T; eigenvalues once, O^3 + I^3 a layer.

    **References**: Martens and Grosse (2015); Grosse and Martens (2016), for convolutions; Ritter et al. (2018).

    **Example**:

    >>> Kronecker().passes
    1
    """

    factored_damping: bool = False

    needs_columns = True

    def add(self, sums: Sums, rows: Rows, number: int) -> Sums:
        return add_factors(sums, rows)

    def check_prior(self, places: Sequence[Place], prior: Tensor) -> None:
        check_outer_products(places, prior)

    def end(self, sums: Sums, rows: Rows, number: int, prior: Tensor) -> Sums:
        """The factors whole, of which only the upper halves were added up."""
        return whole_factors(sums)

    def precision(self, sums: Sums, places: Sequence[Place], scale: float | Tensor, prior: Tensor) -> Precision:
        parts = [
            block_precision(sums, index, place, scale, place.block.gather(prior), self.factored_damping)
            for index, place in enumerate(places)
        ]
        return BlockDiagonal(tuple(place.block for place in places), tuple(parts), prior.shape[-1])

    def bytes(self, survey: Survey, num_data: int, columns: int) -> int:
        """Both factors, their eigenvectors, what is added to them, and a few numbers a weight."""
        return 8 * sum(5 * _factor_entries(place) + 4 * place.block.size for place in survey.places)


def _factor_entries(place: Place) -> int:
    rows, width = place.block.rows // place.groups, place.block.width
    if place.kind == "matrix":
        return place.groups * (rows**2 + width**2)
    if place.kind == "table":
        return place.block.rows + width**2
    return place.block.size**2 if place.block.size <= SMALL else place.block.size


def add_factors(sums: Sums, rows: Rows) -> Sums:
    """The sums of the factors of every layer with these rows added, to the recent ones."""
    assert isinstance(rows.joint, Joint)
    assert rows.batch is not None
    places = survey(rows.joint, rows.batch.inputs).places
    recent = {name.removeprefix(RECENT): value for name, value in sums.items() if name.startswith(RECENT)}
    for piece in rows.jacobians():
        jacobian = piece.jacobian
        if not isinstance(jacobian, Stacked):
            raise TypeError("Kronecker factors are of whole tensors. Got single weights. Use Full() or Diagonal().")
        weights = None if rows.weights is None else rows.weights[piece.low : piece.low + jacobian.num_rows]
        for index, place in enumerate(places):
            _add(recent, f"{index}.", place, jacobian.part(place.block), weights, piece.fresh)
    one = torch.ones((), dtype=torch.float64, device=rows.theta.device)
    sums = added(sums, count=one * (rows.batch.size if rows.weights is None else rows.weights.sum()))
    sums.update({RECENT + name: value for name, value in recent.items()})
    return counted(sums)


def _add(recent: Sums, name: str, place: Place, part: Jacobian, weights: Tensor | None, fresh: bool) -> None:
    """Add what one piece has to the sums of one layer; inputs of a layer are seen once for all columns."""
    outer, inner = name + "outer", name + "inner"
    if isinstance(part, Thin):
        recent[outer] = part.outer_gram(recent.get(outer))
        if fresh:
            recent[inner] = part.inner_gram(weights, recent.get(inner))
    elif isinstance(part, (Matrix, Convolution)):
        added(recent, **{outer: part.outer_gram()}, **({inner: part.inner_gram(weights)} if fresh else {}))
    elif isinstance(part, Lookup):
        added(recent, **{outer: part.outer_gram()}, **({name + "counts": part.counts(weights)} if fresh else {}))
    elif place.block.size > SMALL:
        say_diagonal(place.block.names, place.block.size)
        added(recent, **{name + "diagonal": part.squares()})
    else:
        dense = part.rows().flatten(0, 1)
        added(recent, **{name + "matrix": dense.T @ dense})


@cache
def say_diagonal(names: tuple[str, ...], size: int) -> None:
    """Say once that a layer without a Kronecker rule keeps its diagonal only."""
    logger.warning(
        "%s: %d weights without Kronecker factors keep the diagonal of their curvature alone", ", ".join(names), size
    )


def check_outer_products(places: Sequence[Place], prior: Tensor) -> None:
    """Refuse a prior (R,) that is no outer product over the rows and columns of a layer."""
    for place in places:
        if place.kind != "plain":
            groups = place.groups if place.kind == "matrix" else 1
            prior_patterns(place.block.gather(prior), (groups, place.block.rows // groups, place.block.width))


def whole_factors(sums: Sums) -> Sums:
    """The sums with all that was added, and with both halves of the factors of layers that act as matrices."""
    sums = settled(sums)
    matrices = [name.removesuffix(".inner") for name in sums if name.endswith(".inner")]
    names = [f"{index}.{factor}" for index in matrices for factor in ("outer", "inner")]
    return {**sums, **{name: symmetric(sums[name]) for name in names}}


def block_precision(
    sums: Sums, index: int, place: Place, scale: float | Tensor, prior: Tensor, factored_damping: bool
) -> Precision:
    """The precision of one layer, in the order of its block."""
    count = sums["count"]
    if f"{index}.inner" in sums:
        outer, inner = sums[f"{index}.outer"] / count, sums[f"{index}.inner"] / count
        return KroneckerPrecision.of(outer, inner, prior, scale * count, factored_damping)
    if f"{index}.counts" in sums:
        outer, counts = sums[f"{index}.outer"] / count, sums[f"{index}.counts"] / count
        return KroneckerPrecision.table(counts, outer, prior, scale * count, factored_damping)
    if f"{index}.diagonal" in sums:
        return DiagonalPrecision(sums[f"{index}.diagonal"] * scale, prior)
    return Dense(sums[f"{index}.matrix"] * scale, prior)


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

    needs_columns = True

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
        return 2 * Kronecker().bytes(survey, num_data, columns)
