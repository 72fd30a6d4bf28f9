"""Where a run stands: what callbacks see and checkpoints store."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from posterity.inference.method import Method, Target
from posterity.inference.trace import Trace
from posterity.posteriors.posterior import Posterior


@dataclass
class Run:
    """A run after `step` of `steps` steps. Callbacks may replace `state` and set `stopped` to a reason."""

    method: Method
    joint: Target
    steps: int
    step: int
    state: Any
    trace: Trace = field(default_factory=Trace)
    kept: list[Any] = field(default_factory=list)
    stopped: str = ""
    validate: Callable[[Posterior], float] | None = None

    def posterior(self) -> Posterior:
        """The posterior as it would be if the run ended here."""
        return self.method.posterior(self.joint, self.kept or [self.method.keep(self.state)])

    def latest(self) -> Posterior:
        """The posterior of the present state alone."""
        return self.method.posterior(self.joint, [self.method.keep(self.state)])
