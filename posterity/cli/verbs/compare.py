"""`posterity compare`: several methods on one problem, side by side."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from posterity.cli.frame import options as o
from posterity.cli.frame.executors import ExecutorOption
from posterity.cli.frame.options import AUTO, SECONDS, ComparedOption
from posterity.cli.frame.output import UsageError, console, log, option_values, print_json, table
from posterity.cli.frame.spread import command
from posterity.options import option
from posterity.recipes.settings import Settings

if TYPE_CHECKING:
    from posterity.cli.frame.outcomes import Outcome
    from posterity.cli.frame.pages import Subject
    from posterity.cli.frame.tasks import Task


@dataclass(frozen=True)
class Files:
    """Files to write in addition to the table."""

    figure: Path | None = option(
        None, help="Draw the predictions: a PNG, PDF or SVG file.", unit="FILE", panel=o.OUTPUT
    )
    report: Path | None = o.REPORT


@command
def compare(
    context: typer.Context,
    data: o.Data,
    asked: ComparedOption,
    settings: Settings,
    columns: o.TableOptions,
    reading: o.ReadingOptions,
    files: Files,
    where: ExecutorOption,
    device: o.Device = "auto",
    quiet: o.Quiet = False,
    as_json: o.Json = False,
) -> None:
    """Fit several methods to DATA, compare them on its test rows with baselines, and say which to take.

    A method that fails is named in its row; the others go on. Interrupted, it shows what is finished.
    """
    from posterity.cli.frame.fitting import Fitter, check_auto
    from posterity.cli.frame.outcomes import INTERRUPTED, run_baselines, run_methods
    from posterity.cli.frame.pages import write_page
    from posterity.cli.frame.scores import draw_comparison
    from posterity.cli.frame.sources import say_notes
    from posterity.cli.frame.tasks import check_memory, fitting_threads, make_task
    from posterity.report.files import check_figure_path, check_report_path

    with option_values("compare"):
        if files.report is not None:
            check_report_path(files.report)
        if files.figure is not None:
            check_figure_path(files.figure)
        if columns.test_fraction == 0:
            raise UsageError("compare scores methods on test rows: --test-fraction must be above 0.", "leave it out.")
        drawn, named = files.figure is not None, tuple(word for word in asked.methods if word != AUTO)
        if AUTO in asked.methods:
            check_auto(Settings() if named else settings, log_target=columns.log_target)
        task = make_task(data, named, settings, columns, reading, device, figure=drawn)
        check_memory(named, task)
        auto = Fitter(AUTO, settings, asked.seconds or SECONDS, device, executor=where.executor)
        if drawn and task.source.path is not None:
            log("The figure shows inputs and targets as the network sees them: standardised.", quiet=quiet)
    say_notes(task.source, quiet=quiet)
    debug = "--debug" in context.obj
    with fitting_threads(task):
        methods = run_methods(asked.methods, task, auto, quiet=quiet, debug=debug)
        rows = [*run_baselines(task.source, debug=debug), *methods]
        interrupted = any(outcome.code == INTERRUPTED for outcome in methods)
        posteriors = {outcome.word: outcome.posterior for outcome in methods if outcome.posterior is not None}
        if interrupted or not posteriors:
            files = Files()
        document = _document(task, rows, files)
        if files.figure is not None:
            draw_comparison(files.figure, document, task, posteriors)
    if as_json:
        print_json(document)
    else:
        _print(document, task)
    if files.report is not None:  # after the table, so that an error in the page does not lose it
        with fitting_threads(task):
            write_page(files.report, _subject(document, task, rows, context.obj))
    if interrupted or not posteriors:
        raise typer.Exit(INTERRUPTED if interrupted else next(outcome.code for outcome in methods))


def _document(task: "Task", rows: "list[Outcome]", files: Files) -> dict[str, Any]:
    """Return the results as JSON."""
    from posterity.cli.frame.columns import all_columns, best
    from posterity.cli.frame.outcomes import shares, verdict

    worked = {outcome.word: outcome for outcome in rows if outcome.worked}
    winners = best({word: outcome.numbers for word, outcome in worked.items()}, task.data)

    def row(outcome: "Outcome", kind: str) -> dict[str, Any]:
        keys = (*(column.key for column in all_columns(task.data)), "intervals", *NUMBERS[kind])
        return {
            kind: outcome.word,
            **{key: outcome.numbers.get(key) for key in keys},
            "best": [key for key, who in winners.items() if outcome.word in who],
            "failed": outcome.failed,
            "reason": outcome.reason,
        }

    words = [word for word in worked if word in o.METHODS]
    methods = [
        {**row(outcome, "method"), "starts_from": shares(outcome.word, words) if outcome.worked else None}
        for outcome in rows
        if outcome.word in o.METHODS
    ]
    return {
        "data": task.data.name,
        "task": task.data.task,
        "train_rows": len(task.data.train),
        "test_rows": len(task.data.test),
        "network": task.network.config,
        "settings": task.options,
        "notes": list(task.source.notes),
        "methods": methods,
        "baselines": [row(outcome, "baseline") for outcome in rows if outcome.word not in o.METHODS],
        "verdict": verdict(task.source, worked),
        "figure": None if files.figure is None else str(files.figure),
        "report": None if files.report is None else str(files.report),
    }


def _subject(document: dict[str, Any], task: "Task", rows: "list[Outcome]", words: list[str]) -> "Subject":
    """Return the contents of the comparison's page."""
    from posterity.cli.frame.outside import reach
    from posterity.cli.frame.pages import Subject
    from posterity.cli.frame.tasks import describe
    from posterity.storage import Part

    names = [outcome.label for outcome in rows if outcome.word in o.METHODS]
    one_network = any(outcome.worked and outcome.word in o.METHODS and outcome.word != AUTO for outcome in rows)
    return Subject(
        f"{' and '.join(filter(None, (', '.join(names[:-1]), names[-1])))} on {task.data.name}",
        "Methods fitted to the same training rows, scored on the same test rows.",
        task.source,
        rows,
        document["verdict"],
        words,
        document["settings"],
        _remarks(document, task),
        about={"Network": describe(task) if one_network else f"chosen by {AUTO}", "Seed": str(task.settings.seed)},
        reach=Part({}, reach(task.source)),
    )


NUMBERS = {
    "method": ("chosen", "far", "evidence", "kl_weight", "chains", "negative_limits", "seconds"),
    "baseline": ("seconds",),
}
"""Keys of a row of the document other than its scores, by the kind of the row."""


def _print(document: dict[str, Any], task: "Task") -> None:
    from rich.text import Text

    from posterity.cli.frame.baselines import baselines
    from posterity.cli.frame.columns import columns
    from posterity.cli.frame.tasks import describe

    out, shown = console(), columns(task.data)
    one_network = any(row["method"] != AUTO for row in document["methods"])
    network = f", network {describe(task)}" if one_network else ""
    out.print(Text(f"{task.data.name}{network}", "bold"), soft_wrap=True)
    rows = table("method", *(column.heading for column in shown), "seconds")
    labels = {each.word: each.label for each in baselines(task.data)}
    for row in (*document["baselines"], *document["methods"]):
        is_method = "method" in row
        label = o.method_label(row["method"]) if is_method else labels[row["baseline"]]
        style = "red" if row["failed"] else "" if is_method else "dim"
        cells = [Text(f"{label} ({row['reason']})" if row["failed"] else label, style)]
        for column in shown:
            is_best = column.key in row["best"]
            mark = ("*", "bold green") if is_best else (" ", "")
            value = "-" if row["failed"] else column.shown(row[column.key])
            cells.append(Text.assemble((value, "bold green" if is_best else style), mark))
        seconds = "-" if row["failed"] else f"{'+' if row.get('starts_from') else ''}{row['seconds']:.2f}"
        cells.append(Text(seconds, style))
        rows.add_row(*cells)
    out.print(rows)
    for line in _remarks(document, task):
        out.print(Text(line, "dim"), soft_wrap=True)
    for kind in ("figure", "report"):
        if document[kind] is not None:
            out.print(Text(f"{kind}: {document[kind]}"), soft_wrap=True)
    if document["verdict"] is not None:
        out.print(Text(document["verdict"]["sentence"], "bold"), soft_wrap=True)


def _remarks(document: dict[str, Any], task: "Task") -> list[str]:
    """Return the remarks below the table."""
    from posterity.cli.frame.options import LEVEL
    from posterity.cli.frame.scores import chains_line, evidence_line, far_lines, negative_limits_line
    from posterity.cli.frame.tasks import kl_weight_line

    fitted, rows = task.source.preprocessing, [row for row in document["methods"] if row["failed"] is None]
    units = "" if fitted is None else f", in units of {fitted.target.name},"
    meaning = {
        "classification": "Lower NLL (nats per row) and ECE are better, and higher accuracy and AUROC.",
        "regression": f"Lower NLL (nats per row) and RMSE{units} are better, and higher R2; the best coverage of "
        f"{100 * LEVEL:g} % intervals is {LEVEL:g}.",
    }[task.data.task]
    lines = [
        f"{len(task.data.train):,} training rows, {len(task.data.test):,} test rows, seed {task.settings.seed} "
        f"({'test rows, ' if fitted else ''}starting weights and order of rows).",
        f"{meaning} * best of its column. --json has more scores, and an interval of each.",
    ]
    lines += [
        f"{o.method_label(row['method'])} starts from the same {o.method_label(before)}; its seconds come on top."
        for row in rows
        if (before := row["starts_from"])
    ]
    lines += [f"{AUTO}: {row['chosen']}" for row in rows if row["chosen"]]
    lines += [line for row in rows if (line := kl_weight_line(row["method"], task))]
    lines += [chains_line(row["method"], row["chains"]) for row in rows if row["chains"]]
    lines += [evidence_line(row["method"], task, row["evidence"]) for row in rows if row["evidence"]]
    if line := negative_limits_line(
        task.source, {o.method_label(row["method"]): row["negative_limits"] for row in rows}
    ):
        lines.append(line)
    return lines + far_lines(task.data, {o.method_label(row["method"]): row["far"] for row in rows if row["far"]})
