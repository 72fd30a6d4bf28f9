"""MacKay's fixed point for prior precision and noise."""

import math
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from posterity.errors import positive, positive_whole
from posterity.evidence.groups import Groups, Shared
from posterity.evidence.marginal import Marginal
from posterity.evidence.search import Point, Search
from posterity.evidence.tuned import Tuned, Tuning, unchanged


class Update(NamedTuple):
    """One step of the fixed point: effective numbers (G,) before it, hyper-parameters after it."""

    effective: Tensor
    prior_precision: Tensor  # (G,)
    noise_scale: Tensor | None  # ()


@dataclass(frozen=True)
class MacKay(Tuning):
    """Prior precision and noise by MacKay's re-estimation: effective numbers of weights over their squared size.

    **Math**: gamma_g = n_g - alpha_g tr Sigma_gg (= sum of lambda / (lambda + alpha) with one group), alpha_g =
    gamma_g / |theta* - m|^2_g, 1 / scale^2 = (N - gamma) / RSS, all from the same Gaussian. Under tempering
    n_g, N and the two squares are multiplied by the powers of their terms.

    **Limit**: its fixed point is the maximum of the evidence at this mode, as that of `Evidence`. It comes nearer by
    steps that alternate around it, slowly where the data say little. A search that fails changes nothing and says so.

    **Cost**: one log determinant with its gradient for each step.

    **References**: MacKay (1992), Bayesian interpolation, eq. 4.9-4.14; Bishop (2006), eq. 3.91-3.95.

    **Example**:

    >>> MacKay(noise=False).groups
    Shared()
    """

    groups: Groups = field(default_factory=Shared)
    noise: bool = True
    tolerance: float = 1e-6
    max_steps: int = 1000

    def __post_init__(self) -> None:
        positive("MacKay.tolerance", self.tolerance)
        positive_whole("MacKay.max_steps", self.max_steps)

    def step(self, marginal: Marginal, prior_precision: Tensor, noise_scale: Tensor | float | None = None) -> Update:
        """One re-estimation from prior precisions (G,) and a noise scale; None leaves that as it is."""
        search = Search(marginal, noise_scale is not None)
        logs = prior_precision.log()
        if noise_scale is not None:
            logs = torch.cat(
                [logs, -2.0 * torch.as_tensor(noise_scale, dtype=logs.dtype, device=logs.device).log().reshape(1)]
            )
        point = search.at(logs)
        after = None if point is None else _after(point)
        if point is None or after is None:
            raise ValueError(
                "MacKay.step: there is no next step from here. Weights at the prior mean, or no residuals?"
            )
        return Update(point.gained[: len(marginal.names)], *search.values(after))

    def tune(self, marginal: Marginal) -> Tuned:
        """See `Tuning`."""
        search = Search.wanted(marginal, self.noise)
        start = search.at(search.start)
        point = start
        while point is not None and bool((point.imbalance > self.tolerance).any()):
            after = _after(point)
            if after is None or search.evaluations > self.max_steps:
                break
            point = search.at(after)
        if start is None or point is None:
            return unchanged(self.groups, marginal, search.evaluations, "the log evidence is not finite.", math.nan)
        if bool((point.imbalance > self.tolerance).any()):
            which = search.names[int(point.imbalance.argmax())]
            reason = f"MacKay's fixed point was not reached in {search.evaluations - 1} steps for {which}."
            return unchanged(self.groups, marginal, search.evaluations, reason, start.value)
        return search.tuned(self.groups, start, point)


def _after(point: Point) -> Tensor | None:
    """Each precision times the ratio of its two sides; None where one is not positive."""
    gained, lost = point.gained, point.lost
    return point.logs + (gained / lost).log() if bool(((gained > 0) & (lost > 0)).all()) else None
