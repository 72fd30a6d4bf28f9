"""The evidence of a linear model with normal noise in closed form, maximised over prior scale and noise."""

import torch
from torch import Tensor

SMALLEST_NOISE = 1e-6
"""Smallest noise scale, in standard deviations of the targets: the rounding of linear targets in float32."""
RATIOS = torch.logspace(-14.0, 6.0, 201, dtype=torch.float64, device="cpu")  # of ridge and largest squared value


def best_ridge(
    squares: Tensor, products: Tensor, rest: float, count: int, floor: float, slack: float = 0.0
) -> tuple[float, float]:
    """Return the ridge with the largest evidence, and its noise variance.

    The weights have the prior N(0, s^2 / ridge) for noise of variance s^2. With the squared singular values d of the
    design (`squares`, all above 0), and the products z of its principal directions with the targets, the best s^2 for
    a ridge is (rest + sum of z^2 / d ridge / (d + ridge)) / count, `rest` the squares that no weights reach, and never
    below `floor`. The log evidence is, up to a constant, -count / 2 log s^2 - 1/2 sum log(1 + d / ridge). The ridge is
    searched on a grid, then on a finer one. Where weights can reach all targets, the evidence may not tell a little
    noise from none: with `slack` the largest ridge within that many nats of the maximum is taken there. Bishop (2006),
    section 3.5.
    """
    energy = products.square() / squares
    top = float(squares.max()) if len(squares) else 1.0

    def noise(ridges: Tensor) -> Tensor:
        left = rest + (energy * ridges[:, None] / (squares + ridges[:, None])).sum(1)
        return (left / max(1, count)).clamp_min(floor)

    def evidence(ridges: Tensor) -> Tensor:
        occam = torch.log1p(squares / ridges[:, None]).sum(1)
        return -0.5 * count * noise(ridges).log() - 0.5 * occam

    coarse = top * RATIOS
    values = evidence(coarse)
    index = int(values.argmax())
    if slack and len(squares) >= count:
        chosen = coarse[values >= values[index] - slack][-1]
    else:
        low, high = (float(coarse[min(max(index + step, 0), len(coarse) - 1)].log10()) for step in (-1, 1))
        fine = torch.logspace(low, high, 41, dtype=torch.float64, device="cpu")
        chosen = fine[int(evidence(fine).argmax())]
    return float(chosen), float(noise(chosen[None])[0])
