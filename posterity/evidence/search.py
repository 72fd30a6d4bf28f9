"""The log evidence on the logs of its hyper-parameters, with the two sides of each balance at its maximum."""

import logging
import math
from typing import NamedTuple

import torch
from torch import Tensor

from posterity.errors import NotPositiveDefinite
from posterity.evidence.groups import Groups
from posterity.evidence.marginal import Marginal
from posterity.evidence.tuned import Tuned

logger = logging.getLogger("posterity")


class Point(NamedTuple):
    """Where a search stands: logs of prior precisions and noise precision, the evidence and its gradient there.

    gradient = (gained - lost) / 2: at the optimum a group's effective number of weights, `gained`, is its alpha
    |theta - mean|^2, `lost`; and the number of observations less that of fitted weights is the residuals' chi square.
    """

    logs: Tensor  # (K,)
    value: float
    gradient: Tensor  # (K,)
    lost: Tensor  # (K,)

    @property
    def gained(self) -> Tensor:
        """Effective numbers of weights (G,), and of observations that are left."""
        return 2.0 * self.gradient + self.lost

    @property
    def imbalance(self) -> Tensor:
        """|gained - lost| / (|gained| + lost), (K,): how far each is from its optimum; one if that is at infinity."""
        return 2.0 * self.gradient.abs() / (self.gained.abs() + self.lost).clamp(min=1e-300)


class Search:
    """The evidence as a function of logs (K,): of the prior precision of each group, then of 1 / noise^2 if tuned."""

    def __init__(self, marginal: Marginal, noise: bool) -> None:
        """With or without the noise."""
        self.marginal, self.noise = marginal, noise
        self.evaluations = 0
        self.names = (
            *(f"the prior precision of {name}" for name in marginal.names),
            *(("the noise",) if noise else ()),
        )
        self.size = marginal.pattern.numel()
        logs = marginal.prior_precision.log()
        if noise:
            assert marginal.noise is not None
            logs = torch.cat([logs, logs.new_tensor([-2.0 * math.log(marginal.noise.scale)])])
        self.start = logs

    @classmethod
    def wanted(cls, marginal: Marginal, noise: bool) -> "Search":
        """Over all that can be tuned, `noise` if wanted; what cannot is said."""
        if not marginal.names:
            logger.warning("The prior precision is not tuned: only that of normal priors is.")
        return cls(marginal, noise and marginal.noise is not None)

    def values(self, logs: Tensor) -> tuple[Tensor, Tensor | None]:
        """Prior precisions (G,), and the noise scale if it is tuned."""
        return (logs[:-1].exp(), (-0.5 * logs[-1]).exp()) if self.noise else (logs.exp(), None)

    def at(self, logs: Tensor) -> Point | None:
        """The evidence there; None where it is not finite."""
        self.evaluations += 1
        leaf = logs.detach().clone().requires_grad_()
        marginal = self.marginal
        try:
            with torch.enable_grad():
                alpha, scale = self.values(leaf)
                value = marginal.log_evidence(alpha, scale) + 0.0 * leaf.sum()  # there may be nothing to tune
            (gradient,) = torch.autograd.grad(value, leaf)
        except NotPositiveDefinite:
            return None
        lost = marginal.prior_power * alpha.detach() * marginal.squares
        if scale is not None:
            assert marginal.noise is not None
            chi = marginal.likelihood_power * marginal.noise.squares * scale.detach() ** -2
            lost = torch.cat([lost, chi.reshape(1)])
        number = float(value.detach())
        if not math.isfinite(number) or not bool(torch.isfinite(gradient).all()):
            return None
        return Point(leaf.detach(), number, gradient, lost)

    def tuned(self, groups: Groups, start: Point, found: Point) -> Tuned:
        """The outcome of a search that found a maximum."""
        alpha, scale = self.values(found.logs)
        noise = None if self.marginal.noise is None else self.marginal.noise.scale
        noise = noise if scale is None else float(scale)
        return Tuned(groups, self.marginal.names, alpha, noise, start.value, found.value, self.evaluations)
