"""New places for components that have lost their rows."""

import torch
from torch import Tensor

from posterity.mixtures.covariance import Covariance
from posterity.mixtures.moments import per_component
from posterity.mixtures.passes import log_densities
from posterity.mixtures.rows import Components, Rows
from posterity.mixtures.tied import Tied


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
    """The values with empty components (R, K) at the points (R, E, D), the worst first, and the mean covariance.

    One for each weight that such a component may be given: from its share among all down to that of one row.
    """
    count = values["weights"].shape[-1]
    rank = (empty.cumsum(-1) - 1).clamp_min(0)  # (R, K): the first empty component takes the worst row
    there = points.gather(1, rank[..., None].expand_as(values["means"]))
    means = torch.where(empty[..., None], there, values["means"])
    covariances = values["covariances"]
    shares = torch.where(empty, 0.0, values["weights"])
    if not isinstance(kind, Tied):
        weights = shares.reshape(*shares.shape, *(1,) * (covariances.dim() - 2))
        mean = (weights * covariances).sum(1, keepdim=True) / weights.sum(1, keepdim=True)
        covariances = torch.where(per_component(kind, empty), mean, covariances)
    found = []
    smallest = min(1 / count, 1 / num_data)
    for weight in (1 / count, (smallest / count) ** 0.5, smallest):
        left = 1 - weight * empty.sum(-1, keepdim=True)
        own = torch.where(empty, weight, shares / shares.sum(-1, keepdim=True) * left)
        found.append({"weights": own, "means": means, "covariances": covariances})
    return found
