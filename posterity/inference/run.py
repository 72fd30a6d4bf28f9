"""Where a run stands: what callbacks see and checkpoints store."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from posterity.errors import PosterityError
from posterity.inference.finite import check_kept
from posterity.inference.kept import Kept
from posterity.inference.method import Method, Target
from posterity.inference.trace import Trace
from posterity.posteriors.posterior import Posterior
from posterity.storage import clone


@dataclass
class Run:
    """A run after `step` of `steps` steps. Callbacks may replace `state` and set `stopped` to a reason."""

    method: Method
    joint: Target
    steps: int
    step: int
    state: Any
    trace: Trace = field(default_factory=Trace)
    kept: Kept = field(default_factory=Kept)
    stopped: str = ""
    validate: Callable[[Posterior], float | Tensor] | None = None

    def posterior(self) -> Posterior:
        """The posterior as it would be if the run ended here."""
        return self._made(self.kept or [clone(self.method.keep(self.state))])

    def latest(self) -> Posterior:
        """The posterior of the present state alone."""
        return self._made([clone(self.method.keep(self.state))])  # the next step overwrites the state

    def so_far(self, before: int) -> Posterior | None:
        """The posterior of what was kept before step `before` or anything was not finite; None where nothing was."""
        kept = sum(map(self.method.keeps, range(1, before)))
        good = self.kept.first(min(self.kept.num_finite(), kept))
        try:
            return self.method.posterior(self.joint, good) if good else None
        except (PosterityError, ArithmeticError, ValueError):  # a run that breaks has its own error to tell of
            return None

    def _made(self, kept: Sequence[Any]) -> Posterior:
        # The last update may have broken what no loss has seen yet.
        check_kept(self.joint, kept, self.step, self.method.row)
        return self.method.posterior(self.joint, kept)
