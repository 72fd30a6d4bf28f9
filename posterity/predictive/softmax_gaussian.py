"""E softmax(f) under Gaussian logits of two or three classes, by quadrature."""

import torch
from torch import Tensor

from posterity.predictive.sigmoid_gaussian import sigmoid_gaussian

_LEAST = 81  # nodes on an axis: enough for the Gaussian itself on +-9 standard deviations
_NODES_PER_SCALE = 24.0  # more where the softmax changes faster than the Gaussian
_MOST = 4_000_000  # nodes of one row, which take 0.3 GB
_ROWS = 64  # at a time


def softmax_gaussian(mean: Tensor, covariance: Tensor) -> Tensor:
    """E softmax(f) for f ~ N(mean, covariance), (N, C) and (N, C, C) -> (N, C) in float64, C = 2 or 3; to about 1e-9.

    Two classes are the sigmoid of their difference. For three, the trapezoid rule on a product grid over the two
    differences from the first class, along the axes of their covariance, +-9 standard deviations. Nodes grow with
    these; a ValueError where one row would need more than 4 million (both standard deviations above 80 or so).

    >>> mean, covariance = torch.tensor([[1.0, 0.0, -1.0]]), torch.diag_embed(torch.tensor([[0.5, 1.0, 2.0]]))
    >>> softmax_gaussian(mean, covariance)
    tensor([[0.5854, 0.2697, 0.1450]], dtype=torch.float64)
    """
    mean, covariance = mean.double(), covariance.double()
    classes = mean.shape[-1]
    if classes not in (2, 3):
        raise ValueError(f"softmax_gaussian needs 2 or 3 classes. Got {classes}. Use MonteCarlo().")
    differences = torch.eye(classes, dtype=torch.float64, device=mean.device)[1:]
    differences[:, 0] = -1.0
    centre = mean @ differences.T  # (N, C - 1)
    spread = differences @ covariance @ differences.T
    if classes == 2:
        gap, variance = centre.squeeze(-1), spread.reshape(-1).clamp_min(0.0)
        return torch.stack([sigmoid_gaussian(-gap, variance), sigmoid_gaussian(gap, variance)], dim=-1)
    values, vectors = torch.linalg.eigh(spread)
    axes = vectors * values.clamp_min(0.0).sqrt().unsqueeze(-2)  # (N, 2, 2), columns are standard deviations
    # How far each axis moves any difference of two logits in one standard deviation.
    reach = torch.cat([axes, axes[:, :1] - axes[:, 1:]], dim=1).detach().abs().amax(1)  # (N, 2)
    result = torch.empty_like(mean)
    order = reach.amax(1).argsort()  # rows of one size together
    for low in range(0, len(order), _ROWS):
        rows = order[low : low + _ROWS]
        result[rows] = _three(centre[rows], axes[rows], reach[rows].amax(0))
    return result


def _three(centre: Tensor, axes: Tensor, reach: Tensor) -> Tensor:
    """The same for differences (N, 2) with axes (N, 2, 2), on a grid fine enough for `reach` (2,) of its axes."""
    counts = [max(_LEAST, int(_NODES_PER_SCALE * float(scale)) + 1) for scale in reach]
    if counts[0] * counts[1] > _MOST:
        raise ValueError(
            "softmax_gaussian needs logit differences with standard deviations below 80 or so. "
            f"Got {float(reach[0]):.3g} and {float(reach[1]):.3g} along the axes of one row. Use MonteCarlo()."
        )
    first, second = (torch.linspace(-9.0, 9.0, count, dtype=torch.float64, device=centre.device) for count in counts)
    weight = torch.exp(-0.5 * first**2).unsqueeze(-1) * torch.exp(-0.5 * second**2)
    weight = weight / weight.sum()
    result = []
    together = max(1, _MOST // (4 * weight.numel()))
    for low in range(0, len(centre), together):
        middle, matrix = centre[low : low + together], axes[low : low + together]
        grid = first[:, None, None] * matrix[:, None, None, :, 0] + second[:, None] * matrix[:, None, None, :, 1]
        logits = torch.nn.functional.pad(middle[:, None, None] + grid, (1, 0))  # (n, G1, G2, 3), the first is 0
        result.append(torch.einsum("nghc,gh->nc", logits.softmax(-1), weight))
    return torch.cat(result)
