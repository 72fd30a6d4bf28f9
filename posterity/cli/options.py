"""The options that several verbs share."""

from typing import Annotated

import typer

DATA_NAMES = ("two-moons", "sine", "line", "blobs")

Data = Annotated[str, typer.Argument(metavar="DATA", help=f"A data set: {', '.join(DATA_NAMES)}.", show_default=False)]
Hidden = Annotated[
    str | None,
    typer.Option(metavar="SIZES", help="Hidden layers, as 50,50, or none. Default: 50,50; 50 for sine, none for line."),
]
Activation = Annotated[str, typer.Option(metavar="NAME", help="Between the layers: tanh, relu, sigmoid, gelu or silu.")]
Steps = Annotated[int, typer.Option(metavar="N", help="Steps of the optimiser.")]
BatchSize = Annotated[str, typer.Option(metavar="N", help="Rows in a step, or all.")]
StepSize = Annotated[float, typer.Option(metavar="X", help="First step size of Adam; it falls to 0 along a cosine.")]
PriorScale = Annotated[float, typer.Option(metavar="S", help="Standard deviation of the prior of every weight.")]
Noise = Annotated[
    str | None,
    typer.Option(
        metavar="S",
        help="Standard deviation of the noise in regression, or learn. Default: learn; 0.5, the true one, for line.",
    ),
]
Temperature = Annotated[
    float | None, typer.Option(metavar="T", help="Cold posterior, (likelihood x prior)^(1/T). Default: 1.")
]
Eta = Annotated[
    float | None, typer.Option(metavar="E", help="Tempered posterior, likelihood^(1/E) x prior. Default: 1.")
]
Seed = Annotated[int, typer.Option(metavar="N", help="Fixes the starting weights and the order of rows.")]
Device = Annotated[str, typer.Option(metavar="NAME", help="auto, cpu or cuda.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress on standard error.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]

ACTIVATION = "tanh"
STEPS = 2000
BATCH_SIZE = "128"
STEP_SIZE = 0.01
PRIOR_SCALE = 1.0
