"""exp(z) - 1 and log(1 + z) of complex numbers, with their digits near zero."""

import torch
from torch import Tensor


def complex_expm1(real: Tensor, imaginary: Tensor) -> Tensor:
    """exp(x + i y) - 1, complex, from the two parts.

    >>> complex_expm1(torch.tensor(0.0), torch.tensor(1e-6)).real
    tensor(-5.0000e-13)
    """
    shrunk = torch.expm1(real)
    return torch.complex(
        shrunk * imaginary.cos() - 2.0 * (0.5 * imaginary).sin().square(), (shrunk + 1.0) * imaginary.sin()
    )


def complex_log1p(values: Tensor) -> Tensor:
    """log(1 + z), complex: each part keeps its digits where the other is not far larger.

    >>> complex_log1p(torch.tensor(1e-9j)).imag
    tensor(1.0000e-09)
    """
    x, y = values.real, values.imag
    return torch.complex(0.5 * torch.log1p(2.0 * x + x.square() + y.square()), torch.atan2(y, 1.0 + x))
