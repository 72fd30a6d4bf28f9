"""`posterity compare`: several methods on one problem, side by side."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from posterity.cli.frame import options as o

if TYPE_CHECKING:
    from posterity.cli.frame.tasks import Stage, Task
    from posterity.storage.part import JSON


def compare(
    context: typer.Context,
    data: o.Data,
    methods: o.Methods = o.METHODS,
    figure: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Draw the predictions: a PNG, PDF or SVG file.")
    ] = None,
    report: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write all of it as one HTML page, with figures.")
    ] = None,
    hidden: o.Hidden = None,
    activation: o.Activation = o.ACTIVATION,
    steps: o.Steps = None,
    batch_size: o.BatchSize = o.BATCH_SIZE,
    step_size: o.StepSize = o.STEP_SIZE,
    prior_scale: o.PriorScale = o.PRIOR_SCALE,
    noise: o.Noise = None,
    temperature: o.Temperature = None,
    eta: o.Eta = None,
    structure: o.Structure = None,
    tune: o.Tune = True,
    estimator: o.Estimator = None,
    kl_weight: o.KLWeight = None,
    dropout: o.Dropout = None,
    draws: o.Draws = None,
    warmup: o.Warmup = None,
    chains: o.Chains = None,
    seed: o.Seed = 0,
    device: o.Device = "auto",
    quiet: o.Quiet = False,
    as_json: o.Json = False,
    target: o.Target = None,
    task_name: o.TaskName = "auto",
    drop: o.Drop = None,
    category: o.Category = None,
    separator: o.Separator = None,
    decimal: o.Decimal = None,
    header: o.Header = None,
    encoding: o.Encoding = None,
    test_fraction: o.TestFraction = o.TEST_FRACTION,
) -> None:
    """Fit several methods to DATA and compare them on its test rows."""
    from posterity.cli.frame.output import console, log, option_values, print_json
    from posterity.cli.frame.scores import chains_of, scores
    from posterity.cli.frame.settings import method_names
    from posterity.cli.frame.sources import say_notes
    from posterity.cli.frame.tasks import asked, check_figure_data, check_memory, check_methods, fitting_threads
    from posterity.report.files import check_figure_path, check_report_path

    names = method_names(methods)
    with option_values("compare"):
        task = asked(context.params)  # all options of data, network and optimiser, by name
        check_methods(names, task)
        check_memory(names, task)
        if report is not None:
            check_report_path(report)
        if figure is not None:
            check_figure_path(figure)
            check_figure_data(task)
            if task.source.path is not None:
                log(
                    "The figure shows inputs and targets as the network sees them: standardised.",
                    quiet=quiet,
                )
    say_notes(task.source, quiet=quiet)
    with fitting_threads(task):
        results = _results(names, task, quiet)
        values = {name: scores(stage.posterior, task.source) for name, stage in results.items()}
        if figure is not None:
            _draw(results, values, task, figure)
        told = {name: chains_of(stage.posterior, task) for name, stage in results.items()}
        document = _document(names, task, results, values, told, figure, report)
        if report is not None:
            from posterity.cli.frame.scores import write_report

            posteriors = {name: stage.posterior for name, stage in results.items()}
            remarks = _caption(names, task, results, told)
            write_report(report, document, task, posteriors, remarks=remarks, words=context.obj)
    if as_json:
        print_json(document)
    else:
        _print(console(), names, task, results, values, told, figure, report)


def _results(names: tuple[str, ...], task: "Task", quiet: bool) -> dict[str, "Stage"]:
    """The last stage of each method; methods that begin alike share what they begin with.

    The seconds of a method are those of its stages beyond what it starts from, see `_shares`.
    """
    from posterity.cli.frame.settings import METHODS
    from posterity.cli.frame.tasks import Stage, run_stage, warm_up

    warm_up()
    done: dict[tuple[str, ...], Stage] = {}
    results: dict[str, Stage] = {}
    for name in names:
        stages, seconds, before = METHODS[name], 0.0, _shares(name, names)
        for count in range(1, len(stages) + 1):
            path = stages[:count]
            if path not in done:
                start = done[path[:-1]].posterior if count > 1 else None
                done[path] = run_stage(path[-1], task, start, quiet=quiet)
            if before is None or count > len(METHODS[before]):
                seconds += done[path].seconds
        results[name] = Stage(done[stages].posterior, done[stages].trace, round(seconds, 3))
    return results


def _shares(name: str, names: tuple[str, ...]) -> str | None:
    """The compared method whose result `name` starts from, if any."""
    from posterity.cli.frame.settings import METHODS

    begins = [METHODS[name][:count] for count in range(len(METHODS[name]) - 1, 0, -1)]
    return next((other for begin in begins for other in names if METHODS[other] == begin), None)


def _draw(results: dict[str, "Stage"], values: dict[str, dict[str, float]], task: "Task", path: Path) -> None:
    from posterity.cli.frame.tasks import label
    from posterity.report import comparison

    panels = {label(name): stage.posterior for name, stage in results.items()}
    comparison(panels, task.data, path, {label(name): row["test_nll"] for name, row in values.items()})


def _document(
    names: tuple[str, ...],
    task: "Task",
    results: dict[str, "Stage"],
    values: dict[str, dict[str, float]],
    told: "dict[str, dict[str, JSON] | None]",
    figure: Path | None,
    report: Path | None,
) -> dict[str, Any]:
    from posterity.cli.frame.scores import best, evidence
    from posterity.cli.frame.tasks import kl_weight

    winners = best(values, task.data)
    return {
        "data": task.data.name,
        "task": task.data.task,
        "train_rows": len(task.data.train),
        "test_rows": len(task.data.test),
        "network": task.network.config,
        "settings": {**task.settings.config(), **task.source.config},
        "notes": list(task.source.notes),
        "methods": [
            {
                "method": name,
                **values[name],
                "evidence": evidence(results[name].posterior, task),
                "kl_weight": kl_weight(name, task),
                "chains": told[name],
                "seconds": results[name].seconds,
                "starts_from": _shares(name, names),
                "best": [key for key, who in winners.items() if name in who],
            }
            for name in names
        ],
        "figure": None if figure is None else str(figure),
        "report": None if report is None else str(report),
    }


def _print(
    out: Any,
    names: tuple[str, ...],
    task: "Task",
    results: dict[str, "Stage"],
    values: dict[str, dict[str, float]],
    told: "dict[str, dict[str, JSON] | None]",
    figure: Path | None,
    report: Path | None,
) -> None:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    from posterity.cli.frame.scores import best, columns
    from posterity.cli.frame.tasks import describe, label

    winners = best(values, task.data)
    out.print(Text(f"{task.data.name}, network {describe(task)}", "bold"), soft_wrap=True)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("method")
    for column in columns(task.data):
        table.add_column(column.heading, justify="right")
    table.add_column("seconds", justify="right")
    for name in names:
        cells: list[Text] = [Text(label(name))]
        for column in columns(task.data):
            is_best = name in winners[column.key]
            mark = ("*", "bold green") if is_best else (" ", "")
            cells.append(Text.assemble((column.shown(values[name][column.key]), "bold green" if is_best else ""), mark))
        plus = "+" if _shares(name, names) else ""
        cells.append(Text(f"{plus}{results[name].seconds:.2f}"))
        table.add_row(*cells)
    out.print(table)
    for line in _caption(names, task, results, told):
        out.print(Text(line, "dim"), soft_wrap=True)
    for kind, path in (("figure", figure), ("report", report)):
        if path is not None:
            out.print(Text(f"{kind}: {path}"), soft_wrap=True)


def _units(task: "Task") -> str:
    fitted = task.source.preprocessing
    return "" if fitted is None else f", both in the units of {fitted.target.name}"


def _caption(
    names: tuple[str, ...],
    task: "Task",
    results: dict[str, "Stage"],
    told: "dict[str, dict[str, JSON] | None]",
) -> list[str]:
    from posterity.cli.frame.scores import chains_line, evidence, evidence_line
    from posterity.cli.frame.tasks import kl_weight_line, label

    meaning = {
        "classification": "NLL in nats a row and ECE: less is better; accuracy: more is better.",
        "regression": f"NLL in nats a row and RMSE{_units(task)}: less is better.",
    }[task.data.task]
    lines = [
        f"{len(task.data.train)} training rows, {len(task.data.test)} test rows, seed {task.settings.seed} "
        f"({'test rows, ' if task.source.preprocessing else ''}starting weights and order of rows).",
        f"{meaning}{' * best of its column.' if len(names) > 1 else ''}",
    ]
    lines += [
        f"{label(name)} starts from the same {label(before)}; its seconds come on top."
        for name in names
        if (before := _shares(name, names))
    ]
    lines += [line for name in names if (line := kl_weight_line(name, task))]
    lines += [chains_line(name, chains) for name in names if (chains := told[name]) is not None]
    return lines + [
        evidence_line(name, task, found)
        for name in names
        if (found := evidence(results[name].posterior, task)) is not None
    ]
