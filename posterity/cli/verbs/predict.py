"""`posterity predict`: prints the predictions of a finished run as a table."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from posterity.cli.frame import options as o
from posterity.cli.frame.output import UsageError, finite, log, option_values, print_json
from posterity.cli.frame.predictions import by_output, csv_text, predicted_columns
from posterity.cli.frame.spread import command
from posterity.options import check, option, refused

if TYPE_CHECKING:
    from posterity.cli.frame.folders import Run
    from posterity.cli.frame.sources import Source


def _numbers(text: str) -> tuple[float, ...]:
    try:
        return tuple(float(word) for word in text.split(","))
    except ValueError:
        raise refused(
            f"--quantiles must be numbers with commas between them. Got '{text}'.", "as in --quantiles 0.05,0.5,0.95."
        ) from None


@dataclass(frozen=True)
class PredictOptions:
    """Further columns of the predictions."""

    quantiles: tuple[float, ...] = option(
        (), help="Columns for these quantiles too, as 0.05,0.5,0.95.", unit="NUMBERS", parse=_numbers, check=o.between
    )

    def __post_init__(self) -> None:
        check(self)

    def check_task(self, *, classifies: bool) -> None:
        """Raise a `UsageError` if an option does not suit the task."""
        if classifies and self.quantiles:
            raise UsageError("--quantiles is for numbers, and the run predicts classes.", "leave --quantiles out.")


@command
def predict(
    run: o.Run,
    intervals: o.IntervalOptions,
    wanted: PredictOptions,
    reading: o.ReadingOptions,
    data: Annotated[
        str | None,
        typer.Option(
            "--data",
            metavar="DATA",
            help="A file whose rows to predict, or a data set whose test inputs to take. Default: the run's test rows.",
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="FILE", help="Write the CSV here. Default: standard output.")
    ] = None,
    as_json: o.Json = False,
) -> None:
    """Predict with the posterior in RUN; prints CSV, the inputs first, in the order of the rows.

    Regression: mean, std, and lower and upper, between which 95 % of targets fall; the std due to noise (aleatoric) and
    to what the training rows leave open (epistemic).

    Classification: a probability p_ for each class, the prediction, the entropy in nats, and the same two parts of it.

    The last column, outside, names the column that puts a row outside the training rows; empty for others.
    """
    from posterity.cli.frame.folders import find_rows, find_run
    from posterity.cli.frame.outside import outside
    from posterity.cli.frame.sources import say_notes
    from posterity.storage.disk import write_file

    if out is not None and data is not None and out.exists() and Path(data).exists() and out.samefile(data):
        raise UsageError(f"--out {out} is the file to predict, and would be lost.", "name another file.")
    opened = find_run(run)
    with option_values("predict"):
        for options in (wanted, intervals):
            options.check_task(classifies=opened.config["classes"] is not None)
    source = find_rows(opened, data, reading, "predict", targets=False)
    say_notes(source)
    rows, config = source.data, opened.config
    inputs = _inputs(source)
    level = intervals.probability
    predicted = predicted_columns(
        source, config["classes"], opened.posterior.predict(rows.test.inputs), level, wanted.quantiles
    )
    if intervals.conformal:
        predicted.update(_conformal(run, opened, source, level))
    if (columns_outside := outside(opened.reach, source)) is not None:
        predicted["outside"] = columns_outside
    columns = {**inputs, **{_free(name, inputs): values for name, values in predicted.items()}}
    if out is not None:
        write_file(out, csv_text(columns).encode())
        log(f"{len(rows.test)} predictions in {out}", quiet=as_json)
    if as_json:
        print_json(
            {
                "run": str(run),
                "data": rows.name,
                "task": rows.task,
                "method": config["method"],
                "columns": list(columns),
                "rows": finite(list(zip(*columns.values(), strict=True))),
                "file": None if out is None else str(out),
            },
            indent=None,
        )
    elif out is None:
        print(csv_text(columns), end="")


def _inputs(source: "Source") -> dict[str, list[Any]]:
    """Return the columns of the file as written, or the inputs x1, x2, ..."""
    if source.table is not None:
        return {column.name: list(column.fields) for column in source.table.rows(source.test).columns}
    return {f"x{index}": column.tolist() for index, column in enumerate(source.data.test.inputs.T, start=1)}


def _conformal(run: Path, opened: "Run", source: "Source", level: float) -> dict[str, list[Any]]:
    """Return the ends of conformal intervals, or the sets of classes, and log their guarantee."""
    from posterity.cli.frame.folding import predicted_by_folds
    from posterity.predictive.conformal import ConformalIntervals, ConformalSets

    conformal, predictives, _ = predicted_by_folds(run, opened, source)
    log(f"Conformal prediction at {100 * level:g} %: {conformal.guarantee(level)}")
    if isinstance(conformal, ConformalIntervals):
        ends = conformal.interval(predictives, level)
        lower, upper = (end.exp() for end in ends) if source.log_target else ends
        return {**by_output("conformal_lower", lower.mT.tolist()), **by_output("conformal_upper", upper.mT.tolist())}
    assert isinstance(conformal, ConformalSets)
    names: Sequence[str] = opened.config["classes"]
    sets = conformal.sets(predictives, level).tolist()
    return {"conformal_set": ["|".join(n for n, kept in zip(names, row, strict=True) if kept) for row in sets]}


def _free(name: str, taken: dict[str, list[Any]]) -> str:
    """Return `name`, with a prefix if the file has a column of that name."""
    while name in taken:
        name = f"predicted_{name}"
    return name
