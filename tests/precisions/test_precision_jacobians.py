"""Quadratic forms of every structure on Jacobians made of parts, tied weights included."""

import pytest
import torch
from matrixcases import REST, SCALES, TABLE, TIED, TOTAL, WEIGHT, block_diagonal, dense, diagonal, low_rank, normal

from posterity.jacobians import jacobian
from posterity.jacobians.jacobian import Explicit, Selected, Stacked
from posterity.jacobians.linear import Lookup, Matrix
from posterity.precisions import BlockDiagonal

ROWS, OUTPUTS = 5, 2
SMALL = {
    "dense": lambda: dense(0, (), TOTAL),
    "diagonal": lambda: diagonal(0, (), TOTAL),
    "low rank": lambda: low_rank(0, (), TOTAL, 5),
    "block diagonal": lambda: block_diagonal(0, ()),
    "dense members": lambda: dense(0, (2,), TOTAL),
    "diagonal members": lambda: diagonal(0, (2,), TOTAL),
    "low rank members": lambda: low_rank(0, (2,), TOTAL, 5),
    "block diagonal members": lambda: block_diagonal(0, (2,)),
}


def stacked(tied, missing=False):
    """Derivatives in all blocks; `tied`: the last block is used twice; `missing`: one block has none."""
    index = torch.tensor([[0, 1, 0], [3, 3, 3], [2, 0, 1], [1, 1, 2], [0, 3, 2]])
    pairs = [
        (TABLE, Lookup(index, normal(0, "t", OUTPUTS, ROWS, 3, 3), entries=4)),
        (WEIGHT, Matrix(normal(0, "a", ROWS, 1, 1, 2), normal(0, "g", OUTPUTS, ROWS, 1, 1, 2), bias=True)),
        (REST, Explicit(normal(0, "r", ROWS, OUTPUTS, 5))),
    ]
    if not missing:
        pairs.append((SCALES, Explicit(normal(0, "s", ROWS, OUTPUTS, 1))))
    if tied:
        pairs.append((TIED, Matrix(normal(0, "b", ROWS, 4, 1, 5), normal(0, "h", OUTPUTS, ROWS, 4, 1, 1), bias=False)))
        pairs.append((REST, Explicit(normal(0, "q", ROWS, OUTPUTS, 5))))
    return Stacked(tuple(block for block, _ in pairs), tuple(part for _, part in pairs), TOTAL)


@pytest.mark.parametrize("chunk", [1, 100, 1 << 24])
@pytest.mark.parametrize("form", ["separate", "tied", "missing", "selected"])
@pytest.mark.parametrize("structure", SMALL)
def test_against_dense_rows(structure, form, chunk, monkeypatch):
    monkeypatch.setattr(jacobian, "CHUNK", chunk)
    monkeypatch.setattr(jacobian, "DEVICE_SHARE", 1)
    case = SMALL[structure]()
    whole = stacked(form == "tied", form == "missing")
    given = Selected(whole, torch.arange(TOTAL)) if form == "selected" else whole
    rows, inverse = whole.rows(), torch.linalg.inv(case.matrix)
    flat = rows.flatten(0, 1)
    close = torch.testing.assert_close
    wanted = rows @ inverse.unsqueeze(-3) @ rows.mT
    close(case.precision.quadratic(given), wanted, rtol=1e-9, atol=1e-9)
    close(case.precision.marginal(given), wanted.diagonal(dim1=-2, dim2=-1), rtol=1e-9, atol=1e-9)
    close(case.precision.joint_quadratic(given), flat @ inverse @ flat.mT, rtol=1e-9, atol=1e-9)


def test_the_gradient_in_the_jacobian_is_that_of_the_dense_form():
    """Predictive variances are differentiable in the inputs, through the factors."""
    case = block_diagonal(0, ())
    whole = stacked(tied=False)
    layer = whole.parts[1]
    features = layer.features.clone().requires_grad_()
    parts = (whole.parts[0], Matrix(features, layer.gradients, bias=True), *whole.parts[2:])
    moved = Stacked(whole.blocks, parts, TOTAL)
    inverse = torch.linalg.inv(case.matrix)
    for got, wanted in (
        (case.precision.quadratic(moved), moved.rows() @ inverse @ moved.rows().mT),
        (case.precision.joint_quadratic(moved), moved.rows().flatten(0, 1) @ inverse @ moved.rows().flatten(0, 1).mT),
    ):
        mine, theirs = (torch.autograd.grad(value.square().sum(), features)[0] for value in (got, wanted))
        torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-9)


def test_large_curvature_leaves_quadratic_forms_positive():
    """Directions a million million times better known than before keep positive variances of the right size."""
    case = low_rank(1, (), 8, 3)
    sharp = case.precision.rescaled(1e12, case.prior)
    matrix = 1e12 * case.curvature + torch.diag(case.prior)
    along = (case.precision.factor / case.precision.factor.norm(dim=-1, keepdim=True)).unsqueeze(1)  # (3, 1, 8)
    exact = (along @ torch.linalg.inv(matrix) @ along.mT).flatten()
    assert bool((sharp.variance() > 0).all())
    torch.testing.assert_close(sharp.quadratic(along).flatten(), exact, rtol=1e-2, atol=0.0)


def test_blocks_of_other_shapes_than_the_parts():
    """A precision over one vector of all weights, derivatives given layer by layer."""
    whole = stacked(tied=False)
    case = dense(2, (), TOTAL)
    everything = type(WEIGHT)(tuple(name for block in whole.blocks for name in block.names), 1, TOTAL, weight=0)
    one = BlockDiagonal((everything,), (case.precision,), TOTAL)
    torch.testing.assert_close(one.quadratic(whole), case.precision.quadratic(whole), rtol=1e-10, atol=1e-10)
