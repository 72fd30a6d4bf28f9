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
    """log(1 + z), complex, with its digits near z = 0; at z = -1, where it is infinite, the log of 1e-150.

    >>> complex_log1p(torch.tensor(1e-9j)).imag
    tensor(1.0000e-09)
    """
    x, y = values.real, values.imag
    near = x.square() + y.square() < 0.25
    excess = torch.where(near, 2.0 * x + x.square() + y.square(), torch.zeros_like(x))
    size = torch.where(near, torch.ones_like(x), (1.0 + x).square() + y.square()).clamp_min(1e-300)
    return torch.complex(0.5 * (torch.log1p(excess) + torch.log(size)), torch.atan2(y, 1.0 + x))
