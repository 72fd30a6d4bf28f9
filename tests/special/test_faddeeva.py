"""The complex error function: against scipy, against the real one, and its derivatives."""

import math

import numpy as np
import pytest
import scipy.special
import torch
from torch import Tensor

from posterity.special.functions import faddeeva


def plane(reach: float, count: int = 161) -> Tensor:
    """A grid over a square around zero, with the axes and points close to them."""
    line = torch.cat([torch.linspace(-reach, reach, count, dtype=torch.float64), torch.tensor([1e-12, -1e-7]).double()])
    return torch.complex(*torch.meshgrid(line, line, indexing="ij")).flatten()


@pytest.mark.parametrize("reach", [0.01, 1.5, 8.0, 40.0, 1e4])
def test_equals_scipy_in_the_upper_half_plane(reach: float) -> None:
    values = plane(reach)
    values = values[values.imag >= 0.0]
    expected = scipy.special.wofz(values.cpu().numpy())
    # each of the two parts to that error, relative to the modulus
    found = faddeeva(values).cpu().numpy()
    np.testing.assert_array_less(np.abs(found - expected), 2e-14 * np.abs(expected))


def test_equals_scipy_below_the_real_axis() -> None:
    values = plane(5.0)
    values = values[values.imag < 0.0]
    exact = values.cpu().numpy()
    size = np.abs(2.0 * np.exp(-(exact**2))) + np.abs(scipy.special.wofz(-exact))
    np.testing.assert_array_less(np.abs(faddeeva(values).cpu().numpy() - scipy.special.wofz(exact)), 1e-13 * size)


def test_is_the_scaled_complementary_error_function_on_the_imaginary_axis() -> None:
    values = torch.logspace(-6.0, 6.0, 200, dtype=torch.float64)
    found = faddeeva(torch.complex(torch.zeros_like(values), values))
    torch.testing.assert_close(found.real, torch.special.erfcx(values), rtol=1e-13, atol=0.0)
    assert not found.imag.any()


def test_every_node_of_both_rules_is_a_point_like_any_other() -> None:
    step = math.sqrt(math.pi / 12)
    values = (torch.arange(0, 40, dtype=torch.float64) * step / 4.0).to(torch.complex128)
    expected = scipy.special.wofz(values.cpu().numpy())
    np.testing.assert_allclose(faddeeva(values).cpu().numpy(), expected, rtol=1e-14)


def test_derivatives() -> None:
    values = plane(3.0, count=4).requires_grad_()
    assert torch.autograd.gradcheck(faddeeva, (values,))
    assert torch.autograd.gradgradcheck(faddeeva, (values,))


def test_float32_is_rounded_once_and_vmap_maps() -> None:
    values = plane(3.0, count=9)
    values = values[values.imag >= 0.0]
    single = values.to(torch.complex64)
    assert torch.equal(faddeeva(single), faddeeva(single.to(torch.complex128)).to(torch.complex64))
    assert torch.equal(torch.func.vmap(faddeeva)(values), faddeeva(values))
