"""The HTML report of `posterity compare`."""

import platform
import shlex
import tempfile
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from importlib import import_module
from pathlib import Path
from typing import Any

import posterity
from posterity.cli.frame.scores import columns
from posterity.cli.frame.settings import LABELS
from posterity.cli.frame.tasks import Task, describe, has_figure
from posterity.posteriors import Posterior
from posterity.report import comparison, predicted_observed, reliability_diagram
from posterity.report.figures import MOST_INTERVALS
from posterity.report.html import Picture, comparison_page
from posterity.storage.disk import write_file


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
        LABELS,
        _pictures(document, task, {LABELS[name]: posterior for name, posterior in posteriors.items()}),
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


def _pictures(document: Mapping[str, Any], task: Task, panels: Mapping[str, Posterior]) -> list[Picture]:
    """What the methods predict where that can be drawn, and how it agrees with the test rows."""
    data, source = task.data, task.source
    classes = data.classes is not None
    names = ", ".join(panels)
    nll = {LABELS[row["method"]]: row["test_nll"] for row in document["methods"]}
    seen = "Inputs and targets are shown as the network sees them: standardised. " if source.path is not None else ""
    pictures = []
    if has_figure(task):
        png = _png(lambda file: comparison(panels, data, file, nll))
        if classes:
            alt = f"Map of the predicted class over the two inputs, one panel each for {names}, with the training rows."
            read = "Colours reach well beyond the data: there, a method that knows its limits is less sure."
            pictures.append(Picture("What is predicted", png, alt, f"{seen}{read}"))
        else:
            alt = f"Predicted mean and 95 % bands over the input, one panel each for {names}, with the training rows."
            read = "The outer band should hold 95 % of new targets; the inner one is what the weights leave open. "
            pictures.append(Picture("What is predicted", png, alt, f"{seen}{read}Bands should widen beyond the rows."))
    if classes:
        ece = ", ".join(f"{LABELS[row['method']]} {row['ece']:.3f}" for row in document["methods"])
        png = _png(lambda file: reliability_diagram(panels, data, file))
        alt = f"Reliability diagram, accuracy against confidence on the test rows; ECE: {ece}."
        read = "Each dot is a bin of test rows, its area their share. On the dashed line confidence is what it claims "
        pictures.append(Picture("Is confidence earned?", png, alt, f"{read}to be; below it the method is too sure."))
    else:
        png = _png(lambda file: predicted_observed(panels, data, file, scale=source.scale, shift=source.shift))
        rmse = ", ".join(f"{LABELS[row['method']]} {row['rmse']:.4g}" for row in document["methods"])
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
