"""New places for components that have lost their rows."""

import torch
from torch import Tensor

from posterity.mixtures.covariance import Covariance
from posterity.mixtures.full import non_negative
from posterity.mixtures.passes import log_densities
from posterity.mixtures.rows import Components, Rows
from posterity.mixtures.tied import Tied

SIZES = (1.0, 0.1)  # of covariances, over the mean one


def worst_rows(rows: Rows, kind: Covariance, components: Components, count: int) -> Tensor | None:
    """The `count` rows of lowest density, relative to the centre, (R, count, D); None where every row has a label."""
    found = log_densities(rows, kind, components)  # (R, N)
    free = torch.ones(len(rows.points), dtype=torch.bool, device=found.device)
    if rows.labels is not None:
        free &= rows.labels < 0
    if rows.weights is not None:
        free &= rows.weights > 0
    if int(free.sum()) < count:
        return None
    lowest = torch.where(free, found, torch.inf).topk(count, largest=False).indices
    return rows.points[lowest].to(torch.float64) - rows.centre


def proposals(
    kind: Covariance, values: dict[str, Tensor], empty: Tensor, points: Tensor, num_data: int
) -> list[dict[str, Tensor]]:
    """The values with empty components (R, K) at the points (R, E, D), the worst first.

    Weight and covariance of such a component come in several sizes: its share among all or that of one row; the mean
    covariance of the others or a tenth of it.
    """
    count = values["weights"].shape[-1]
    rank = (empty.cumsum(-1) - 1).clamp_min(0)  # (R, K): the first empty component takes the worst row
    there = points.gather(1, rank[..., None].expand_as(values["means"]))
    means = torch.where(empty[..., None], there, values["means"])
    shares = torch.where(empty, 0.0, values["weights"])
    shares = shares / shares.sum(-1, keepdim=True)
    found = []
    for weight in (1 / count, min(1 / count, 1 / num_data)):
        left = 1 - weight * empty.sum(-1, keepdim=True).to(shares)
        own = torch.where(empty, weight, shares * left)
        for covariances in _sizes(kind, values["covariances"], shares, empty):
            found.append({"weights": own, "means": means, "covariances": covariances})
    return found


def _sizes(kind: Covariance, covariances: Tensor, shares: Tensor, empty: Tensor) -> list[Tensor]:
    """The covariances where those of empty components are the mean one, or a part of it; shared ones as they are."""
    if isinstance(kind, Tied):
        return [covariances]
    shares = shares.reshape(*shares.shape, *(1,) * (covariances.dim() - 2))
    mean = (shares * covariances).sum(1, keepdim=True)
    if kind.matrices:  # a sum of matrices close to singular may be rounded to one that is not positive
        mean = non_negative(mean)
    return [torch.where(kind.marked(empty), size * mean, covariances) for size in SIZES]
