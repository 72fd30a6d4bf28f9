"""`posterity fit`: one posterior into a run folder, resumable at any moment."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from posterity.cli.frame import options as o
from posterity.cli.frame.options import MethodOption
from posterity.cli.frame.output import console, log, option_values, print_json
from posterity.cli.frame.spread import command
from posterity.errors import positive, positive_whole
from posterity.options import check, option
from posterity.recipes.methods import RECIPES
from posterity.recipes.settings import Settings

if TYPE_CHECKING:
    from posterity.cli.frame.tasks import Task
    from posterity.inference import Checkpoint


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

    def __post_init__(self) -> None:
        check(self)


@command
def fit(
    data: o.Data,
    asked: MethodOption,
    settings: Settings,
    columns: o.TableOptions,
    reading: o.ReadingOptions,
    run: RunOptions,
    device: o.Device = "auto",
    quiet: o.Quiet = False,
    as_json: o.Json = False,
) -> None:
    """Fit a posterior to DATA and keep it in the folder RUN.

    A run that was stopped or killed goes on when the same command is given again, and ends with the same bits.
    """
    from posterity.cli.frame.folders import Slot
    from posterity.cli.frame.sources import say_notes
    from posterity.cli.frame.tasks import check_memory, make_task
    from posterity.inference import Checkpoint

    name = asked.method
    with option_values("fit"):
        task = make_task(data, (name,), settings, columns, reading, device)
        check_memory((name,), task)
        every = Checkpoint(run.out, run.checkpoint_seconds, run.checkpoint_steps)
    say_notes(task.source, quiet=quiet)
    slot = Slot(run.out, task.config(name))
    seconds = None
    if slot.finished(force=run.force):
        log(f"{run.out} is finished already.", quiet=quiet)
    else:
        seconds = _run(slot, task, name, every, force=run.force, quiet=quiet)
    _report(slot, task, name, seconds, as_json)


def _run(slot: Any, task: "Task", name: str, every: "Checkpoint", *, force: bool, quiet: bool) -> float:
    """Run all stages and put the result in its place; the seconds that this took."""
    from dataclasses import replace

    from posterity.cli.frame.columns import scores
    from posterity.cli.frame.tasks import fitting_threads, run_stage
    from posterity.errors import Diverged
    from posterity.storage import Part

    seconds, trace, posterior = 0.0, {}, None
    try:
        with slot.running(force=force), fitting_threads(task):
            for number, stage in enumerate(RECIPES[name].stages, start=1):
                checkpoint = replace(every, path=slot.stage(number, stage))
                done = run_stage(stage, task, posterior, checkpoint=checkpoint, quiet=quiet)
                posterior, seconds = done.posterior, seconds + done.seconds
                for column, tensor in done.trace.tensors().items():
                    kind, _, rest = column.partition(".")
                    trace[f"{kind}.{stage}.{rest}"] = tensor  # "value.map.loss": `Trace.from_tensors` reads it
            assert posterior is not None
            result = {
                "trace": Part({}, trace),
                "scores": Part({**scores(posterior.predict(task.data.test.inputs), task.source)}),
            }
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

    from posterity.cli.frame.columns import columns
    from posterity.cli.frame.folders import open_run
    from posterity.cli.frame.scores import (
        chains_line,
        chains_of,
        evidence,
        evidence_line,
        negative_limits,
        negative_limits_line,
    )
    from posterity.cli.frame.tasks import describe, kl_weight, kl_weight_line

    posterior = open_run(slot.path)[1]
    values = slot.scores(("test_nll",))
    tuned, told = evidence(posterior, task), chains_of(posterior, task)
    if as_json:
        print_json(
            {
                "run": str(slot.path),
                "finished_already": seconds is None,
                "data": task.data.name,
                "task": task.data.task,
                "method": name,
                "network": task.network.config,
                "settings": task.options,
                "scores": values,
                "evidence": tuned,
                "kl_weight": kl_weight(name, task),
                "chains": told,
                "seconds": None if seconds is None else round(seconds, 3),
            }
        )
        return
    known = [column for column in columns(task.data) if column.key in values]  # earlier releases stored fewer
    shown = "   ".join(f"{column.heading} {column.shown(values[column.key])}" for column in known)
    out = console()
    out.print(Text(f"{task.data.name}, {RECIPES[name].label}, network {describe(task)}", "bold"), soft_wrap=True)
    out.print(Text(f"{len(task.data.test)} test rows:   {shown}"), soft_wrap=True)
    if tuned is not None:
        out.print(Text(evidence_line(name, task, tuned)), soft_wrap=True)
    if told is not None:
        out.print(Text(chains_line(name, told)), soft_wrap=True)
    if line := kl_weight_line(name, task):
        out.print(Text(line), soft_wrap=True)
    if task.source.preprocessing is not None:
        count = negative_limits(posterior.predict(task.data.test.inputs), task.source)
        if line := negative_limits_line(task.source, {RECIPES[name].label: count}):
            out.print(Text(line), soft_wrap=True)
    out.print(Text(f"run folder: {slot.path}"), soft_wrap=True)
