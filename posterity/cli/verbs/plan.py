"""`posterity plan`: what methods take in memory and time, before anything is fitted."""

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from posterity.cli.frame import options as o
from posterity.cli.frame.options import MethodsOption
from posterity.cli.frame.output import console, option_values, print_json
from posterity.cli.frame.spread import command
from posterity.errors import positive_whole
from posterity.recipes.settings import Settings

if TYPE_CHECKING:
    from posterity.cli.frame.tasks import Task
    from posterity.inference import Plan


@command
def plan(
    data: o.Data,
    asked: MethodsOption,
    settings: Settings,
    columns: o.TableOptions,
    reading: o.ReadingOptions,
    device: o.Device = "auto",
    world_size: Annotated[
        int, typer.Option("--world-size", metavar="N", help="Of each of N devices that share the rows.")
    ] = 1,
    quiet: o.Quiet = False,
    as_json: o.Json = False,
) -> None:
    """Tell how much memory and time methods would take on DATA; nothing is fitted."""
    from posterity.cli.frame.sources import say_notes
    from posterity.cli.frame.tasks import make_task, plans

    with option_values("plan"):
        positive_whole("--world-size", world_size)
        task = make_task(data, asked.methods, settings, columns, reading, device)
    say_notes(task.source, quiet=quiet)
    needed = plans(asked.methods, task, world_size)
    if as_json:
        print_json(_document(task, needed))
    else:
        _print(task, needed)


def _document(task: "Task", needed: dict[str, "Plan"]) -> dict[str, Any]:
    memory = next(iter(needed.values())).memory
    return {
        "data": task.data.name,
        "task": task.data.task,
        "network": task.network.config,
        "settings": task.options,
        "device": str(task.joint.device),
        "memory": memory,
        "world_size": next(iter(needed.values())).world_size,
        "stages": [
            {
                "stage": stage,
                "method": each.method,
                "parts": each.parts,
                "total": each.total,
                "fits": each.fits,
                "predictions": each.predictions,
                "time": None if each.time is None else {**asdict(each.time), "total": each.time.total},
                "alternatives": [
                    {"setting": name, "total": total, "fits": each.has_room(total)}
                    for name, total in each.alternatives.items()
                ],
            }
            for stage, each in needed.items()
        ],
    }


def _print(task: "Task", needed: dict[str, "Plan"]) -> None:
    from rich.text import Text

    from posterity.cli.frame.tasks import describe

    out = console()
    out.print(Text(f"{task.data.name}, network {describe(task)}", "bold"), soft_wrap=True)
    for each in needed.values():
        out.print()
        out.print(Text(str(each)), soft_wrap=True)
