"""Precision matrices of every structure, next to the dense matrices they stand for."""

from typing import NamedTuple

import torch
from torch import Tensor

from posterity.numerics import Block, Key
from posterity.precisions import BlockDiagonal, Dense, Diagonal, Kronecker, LowRank, LowRankCovariance, Precision

FLOAT64 = torch.float64


class MatrixCase(NamedTuple):
    """A structured matrix, and its curvature (..., R, R) and prior (..., R), dense."""

    precision: Precision
    curvature: Tensor
    prior: Tensor

    @property
    def matrix(self) -> Tensor:
        return self.curvature + torch.diag_embed(self.prior)


def normal(seed, label, *shape):
    """Standard normal numbers on the default device."""
    return Key(seed).fold(label).normal(shape, FLOAT64, "cpu").to(torch.get_default_device())


def between(seed, label, *shape):
    """Numbers between 0.3 and 2.3."""
    return Key(seed).fold(label).uniform(shape, FLOAT64, "cpu").to(torch.get_default_device()) * 2 + 0.3


def gram(seed, label, *shape):
    """Positive semi-definite matrices (..., n, n), the last of `shape` being n."""
    root = normal(seed, label, *shape, shape[-1])
    return root @ root.mT


def kron(outer, inner):
    """Block-diagonal over G of the Kronecker products, of (..., G, O, O) and (..., G, I, I)."""
    lead, groups = outer.shape[:-3], outer.shape[-3]
    size = outer.shape[-1] * inner.shape[-1]
    dense = outer.new_zeros(*lead, groups * size, groups * size)
    for group in range(groups):
        product = torch.einsum("...ab,...cd->...acbd", outer[..., group, :, :], inner[..., group, :, :])
        low = group * size
        dense[..., low : low + size, low : low + size] = product.reshape(*lead, size, size)
    return dense


def dense(seed, lead, size=5):
    curvature, prior = gram(seed, "c", *lead, size), between(seed, "p", *lead, size)
    return MatrixCase(Dense(curvature, prior), curvature, prior)


def dense_alone(seed, lead, size=4):
    matrix = gram(seed, "c", *lead, size) + 0.5 * torch.eye(size, dtype=FLOAT64)
    return MatrixCase(Dense(matrix), matrix, torch.zeros(*lead, size, dtype=FLOAT64))


def diagonal(seed, lead, size=5):
    curvature, prior = between(seed, "c", *lead, size), between(seed, "p", *lead, size)
    return MatrixCase(Diagonal(curvature, prior), torch.diag_embed(curvature), prior)


def low_rank(seed, lead, size=6, rank=3):
    factor, prior = normal(seed, "f", *lead, rank, size), between(seed, "p", *lead, size)
    return MatrixCase(LowRank(factor, prior, 1.7), 1.7 * factor.mT @ factor, prior)


def low_rank_covariance(seed, lead, size=6, rank=3):
    """The inverse has no part that is a prior's."""
    factor, own = normal(seed, "f", *lead, rank, size), between(seed, "d", *lead, size)
    matrix = torch.linalg.inv(factor.mT @ factor + torch.diag_embed(own))
    return MatrixCase(LowRankCovariance(own, factor), matrix, torch.zeros_like(own))


def kronecker(seed, lead, shape=(1, 3, 4)):
    """With one prior precision for all weights."""
    groups, rows, columns = shape
    outer, inner = gram(seed, "o", *lead, groups, rows), gram(seed, "i", *lead, groups, columns)
    prior = between(seed, "p", *lead, 1).expand(*lead, groups * rows * columns)
    return MatrixCase(Kronecker.of(outer, inner, prior, 1.3), 1.3 * kron(outer, inner), prior)


def patterned(seed, lead, shape=(2, 2, 3)):
    """With prior precisions that are an outer product over rows and columns, in two groups."""
    groups, rows, columns = shape
    outer, inner = gram(seed, "o", *lead, groups, rows), gram(seed, "i", *lead, groups, columns)
    prior = between(seed, "r", *lead, groups, rows, 1) * between(seed, "c", *lead, groups, 1, columns)
    prior = prior.flatten(-3)
    return MatrixCase(Kronecker.of(outer, inner, prior, 0.7), 0.7 * kron(outer, inner), prior)


def corrected(seed, lead, shape=(2, 2, 3)):
    """With eigenvalues given in the basis of the factors."""
    first = patterned(seed, lead, shape)
    values = between(seed, "v", *lead, *shape)
    precision = first.precision.corrected(values)
    factors = (precision.outer, precision.inner)
    lifted = [factor.pattern.sqrt().unsqueeze(-1) * factor.vectors for factor in factors]  # B^-T
    root = kron(*lifted)
    curvature = 0.7 * (root * values.flatten(-3).unsqueeze(-2)) @ root.mT
    return MatrixCase(precision, curvature, first.prior)


def table(seed, lead, entries=4, width=3):
    """An embedding, some of whose entries were never looked up."""
    counts = between(seed, "n", *lead, entries) * torch.tensor([1.0, 0.0, 2.0, 1.0], dtype=FLOAT64)
    inner = gram(seed, "i", *lead, width)
    prior = (between(seed, "r", *lead, entries, 1) * between(seed, "c", *lead, 1, width)).flatten(-2)
    outer = torch.diag_embed(counts).unsqueeze(-3)
    return MatrixCase(Kronecker.table(counts, inner, prior), kron(outer, inner.unsqueeze(-3)), prior)


WEIGHT = Block(("first.weight", "first.bias"), rows=2, columns=2, weight=3, bias=1)
TABLE = Block(("table",), rows=4, columns=3, weight=7)
SCALES = Block(("norm",), rows=1, columns=1, weight=0)
REST = Block(("rest",), rows=5, columns=1, weight=19)
TIED = Block(("rest",), rows=1, columns=5, weight=19)  # other uses of the same weights
TOTAL = 24


def block_diagonal(seed, lead):
    """A layer with a bias, a table, one dense block and one weight, scattered over the vector."""
    blocks = (WEIGHT, TABLE, SCALES, REST)
    cases = (patterned(seed, lead, (1, 2, 3)), table(seed, lead), diagonal(seed, lead, 1), dense(seed, lead))
    curvature = torch.zeros(*lead, TOTAL, TOTAL, dtype=FLOAT64)
    prior = torch.zeros(*lead, TOTAL, dtype=FLOAT64)
    for block, case in zip(blocks, cases, strict=True):
        index = block.index
        curvature[..., index.unsqueeze(-1), index] = case.curvature
        prior[..., index] = case.prior
    return MatrixCase(BlockDiagonal(blocks, tuple(case.precision for case in cases), TOTAL), curvature, prior)


STRUCTURES = {
    "dense": dense,
    "dense alone": dense_alone,
    "diagonal": diagonal,
    "low rank": low_rank,
    "low rank covariance": low_rank_covariance,
    "kronecker": kronecker,
    "kronecker, prior pattern, groups": patterned,
    "kronecker, corrected": corrected,
    "kronecker, table": table,
    "block diagonal": block_diagonal,
}


def as_matrix(precision: Precision) -> Tensor:
    """A precision of any structure as the matrix it stands for, (R, R)."""
    return torch.stack([precision.matvec(unit) for unit in torch.eye(precision.size, dtype=FLOAT64)])
