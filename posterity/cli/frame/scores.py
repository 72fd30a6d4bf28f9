"""Scores, evidence and chain diagnostics of a run, as columns and lines."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from posterity.cli.frame.sources import Source
from posterity.cli.frame.tasks import Task, label
from posterity.datasets import DataSet
from posterity.diagnostics import convergence
from posterity.likelihoods import Gaussian
from posterity.metrics import accuracy, expected_calibration_error, negative_log_likelihood, root_mean_squared_error
from posterity.posteriors import Linearized, Posterior, Samples
from posterity.predictive.predictive import Predictive
from posterity.priors import Normal
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


def evidence(posterior: Posterior, task: Task) -> dict[str, float] | None:
    """Log evidence in nats, and the prior scale and noise for which it is, tuned or not; None where there is none.

    Noise and evidence are those of the targets in the units of the file; the prior is that of the network's weights.
    """
    if not isinstance(posterior, Linearized) or posterior.log_evidence is None:
        return None
    joint, scale = task.joint, task.source.scale
    power, count = float(joint.tempering.likelihood_power), len(task.data.train)
    found = {"log_evidence": float(posterior.log_evidence) - power * count * math.log(scale)}
    fitted = posterior.joint.as_joint("evidence")
    prior, likelihood = fitted.prior, fitted.likelihood
    if isinstance(prior, Normal) and not isinstance(prior.scale, Tensor):
        found["prior_scale"] = float(prior.scale)
    if isinstance(likelihood, Gaussian):
        found["noise"] = float(torch.as_tensor(likelihood.scale)) * scale
    return found


def evidence_line(method: str, task: Task, found: dict[str, float]) -> str:
    """The same in a line."""
    names = {"prior_scale": "prior scale", "noise": "noise"}
    known = [f"{text} {found[key]:.4g}" for key, text in names.items() if key in found]
    how = " tuned by the evidence" if method == "laplace" and task.settings.tune else ""
    return f"{label(method)}{how}: {', '.join(known)}, log evidence {found['log_evidence']:.2f} nats."


@dataclass(frozen=True)
class Column:
    """One score: its key in JSON, its heading, the metric, and whether less of it is better.

    `rescaled` turns its value for targets that were divided by a scale into that for the targets themselves.
    """

    key: str
    heading: str
    metric: Callable[[Predictive, Tensor], float]
    lower_is_better: bool = True
    rescaled: Callable[[float, float], float] = lambda value, scale: value

    def shown(self, value: float) -> str:
        """The value as tables show it."""
        return f"{value:.4f}" if value == 0 or abs(value) >= 0.01 else f"{value:.3g}"


_CLASSES = (
    Column("test_nll", "test NLL", negative_log_likelihood),
    Column("ece", "ECE", expected_calibration_error),
    Column("accuracy", "accuracy", accuracy, lower_is_better=False),
)
_NUMBERS = (
    Column("test_nll", "test NLL", negative_log_likelihood, rescaled=lambda value, scale: value + math.log(scale)),
    Column("rmse", "RMSE", root_mean_squared_error, rescaled=lambda value, scale: value * scale),
)


def columns(data: DataSet) -> tuple[Column, ...]:
    """The scores that suit the data."""
    return _CLASSES if data.task == "classification" else _NUMBERS


def scores(posterior: Posterior, source: Source) -> dict[str, float]:
    """Every score on the test rows, by key, in the units of the file if they come from one."""
    data = source.data
    predictive = posterior.predict(data.test.inputs)
    return {
        column.key: column.rescaled(column.metric(predictive, data.test.targets), source.scale)
        for column in columns(data)
    }


def best(rows: Mapping[str, Mapping[str, float]], data: DataSet) -> dict[str, tuple[str, ...]]:
    """For each score, the names of the rows that are best as shown; none where all rows show the same."""
    found = {}
    for column in columns(data):
        values = {name: float(column.shown(row[column.key])) for name, row in rows.items()}
        goal = min(values.values()) if column.lower_is_better else max(values.values())
        winners = tuple(name for name, value in values.items() if value == goal)
        found[column.key] = winners if len(winners) < len(rows) else ()
    return found
