"""`posterity compare`: several methods on one problem, side by side."""

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from posterity.cli.frame import options as o
from posterity.cli.frame.methods import RECIPES, MethodsOption
from posterity.cli.frame.options import Settings
from posterity.cli.frame.output import console, log, option_values, print_json, table
from posterity.cli.frame.spread import command
from posterity.options import option

if TYPE_CHECKING:
    from posterity.cli.frame.tasks import Stage, Task


@dataclass(frozen=True)
class Files:
    """What to write beside the table."""

    figure: Path | None = option(
        None, help="Draw the predictions: a PNG, PDF or SVG file.", unit="FILE", panel=o.OUTPUT
    )
    report: Path | None = option(
        None, help="Write all of it as one HTML page, with figures.", unit="FILE", panel=o.OUTPUT
    )


@command
def compare(
    context: typer.Context,
    data: o.Data,
    asked: MethodsOption,
    settings: Settings,
    columns: o.TableOptions,
    reading: o.ReadingOptions,
    files: Files,
    device: o.Device = "auto",
    quiet: o.Quiet = False,
    as_json: o.Json = False,
) -> None:
    """Fit several methods to DATA and compare them on its test rows."""
    from posterity.cli.frame.scores import draw_comparison, write_report
    from posterity.cli.frame.sources import say_notes
    from posterity.cli.frame.tasks import check_figure_data, check_memory, fitting_threads, make_task
    from posterity.report.files import check_figure_path, check_report_path

    with option_values("compare"):
        task = make_task(data, asked.methods, settings, columns, reading, device)
        check_memory(asked.methods, task)
        if files.report is not None:
            check_report_path(files.report)
        if files.figure is not None:
            check_figure_path(files.figure)
            check_figure_data(task)
            if task.source.path is not None:
                log("The figure shows inputs and targets as the network sees them: standardised.", quiet=quiet)
    say_notes(task.source, quiet=quiet)
    with fitting_threads(task):
        results = _results(asked.methods, task, quiet)
        document = _document(task, results, files)
        posteriors = {name: stage.posterior for name, stage in results.items()}
        if files.figure is not None:
            draw_comparison(files.figure, document, task, posteriors)
        if files.report is not None:
            write_report(files.report, document, task, posteriors, remarks=_remarks(document, task), words=context.obj)
    if as_json:
        print_json(document)
    else:
        _print(document, task)


def _results(names: tuple[str, ...], task: "Task", quiet: bool) -> dict[str, "Stage"]:
    """The last stage of each method; methods that begin alike share what they begin with.

    The seconds of a method count only the stages that it does not share, see `_shares`.
    """
    from posterity.cli.frame.tasks import Stage, run_stage, warm_up

    warm_up()
    done: dict[tuple[str, ...], Stage] = {}
    results: dict[str, Stage] = {}
    for name in names:
        stages, seconds, before = RECIPES[name].stages, 0.0, _shares(name, names)
        for count in range(1, len(stages) + 1):
            path = stages[:count]
            if path not in done:
                start = done[path[:-1]].posterior if count > 1 else None
                done[path] = run_stage(path[-1], task, start, quiet=quiet)
            if before is None or count > len(RECIPES[before].stages):
                seconds += done[path].seconds
        results[name] = Stage(done[stages].posterior, done[stages].trace, round(seconds, 3))
    return results


def _shares(name: str, names: Collection[str]) -> str | None:
    """The compared method whose result `name` starts from, if any."""
    before = RECIPES[name].after
    begins = [before[:count] for count in range(len(before), 0, -1)]
    return next((other for begin in begins for other in names if RECIPES[other].stages == begin), None)


def _document(task: "Task", results: "dict[str, Stage]", files: Files) -> dict[str, Any]:
    """All that there is to tell, as JSON."""
    from posterity.cli.frame.scores import best, chains_of, evidence, scores
    from posterity.cli.frame.tasks import kl_weight

    values = {name: scores(stage.posterior, task.source) for name, stage in results.items()}
    winners = best(values, task.data)
    return {
        "data": task.data.name,
        "task": task.data.task,
        "train_rows": len(task.data.train),
        "test_rows": len(task.data.test),
        "network": task.network.config,
        "settings": task.options,
        "notes": list(task.source.notes),
        "methods": [
            {
                "method": name,
                **values[name],
                "evidence": evidence(stage.posterior, task),
                "kl_weight": kl_weight(name, task),
                "chains": chains_of(stage.posterior, task),
                "seconds": stage.seconds,
                "starts_from": _shares(name, results),
                "best": [key for key, who in winners.items() if name in who],
            }
            for name, stage in results.items()
        ],
        "figure": None if files.figure is None else str(files.figure),
        "report": None if files.report is None else str(files.report),
    }


def _print(document: dict[str, Any], task: "Task") -> None:
    from rich.text import Text

    from posterity.cli.frame.scores import columns
    from posterity.cli.frame.tasks import describe

    out, shown = console(), columns(task.data)
    out.print(Text(f"{task.data.name}, network {describe(task)}", "bold"), soft_wrap=True)
    rows = table("method", *(column.heading for column in shown), "seconds")
    for row in document["methods"]:
        cells = [Text(RECIPES[row["method"]].label)]
        for column in shown:
            is_best = column.key in row["best"]
            mark = ("*", "bold green") if is_best else (" ", "")
            cells.append(Text.assemble((column.shown(row[column.key]), "bold green" if is_best else ""), mark))
        cells.append(Text(f"{'+' if row['starts_from'] else ''}{row['seconds']:.2f}"))
        rows.add_row(*cells)
    out.print(rows)
    for line in _remarks(document, task):
        out.print(Text(line, "dim"), soft_wrap=True)
    for kind in ("figure", "report"):
        if document[kind] is not None:
            out.print(Text(f"{kind}: {document[kind]}"), soft_wrap=True)


def _remarks(document: dict[str, Any], task: "Task") -> list[str]:
    """What to know about the table, line by line."""
    from posterity.cli.frame.scores import chains_line, evidence_line
    from posterity.cli.frame.tasks import kl_weight_line

    fitted, rows = task.source.preprocessing, document["methods"]
    units = "" if fitted is None else f", both in the units of {fitted.target.name}"
    meaning = {
        "classification": "NLL in nats a row and ECE: less is better; accuracy: more is better.",
        "regression": f"NLL in nats a row and RMSE{units}: less is better.",
    }[task.data.task]
    lines = [
        f"{len(task.data.train)} training rows, {len(task.data.test)} test rows, seed {task.settings.seed} "
        f"({'test rows, ' if fitted else ''}starting weights and order of rows).",
        f"{meaning}{' * best of its column.' if len(rows) > 1 else ''}",
    ]
    lines += [
        f"{RECIPES[row['method']].label} starts from the same {RECIPES[before].label}; its seconds come on top."
        for row in rows
        if (before := row["starts_from"])
    ]
    lines += [line for row in rows if (line := kl_weight_line(row["method"], task))]
    lines += [chains_line(row["method"], row["chains"]) for row in rows if row["chains"]]
    return lines + [evidence_line(row["method"], task, row["evidence"]) for row in rows if row["evidence"]]
