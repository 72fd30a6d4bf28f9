"""Sums of precisions: the curvature of earlier data added to that of new data."""

import torch
from torch import Tensor

from posterity.precisions.block import BlockDiagonal, PerMember
from posterity.precisions.dense import Dense
from posterity.precisions.diagonal import Diagonal
from posterity.precisions.kronecker import Factor, Kronecker
from posterity.precisions.low_rank import LowRank
from posterity.precisions.precision import Precision, number


def updated(precision: Precision, other: Precision, scale: Tensor | float = 1.0) -> Precision:
    """Lambda + scale (Lambda_other - diag(`base` of other)): the other's curvature added, the prior staying as it is.

    Both must be of one structure. Exact for `Dense`, `Diagonal`, `LowRank` (whose rank grows), mixtures of `Dense` and
    `LowRank`, and for `BlockDiagonal` with such parts. `Kronecker` factors become those of both data together,
    (n1 A1 + n2 A2) / (n1 + n2) on either side with scale n1 + n2, where the n are the scales: exact where one of the
    factors is the same in both. Differentiable in the scales.

    >>> first, second = Diagonal(torch.ones(2), prior=torch.ones(2)), Diagonal(torch.ones(2), prior=torch.ones(2))
    >>> updated(first, second).diagonal()
    tensor([3., 3.], dtype=torch.float64)
    """
    if precision.size != other.size:
        raise ValueError(f"updated: precisions must be over as many weights. Got {precision.size} and {other.size}.")
    if isinstance(precision, PerMember) or isinstance(other, PerMember):
        count = len((precision if isinstance(precision, PerMember) else other).parts)  # type: ignore[attr-defined]
        pairs = ((_of_member(precision, index), _of_member(other, index)) for index in range(count))
        return PerMember(tuple(updated(first, second, scale) for first, second in pairs))
    if isinstance(precision, BlockDiagonal) and isinstance(other, BlockDiagonal) and precision.blocks == other.blocks:
        parts = zip(precision.parts, other.parts, strict=True)
        return BlockDiagonal(
            precision.blocks, tuple(updated(first, second, scale) for first, second in parts), precision.total
        )
    if isinstance(precision, Diagonal) and isinstance(other, Diagonal):
        added = number(scale, other.curvature).unsqueeze(-1) * (other.entries - base(other))
        return Diagonal(precision.curvature + added, precision.prior)
    if isinstance(precision, Kronecker) and isinstance(other, Kronecker):
        return _of_both(precision, other, number(scale, other.prior))
    if isinstance(precision, LowRank) and isinstance(other, LowRank):
        factors = (_factor(precision), number(scale, other.factor).sqrt()[..., None, None] * _factor(other))
        return LowRank(torch.cat(factors, -2), precision.prior)
    if isinstance(precision, (Dense, LowRank)) and isinstance(other, (Dense, LowRank)):
        added = number(scale, other.diagonal())[..., None, None] * _matrix(other)
        own = precision.curvature if isinstance(precision, Dense) else precision.factor.mT @ precision.factor
        return Dense(own * number(precision.scale, own)[..., None, None] + added, precision.prior)
    raise TypeError(
        f"updated: curvatures are added within one structure. Got {_kind(precision)} and {_kind(other)}. "
        "Use the structure that the earlier data were kept in."
    )


def base(precision: Precision) -> Tensor:
    """A positive diagonal (..., R) within Lambda, which a precision that is to be `updated` has for its prior.

    It is the prior of the precision; where that has none, or is zero, half of Lambda's own diagonal.
    """
    if isinstance(precision, PerMember):
        return torch.stack([base(part) for part in precision.parts])
    if isinstance(precision, BlockDiagonal):
        values = [base(part) for part in precision.parts]
        whole = values[0].new_empty(*values[0].shape[:-1], precision.total)
        for block, value in zip(precision.blocks, values, strict=True):
            block.scatter(value, whole)
        return whole
    if isinstance(precision, (Kronecker, LowRank)):
        return precision.prior
    half = 0.5 * precision.diagonal()
    prior = precision.prior if isinstance(precision, (Dense, Diagonal)) else None
    return half if prior is None else torch.where(prior > 0, prior, half)


def _matrix(precision: Dense | LowRank) -> Tensor:
    """Lambda - diag(base), dense."""
    if isinstance(precision, LowRank):
        factor = _factor(precision)
        return factor.mT @ factor
    entries = precision.diagonal() - base(precision)
    return torch.diagonal_scatter(precision.matrix, entries, dim1=-2, dim2=-1)


def _factor(precision: LowRank) -> Tensor:
    return number(precision.scale, precision.factor).sqrt()[..., None, None] * precision.factor


def _of_both(first: Kronecker, second: Kronecker, scale: Tensor) -> Kronecker:
    """The factors of all data."""
    if first.values is not None or second.values is not None:
        raise ValueError(
            "updated: corrected eigenvalues belong to the eigenvectors of their own data, so they cannot be added to "
            "those of other data. Use the structure Kronecker() for all of them."
        )
    if first.shape != second.shape:
        raise ValueError(f"updated: Kronecker factors must be of one shape. Got {first.shape} and {second.shape}.")
    counts = number(first.scale, first.prior), number(second.scale, second.prior) * scale
    total = counts[0] + counts[1]
    shares = [(count / total)[..., None, None, None] for count in counts]
    inner = shares[0] * first.inner.matrix + shares[1] * second.inner.matrix
    if first.outer.vectors is None and second.outer.vectors is None:
        entries = [factor.values * factor.pattern for factor in (first.outer, second.outer)]
        mixed = shares[0].squeeze(-1) * entries[0] + shares[1].squeeze(-1) * entries[1]
        outer = Factor.diagonal(mixed, first.outer.pattern)
    else:
        mixed = shares[0] * first.outer.matrix + shares[1] * second.outer.matrix
        outer = Factor.of(mixed, first.outer.pattern)
    inner_factor = Factor.of(inner, first.inner.pattern)
    return Kronecker(outer, inner_factor, first.prior, None, total, first.factored_damping)


def _of_member(precision: Precision, index: int) -> Precision:
    return precision.member(index) if isinstance(precision, PerMember) else precision


def _kind(precision: Precision) -> str:
    if isinstance(precision, BlockDiagonal):
        return (
            f"{len(precision.parts)} blocks of {', '.join(sorted({type(part).__name__ for part in precision.parts}))}"
        )
    return type(precision).__name__
