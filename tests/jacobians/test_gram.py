"""X^T X by its upper blocks."""

import pytest
import torch

from posterity.jacobians.linear import symmetric, upper_gram
from posterity.numerics import Key


def gram(matrix):
    return symmetric(upper_gram(matrix))


@pytest.mark.parametrize("rows", [0, 1, 7])
@pytest.mark.parametrize("columns", [1, 3, 255, 256, 257, 259, 401])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_equals_the_product(rows, columns, dtype):
    matrix = Key(rows).normal((rows, columns), torch.float64).to(dtype)
    tolerance = 1e-5 if dtype == torch.float32 else 1e-12
    found = gram(matrix)
    assert found.dtype == dtype
    torch.testing.assert_close(found, matrix.T @ matrix, rtol=tolerance, atol=tolerance)


def test_rows_that_do_not_lie_together_and_gradients():
    matrix = Key(0).normal((300, 9), torch.float64).T  # (9, 300), columns first
    torch.testing.assert_close(gram(matrix), matrix.T @ matrix, rtol=1e-12, atol=1e-12)
    leaf = matrix.clone().requires_grad_()
    weights = Key(1).normal((300, 300), torch.float64)
    (found,) = torch.autograd.grad((gram(leaf) * weights).sum(), leaf)
    (wanted,) = torch.autograd.grad(((leaf.T @ leaf) * weights).sum(), leaf)
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


def test_it_is_added_to_what_is_there():
    matrix = Key(3).normal((5, 300), torch.float64)
    total = upper_gram(matrix, upper_gram(matrix[:2]))
    torch.testing.assert_close(symmetric(total), matrix.T @ matrix + matrix[:2].T @ matrix[:2], rtol=1e-12, atol=1e-12)
