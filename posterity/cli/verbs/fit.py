"""`posterity fit`: one posterior into a run folder, resumable at any moment."""

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from posterity.cli.frame import options as o
from posterity.cli.frame.executors import ExecutorOption
from posterity.cli.frame.options import AUTO, MethodOption
from posterity.cli.frame.output import console, log, option_values, print_json, table
from posterity.cli.frame.spread import command
from posterity.errors import positive, positive_whole
from posterity.options import check, option, refused
from posterity.recipes.methods import RECIPES
from posterity.recipes.settings import Settings

if TYPE_CHECKING:
    from posterity.cli.frame.fitting import Asked, Model
    from posterity.cli.frame.folders import Slot
    from posterity.cli.frame.sources import Source
    from posterity.cli.frame.tasks import Task
    from posterity.inference import Checkpoint
    from posterity.storage import Part

SPLIT, PLUS = "split", "cv+"
LEVEL = 0.9  # at which the guarantee of conformal intervals is said


@dataclass(frozen=True)
class RunOptions:
    """Where the run is kept, and when it is stored."""

    out: Path = option(help="The run folder to make.", unit="RUN", panel=o.OUTPUT)
    checkpoint_steps: int | None = option(
        None, help="Store the run after so many steps.", unit="N", check=positive_whole, panel=o.OUTPUT
    )
    checkpoint_seconds: float = option(
        60.0, help="Store the run after so many seconds.", unit="S", check=positive, panel=o.OUTPUT
    )
    force: bool = option(
        False,
        help="Start anew in a folder that holds another run; replace it at the end.",
        flags=("--force",),
        panel=o.OUTPUT,
    )

    report: Path | None = o.REPORT

    def __post_init__(self) -> None:
        check(self)


def _folds(name: str, value: int) -> None:
    if value < 2:
        raise refused(f"{name} must be 2 or more. Got {value}.", "--cv 5 scores each fifth by a fit to the others.")


@dataclass(frozen=True)
class FoldOptions:
    """What is fitted to parts of the training rows, beside the fit to all of them."""

    cv: int | None = option(
        None,
        help="Score by so many folds, each by a fit to the others; then fit all rows.",
        unit="K",
        check=_folds,
        panel="Data",
    )
    conformal: str | None = option(
        None,
        help="Keep what 'predict --conformal' needs: a fifth of the training rows out of the fit, or the models of the "
        "folds (5, or as --cv says). In this order:",
        unit="NAME",
        choices=(SPLIT, PLUS),
        panel="Data",
    )

    def __post_init__(self) -> None:
        check(self)


@command
def fit(
    context: typer.Context,
    data: o.Data,
    named: MethodOption,
    settings: Settings,
    columns: o.TableOptions,
    reading: o.ReadingOptions,
    parts: FoldOptions,
    run: RunOptions,
    where: ExecutorOption,
    device: o.Device = "auto",
    quiet: o.Quiet = False,
    as_json: o.Json = False,
) -> None:
    """Fit a posterior to DATA and keep it in the folder RUN.

    A run that was stopped or killed goes on when the same command is given again, and ends with the same bits; auto
    starts again.
    """
    from posterity.cli.frame.fitting import asked_for
    from posterity.cli.frame.folders import Slot
    from posterity.cli.frame.folding import NUM_FOLDS, divided, without_calibration
    from posterity.cli.frame.sources import at_most, find_data, say_notes
    from posterity.cli.frame.tasks import check_memory, task_of
    from posterity.inference import Checkpoint
    from posterity.processes import done_by_first
    from posterity.report.files import check_report_path

    with option_values("fit"):
        if run.report is not None:
            check_report_path(run.report)
        asked = asked_for(data, named, settings, device, where.executor, log_target=columns.log_target)
        if parts.cv is not None and columns.test_fraction is None and columns.target is not None:
            columns = replace(columns, test_fraction=0.0)
        source, held = find_data(data, columns, reading, settings.seed), None
        if parts.conformal == SPLIT:
            source, held = without_calibration(source, settings.seed)
        count = parts.cv or (at_most(NUM_FOLDS, source.by) if parts.conformal == PLUS else 0)
        if count:
            # Refuses more folds than rows or groups before anything is fitted.
            divided(source, count, settings.seed, alike=parts.conformal is None)
        elif where.executor is not None and asked.method != AUTO:
            raise refused("--executor is for many fits, and this is one.", "add --cv 5, or leave it out.")
        task = None
        if asked.method != AUTO:
            task = task_of(source, (asked.method,), settings, device)
            check_memory((asked.method,), task)
            source = task.source
        every = Checkpoint(run.out, run.checkpoint_seconds, run.checkpoint_steps)
    say_notes(source, quiet=quiet)
    log(asked.note, quiet=quiet or not asked.note)
    config = asked.auto_config(source) if task is None else task.config(asked.method)
    slot = Slot(run.out, {**config, **{name: value for name, value in vars(parts).items() if value is not None}})
    seconds = None
    if slot.finished(force=run.force):
        log(f"{run.out} is finished already.", quiet=quiet)
    else:
        own = partial(_run, slot, asked, source, held, task, parts, count, every, force=run.force, quiet=quiet)
        spent: list[float] = []
        if asked.method == AUTO:  # it is many small fits, within a time
            done_by_first(lambda: spent.append(own()))
        else:
            spent.append(own())
        seconds = sum(spent)
    _report(slot, asked, source, task, parts, seconds, run.report, context.obj, as_json)


def _run(
    slot: "Slot",
    asked: "Asked",
    source: "Source",
    held: "Source | None",
    task: "Task | None",
    parts: FoldOptions,
    count: int,
    every: "Checkpoint",
    *,
    force: bool,
    quiet: bool,
) -> float:
    """Fit the folds and all training rows, and put the result in its place; the seconds that this took."""
    from posterity.cli.frame.columns import scores
    from posterity.cli.frame.fitting import timed_automatic
    from posterity.cli.frame.outside import reach
    from posterity.errors import Diverged
    from posterity.storage import Part

    try:
        with slot.running(force=force):
            spent, further, models = _fit_folds(slot, asked, source, parts, count, quiet=quiet)
            model: Model
            trace: dict[str, Any] = {}
            if task is None:
                model, seconds = timed_automatic(asked, source, quiet=quiet)
            else:
                model, seconds, trace = _run_stages(slot, task, asked.method, every, quiet=quiet)
            test = source.data.test
            values = scores(model.predict(test.inputs), source) if len(test) else {}
            if parts.conformal is not None:
                further |= _conformal(source, held, model, models)
            result = {"trace": Part({}, trace), "scores": Part({**values})}
            slot.finish({**model.parts(), **result, **further, **source.part(), "reach": Part({}, reach(source))})
    except Diverged:
        slot.discard()  # the same numbers would only come again
        raise
    except KeyboardInterrupt:
        if slot.stages.exists():
            log(f"The run so far is kept in {slot.path}: the same command goes on from there.", quiet=quiet)
        else:
            log("Nothing is kept of the fit under way: the same command starts it again.", quiet=quiet)
        raise
    return seconds + spent


def _run_stages(
    slot: "Slot", task: "Task", name: str, every: "Checkpoint", *, quiet: bool
) -> "tuple[Model, float, dict[str, Any]]":
    """The posterior of all stages, the seconds that this took, and the trace."""
    from posterity.cli.frame.tasks import fitting_threads, run_stage

    seconds, trace, posterior = 0.0, {}, None
    with fitting_threads(task):
        for number, stage in enumerate(RECIPES[name].stages, start=1):
            checkpoint = replace(every, path=slot.stage(number, stage))
            done = run_stage(stage, task, posterior, checkpoint=checkpoint, quiet=quiet)
            posterior, seconds = done.posterior, seconds + done.seconds
            for column, tensor in done.trace.tensors().items():
                kind, _, rest = column.partition(".")
                trace[f"{kind}.{stage}.{rest}"] = tensor  # "value.map.loss": `Trace.from_tensors` reads it
    assert posterior is not None
    return posterior, seconds, trace


def _fit_folds(
    slot: "Slot", asked: "Asked", source: "Source", parts: FoldOptions, count: int, *, quiet: bool
) -> "tuple[float, dict[str, Part], list[Any]]":
    """The seconds of the folds, their scores as a part of the run folder if wanted, and their models."""
    import time

    from posterity.cli.frame.columns import pooled_scores
    from posterity.cli.frame.folding import fold_models
    from posterity.storage import Part

    if not count:
        return 0.0, {}, []
    begin = time.perf_counter()
    models = fold_models(asked, source, count, slot.config, slot.stages, alike=parts.conformal is None, quiet=quiet)
    if parts.cv is None:
        return time.perf_counter() - begin, {}, models
    pairs = [own.final_units(fold.model.predict(own.data.test.inputs)) for own, fold in models]
    values, ends = pooled_scores(pairs, source.data)
    seconds = time.perf_counter() - begin
    rows = sum(len(own.data.test) for own, _ in models)
    return seconds, {"cv": Part({"folds": count, "rows": rows, "scores": values, "intervals": ends})}, models


def _conformal(source: "Source", held: "Source | None", model: "Model", models: list[Any]) -> "dict[str, Part]":
    """What the run folder keeps for conformal prediction: scores of calibration rows, or of the folds."""
    from posterity.cli.frame.folding import FoldModel, calibrated, conformal_parts

    if held is not None:
        return conformal_parts(calibrated([(held, FoldModel(model, source.preprocessing, None))], source), [])
    return conformal_parts(calibrated(models, source), [fold for _, fold in models])


def _report(
    slot: "Slot",
    asked: "Asked",
    source: "Source",
    task: "Task | None",
    parts: FoldOptions,
    seconds: float | None,
    page: Path | None,
    words: list[str],
    as_json: bool,
) -> None:
    from rich.text import Text

    from posterity.cli.frame.columns import columns
    from posterity.cli.frame.folders import open_run
    from posterity.cli.frame.folding import stored_conformal
    from posterity.cli.frame.scores import (
        chains_line,
        chains_of,
        evidence,
        evidence_line,
        negative_limits,
        negative_limits_line,
    )
    from posterity.cli.frame.tasks import describe, kl_weight, kl_weight_line

    name, rows = asked.method, source.data
    model = open_run(slot.path)[1]
    values = slot.scores(("test_nll",) if len(rows.test) else ())
    folds = slot.part("cv") if parts.cv is not None else None
    conformal = stored_conformal(slot.path, slot.config) if parts.conformal is not None else None
    promise = None if conformal is None else conformal[0].guarantee(LEVEL)
    chosen = getattr(model, "sentence", None)
    tuned, told = (None, None) if task is None else (evidence(model, task), chains_of(model, task))
    if as_json:
        print_json(
            {
                "run": str(slot.path),
                "finished_already": seconds is None,
                "data": rows.name,
                "task": rows.task,
                "method": name,
                "network": None if task is None else task.network.config,
                "settings": slot.config if task is None else task.options,
                "train_rows": len(rows.train),
                "test_rows": len(rows.test),
                "scores": values,
                "cv": folds,
                "conformal": None if promise is None else {"level": LEVEL, "guarantee": promise},
                "chosen": chosen,
                "evidence": tuned,
                "kl_weight": None if task is None else kl_weight(name, task),
                "chains": told,
                "seconds": None if seconds is None else round(seconds, 3),
                "report": None if page is None else str(page),
            }
        )
        if page is not None:
            _write_page(page, slot, asked, source, task, folds, promise, seconds, words)
        return
    known = [column for column in columns(rows) if column.key in values]  # earlier releases stored fewer
    shown = "   ".join(f"{column.heading} {column.shown(values[column.key])}" for column in known)
    network = "" if task is None else f", network {describe(task)}"
    lines = [f"{len(rows.test):,} test rows:   {shown}"] if len(rows.test) else []
    if not len(rows.test) and folds is None:
        lines.append(f"All {len(rows.train):,} rows are fitted: --cv 5 would score them by cross-validation.")
    lines += [f"{AUTO}: {chosen}"] if chosen is not None else []
    lines += [evidence_line(name, task, tuned)] if task is not None and tuned is not None else []
    lines += [chains_line(name, told)] if told is not None else []
    lines += [line] if task is not None and (line := kl_weight_line(name, task)) else []
    if source.preprocessing is not None and len(rows.test):
        count = negative_limits(model.predict(rows.test.inputs), source)
        lines += [line] if (line := negative_limits_line(source, {o.method_label(name): count})) else []
    lines += [f"Conformal prediction ({parts.conformal}) at {100 * LEVEL:g} %: {promise}"] if promise else []
    out = console()
    out.print(Text(f"{rows.name}, {o.method_label(name)}{network}", "bold"), soft_wrap=True)
    if folds is not None:
        out.print(_fold_table(folds, source))
    for line in (*lines, f"run folder: {slot.path}"):
        out.print(Text(line), soft_wrap=True)
    if page is not None:
        _write_page(page, slot, asked, source, task, folds, promise, seconds, words)
        out.print(Text(f"report: {page}"), soft_wrap=True)


def _write_page(
    path: Path,
    slot: "Slot",
    asked: "Asked",
    source: "Source",
    task: "Task | None",
    folds: dict[str, Any] | None,
    promise: str | None,
    seconds: float | None,
    words: list[str],
) -> None:
    from posterity.cli.frame.columns import all_columns
    from posterity.cli.frame.folders import open_run
    from posterity.cli.frame.options import LEVEL as OF_SCORES
    from posterity.cli.frame.outcomes import run_baselines, stored_outcome, verdict
    from posterity.cli.frame.outside import reach
    from posterity.cli.frame.pages import Subject, write_page
    from posterity.cli.frame.scores import far_lines
    from posterity.cli.frame.tasks import describe
    from posterity.report.html import paragraph, section, table
    from posterity.report.numbers import with_ends
    from posterity.storage import Part

    outcome = stored_outcome(asked.method, source, open_run(slot.path)[1], slot.path, seconds)
    rows = [*(run_baselines(source, debug=False) if len(source.data.test) else []), outcome]
    more = []
    if folds is not None:
        scored = [
            (column.heading.removeprefix("test "), *with_ends(value, folds["intervals"][column.key]))
            for column in all_columns(source.data)
            if (value := folds["scores"].get(column.key)) is not None
        ]
        title = f"{folds['folds']}-fold cross-validation"
        about = paragraph(f"Each of {folds['rows']:,} rows is scored by a fit to the other folds.")
        more.append(section(title, about, table(title, ["score", "value", f"{100 * OF_SCORES:g} % interval"], scored)))
    if promise is not None:
        more.append(section("Conformal prediction", paragraph(f"At {100 * LEVEL:g} %: {promise}")))
    known = {} if task is None else {"Network": describe(task)}
    write_page(
        path,
        Subject(
            f"{outcome.label} on {source.data.name}",
            "One posterior, fitted to the training rows and scored on the test rows, beside baselines.",
            source,
            rows,
            verdict(source, {each.word: each for each in rows if each.worked}) if len(source.data.test) else None,
            words,
            slot.config if task is None else task.options,
            far_lines(source.data, {outcome.label: far}) if (far := outcome.numbers.get("far")) else (),
            more=more,
            about={**known, "Run folder": str(slot.path), "Seed": str(asked.settings.seed)},
            reach=Part({}, reach(source)),
        ),
    )


def _fold_table(folds: dict[str, Any], source: "Source") -> Any:
    """The scores of cross-validation."""
    from posterity.cli.frame.columns import all_columns
    from posterity.cli.frame.options import LEVEL

    by = {"random": "", "group": " by group", "time": " in time order"}[source.order]
    heading = f"{folds['folds']}-fold cross-validation{by}, {folds['rows']} rows"
    rows = table(heading, "score", f"{100 * LEVEL:g} % interval")
    for column in all_columns(source.data):
        if column.key in folds["scores"]:
            ends = folds["intervals"][column.key]
            told = "" if ends is None else f"{column.shown(ends[0])} to {column.shown(ends[1])}"
            rows.add_row(column.heading.removeprefix("test "), column.shown(folds["scores"][column.key]), told)
    return rows
