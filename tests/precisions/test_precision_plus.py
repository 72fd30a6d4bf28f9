"""Sums of precisions against dense ones."""

import pytest
import torch
from torch import Tensor

from posterity.numerics import Block
from posterity.numerics.random import Key
from posterity.precisions import BlockDiagonal, Dense, Diagonal, Kronecker, LowRank, PerMember, Precision

pytestmark = pytest.mark.cpu  # the matrices are there

R = 6


def square(name: str, size: int = R, rows: int = 9) -> Tensor:
    factor = Key(3).fold(name).normal((rows, size), torch.float64, torch.device("cpu"))
    return factor.T @ factor


def thin(name: str) -> Tensor:
    return Key(4).fold(name).normal((2, R), torch.float64, torch.device("cpu"))


CPU = torch.device("cpu")
PRIOR = 0.3 + torch.arange(R, dtype=torch.float64, device=CPU)
ONE = torch.full((R,), 0.7, dtype=torch.float64, device=CPU)
BLOCKS = (Block(("a",), 2, 2, weight=2), Block(("b",), 2, 1, weight=0))


def blocks(name: str, prior: Tensor) -> BlockDiagonal:
    first, second = (block.gather(prior) for block in BLOCKS)
    return BlockDiagonal(BLOCKS, (Dense(square(name, 4), first), Diagonal(square(name, 2).diagonal(), second)), R)


PAIRS: dict[str, tuple[Precision, Precision]] = {
    "dense": (Dense(square("a"), PRIOR, 2.0), Dense(square("b"), ONE, 0.5)),
    "dense without prior": (Dense(square("a")), Dense(square("b"))),
    "dense with a flat prior": (Dense(square("a"), ONE), Dense(square("b"), torch.zeros(R, device=CPU))),
    "diagonal": (Diagonal(square("a").diagonal(), PRIOR), Diagonal(square("b").diagonal(), ONE)),
    "diagonal without prior": (Diagonal(square("a").diagonal()), Diagonal(square("b").diagonal())),
    "low rank": (LowRank(thin("a"), PRIOR, 3.0), LowRank(thin("b"), ONE, 0.2)),
    "low rank and dense": (LowRank(thin("a"), PRIOR, 3.0), Dense(square("b"), ONE)),
    "dense and low rank": (Dense(square("a"), PRIOR, 0.1), LowRank(thin("b"), ONE, 0.2)),
    "blocks": (blocks("a", PRIOR), blocks("b", ONE)),
    "members": (PerMember((Dense(square("a")), Dense(square("c")))), PerMember((Dense(square("b")),) * 2)),
    "members and one": (PerMember((Dense(square("a")), Dense(square("c")))), Dense(square("b"))),
}


def dense(precision: Precision) -> Tensor:
    return torch.linalg.inv(precision.covariance())


@pytest.mark.parametrize("name", PAIRS)
def test_is_the_sum_of_the_matrices(name: str) -> None:
    first, second = PAIRS[name]
    first = first.rescaled(1.0, 1.5 * second.base)
    found = dense(first.plus(second, 1.5))
    wanted = dense(first) + 1.5 * (dense(second) - torch.diag_embed(second.base))
    assert torch.allclose(found, wanted, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", PAIRS)
def test_the_base_is_positive_and_within(name: str) -> None:
    second = PAIRS[name][1]
    assert bool((second.base > 0).all())
    assert bool((second.base <= second.diagonal()).all())


def kronecker(outer: Tensor, inner: Tensor, scale: float) -> Kronecker:
    return Kronecker.of(outer[None], inner[None], ONE, scale)


def test_kronecker_factors_are_those_of_all_data() -> None:
    outers, inners = [square("o", 2), square("p", 2)], [square("i", 3), square("j", 3)]
    found = kronecker(outers[0], inners[0], 4.0).plus(kronecker(outers[1], inners[1], 6.0), 0.5)
    outer = (4.0 * outers[0] + 3.0 * outers[1]) / 7.0
    inner = (4.0 * inners[0] + 3.0 * inners[1]) / 7.0
    assert torch.allclose(dense(found), 7.0 * torch.kron(outer, inner) + torch.diag(ONE), rtol=1e-9)


def test_kronecker_is_exact_where_a_factor_is_shared() -> None:
    outer, inners = square("o", 2), [square("i", 3), square("j", 3)]
    first, second = kronecker(outer, inners[0], 4.0), kronecker(outer, inners[1], 6.0)
    wanted = dense(first) + dense(second) - torch.diag(ONE)
    assert torch.allclose(dense(first.plus(second)), wanted, rtol=1e-9)


def test_tables_stay_tables() -> None:
    inner = square("i", 2)
    first = Kronecker.table(torch.tensor([1.0, 2.0, 0.0]), inner, ONE)
    second = Kronecker.table(torch.tensor([0.0, 1.0, 5.0]), inner, ONE)
    found = first.plus(second)
    assert isinstance(found, Kronecker)
    assert found.outer.vectors is None
    counts = torch.diag(torch.tensor([1.0, 3.0, 5.0], dtype=torch.float64))
    assert torch.allclose(dense(found), torch.kron(counts, inner) + torch.diag(ONE), rtol=1e-9)


@pytest.mark.parametrize("name", ["dense", "diagonal", "low rank", "low rank and dense", "blocks"])
def test_the_log_determinant_has_derivatives_in_the_scale(name: str) -> None:
    first, second = PAIRS[name]

    def logdet(scale: Tensor) -> Tensor:
        return first.rescaled(scale, PRIOR).plus(second).logdet

    assert torch.autograd.gradcheck(logdet, torch.tensor(1.3, dtype=torch.float64, requires_grad=True))


def test_kronecker_log_determinants_have_derivatives_too() -> None:
    first, second = kronecker(square("o", 2), square("i", 3), 4.0), kronecker(square("p", 2), square("j", 3), 6.0)

    def logdet(scale: Tensor) -> Tensor:
        return first.rescaled(scale, ONE).plus(second).logdet

    assert torch.autograd.gradcheck(logdet, torch.tensor(1.3, dtype=torch.float64, requires_grad=True))


def test_other_structures_are_refused() -> None:
    with pytest.raises(TypeError, match=r"within one structure. Got Diagonal and Dense"):
        PAIRS["diagonal"][0].plus(PAIRS["dense"][0])
    with pytest.raises(TypeError, match="2 blocks of Dense, Diagonal and Dense"):
        PAIRS["blocks"][0].plus(PAIRS["dense"][0])
    with pytest.raises(ValueError, match=r"as many weights. Got 6 and 2"):
        PAIRS["dense"][0].plus(Dense(torch.eye(2)))
    corrected = kronecker(square("o", 2), square("i", 3), 1.0)
    corrected = corrected.corrected(torch.ones(1, 2, 3))
    with pytest.raises(ValueError, match=r"Use the structure Kronecker\(\)"):
        corrected.plus(corrected)
    with pytest.raises(ValueError, match="one shape"):
        kronecker(square("o", 2), square("i", 3), 1.0).plus(kronecker(square("o", 3), square("i", 2), 1.0))
