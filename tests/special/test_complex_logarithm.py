"""exp(z) - 1 and log(1 + z) near zero and away from it."""

import numpy as np
import pytest
import torch

from posterity.numerics import Key
from posterity.special.functions import complex_expm1, complex_log1p


def numbers(seed: int) -> torch.Tensor:
    """Complex numbers of all sizes from 1e-12 to 1."""
    key = Key(seed)
    sizes = 10.0 ** (-12.0 * key.fold("size").uniform((200,), torch.float64, "cpu"))
    return sizes * torch.exp(2.0j * np.pi * key.fold("angle").uniform((200,), torch.float64, "cpu"))


def test_expm1_has_the_digits_of_both_parts() -> None:
    values = numbers(0)
    found = complex_expm1(values.real, values.imag).numpy()
    exact = values.numpy().astype(np.clongdouble)
    # 1 - cos is 2 sin^2 of the half, in extended precision
    real = np.expm1(exact.real) * np.cos(exact.imag) - 2.0 * np.sin(exact.imag / 2) ** 2
    np.testing.assert_allclose(found.real, real.astype(float), rtol=1e-13, atol=1e-28)
    np.testing.assert_allclose(found.imag, (np.exp(exact.real) * np.sin(exact.imag)).astype(float), rtol=1e-14)


def test_log1p_undoes_expm1() -> None:
    values = numbers(1)
    found = complex_log1p(complex_expm1(values.real, values.imag))
    size = values.abs().numpy()
    assert (np.abs((found - values).numpy()) <= 1e-15 * np.maximum(size, 1e-3 * size)).all()


def test_log1p_where_the_sum_all_but_vanishes() -> None:
    values = torch.tensor([-1.0 + 1e-9j, -1.0 - 1e-12 + 0.0j, -1.0 + 0.0j], dtype=torch.complex128)
    found = complex_log1p(values).real
    np.testing.assert_allclose(found[:2].cpu().numpy(), np.log([1e-9, 1e-12]), rtol=1e-4)
    assert float(found[2]) == pytest.approx(-150.0 * np.log(10.0))


def test_gradients() -> None:
    values = (0.3 * numbers(2)[:5]).requires_grad_()
    assert torch.autograd.gradcheck(lambda z: complex_expm1(z.real, z.imag), (values,))
    assert torch.autograd.gradcheck(complex_log1p, (values,))
