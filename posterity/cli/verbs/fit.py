"""`posterity fit`: one posterior into a run folder, resumable at any moment."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from posterity.cli.frame import options as o

if TYPE_CHECKING:
    from posterity.cli.frame.tasks import Task
    from posterity.inference import Checkpoint


def fit(
    context: typer.Context,
    data: o.Data,
    out: Annotated[Path, typer.Option(metavar="RUN", help="The run folder to make.", show_default=False)],
    method: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="map, laplace, mean-field, conjugate, dropout, ensemble, natural-gradient, swag, sgld, sghmc, "
            "nuts or hmc.",
        ),
    ] = "laplace",
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
    checkpoint_steps: Annotated[
        int | None, typer.Option(metavar="N", help="Store the run after so many steps.", show_default=False)
    ] = None,
    checkpoint_seconds: Annotated[float, typer.Option(metavar="S", help="Store the run after so many seconds.")] = 60.0,
    device: o.Device = "auto",
    force: Annotated[
        bool, typer.Option("--force", help="Start anew in a folder that holds another run; replace it at the end.")
    ] = False,
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
    """Fit a posterior to DATA and keep it in the folder RUN.

    A run that was stopped or killed goes on when the same command is given again, and ends with the same bits.
    """
    from posterity.cli.frame.folders import Slot
    from posterity.cli.frame.output import log, option_values
    from posterity.cli.frame.settings import method_name
    from posterity.cli.frame.sources import say_notes
    from posterity.cli.frame.tasks import asked, check_memory, check_methods
    from posterity.errors import positive
    from posterity.inference import Checkpoint

    name = method_name(method)
    with option_values("fit"):
        task = asked(context.params)  # all options of data, network and optimiser, by name
        check_methods((name,), task)
        check_memory((name,), task)
        positive("--checkpoint-seconds", checkpoint_seconds)
        positive("--checkpoint-steps", 1 if checkpoint_steps is None else checkpoint_steps)
        every = Checkpoint(out, checkpoint_seconds, checkpoint_steps)
    say_notes(task.source, quiet=quiet)
    slot = Slot(out, task.config(name))
    seconds = None
    if slot.finished(force=force):
        log(f"{out} is finished already.", quiet=quiet)
    else:
        seconds = _run(slot, task, name, every, force=force, quiet=quiet)
    _report(slot, task, name, seconds, as_json)


def _run(slot: Any, task: "Task", name: str, every: "Checkpoint", *, force: bool, quiet: bool) -> float:
    """Run all stages and put the result in its place; the seconds that this took."""
    from dataclasses import replace

    from posterity.cli.frame.output import log
    from posterity.cli.frame.scores import scores
    from posterity.cli.frame.settings import METHODS
    from posterity.cli.frame.tasks import fitting_threads, run_stage
    from posterity.errors import Diverged
    from posterity.storage import Part

    seconds, trace, posterior = 0.0, {}, None
    try:
        with slot.running(force=force), fitting_threads(task):
            for number, stage in enumerate(METHODS[name], start=1):
                checkpoint = replace(every, path=slot.stage(number, stage))
                done = run_stage(stage, task, posterior, checkpoint=checkpoint, quiet=quiet)
                posterior, seconds = done.posterior, seconds + done.seconds
                for column, tensor in done.trace.tensors().items():
                    kind, _, rest = column.partition(".")
                    trace[f"{kind}.{stage}.{rest}"] = tensor  # "value.map.loss": `Trace.from_tensors` reads it
            assert posterior is not None
            result = {"trace": Part({}, trace), "scores": Part({**scores(posterior, task.source)})}
            slot.finish({**posterior.parts(), **result, **task.source.part()})
    except Diverged:
        slot.discard()  # the same numbers would only come again
        raise
    except KeyboardInterrupt:
        log(f"The run so far is kept in {slot.path}: the same command goes on from there.", quiet=quiet)
        raise
    return seconds


def _report(slot: Any, task: "Task", name: str, seconds: float | None, as_json: bool) -> None:
    from rich.text import Text

    from posterity.cli.frame.folders import open_run
    from posterity.cli.frame.output import console, print_json
    from posterity.cli.frame.scores import chains_line, chains_of, columns, evidence, evidence_line
    from posterity.cli.frame.tasks import describe, kl_weight, kl_weight_line, label

    posterior = open_run(slot.path)[1]
    values, found, told = slot.scores(), evidence(posterior, task), chains_of(posterior, task)
    if as_json:
        print_json(
            {
                "run": str(slot.path),
                "finished_already": seconds is None,
                "data": task.data.name,
                "task": task.data.task,
                "method": name,
                "network": task.network.config,
                "settings": {**task.settings.config(), **task.source.config},
                "scores": values,
                "evidence": found,
                "kl_weight": kl_weight(name, task),
                "chains": told,
                "seconds": None if seconds is None else round(seconds, 3),
            }
        )
        return
    shown = "   ".join(f"{column.heading} {column.shown(values[column.key])}" for column in columns(task.data))
    out = console()
    out.print(Text(f"{task.data.name}, {label(name)}, network {describe(task)}", "bold"), soft_wrap=True)
    out.print(Text(f"{len(task.data.test)} test rows:   {shown}"), soft_wrap=True)
    if found is not None:
        out.print(Text(evidence_line(name, task, found)), soft_wrap=True)
    if told is not None:
        out.print(Text(chains_line(name, told)), soft_wrap=True)
    if line := kl_weight_line(name, task):
        out.print(Text(line), soft_wrap=True)
    out.print(Text(f"run folder: {slot.path}"), soft_wrap=True)
