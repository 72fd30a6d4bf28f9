"""How the rounds of a mixture are run by EM, and what is noted of the run."""

import logging
from collections import deque
from collections.abc import Callable
from typing import NamedTuple, Protocol

from torch import Tensor

from posterity.errors import BoundFell
from posterity.inference.infer import infer
from posterity.methods.coordinate_ascent import Values
from posterity.methods.expectation_maximization import ExpectationMaximization
from posterity.model.density import Density

logger = logging.getLogger("posterity")

COLLINEAR = 1e5  # condition number of correlations from which rounding can be 1e-10 of the bound


class Steps(Protocol):
    """The E-step, M-step and bound of a mixture on its rows, for all restarts at once."""

    def expectation(self, values: Values, latent: Values) -> Values:
        """What the M-step needs of q."""

    def maximisation(self, values: Values, latent: Values) -> Values:
        """The best values for q."""

    def bound(self, values: Values, latent: Values) -> Tensor:
        """What both raise, (R,)."""


class Run(NamedTuple):
    """The values of the best restart (1, ...), its bounds, and whether they came to a standstill."""

    values: dict[str, Tensor]
    touching: list[float]  # after each E-step
    bounds: list[float]  # after each M-step
    converged: bool


def run(
    steps: Steps,
    density: Density,
    start: Values,
    *,
    name: str,
    condition: Callable[[Values], float],
    max_iter: int,
    tol: float,
    exact: bool,
    progress: bool,
) -> Run:
    """Rounds from `start` (R, ...) until the bound of each restart changes by at most `tol`, or `max_iter` of them.

    `name` is that of the estimator, for the warning that it has not converged. `condition` is the condition number of
    the matrices in values, which magnifies rounding: where it is small, a fall of the bound by `exact` steps is an
    error; otherwise rounding explains it, and the rounds are run again without that check, which is logged.
    """
    watched = _Watched(steps)
    try:
        found = _rounds(watched, density, start, max_iter, tol, exact, progress)
    except BoundFell:
        worst = max(map(condition, watched.last))
        if worst < COLLINEAR:
            raise
        logger.info("the bound fell by rounding: correlations have the condition number %.1e", worst)
        found = _rounds(steps, density, start, max_iter, tol, False, progress)
    if not found.converged:
        logger.warning(
            "%s has not converged after max_iter = %d rounds. Raise max_iter or tol, or try n_init.", name, max_iter
        )
    return found


def _rounds(
    steps: Steps, density: Density, start: Values, max_iter: int, tol: float, exact: bool, progress: bool
) -> Run:
    em = ExpectationMaximization(
        steps.expectation,
        steps.maximisation,
        steps.bound,
        rounds=max_iter,
        tolerance=0.0,
        absolute=tol,
        exact=exact,
        batched=True,
        restarts=len(next(iter(start.values()))),
    )
    q, trace = infer(em, density, None, start=density.unconstrained(start), progress=progress)
    best = int(trace["bound_after_m"][-1].argmax())
    touching, bounds = (trace[column][:, best].tolist() for column in ("bound", "bound_after_m"))
    still = [place for place in range(1, len(touching)) if abs(touching[place] - touching[place - 1]) <= tol]
    rounds = still[0] + 1 if still else len(touching)
    values = {name: value[None] for name, value in density.constrained(q.start().point()).items()}
    return Run(values, touching[:rounds], bounds[:rounds], bool(still))


class _Watched:
    """The steps, with the values at which the last two bounds were taken."""

    def __init__(self, steps: Steps) -> None:
        self.expectation, self.maximisation, self._bound = steps.expectation, steps.maximisation, steps.bound
        self.last = deque[Values](maxlen=2)

    def bound(self, values: Values, latent: Values) -> Tensor:
        self.last.append(values)
        return self._bound(values, latent)
