"""Closed forms of the Fisher information of classes at positions, against the dense matrix."""

import pytest
import torch

from posterity.likelihoods import Categorical, Gaussian
from posterity.numerics import Key

FLOAT64 = torch.float64
SHAPES = {0: (5, 4), 1: (5, 3, 4), 2: (5, 3, 2, 2)}


@pytest.mark.parametrize("positions", SHAPES)
def test_products_and_signed_roots(positions: int) -> None:
    likelihood, outputs = Categorical(positions), 3.0 * Key(0).normal(SHAPES[positions], FLOAT64)
    dense, fisher = likelihood.output_fisher(outputs), likelihood.fisher_by_position(outputs)
    vectors = Key(1).normal(SHAPES[positions], FLOAT64)
    wanted = (dense @ vectors.flatten(1).unsqueeze(-1)).view_as(outputs)
    torch.testing.assert_close(fisher.product(vectors), wanted, rtol=1e-12, atol=1e-12)
    size = dense.shape[-1]
    units = torch.eye(size, dtype=FLOAT64).view(size, 1, *outputs.shape[1:]).expand(size, *outputs.shape)
    root = fisher.signed(units).reshape(size, len(outputs), size)  # column k is S e_k
    torch.testing.assert_close(torch.einsum("kna,knb->nab", root, root), dense, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("positions", SHAPES)
@pytest.mark.parametrize("lead", [(), (2,)])
def test_the_closed_root_has_a_column_less_than_classes_at_each_position(positions: int, lead) -> None:
    outputs = 3.0 * Key(0).normal((*lead, *SHAPES[positions]), FLOAT64)
    likelihood = Categorical(positions)
    root, dense = likelihood.output_root(outputs), likelihood.output_fisher(outputs)
    labels = outputs.shape[len(lead) + 2 :].numel()
    assert root.shape == ((outputs.shape[len(lead) + 1] - 1) * labels, *outputs.shape)
    flat = root.flatten(-1 - positions)
    torch.testing.assert_close(torch.einsum("k...a,k...b->...ab", flat, flat), dense, rtol=1e-12, atol=1e-12)


def test_no_closed_form_where_there_are_no_classes() -> None:
    assert Gaussian().fisher_by_position(torch.zeros(2, 3)) is None
