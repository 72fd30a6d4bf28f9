"""The options that several verbs share."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

DATA_NAMES = ("two-moons", "sine", "line", "blobs")
STRUCTURES = ("full", "corrected-kronecker", "kronecker", "block-diagonal", "diagonal", "low-rank")
ESTIMATORS = ("antithetic", "weights", "local", "flipout")

Data = Annotated[
    str,
    typer.Argument(
        metavar="DATA", help=f"A data set: {', '.join(DATA_NAMES)}, or a CSV or TSV file.", show_default=False
    ),
]
Methods = Annotated[
    str,
    typer.Option(
        metavar="NAMES",
        help="Of map, laplace, mean-field, conjugate, dropout, ensemble, natural-gradient, swag, sgld, sghmc, nuts and "
        "hmc.",
    ),
]
Run = Annotated[Path, typer.Argument(metavar="RUN", help="A run folder made by 'posterity fit'.", show_default=False)]
Hidden = Annotated[
    str | None,
    typer.Option(
        metavar="SIZES", help="Hidden layers, as 50,50, or none. Default: 50,50; 50 for sine and files, none for line."
    ),
]
Activation = Annotated[str, typer.Option(metavar="NAME", help="Between the layers: tanh, relu, sigmoid, gelu or silu.")]
Steps = Annotated[
    int | None,
    typer.Option(metavar="N", help="Steps of the optimiser. Default: 2000; for large files more, to 20000 at most."),
]
BatchSize = Annotated[str, typer.Option(metavar="N", help="Rows in a step, or all.")]
StepSize = Annotated[float, typer.Option(metavar="X", help="First step size of Adam; it falls to 0 along a cosine.")]
PriorScale = Annotated[
    float,
    typer.Option(
        metavar="S", help="Standard deviation of the prior of every weight; where laplace starts to look for a better."
    ),
]
Structure = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help=f"What laplace keeps of the curvature: {', '.join(STRUCTURES)}. Default: full up to 3000 weights, "
        "else kronecker.",
    ),
]
Tune = Annotated[
    bool,
    typer.Option(
        "--tune/--no-tune",
        help="Whether laplace moves the prior scale, and a noise to be learnt, to the largest evidence.",
    ),
]
Estimator = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="How mean-field draws for its gradient: weights (one draw a step), antithetic (steps in mirrored pairs), "
        "local (noise in the layers, for each row), flipout. Default: antithetic.",
    ),
]
KLWeight = Annotated[
    float | None,
    typer.Option(
        metavar="E",
        help="--eta for mean-field alone. Default: 1, the posterior itself; for classes training rows / (2 weights) if "
        "that is less, as 1 leaves most weights at the prior where they outnumber the rows.",
    ),
]
Noise = Annotated[
    str | None,
    typer.Option(
        metavar="S",
        help="Standard deviation of the noise in regression, in units of the target, or learn. "
        "Default: learn; 0.5, the true one, for line.",
    ),
]
Temperature = Annotated[
    float | None, typer.Option(metavar="T", help="Cold posterior, (likelihood x prior)^(1/T). Default: 1.")
]
Eta = Annotated[
    float | None, typer.Option(metavar="E", help="Tempered posterior, likelihood^(1/E) x prior. Default: 1.")
]
Dropout = Annotated[
    float | None, typer.Option(metavar="P", help="Rate behind each hidden layer, for dropout. Default: 0.1.")
]
Draws = Annotated[int | None, typer.Option(metavar="N", help="Draws of each chain of nuts and hmc. Default: 250.")]
Warmup = Annotated[
    int | None, typer.Option(metavar="N", help="Transitions of nuts and hmc before the draws. Default: 250.")
]
Chains = Annotated[int | None, typer.Option(metavar="N", help="Chains of nuts and hmc. Default: 4.")]
Seed = Annotated[
    int, typer.Option(metavar="N", help="Fixes the starting weights, the order of rows, and a file's test rows.")
]
Device = Annotated[str, typer.Option(metavar="NAME", help="auto, cpu or cuda.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress on standard error.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]

ACTIVATION = "tanh"
BATCH_SIZE = "128"
STEP_SIZE = 0.01
PRIOR_SCALE = 1.0
METHODS = "map,laplace"

FILES = "Files"
Target = Annotated[
    str | None,
    typer.Option(metavar="COLUMN", help="The column to predict; files need it.", rich_help_panel=FILES),
]
TaskName = Annotated[
    str,
    typer.Option("--task", metavar="NAME", help="auto, regression or classification.", rich_help_panel=FILES),
]
Drop = Annotated[
    list[str] | None,
    typer.Option(metavar="COLUMN", help="Leave this column out; may be given again.", rich_help_panel=FILES),
]
Category = Annotated[
    list[str] | None,
    typer.Option(
        metavar="COLUMN", help="Its numbers are names of categories; may be given again.", rich_help_panel=FILES
    ),
]
Separator = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="comma, semicolon, tab, pipe or whitespace. Default: found out.",
        rich_help_panel=FILES,
    ),
]
Decimal = Annotated[
    str | None,
    typer.Option(metavar="SIGN", help="The decimal mark, . or a comma. Default: found out.", rich_help_panel=FILES),
]
Header = Annotated[
    bool | None,
    typer.Option(
        "--header/--no-header",
        help="Whether the first line names the columns. Default: found out.",
        rich_help_panel=FILES,
    ),
]
Encoding = Annotated[
    str | None, typer.Option(metavar="NAME", help="As utf-8 or cp1252. Default: found out.", rich_help_panel=FILES)
]
TestFraction = Annotated[
    float, typer.Option(metavar="X", help="The part of the rows to test on.", rich_help_panel=FILES)
]
TEST_FRACTION = 0.2


@dataclass(frozen=True)
class TableOptions:
    """How to read a file; None is found out."""

    target: str | None = None
    task: str = "auto"
    drop: tuple[str, ...] = ()
    category: tuple[str, ...] = ()
    separator: str | None = None
    decimal: str | None = None
    header: bool | None = None
    encoding: str | None = None
    test_fraction: float = TEST_FRACTION

    def reading(self) -> dict[str, Any]:
        """What `read_table` takes whatever the file is read for."""
        return {name: getattr(self, name) for name in READING}

    def given(self) -> tuple[str, ...]:
        """The names of the options that are not at their default."""
        default = TableOptions()
        return tuple(name for name in asdict(self) if getattr(self, name) != getattr(default, name))

    def config(self) -> dict[str, Any]:
        """As JSON, for the description of a run; whether the task was given does not matter, the task does."""
        values = {**asdict(self), "drop": list(self.drop), "category": list(self.category)}
        del values["task"]
        return values

    @classmethod
    def stored(cls, config: dict[str, Any]) -> "TableOptions":
        """The options in the description of a run."""
        values = {name: config[name] for name in asdict(cls()) if name in config and name != "task"}
        return cls(**{**values, "drop": tuple(config["drop"]), "category": tuple(config["category"])})


READING = ("separator", "decimal", "header", "encoding")
