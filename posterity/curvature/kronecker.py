"""Kronecker-factored curvature (KFAC), and its correction in the eigenbasis (EKFAC)."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from posterity.curvature.curvature import Rows
from posterity.curvature.structure import RECENT, Products, Structure, Sums, added, counted, settled
from posterity.curvature.survey import PLAIN, Place, Survey
from posterity.jacobians.convolution import Convolution
from posterity.jacobians.jacobian import Jacobian, Stacked
from posterity.jacobians.linear import Lookup, Matrix, Thin, symmetric
from posterity.jacobians.output_layer import OutputLayer
from posterity.precisions.block import BlockDiagonal
from posterity.precisions.dense import Dense
from posterity.precisions.diagonal import Diagonal as DiagonalPrecision
from posterity.precisions.kronecker import Kronecker as KroneckerPrecision
from posterity.precisions.kronecker import prior_patterns
from posterity.precisions.precision import Precision

logger = logging.getLogger("posterity")

WIDEST = 4096  # classes of an output layer up to which its outer factor is a whole matrix
SMALL = 512  # weights of a layer without Kronecker factors up to which its block is kept whole


class Factored(Structure):
    """Structures made of Kronecker factors, one pair for each layer."""

    needs_columns = True

    def check_prior(self, places: Sequence[Place], prior: Tensor) -> None:
        for place in places:
            if not _whole(place):
                groups = place.groups if place.kind == "matrix" else 1
                prior_patterns(place.block.gather(prior), (groups, place.block.rows // groups, place.block.width))


@dataclass(frozen=True)
class Kronecker(Factored):
    """Independent layers, each with a Kronecker product for its curvature (KFAC).

    **Math**: the block of a layer z = W a + b is N G (x) A over the row-major (W b), where A is the mean over rows of
    a a^T, a with a 1 for the bias, and G the mean of sum_k g_k g_k^T, g_k the gradient of column k in z. For layers
    with T positions (convolutions, sequences, steps of a recurrent layer), A is a mean over positions and G a sum.
    `factored_damping` adds the prior t as (sqrt(N) G + sqrt(t) I) (x) (sqrt(N) A + sqrt(t) I) (Ritter et al.) in place
    of the exact t I.

    **Limit**: exact for one row, and when G does not depend on the row (linear networks with Gaussian noise). Padded
    positions count in the A of hidden layers, though their labels are missing: pad no further than needed. Norm
    layers, weights that are used several times, and unknown ones have whole blocks up to 512 weights. Beyond that, uses
    by linear maps (steps of a recurrent layer) count as positions, and the others keep their exact diagonal. Of an
    output layer with more than 4,096 classes, G is kept as its diagonal: its rows are independent then.

    **Cost**: K backward passes, products a a^T and g g^T; eigenvalues once, O^3 + I^3 per layer.

    **References**: Martens and Grosse (2015); Grosse and Martens (2016), for convolutions; Ritter et al. (2018).

    **Example**:

    >>> Kronecker().passes
    1
    """

    factored_damping: bool = False

    def add(self, sums: Sums, rows: Rows, number: int) -> Sums:
        return add_factors(sums, rows)

    def end(self, sums: Sums, rows: Rows, number: int, prior: Tensor) -> Sums:
        return whole_factors(sums)

    def precision(self, sums: Sums, places: Sequence[Place], scale: float | Tensor, prior: Tensor) -> Precision:
        parts = [
            block_precision(sums, index, scale, place.block.gather(prior), self.factored_damping)
            for index, place in enumerate(places)
        ]
        return BlockDiagonal(tuple(place.block for place in places), tuple(parts), prior.shape[-1])

    def bytes(self, survey: Survey, num_data: int, columns: int) -> int:
        # Factors, their copies and eigenvectors, and three numbers for each weight.
        return 8 * sum(3 * _factor_entries(place) + 3 * place.block.size for place in survey.places)

    def making_bytes(self, survey: Survey) -> int:
        return _decomposition_bytes(survey)

    def summed_bytes(self, survey: Survey, num_data: int, columns: int, itemsize: int) -> int:
        return itemsize * 2 * sum(map(_factor_entries, survey.places))

    def products(self, survey: Survey, num_data: int, columns: int) -> Products | None:
        """Upper halves of both factors of each layer, and the cubes of their sizes for the decomposition."""
        if any(place.kind != "matrix" or _whole(place) or is_wide(place) for place in survey.places):
            return None
        a_row = once = summed = 0
        for place in survey.places:
            rows, width = place.block.rows // place.groups, place.block.width
            a_row += place.groups * place.positions * place.times * (_half(width) + columns * _half(rows))
            once += place.groups * (rows**3 + width**3)
            summed += place.groups * (_half(rows) + _half(width))
        return Products(a_row, once, summed)


DECOMPOSED = 5  # matrices: white, symmetric, eigenvectors, and twice as much work space


def _half(size: int) -> int:
    """Entries of the upper half of a symmetric matrix."""
    return size * (size + 1) // 2


def _whole(place: Place) -> bool:
    """Whether a layer has no factors, but its whole block or diagonal: no matrix, or a small one used several times."""
    return place.kind == PLAIN or (place.times > 1 and place.block.size <= SMALL)


def _factor_entries(place: Place) -> int:
    rows, width = place.block.rows // place.groups, place.block.width
    if _whole(place):
        return place.block.size**2 if place.block.size <= SMALL else place.block.size
    if is_wide(place):
        return rows + width**2
    return place.groups * (rows**2 + width**2) if place.kind == "matrix" else place.block.rows + width**2


def _decomposition_bytes(survey: Survey) -> int:
    """Bytes while the factors are decomposed one after the other, beyond what stays of them in the end.

    A factor is whitened, made symmetric, and decomposed with work space of twice its size; what stays are eigenvectors,
    and three numbers for each weight.
    """
    held = peak = 0
    for place in survey.places:
        whole, tables = _factor_entries(place), 3 * place.block.size
        if place.kind == "matrix" and not _whole(place):
            inner = place.groups * place.block.width**2
            outer = whole - inner
            peak = max(peak, held + whole + DECOMPOSED * outer, held + whole + outer + DECOMPOSED * inner)
        else:
            peak = max(peak, held + DECOMPOSED * whole)
        held += whole + tables
    return 8 * max(0, peak - held)


def is_wide(place: Place) -> bool:
    """Whether this is an output layer whose outer factor would be too large a matrix."""
    return place.output and place.groups == 1 and place.block.rows > WIDEST


def add_factors(sums: Sums, rows: Rows) -> Sums:
    """Add rows to the recent sums of the factors of every layer."""
    recent = {name.removeprefix(RECENT): value for name, value in sums.items() if name.startswith(RECENT)}
    whole = [place.block.size for place in rows.places if _whole(place) and place.block.size <= SMALL]
    for piece in rows.jacobians(whole=max(whole, default=0)):
        jacobian = piece.jacobian
        if not isinstance(jacobian, Stacked):
            raise TypeError("Kronecker factors are of whole tensors. Got single weights. Use Full() or Diagonal().")
        weights = None if rows.weights is None else rows.weights[piece.low : piece.low + jacobian.num_rows]
        for index, place in enumerate(rows.places):
            _add(recent, f"{index}.", place, jacobian.part(place.block), weights, piece.fresh)
    unit = torch.ones((), dtype=torch.float64, device=rows.theta.device)
    sums = added(sums, count=unit * (rows.data[1].size if rows.weights is None else rows.weights.sum()))
    sums.update({RECENT + name: value for name, value in recent.items()})
    return counted(sums)


def _add(recent: Sums, name: str, place: Place, part: Jacobian, weights: Tensor | None, fresh: bool) -> None:
    """Add the derivatives in one layer to its sums; the layer's inputs count once for all columns."""
    outer, inner = name + "outer", name + "inner"
    if _whole(place) and place.block.size <= SMALL:
        dense = part.rows().flatten(0, 1)
        added(recent, **{name + "matrix": dense.T @ dense})
    elif is_wide(place) and isinstance(part, (OutputLayer, Thin, Matrix)):
        _say_wide(place.block.names, place.block.rows)
        added(recent, **{name + "counts": part.outer_squares()})
        if fresh:
            added(recent, **{inner: part.inner_gram() if isinstance(part, OutputLayer) else part.inner_gram(weights)})
    elif isinstance(part, Thin):
        recent[outer] = part.outer_gram(recent.get(outer))
        if fresh:
            recent[inner] = part.inner_gram(weights, recent.get(inner))
    elif isinstance(part, OutputLayer):
        added(recent, **{outer: part.outer_gram(), inner: part.inner_gram()})  # with weights of its own
    elif isinstance(part, (Matrix, Convolution)):
        added(recent, **{outer: part.outer_gram()}, **({inner: part.inner_gram(weights)} if fresh else {}))
    elif isinstance(part, Lookup):
        added(recent, **{outer: part.outer_gram()}, **({name + "counts": part.counts(weights)} if fresh else {}))
    else:
        say_diagonal(place.block.names, place.block.size)
        added(recent, **{name + "diagonal": part.squares()})


@cache
def _say_wide(names: tuple[str, ...], classes: int) -> None:
    """Log once that an outer factor is kept as its diagonal."""
    logger.warning(
        f"{', '.join(names)}: the Kronecker factor of {classes:,} classes is kept as its diagonal, so that the rows of "
        f"the layer are independent: a matrix would take {8 * classes**2 / 1e9:.3g} GB, and its decomposition long"
    )


@cache
def say_diagonal(names: tuple[str, ...], size: int) -> None:
    """Warn once that a layer without a Kronecker rule keeps its diagonal only."""
    logger.warning(
        "%s: %d weights without Kronecker factors keep the diagonal of their curvature alone", ", ".join(names), size
    )


def whole_factors(sums: Sums) -> Sums:
    """Settle the recent sums, and fill in the lower triangles of the factors of layers that act as matrices."""
    sums = settled(sums)
    layers = [name.removesuffix(".inner") for name in sums if name.endswith(".inner")]
    names = [f"{layer}.{factor}" for layer in layers for factor in ("outer", "inner")]
    return {**sums, **{name: symmetric(sums[name]) for name in names if name in sums}}


def block_precision(
    sums: Sums, index: int, scale: float | Tensor, prior: Tensor, factored_damping: bool = False
) -> Precision:
    """The precision of one layer, in the order of its block."""
    count = sums["count"]
    if f"{index}.counts" in sums and f"{index}.inner" in sums:  # an output layer of many classes
        counts, inner = sums[f"{index}.counts"] / count, sums[f"{index}.inner"][0] / count
        return KroneckerPrecision.table(counts, inner, prior, scale * count, factored_damping)
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
class CorrectedKronecker(Factored):
    """Kronecker eigenvectors with the exact curvature along each of them (EKFAC).

    **Math**: with B = B_G (x) B_A the eigenvectors of the Kronecker factors, the block of a layer is
    B^-T diag(s) B^-1, s = the diagonal of B^T C B for the exact block C.

    **Limit**: the nearest matrix to C in the Frobenius norm among those with these eigenvectors, so never worse than
    `Kronecker`; layers without factors are treated as there.

    **Cost**: two passes over the data: the pass of `Kronecker`, and one with the cost of an exact diagonal.

    **References**: George et al. (2018), Fast approximate natural gradient descent in a Kronecker-factored eigenbasis.

    **Example**:

    >>> CorrectedKronecker().passes
    2
    """

    @property
    def passes(self) -> int:
        return 2  # one for the eigenvectors, one for the variances along them

    def add(self, sums: Sums, rows: Rows, number: int) -> Sums:
        if number == 0:
            return add_factors(sums, rows)
        for piece in rows.jacobians():
            assert isinstance(piece.jacobian, Stacked)
            for index, place in enumerate(rows.places):
                if f"{index}.inner_basis" not in sums:
                    continue
                part, inner = piece.jacobian.part(place.block), sums[f"{index}.inner_basis"]
                if isinstance(part, OutputLayer):
                    squares = part.rotated_squares(sums.get(f"{index}.outer_basis"), inner)
                elif f"{index}.outer_basis" not in sums and isinstance(part, (Matrix, Thin)):
                    squares = part.rotated(None, inner).squares()
                elif isinstance(part, (Matrix, Thin, Convolution)):
                    squares = part.rotated(sums[f"{index}.outer_basis"], inner).squares()
                else:
                    assert isinstance(part, Lookup)
                    squares = part.rotated(inner[0]).squares()
                added(sums, **{f"{index}.values": squares.to(inner)})
        return sums

    def fixed(self, name: str, number: int) -> bool:
        return super().fixed(name, number) if number == 0 else not name.endswith(".values")

    def end(self, sums: Sums, rows: Rows, number: int, prior: Tensor) -> Sums:
        """Compute the eigenvectors after the first pass, for a prior of this pattern."""
        if number > 0:
            return sums
        sums = whole_factors(sums)
        for index, place in enumerate(rows.places):
            part = block_precision(sums, index, 1.0, place.block.gather(prior))
            if isinstance(part, KroneckerPrecision):
                # Contiguous, so that products after a resumed run give the same bits.
                if part.outer.vectors is not None:
                    sums[f"{index}.outer_basis"] = part.outer.basis.contiguous()
                sums[f"{index}.inner_basis"] = part.inner.basis.contiguous()
        return sums

    def precision(self, sums: Sums, places: Sequence[Place], scale: float | Tensor, prior: Tensor) -> Precision:
        parts = []
        for index, place in enumerate(places):
            part = block_precision(sums, index, scale, place.block.gather(prior))
            if isinstance(part, KroneckerPrecision):
                values = sums[f"{index}.values"].view(part.shape)
                if part.outer.vectors is None:  # rows of a table, or of many classes, are scaled and not rotated
                    values = values / part.outer.pattern.unsqueeze(-1)
                part = part.corrected(values / sums["count"])
            parts.append(part)
        return BlockDiagonal(tuple(place.block for place in places), tuple(parts), prior.shape[-1])

    def bytes(self, survey: Survey, num_data: int, columns: int) -> int:
        # Beside what `Kronecker` has: the bases and the variances along them, both with a copy.
        entries = sum(2 * _factor_entries(place) + 4 * place.block.size for place in survey.places)
        return Kronecker().bytes(survey, num_data, columns) + 8 * entries

    def making_bytes(self, survey: Survey) -> int:
        return _decomposition_bytes(survey)

    def summed_bytes(self, survey: Survey, num_data: int, columns: int, itemsize: int) -> int:
        entries = sum(2 * _factor_entries(place) + 2 * place.block.size for place in survey.places)
        return 8 * entries
