"""`posterity plan`: what methods take in memory, before anything is fitted."""

from typing import TYPE_CHECKING, Any

import typer

from posterity.cli.frame import options as o

if TYPE_CHECKING:
    from posterity.cli.frame.tasks import Task
    from posterity.inference import Plan


def plan(
    context: typer.Context,
    data: o.Data,
    methods: o.Methods = o.METHODS,
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
    """Tell how much memory methods would take on DATA; nothing is fitted."""
    from posterity.cli.frame.output import console, option_values, print_json
    from posterity.cli.frame.settings import method_names
    from posterity.cli.frame.sources import say_notes
    from posterity.cli.frame.tasks import asked, check_methods, plans

    names = method_names(methods)
    with option_values("plan"):
        task = asked(context.params)  # all options of data, network and optimiser, by name
        check_methods(names, task)
    say_notes(task.source, quiet=quiet)
    found = plans(names, task)
    if as_json:
        print_json(_document(task, found))
    else:
        _print(console(), task, found)


def _document(task: "Task", found: dict[str, "Plan"]) -> dict[str, Any]:
    memory = next(iter(found.values())).memory
    return {
        "data": task.data.name,
        "task": task.data.task,
        "network": task.network.config,
        "settings": {**task.settings.config(), **task.source.config},
        "device": str(task.joint.device),
        "memory": memory,
        "stages": [
            {
                "stage": stage,
                "method": each.method,
                "parts": each.parts,
                "total": each.total,
                "fits": each.fits,
                "predictions": each.predictions,
                "alternatives": [
                    {"setting": name, "total": needed, "fits": each.has_room(needed)}
                    for name, needed in each.alternatives.items()
                ],
            }
            for stage, each in found.items()
        ],
    }


def _print(out: Any, task: "Task", found: dict[str, "Plan"]) -> None:
    from rich.text import Text

    from posterity.cli.frame.tasks import describe

    out.print(Text(f"{task.data.name}, network {describe(task)}", "bold"), soft_wrap=True)
    for each in found.values():
        out.print()
        out.print(Text(str(each)), soft_wrap=True)
