"""Every structure of precision matrix against the dense matrix it stands for."""

import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from matrixcases import FLOAT64, STRUCTURES, TOTAL, diagonal, kronecker, low_rank, normal, patterned

from posterity.jacobians.jacobian import Explicit, Selected
from posterity.numerics import Block
from posterity.precisions import BlockDiagonal, Diagonal
from posterity.storage import decode, encode

SEEDS = st.integers(0, 10**6)
LEADS = [(), (2,), (2, 3)]


def close(got, wanted, tolerance=1e-9):
    assert got.dtype == FLOAT64
    torch.testing.assert_close(got, wanted, rtol=tolerance, atol=tolerance)


def check_all(case, seed):
    precision, matrix = case.precision, case.matrix
    inverse, lead, size = torch.linalg.inv(matrix), matrix.shape[:-2], matrix.shape[-1]
    assert precision.size == size
    close(precision.logdet, torch.logdet(matrix))
    vector = normal(seed, "vector", *lead, size)
    close(precision.matvec(vector), (matrix @ vector.unsqueeze(-1)).squeeze(-1))
    close(precision.solve(vector), (inverse @ vector.unsqueeze(-1)).squeeze(-1))
    close(precision.variance(), inverse.diagonal(dim1=-2, dim2=-1))
    close(precision.covariance(), inverse)
    assert torch.equal(precision.covariance(), precision.covariance().mT)
    half = precision.colour(torch.eye(size, dtype=FLOAT64))  # row s is M e_s
    close(half.mT @ half, inverse)
    noise = normal(seed, "noise", *lead, 3, size)
    close(precision.colour(noise), (noise.unsqueeze(-2) @ half.unsqueeze(-3)).squeeze(-2))
    jacobian = normal(seed, "jacobian", 4, 2, size)
    flat = jacobian.flatten(0, 1)
    every = Selected(Explicit(jacobian), torch.arange(size))
    for given_as in (jacobian, Explicit(jacobian), every):
        close(precision.quadratic(given_as), jacobian @ inverse.unsqueeze(-3) @ jacobian.mT)
        close(precision.joint_quadratic(given_as), flat @ inverse @ flat.mT)


@pytest.mark.parametrize("lead", LEADS, ids=str)
@pytest.mark.parametrize("structure", STRUCTURES)
def test_against_the_dense_matrix(structure, lead):
    check_all(STRUCTURES[structure](1, lead), 1)


@given(SEEDS, st.tuples(st.integers(1, 3), st.integers(1, 4), st.integers(1, 5)), st.booleans())
@settings(deadline=None, max_examples=25)
def test_kronecker_of_any_size(seed, shape, pattern):
    check_all((patterned if pattern else kronecker)(seed, (), shape), seed)


@given(SEEDS, st.integers(1, 7), st.integers(0, 5))
@settings(deadline=None, max_examples=25)
def test_low_rank_of_any_size(seed, size, rank):
    check_all(low_rank(seed, (), size, rank), seed)


@given(SEEDS, st.permutations(range(4)), st.booleans())
@settings(deadline=None, max_examples=20)
def test_blocks_in_any_order(seed, order, bias):
    """A matrix with or without a bias and three vectors, laid out one after the other in any order."""
    sizes = {0: 6, 1: 3, 2: 1, 3: 2}  # 1 is the bias of 0
    places, end = {}, 0
    for which in order:
        places[which] = end
        end += sizes[which]
    weight = Block(("w", "b") if bias else ("w",), 3, 2, weight=places[0], bias=places[1] if bias else None)
    alone = () if bias else (Block(("b",), 3, 1, weight=places[1]),)
    blocks = (weight, *alone, Block(("x",), 1, 1, weight=places[2]), Block(("y",), 1, 2, weight=places[3]))
    cases = [patterned(seed, (), (1, 3, weight.width)), *(diagonal(seed + 1, (), block.size) for block in blocks[1:])]
    matrix = torch.zeros(end, end, dtype=FLOAT64)
    for block, case in zip(blocks, cases, strict=True):
        matrix[block.index.unsqueeze(-1), block.index] = case.matrix
    whole = BlockDiagonal(blocks, tuple(case.precision for case in cases), end)
    close(whole.covariance(), torch.linalg.inv(matrix))
    vector = normal(seed, "v", end)
    close(whole.matvec(vector), matrix @ vector)
    close(whole.logdet, torch.logdet(matrix))


@pytest.mark.parametrize("structure", STRUCTURES)
def test_a_member_is_its_own_matrix(structure):
    case = STRUCTURES[structure](2, (3,))
    for index in range(3):
        one = case.precision.member(index)
        assert type(one) is type(case.precision)
        close(one.covariance(), torch.linalg.inv(case.matrix[index]))
        close(one.logdet, torch.logdet(case.matrix[index]))


@pytest.mark.parametrize("structure", STRUCTURES)
def test_stored_and_read_back(structure, monkeypatch):
    case = STRUCTURES[structure](3, ())
    tensors = {}
    text = json.dumps(encode(case.precision, tensors))
    if "kronecker" in structure:  # the decomposition itself is stored
        monkeypatch.setattr(torch.linalg, "eigh", None)
    back = decode(json.loads(text), tensors)
    vector = normal(3, "v", case.precision.size)
    assert type(back) is type(case.precision)
    assert torch.equal(back.logdet, case.precision.logdet)
    assert torch.equal(back.matvec(vector), case.precision.matvec(vector))
    assert torch.equal(back.variance(), case.precision.variance())


@pytest.mark.parametrize("structure", STRUCTURES)
def test_single_precision_vectors_are_taken_and_double_ones_given(structure):
    case = STRUCTURES[structure](4, ())
    precision, size = case.precision, case.precision.size
    vector, jacobian = normal(4, "v", size).float(), normal(4, "j", 3, 2, size).float()
    inverse = torch.linalg.inv(case.matrix)
    close(precision.matvec(vector), case.matrix @ vector.double())
    close(precision.solve(vector), inverse @ vector.double())
    close(precision.quadratic(jacobian), jacobian.double() @ inverse @ jacobian.double().mT)
    assert precision.colour(vector.unsqueeze(0)).dtype == FLOAT64
    assert precision.quadratic(Explicit(jacobian)).dtype == FLOAT64
    assert precision.joint_quadratic(Explicit(jacobian)).dtype == FLOAT64


@pytest.mark.parametrize(
    "blocks",
    [
        (),
        (Block(("a",), 1, TOTAL - 1, weight=0),),
        (Block(("a",), 1, TOTAL, weight=0), Block(("b",), 1, 1, weight=3)),
        (Block(("a",), 1, TOTAL, weight=1),),
    ],
)
def test_blocks_that_are_no_partition_are_refused(blocks):
    parts = tuple(Diagonal(torch.ones(block.size)) for block in blocks)
    with pytest.raises(ValueError, match=r"must hold each of the 24 weights once"):
        BlockDiagonal(blocks, parts, TOTAL)


def test_parts_of_the_wrong_size_are_refused():
    with pytest.raises(ValueError, match=r"must have the sizes \(2,\) of the blocks\. Got \(3,\)"):
        BlockDiagonal((Block(("a",), 1, 2, weight=0),), (Diagonal(torch.ones(3)),), 2)
