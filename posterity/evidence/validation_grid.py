"""Prior precision by trial on held-out rows."""

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from posterity.errors import NotPositiveDefinite, positive, positive_whole
from posterity.evidence.groups import Shared
from posterity.evidence.marginal import Marginal
from posterity.evidence.tuned import Tuned, unchanged

logger = logging.getLogger("posterity")


@dataclass(frozen=True)
class ValidationGrid:
    """The prior precision, among some on a logarithmic grid and the present one, with the least validation loss.

    **Math**: argmin over alpha of score(alpha), say the negative log-likelihood of validation rows under the
    predictive of the Gaussian with that prior precision.

    **Limit**: as fine as the grid; the noise stays as it is. Trials that fail or score NaN are passed over.

    **Cost**: `count` + 1 scores.

    **References**: Ritter et al. (2018), section 5.

    **Example**:

    >>> grid = ValidationGrid(lowest=0.01, highest=100.0, count=5)
    >>> [round(value, 4) for value in grid.values]
    [0.01, 0.1, 1.0, 10.0, 100.0]
    """

    lowest: float = 1e-4
    highest: float = 1e4
    count: int = 21

    def __post_init__(self) -> None:
        positive("ValidationGrid.lowest", self.lowest)
        positive("ValidationGrid.highest", self.highest)
        positive_whole("ValidationGrid.count", self.count)
        if self.lowest >= self.highest:
            raise ValueError(
                f"ValidationGrid.lowest must be below ValidationGrid.highest. Got {self.lowest} and {self.highest}."
            )

    @property
    def values(self) -> list[float]:
        """The grid."""
        logs = torch.linspace(math.log(self.lowest), math.log(self.highest), self.count, dtype=torch.float64)
        return [float(value) for value in logs.exp()]

    def tune(self, marginal: Marginal, score: Callable[[float], float]) -> Tuned:
        """The best by `score`, which takes a prior precision and gives a loss; `marginal` has one group.

        Where weights have prior scales of their own, the precision is the geometric mean of theirs.
        """
        if len(marginal.names) != 1:
            raise ValueError(
                "ValidationGrid tunes one normal prior precision, shared by all weights. "
                f"Got {len(marginal.names)} groups. Use groups=Shared() and a Normal prior."
            )
        present = float(marginal.prior_precision)
        values = [present, *self.values]
        losses = [_score(score, value) for value in values]
        best = min(range(len(values)), key=losses.__getitem__)
        if not math.isfinite(losses[best]):
            return unchanged(Shared(), marginal, len(values), "no prior precision has a finite score.", -losses[0])
        if best in (1, self.count) and self.count > 1:
            logger.warning("The best prior precision, %.3g, is at the end of the grid: widen it.", values[best])
        noise = None if marginal.noise is None else marginal.noise.scale
        alpha = torch.full_like(marginal.prior_precision, values[best])
        return Tuned(Shared(), marginal.names, alpha, noise, -losses[0], -losses[best], len(values))


def _score(score: Callable[[float], float], value: float) -> float:
    """The loss, infinite where there is none."""
    try:
        loss = float(score(value))
    except (NotPositiveDefinite, FloatingPointError):
        return math.inf
    return math.inf if math.isnan(loss) else loss
