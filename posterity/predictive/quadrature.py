"""Integrals of sigmoids and softmaxes over Gaussian logits."""

import math

import torch
from torch import Tensor


def probit_gaussian(mean: Tensor, variance: Tensor) -> Tensor:
    """E Phi(f) = Phi(mean / sqrt(1 + variance)) for f ~ N(mean, variance), entry by entry."""
    value: Tensor = torch.special.ndtr(mean / torch.sqrt(1.0 + variance))
    return value


def probit_phi(mean: Tensor, variance: Tensor) -> Tensor:
    """Phi(mean / sqrt(8 / pi + variance)), close to E sigmoid(f) for f ~ N(mean, variance); entry by entry."""
    value: Tensor = torch.special.ndtr(mean / torch.sqrt(8.0 / math.pi + variance))
    return value


_NODES = 401
_WIDE = 10.0  # standard deviation above which a grid on +-9 of them is too coarse for the sigmoid
_SIGMOID_ROWS = 4096  # rows at a time: bounds the memory


def sigmoid_gaussian(mean: Tensor, variance: Tensor) -> Tensor:
    """E sigmoid(f) for f ~ N(mean, variance), entry by entry, to about 1e-12.

    The trapezoid rule with 401 nodes, which converges exponentially for smooth integrands. Up to a standard
    deviation of 10 it runs over mean +- 9 standard deviations. Beyond, the sigmoid is too steep for that grid:
    there E Phi(f sqrt(pi / 8)), known exactly, is taken out, and the rule sums the small smooth rest
    sigmoid(f) - Phi(f sqrt(pi / 8)), which vanishes outside -40 .. 40. At variance 0 it is sigmoid(mean).

    >>> sigmoid_gaussian(torch.tensor([0.0, 2.0]), torch.tensor([1e6, 0.0]))
    tensor([0.5000, 0.8808])
    """
    pairs = torch.stack([mean + torch.zeros_like(variance), variance + torch.zeros_like(mean)])  # broadcast
    flat = pairs.double().reshape(2, -1)
    firsts = range(0, max(1, flat.shape[1]), _SIGMOID_ROWS)
    parts = [sigmoid_gaussian_rows(*flat[:, row : row + _SIGMOID_ROWS]) for row in firsts]
    return torch.cat(parts).reshape(pairs.shape[1:]).to(pairs.dtype)


def sigmoid_gaussian_rows(mean: Tensor, variance: Tensor) -> Tensor:
    """`sigmoid_gaussian` of float64 vectors (N,), all at once."""
    scale = variance.sqrt()
    node = torch.linspace(-9.0, 9.0, _NODES, dtype=torch.float64, device=mean.device)
    weight = torch.exp(-0.5 * node**2)
    weight = weight / weight.sum()
    narrow = torch.sigmoid(mean[:, None] + scale[:, None] * node) @ weight  # (N,)
    point = torch.linspace(-40.0, 40.0, _NODES, dtype=torch.float64, device=mean.device)
    rest = torch.sigmoid(point) - probit_phi(point, torch.zeros_like(point))
    wide_scale = scale.clamp_min(_WIDE)  # the narrow rows are not used
    density = torch.exp(-0.5 * ((point - mean[:, None]) / wide_scale[:, None]) ** 2) / wide_scale[:, None]
    step = 80.0 / (_NODES - 1)
    wide = probit_phi(mean, variance) + density @ rest * (step / math.sqrt(2.0 * math.pi))
    return torch.where(scale > _WIDE, wide.clamp(0.0, 1.0), narrow)


_LEAST = 81  # nodes on an axis: enough for the Gaussian itself on +-9 standard deviations
_NODES_PER_SCALE = 24.0  # nodes per unit of logit scale, where the softmax changes faster than the Gaussian
_MOST = 4_000_000  # nodes of one row, which take 0.3 GB
_SOFTMAX_ROWS = 64  # rows at a time


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
    for low in range(0, len(order), _SOFTMAX_ROWS):
        rows = order[low : low + _SOFTMAX_ROWS]
        result[rows] = _three(centre[rows], axes[rows], reach[rows].amax(0))
    return result


def _three(centre: Tensor, axes: Tensor, reach: Tensor) -> Tensor:
    """E softmax of three logits, from differences (N, 2) with axes (N, 2, 2); `reach` (2,) sets the grid's nodes."""
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
