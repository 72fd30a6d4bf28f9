"""How the rounds of a mixture are run by EM, and what is noted of the run."""

import logging
from typing import NamedTuple, Protocol

from torch import Tensor

from posterity.inference.infer import infer
from posterity.methods.coordinate_ascent import Values
from posterity.methods.expectation_maximization import ExpectationMaximization
from posterity.model.density import Density

logger = logging.getLogger("posterity")


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
    max_iter: int,
    tol: float,
    exact: bool,
    progress: bool,
) -> Run:
    """Rounds from `start` (R, ...) until the bound of each restart changes by at most `tol`, or `max_iter` of them.

    `name` is that of the estimator, for the warning that it has not converged.
    """
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
    if not still:
        logger.warning(
            "%s has not converged after max_iter = %d rounds. Raise max_iter or tol, or try n_init.", name, max_iter
        )
    values = {name: value[None] for name, value in density.constrained(q.start().point()).items()}
    return Run(values, touching[:rounds], bounds[:rounds], bool(still))
