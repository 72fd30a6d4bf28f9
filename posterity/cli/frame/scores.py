"""Scores, evidence and chain diagnostics of runs, as columns and lines, and as the HTML page of a comparison."""

import math
import platform
import shlex
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import posterity
from posterity.cli.frame.methods import RECIPES
from posterity.cli.frame.sources import Source
from posterity.cli.frame.tasks import Task, describe, has_figure
from posterity.datasets import DataSet
from posterity.diagnostics import convergence
from posterity.likelihoods import Gaussian
from posterity.metrics import accuracy, expected_calibration_error, negative_log_likelihood, root_mean_squared_error
from posterity.posteriors import Linearized, Posterior, Samples
from posterity.predictive.predictive import Predictive
from posterity.priors import Normal
from posterity.report import comparison, predicted_observed, reliability_diagram
from posterity.report.figures import MOST_INTERVALS
from posterity.report.html import Picture, comparison_page
from posterity.storage.disk import write_file
from posterity.storage.part import JSON

ROWS = 100  # training rows at which the outputs of chains are compared


def chains_of(posterior: Posterior, task: Task) -> dict[str, JSON] | None:
    """Diagnostics of chains, of the network's outputs at training rows and of the noise; None for other posteriors."""
    if not isinstance(posterior, Samples):
        return None
    inputs = task.data.train.inputs[:ROWS].to(posterior.joint.device)
    result = convergence(posterior, inputs)
    return {
        "chains": result.num_chains,
        "draws": result.num_draws,
        "rhat": _known(result.rhat),
        "bulk_ess": _known(result.bulk_ess),
        "tail_ess": _known(result.tail_ess),
        "divergences": None if result.divergences is None else result.num_divergences,
        "warnings": list(result.warnings),
    }


def chains_line(method: str, result: dict[str, Any]) -> str:
    """The same in a line, with the gravest of the warnings."""
    chains = f"{result['chains']} chain{'s' if result['chains'] != 1 else ''} of {result['draws']} draws"
    numbers = [f"R-hat {result['rhat']:.3f}"] if result["rhat"] is not None else []
    numbers += [f"bulk ESS {result['bulk_ess']:,.0f}"] if result["bulk_ess"] is not None else []
    numbers += [f"{result['divergences']} divergences"] if result["divergences"] is not None else []
    verdict = f" Not to be relied on yet: {result['warnings'][0]}" if result["warnings"] else " They agree."
    return f"{RECIPES[method].label}: {', '.join([chains, *numbers])} (outputs at training rows, noise).{verdict}"


def _known(value: float) -> float | None:
    return value if math.isfinite(value) else None  # chains that never move have an infinite R-hat


def evidence(posterior: Posterior, task: Task) -> dict[str, float] | None:
    """Log evidence in nats, and the prior scale and noise for which it is, tuned or not; None where there is none.

    Noise and evidence are in the units of the file's target; the prior scale is for the network's weights.
    """
    if not isinstance(posterior, Linearized) or posterior.log_evidence is None:
        return None
    joint, scale = task.joint, task.source.scale
    power, count = float(joint.tempering.likelihood_power), len(task.data.train)
    result = {"log_evidence": float(posterior.log_evidence) - power * count * math.log(scale)}
    fitted = posterior.joint.as_joint("evidence")
    prior, likelihood = fitted.prior, fitted.likelihood
    if isinstance(prior, Normal) and not isinstance(prior.scale, Tensor):
        result["prior_scale"] = float(prior.scale)
    if isinstance(likelihood, Gaussian):
        result["noise"] = float(torch.as_tensor(likelihood.scale)) * scale
    return result


def evidence_line(method: str, task: Task, result: dict[str, float]) -> str:
    """The same in a line."""
    names = {"prior_scale": "prior scale", "noise": "noise"}
    known = [f"{text} {result[key]:.4g}" for key, text in names.items() if key in result]
    known.append(f"log evidence {result['log_evidence']:.2f} nats.")
    how = " tuned by the evidence" if method == "laplace" and task.settings.tune else ""
    return f"{RECIPES[method].label}{how}: {', '.join(known)}"


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
    winning = {}
    for column in columns(data):
        values = {name: float(column.shown(row[column.key])) for name, row in rows.items()}
        goal = min(values.values()) if column.lower_is_better else max(values.values())
        winners = tuple(name for name, value in values.items() if value == goal)
        winning[column.key] = winners if len(winners) < len(rows) else ()
    return winning


def draw_comparison(path: Path, document: Mapping[str, Any], task: Task, posteriors: Mapping[str, Posterior]) -> None:
    """Draw what the posteriors predict over the inputs, one panel a method."""
    panels = {RECIPES[name].label: posterior for name, posterior in posteriors.items()}
    nll = {RECIPES[row["method"]].label: row["test_nll"] for row in document["methods"]}
    comparison(panels, task.data, path, nll)


def write_report(
    path: Path,
    document: Mapping[str, Any],
    task: Task,
    posteriors: Mapping[str, Posterior],
    *,
    remarks: Sequence[str],
    words: Sequence[str],
) -> None:
    """Write the page of a comparison to `path`: its document, and pictures of the posteriors by method."""
    page = comparison_page(
        document,
        columns(task.data),
        {word: recipe.label for word, recipe in RECIPES.items()},
        _pictures(document, task, posteriors),
        network=describe(task),
        remarks=remarks,
        command=shlex.join(["posterity", *words]),
        date=datetime.now().astimezone().strftime("%Y-%m-%d %H:%M %Z"),
        versions={
            "posterity": posterity.__version__,
            "python": platform.python_version(),
            **{name: import_module(name).__version__ for name in ("torch", "numpy", "matplotlib")},
        },
    )
    write_file(path, page.encode("utf-8", "replace"))  # a path may hold bytes that are no text


def _pictures(document: Mapping[str, Any], task: Task, posteriors: Mapping[str, Posterior]) -> list[Picture]:
    """What the methods predict where that can be drawn, and how it agrees with the test rows."""
    data, source = task.data, task.source
    classes = data.classes is not None
    panels = {RECIPES[name].label: posterior for name, posterior in posteriors.items()}
    names = ", ".join(panels)
    seen = "Inputs and targets are shown as the network sees them: standardised. " if source.path is not None else ""
    pictures = []
    if has_figure(task):
        png = _png(lambda file: draw_comparison(file, document, task, posteriors))
        if classes:
            alt = f"Map of the predicted class over the two inputs, one panel each for {names}, with the training rows."
            read = "Colours reach well beyond the data: there, a method that knows its limits is less sure."
            pictures.append(Picture("What is predicted", png, alt, f"{seen}{read}"))
        else:
            alt = f"Predicted mean and 95 % bands over the input, one panel each for {names}, with the training rows."
            read = "The outer band should hold 95 % of new targets; the inner one is what the weights leave open. "
            pictures.append(Picture("What is predicted", png, alt, f"{seen}{read}Bands should widen beyond the rows."))
    if classes:
        ece = ", ".join(f"{RECIPES[row['method']].label} {row['ece']:.3f}" for row in document["methods"])
        png = _png(lambda file: reliability_diagram(panels, data, file))
        alt = f"Reliability diagram, accuracy against confidence on the test rows; ECE: {ece}."
        read = "Each dot is a bin of test rows, its area their share. On the dashed line confidence is what it claims "
        pictures.append(Picture("Is confidence earned?", png, alt, f"{read}to be; below it the method is too sure."))
    else:
        png = _png(lambda file: predicted_observed(panels, data, file, scale=source.scale, shift=source.shift))
        rmse = ", ".join(f"{RECIPES[row['method']].label} {row['rmse']:.4g}" for row in document["methods"])
        alt = f"Predicted means with 95 % intervals against the observed targets of test rows; RMSE: {rmse}."
        shown = f"{min(len(data.test), MOST_INTERVALS)} of {len(data.test)} test rows. "
        read = "About 19 in 20 intervals should cross the dashed line, where predicted is observed; red ones do not."
        pictures.append(Picture("Predicted and observed", png, alt, f"{shown}{read}"))
    return pictures


def _png(draw: Callable[[Path], None]) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "figure.png"
        draw(file)
        return file.read_bytes()
