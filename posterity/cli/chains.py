"""Whether the chains of a sampler can be relied on, as the command line tells it."""

import math
from typing import Any

from posterity.cli.tasks import Task, label
from posterity.diagnostics import convergence
from posterity.posteriors import Posterior, Samples
from posterity.storage.part import JSON

ROWS = 100  # training rows at which the outputs of chains are compared


def chains_of(posterior: Posterior, task: Task) -> dict[str, JSON] | None:
    """Diagnostics of chains, of the network's outputs at training rows and of the noise; None for other posteriors."""
    if not isinstance(posterior, Samples):
        return None
    inputs = task.data.train.inputs[:ROWS].to(posterior.joint.device)
    found = convergence(posterior, inputs)
    return {
        "chains": found.num_chains,
        "draws": found.num_draws,
        "rhat": _known(found.rhat),
        "bulk_ess": _known(found.bulk_ess),
        "tail_ess": _known(found.tail_ess),
        "divergences": None if found.divergences is None else found.num_divergences,
        "warnings": list(found.warnings),
    }


def chains_line(method: str, found: dict[str, Any]) -> str:
    """The same in a line, with the gravest of the warnings."""
    chains = f"{found['chains']} chain{'s' if found['chains'] != 1 else ''} of {found['draws']} draws"
    numbers = [f"R-hat {found['rhat']:.3f}"] if found["rhat"] is not None else []
    numbers += [f"bulk ESS {found['bulk_ess']:,.0f}"] if found["bulk_ess"] is not None else []
    numbers += [f"{found['divergences']} divergences"] if found["divergences"] is not None else []
    verdict = f" Not to be relied on yet: {found['warnings'][0]}" if found["warnings"] else " They agree."
    return f"{label(method)}: {', '.join([chains, *numbers])} (outputs at training rows, noise).{verdict}"


def _known(value: float) -> float | None:
    return None if math.isnan(value) else value
