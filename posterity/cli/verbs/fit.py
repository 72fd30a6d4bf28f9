"""`posterity fit`: fits one posterior into a run folder, resumable at any moment."""

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
    from posterity.cli.frame.fitting import Fitter, Model
    from posterity.cli.frame.folders import Slot
    from posterity.cli.frame.sources import Source
    from posterity.cli.frame.tasks import Task
    from posterity.inference import Checkpoint
    from posterity.storage import Part

SPLIT, PLUS = "split", "cv+"
LEVEL = 0.9  # level at which the guarantee of conformal intervals is printed


@dataclass(frozen=True)
class RunOptions:
    """The run folder, and when checkpoints are written."""

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
    """Fits to parts of the training rows, in addition to the fit to all of them."""

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
    from posterity.cli.frame.fitting import make_fitter
    from posterity.cli.frame.folders import Slot
    from posterity.cli.frame.folding import NUM_FOLDS, split_calibration, training_folds
    from posterity.cli.frame.sources import at_most, find_data, say_notes
    from posterity.cli.frame.tasks import check_memory, task_of
    from posterity.inference import Checkpoint
    from posterity.processes import done_by_first
    from posterity.report.files import check_report_path

    with option_values("fit"):
        if run.report is not None:
            check_report_path(run.report)
        fitter = make_fitter(data, named, settings, device, where.executor, log_target=columns.log_target)
        if parts.cv is not None and columns.test_fraction is None and columns.target is not None:
            columns = replace(columns, test_fraction=0.0)
        source, held = find_data(data, columns, reading, settings.seed), None
        if parts.conformal == SPLIT:
            source, held = split_calibration(source, settings.seed)
        count = parts.cv or (at_most(NUM_FOLDS, source.by) if parts.conformal == PLUS else 0)
        if count:
            # Refuses more folds than rows or groups before anything is fitted.
            training_folds(source, count, settings.seed, stratified=parts.conformal is None)
        elif where.executor is not None and fitter.method != AUTO:
            raise refused("--executor is for many fits, and this is one.", "add --cv 5, or leave it out.")
        task = None
        if fitter.method != AUTO:
            task = task_of(source, (fitter.method,), settings, device)
            check_memory((fitter.method,), task)
            source = task.source
        every = Checkpoint(run.out, run.checkpoint_seconds, run.checkpoint_steps)
    say_notes(source, quiet=quiet)
    log(fitter.note, quiet=quiet or not fitter.note)
    config = fitter.auto_config(source) if task is None else task.config(fitter.method)
    slot = Slot(run.out, {**config, **{name: value for name, value in vars(parts).items() if value is not None}})
    seconds = None
    if slot.finished(force=run.force):
        log(f"{run.out} is finished already.", quiet=quiet)
    else:
        own = partial(_run, slot, fitter, source, held, task, parts, count, every, force=run.force, quiet=quiet)
        spent: list[float] = []
        if fitter.method == AUTO:  # many small fits, which only one process runs
            done_by_first(lambda: spent.append(own()))
        else:
            spent.append(own())
        seconds = sum(spent)
    _report(slot, fitter, source, task, parts, seconds, run.report, context.obj, as_json)


def _run(
    slot: "Slot",
    fitter: "Fitter",
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
    """Fit the folds and all training rows, and commit the result; return the seconds of the fits."""
    from posterity.cli.frame.columns import scores
    from posterity.cli.frame.fitting import timed_automatic
    from posterity.cli.frame.outside import reach
    from posterity.errors import Diverged
    from posterity.storage import Part

    try:
        with slot.running(force=force):
            spent, further, models = _fit_folds(slot, fitter, source, parts, count, quiet=quiet)
            model: Model
            trace: dict[str, Any] = {}
            if task is None:
                model, seconds = timed_automatic(fitter, source, quiet=quiet)
            else:
                model, seconds, trace = _run_stages(slot, task, fitter.method, every, quiet=quiet)
            test = source.data.test
            values = scores(model.predict(test.inputs), source) if len(test) else {}
            if parts.conformal is not None:
                further |= _conformal(source, held, model, models)
            result = {"trace": Part({}, trace), "scores": Part({**values})}
            slot.finish({**model.parts(), **result, **further, **source.part(), "reach": Part({}, reach(source))})
    except Diverged:
        slot.discard()  # a rerun would diverge again
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
    """Run all stages; return the posterior, the seconds and the traces."""
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
    slot: "Slot", fitter: "Fitter", source: "Source", parts: FoldOptions, count: int, *, quiet: bool
) -> "tuple[float, dict[str, Part], list[Any]]":
    """Fit the folds; return the seconds, the part of the run folder with their scores (for --cv), and their models."""
    import time

    from posterity.cli.frame.columns import pooled_scores
    from posterity.cli.frame.folding import fold_models
    from posterity.storage import Part

    if not count:
        return 0.0, {}, []
    begin = time.perf_counter()
    models = fold_models(
        fitter, source, count, slot.config, slot.stages, stratified=parts.conformal is None, quiet=quiet
    )
    if parts.cv is None:
        return time.perf_counter() - begin, {}, models
    pairs = [own.final_units(fold.model.predict(own.data.test.inputs)) for own, fold in models]
    values, ends = pooled_scores(pairs, source.data)
    seconds = time.perf_counter() - begin
    rows = sum(len(own.data.test) for own, _ in models)
    return seconds, {"cv": Part({"folds": count, "rows": rows, "scores": values, "intervals": ends})}, models


def _conformal(source: "Source", held: "Source | None", model: "Model", models: list[Any]) -> "dict[str, Part]":
    """Return the parts of the run folder for conformal prediction, from calibration rows or from the folds."""
    from posterity.cli.frame.folding import FoldModel, calibrate, conformal_parts

    if held is not None:
        return conformal_parts(calibrate([(held, FoldModel(model, source.preprocessing, None))], source), [])
    return conformal_parts(calibrate(models, source), [fold for _, fold in models])


def _report(
    slot: "Slot",
    fitter: "Fitter",
    source: "Source",
    task: "Task | None",
    parts: FoldOptions,
    seconds: float | None,
    page: Path | None,
    words: list[str],
    as_json: bool,
) -> None:
    from rich.text import Text

    from posterity.cli.frame.folders import open_run
    from posterity.cli.frame.folding import stored_conformal
    from posterity.cli.frame.scores import chains_of, evidence
    from posterity.cli.frame.tasks import kl_weight

    rows, model = source.data, open_run(slot.path)[1]
    conformal = stored_conformal(slot.path, slot.config) if parts.conformal is not None else None
    document = {
        "run": str(slot.path),
        "finished_already": seconds is None,
        "data": rows.name,
        "task": rows.task,
        "method": fitter.method,
        "network": None if task is None else task.network.config,
        "settings": slot.config if task is None else task.options,
        "train_rows": len(rows.train),
        "test_rows": len(rows.test),
        "scores": slot.scores(("test_nll",) if len(rows.test) else ()),
        "cv": None if parts.cv is None else slot.part("cv"),
        "conformal": None if conformal is None else {"level": LEVEL, "guarantee": conformal[0].guarantee(LEVEL)},
        "chosen": getattr(model, "sentence", None),
        "evidence": None if task is None else evidence(model, task),
        "kl_weight": None if task is None else kl_weight(fitter.method, task),
        "chains": None if task is None else chains_of(model, task),
        "seconds": None if seconds is None else round(seconds, 3),
        "report": None if page is None else str(page),
    }
    if as_json:
        print_json(document)
    else:
        _print(document, model, source, task, parts.conformal)
    if page is not None:
        _write_page(page, slot, fitter, source, task, model, document, seconds, words)
        if not as_json:
            console().print(Text(f"report: {page}"), soft_wrap=True)


def _print(
    document: dict[str, Any], model: "Model", source: "Source", task: "Task | None", conformal: str | None
) -> None:
    from rich.text import Text

    from posterity.cli.frame.columns import columns
    from posterity.cli.frame.scores import chains_line, evidence_line, negative_limits, negative_limits_line
    from posterity.cli.frame.tasks import describe, kl_weight_line

    rows, name, scores = source.data, document["method"], document["scores"]
    known = [column for column in columns(rows) if column.key in scores]  # earlier releases stored fewer
    shown = "   ".join(f"{column.heading} {column.shown(scores[column.key])}" for column in known)
    network = "" if task is None else f", network {describe(task)}"
    lines = [f"{len(rows.test):,} test rows:   {shown}"] if len(rows.test) else []
    if not len(rows.test) and document["cv"] is None:
        lines.append(f"All {len(rows.train):,} rows are fitted: --cv 5 would score them by cross-validation.")
    if document["chosen"] is not None:
        lines.append(f"{AUTO}: {document['chosen']}")
    if task is not None:
        lines += [evidence_line(name, task, document["evidence"])] if document["evidence"] is not None else []
        lines += [chains_line(name, document["chains"])] if document["chains"] is not None else []
        lines += [line] if (line := kl_weight_line(name, task)) else []
    if source.preprocessing is not None and len(rows.test):
        count = negative_limits(model.predict(rows.test.inputs), source)
        lines += [line] if (line := negative_limits_line(source, {o.method_label(name): count})) else []
    if document["conformal"] is not None:
        promise = document["conformal"]["guarantee"]
        lines.append(f"Conformal prediction ({conformal}) at {100 * LEVEL:g} %: {promise}")
    out = console()
    out.print(Text(f"{rows.name}, {o.method_label(name)}{network}", "bold"), soft_wrap=True)
    if document["cv"] is not None:
        out.print(_fold_table(document["cv"], source))
    for line in (*lines, f"run folder: {document['run']}"):
        out.print(Text(line), soft_wrap=True)


def _write_page(
    path: Path,
    slot: "Slot",
    fitter: "Fitter",
    source: "Source",
    task: "Task | None",
    model: "Model",
    document: dict[str, Any],
    seconds: float | None,
    words: list[str],
) -> None:
    from posterity.cli.frame.columns import all_columns
    from posterity.cli.frame.options import LEVEL as OF_SCORES
    from posterity.cli.frame.outcomes import run_baselines, stored_outcome, verdict
    from posterity.cli.frame.outside import reach
    from posterity.cli.frame.pages import Subject, write_page
    from posterity.cli.frame.scores import far_lines
    from posterity.cli.frame.tasks import describe
    from posterity.report.html import paragraph, section, table
    from posterity.report.numbers import with_ends
    from posterity.storage import Part

    outcome = stored_outcome(fitter.method, source, model, slot.path, seconds)
    rows = [*(run_baselines(source, debug=False) if len(source.data.test) else []), outcome]
    more = []
    if (folds := document["cv"]) is not None:
        scored = [
            (column.heading.removeprefix("test "), *with_ends(value, folds["intervals"][column.key]))
            for column in all_columns(source.data)
            if (value := folds["scores"].get(column.key)) is not None
        ]
        title = f"{folds['folds']}-fold cross-validation"
        about = paragraph(f"Each of {folds['rows']:,} rows is scored by a fit to the other folds.")
        more.append(section(title, about, table(title, ["score", "value", f"{100 * OF_SCORES:g} % interval"], scored)))
    if document["conformal"] is not None:
        promise = document["conformal"]["guarantee"]
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
            document["settings"],
            far_lines(source.data, {outcome.label: far}) if (far := outcome.numbers.get("far")) else (),
            more=more,
            about={**known, "Run folder": str(slot.path), "Seed": str(fitter.settings.seed)},
            reach=Part({}, reach(source)),
        ),
    )


def _fold_table(folds: dict[str, Any], source: "Source") -> Any:
    """Return the table of the cross-validation scores."""
    from posterity.cli.frame.columns import all_columns
    from posterity.cli.frame.options import LEVEL

    by = {"random": "", "group": " by group", "time": " in time order"}[source.order]
    heading = f"{folds['folds']}-fold cross-validation{by}, {folds['rows']} rows"
    rows = table(heading, "score", f"{100 * LEVEL:g} % interval")
    for column in all_columns(source.data):
        if column.key in folds["scores"]:
            ends = folds["intervals"][column.key]
            value = column.shown(folds["scores"][column.key])
            rows.add_row(column.heading.removeprefix("test "), value, column.interval(ends))
    return rows
