"""The options that verbs share: data, methods, run and output."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from posterity.errors import positive
from posterity.options import check, comma_separated, option, refused
from posterity.recipes.methods import RECIPES

DATA_NAMES = ("two-moons", "sine", "line", "blobs", "waves")
OUTPUT = "Output"
REPORT: Any = option(None, help="Write all of it as one HTML page, with figures.", unit="FILE", panel=OUTPUT)
"""The field `report` of each verb that can write a page."""

Data = Annotated[
    str,
    typer.Argument(
        metavar="DATA",
        help=f"A data set: {', '.join(DATA_NAMES)}, or a CSV, TSV, Parquet or Excel file.",
        show_default=False,
    ),
]
Run = Annotated[Path, typer.Argument(metavar="RUN", help="A run folder made by 'posterity fit'.", show_default=False)]
Device = Annotated[str, typer.Option(metavar="NAME", help="auto, cpu or cuda.", rich_help_panel=OUTPUT)]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress on standard error.", rich_help_panel=OUTPUT)]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document.", rich_help_panel=OUTPUT)]


class BareSwitches:
    """A command whose help omits the type of switches, which newer versions of typer print as <bool>."""

    def get_params(self, ctx: Any) -> list[Any]:  # the context's class moved between typer's versions
        """Return the parameters, with no metavar for switches."""
        parameters: list[Any] = super().get_params(ctx)  # type: ignore[misc]
        for each in parameters:
            if getattr(each, "is_bool_flag", False):
                each.metavar = ""
        return parameters


TEST_FRACTION = 0.2


def _share(name: str, value: float) -> None:
    if not 0 <= value < 1:
        raise refused(
            f"{name} must be from 0 up and below 1. Got {value:g}.",
            f"{TEST_FRACTION:g} tests on a fifth of the rows, 0 fits all of them.",
        )


_FILES: dict[str, Any] = {"panel": "Data"}


@dataclass(frozen=True)
class ReadingOptions:
    """How to read a text file; None: found out from the file."""

    separator: str | None = option(
        None, help="comma, semicolon, tab, pipe or whitespace.", unit="NAME", usual="found out", **_FILES
    )
    decimal: str | None = option(None, help="The decimal mark, . or a comma.", unit="SIGN", usual="found out", **_FILES)
    header: bool | None = option(None, help="Whether the first line names the columns.", usual="found out", **_FILES)
    encoding: str | None = option(None, help="As utf-8 or cp1252.", unit="NAME", usual="found out", **_FILES)
    thousands: str | None = option(
        None,
        help="The mark between groups of three digits: a comma, a point, a space, ' or _.",
        unit="SIGN",
        usual="none",
        **_FILES,
    )
    dates: str | None = option(
        None,
        help="What comes first in dates such as 1/2/2020: day-first or month-first.",
        unit="NAME",
        usual="found out where some day is above 12",
        **_FILES,
    )


@dataclass(frozen=True)
class TableOptions:
    """Roles of the columns of a file, and the division of its rows."""

    target: str | None = option(None, help="The column to predict; files need it.", unit="COLUMN", **_FILES)
    task: str = option("auto", help="auto, regression or classification.", unit="NAME", **_FILES)
    drop: tuple[str, ...] = option((), help="Leave this column out; may be given again.", unit="COLUMN", **_FILES)
    category: tuple[str, ...] = option(
        (), help="Its numbers are names of categories; may be given again.", unit="COLUMN", **_FILES
    )
    log_target: bool = option(
        False,
        help="Model the logarithm of a target that is above 0; predictions and scores are in its own units.",
        flags=("--log-target",),
        **_FILES,
    )
    test_fraction: float | None = option(
        None,
        help="The part of the rows to test on; 0 fits all rows.",
        unit="X",
        check=_share,
        usual=f"{TEST_FRACTION:g}; 0 with --cv",
        **_FILES,
    )
    group: str | None = option(
        None,
        help="Rows of one value in this column stay together, in test rows and in all folds. It is no input.",
        unit="COLUMN",
        **_FILES,
    )
    time: str | None = option(
        None,
        help="Rows are in the order of this column: later rows test fits to earlier ones, in all folds. It is no "
        "input.",
        unit="COLUMN",
        **_FILES,
    )
    keep: bool = option(
        False, help="The column of --group or --time is an input all the same.", flags=("--keep",), **_FILES
    )

    def __post_init__(self) -> None:
        check(self)
        if self.group is not None and self.time is not None:
            raise refused("--group and --time cannot be given together.", "leave one of them out.")
        if self.keep and self.group is self.time:
            raise refused("--keep is for the column of --group or --time, and neither is given.", "leave --keep out.")
        if self.target is not None and self.target in (self.group, self.time):
            raise refused(
                f"The column {self.target!r} cannot be both the target and the column of --group or --time.",
                "name another.",
            )


LEVEL = 0.95
"""Level of bootstrap intervals, and the default level of predictive intervals."""


def between(name: str, value: float) -> None:
    """Raise an error of usage unless a value is a probability above 0 and below 1."""
    if not 0 < value < 1:
        raise refused(f"{name} must be between 0 and 1. Got {value:g}.", f"as in {name} 0.9.")


@dataclass(frozen=True)
class IntervalOptions:
    """Which predictive intervals to show or to score."""

    level: float | None = option(
        None, help="Probability of the intervals, and of conformal sets.", unit="X", check=between, usual=f"{LEVEL:g}"
    )
    conformal: bool = option(
        False,
        help="Intervals, or sets of classes, whose coverage is guaranteed, too; for runs of 'fit --conformal'.",
        flags=("--conformal",),
    )

    def __post_init__(self) -> None:
        check(self)

    @property
    def probability(self) -> float:
        """The level, or its default."""
        return LEVEL if self.level is None else self.level

    def check_task(self, *, classifies: bool) -> None:
        """Raise an error of usage where an option does not suit the task."""
        if classifies and self.level is not None and not self.conformal:
            raise refused(
                "--level is for numbers and for conformal sets, and the run predicts classes.",
                "leave --level out, or add --conformal.",
            )


AUTO = "auto"
SECONDS = 60.0
METHODS = (*RECIPES, AUTO)
_BUDGET: dict[str, Any] = {
    "help": "The budget of auto on two CPU cores, from which its plan follows.",
    "unit": "S",
    "check": positive,
    "usual": f"{SECONDS:g}",
    "panel": "Method",
}


def method_label(word: str) -> str:
    """Return the name of a method in the spelling of the literature."""
    return RECIPES[word].label if word in RECIPES else word


@dataclass(frozen=True)
class MethodOption:
    """The method to fit by."""

    method: str | None = option(
        None,
        help="One of",
        unit="NAME",
        choices=METHODS,
        usual="auto for files; laplace for data sets, and where another option of a network or a method is given",
        panel="Method",
    )
    seconds: float | None = option(None, **_BUDGET)

    def __post_init__(self) -> None:
        check(self)


@dataclass(frozen=True)
class MethodsOption:
    """The methods to plan or to compare."""

    methods: tuple[str, ...] = option(
        ("map", "laplace"),
        help="Methods, with commas between them:",
        unit="NAMES",
        choices=tuple(RECIPES),
        parse=comma_separated,
        panel="Method",
    )

    def __post_init__(self) -> None:
        check(self)
        if not self.methods:
            raise refused("--methods names no method.", f"the methods are {', '.join(RECIPES)}.")


@dataclass(frozen=True)
class ComparedOption(MethodsOption):
    """The methods of a comparison, which may include `auto`."""

    methods: tuple[str, ...] = option(
        ("map", "laplace"),
        help="Methods, with commas between them:",
        unit="NAMES",
        choices=METHODS,
        parse=comma_separated,
        panel="Method",
    )
    seconds: float | None = option(None, **_BUDGET)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.seconds is not None and AUTO not in self.methods:
            raise refused("--seconds is for auto, which was not asked for.", "add auto to --methods, or leave it out.")
