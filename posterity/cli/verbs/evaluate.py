"""`posterity evaluate`: the scores of a finished run."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from posterity.cli.frame import options as o
from posterity.cli.frame.output import UsageError, console, finite, option_values, print_json, table
from posterity.cli.frame.spread import command
from posterity.options import option, refused

if TYPE_CHECKING:
    from torch import Tensor

    from posterity.cli.frame.folders import Run
    from posterity.cli.frame.sources import Source
    from posterity.predictive.predictive import Predictive

COVERAGES = (1.0, 0.95, 0.9, 0.8, 0.7, 0.5)  # shares of answered rows for which abstention is shown
MOST_CLASSES = 10  # most classes of a printed confusion matrix


def _numbers(text: str) -> tuple[float, ...]:
    words = text.replace(";", ",").split(",")
    try:
        values = tuple(float(word) for word in words)
    except ValueError:
        values = (math.nan,)
    if not all(map(math.isfinite, values)):
        raise refused(f"--costs must be numbers with commas between them. Got '{text}'.", COSTS_HINT)
    return values


COSTS_HINT = (
    "--costs 1,5 is 1 for a false alarm and 5 for a miss of the second class; for more classes give a row for each "
    "true class, a column for each decision."
)


@dataclass(frozen=True)
class EvaluateOptions:
    """Rows to score, and further results."""

    data: str | None = option(
        None,
        help="A file with the target column, or a data set whose test rows to take.",
        unit="DATA",
        usual="the run's test rows",
        panel="Data",
    )
    costs: tuple[float, ...] = option(
        (),
        help="Costs of decisions: of a false alarm and a miss of the second of two classes, as 1,5; or a row for each "
        "true class, one after the other. A last column more is the cost of not deciding.",
        unit="NUMBERS",
        parse=_numbers,
    )
    importance: bool = option(
        False, help="How much the NLL rises when a column is permuted, for each.", flags=("--importance",)
    )
    report: Path | None = o.REPORT


@command
def evaluate(
    context: typer.Context,
    run: o.Run,
    intervals: o.IntervalOptions,
    wanted: EvaluateOptions,
    reading: o.ReadingOptions,
    as_json: o.Json = False,
) -> None:
    """Score the posterior in RUN on rows whose targets are known, each score with its 95 % bootstrap interval.

    Also tells how many of the rows were fitted, and the risk where the least certain rows are left unanswered.
    """
    from posterity.cli.frame.columns import scores_and_intervals
    from posterity.cli.frame.folders import find_rows, find_run
    from posterity.cli.frame.importance import column_importance
    from posterity.cli.frame.sources import say_notes
    from posterity.report.files import check_report_path

    with option_values("evaluate"):
        if wanted.report is not None:
            check_report_path(wanted.report)
    opened = find_run(run)
    with option_values("evaluate"):
        intervals.check_task(classifies=opened.config["classes"] is not None)
    source = find_rows(opened, wanted.data, reading, "evaluate", targets=True)
    with option_values("evaluate"):
        costs = _cost_table(wanted.costs, source)
    say_notes(source)
    predictive = opened.posterior.predict(source.data.test.inputs)
    values, ends = scores_and_intervals(predictive, source, intervals.probability)
    importance = None
    if wanted.importance:
        importance = column_importance(opened.posterior.predict, opened.preprocessing, *source.data.test.pair)
    document = {
        "run": str(run),
        "data": source.data.name,
        "task": source.data.task,
        "method": str(opened.config["method"]),
        "rows": len(source.data.test),
        "level": intervals.probability,
        "scores": values,
        "intervals": ends,
        "conformal": _conformal(run, opened, source, intervals.probability) if intervals.conformal else None,
        "fitted_rows": _fitted_rows(opened, source),
        "abstention": _abstention(predictive, source),
        "confusion": _confusion(predictive, source, None),
        "decisions": None if costs is None else _decisions(predictive, source, costs),
        "importance": importance,
        "report": None if wanted.report is None else str(wanted.report),
    }
    if as_json:
        print_json(finite(document))
    else:
        _print(document, source)
        if wanted.report is not None:
            console().print(f"report: {wanted.report}", soft_wrap=True, markup=False)
    if wanted.report is not None:  # after the scores, so that an error in the page does not lose them
        _write_page(wanted.report, run, opened, source, document, context.obj)


def _write_page(
    path: Path, run: Path, opened: "Run", source: "Source", document: dict[str, Any], words: list[str]
) -> None:
    from posterity.cli.frame.pages import subject_of_run, write_page
    from posterity.report.html import section
    from posterity.report.html import table as html_table
    from posterity.report.numbers import number

    abstention = document["abstention"]
    answered = [
        (f"{100 * share:g} %", number(risk))
        for share, risk in zip(abstention["answered"], abstention["risks"], strict=True)
    ]
    heads = ["rows answered", abstention["risk"]]
    surest = section("Where only the surest rows are answered", html_table("Abstention", heads, answered))
    subject = subject_of_run(
        run,
        opened,
        source,
        words,
        remarks=_lines(document)[: bool(document["conformal"])],
        cautions=[_fitted_line(document)] if document["fitted_rows"] else [],
        more=[surest],
        level=document["level"],
    )
    write_page(path, subject)


def _fitted_line(document: dict[str, Any]) -> str:
    return (
        f"{document['fitted_rows']:,} of these {document['rows']:,} rows were fitted: on them the scores say how well "
        "the run remembers, not how well it predicts."
    )


def _cost_table(numbers: tuple[float, ...], source: "Source") -> list[list[float]] | None:
    """Return the costs by true class and decision."""
    if not numbers:
        return None
    classes = source.data.classes
    if classes is None:
        raise UsageError("--costs is for classes, and the target is a number.", "leave --costs out.")
    count = len(classes)
    if count == 2 and len(numbers) == 2:
        return [[0.0, numbers[0]], [numbers[1], 0.0]]
    if len(numbers) not in (count**2, count * (count + 1)):
        wanted = f"{count**2} numbers for {count} classes" + (", or 2" if count == 2 else "")
        raise UsageError(f"--costs must be {wanted}. Got {len(numbers)}.", COSTS_HINT)
    width = len(numbers) // count
    return [list(numbers[row * width : (row + 1) * width]) for row in range(count)]


def _conformal(run: Path, opened: "Run", source: "Source", level: float) -> dict[str, Any]:
    """Return coverage and mean width, or mean size of sets, of conformal prediction, with bootstrap intervals."""
    from posterity.cli.frame.folding import predicted_by_folds
    from posterity.metrics import bootstrap
    from posterity.metrics.scores import mean_over_rows
    from posterity.predictive.conformal import ConformalIntervals, ConformalSets

    conformal, predictives, targets = predicted_by_folds(run, opened, source)
    if isinstance(conformal, ConformalIntervals):
        lower, upper = (end.flatten(1).cpu() for end in conformal.interval(predictives, level))
        y = targets.double().reshape(lower.shape).cpu()
        hits = ((lower <= y) & (y <= upper)).double().mean(1)
        ends = (lower.exp(), upper.exp()) if source.log_target else (lower, upper)
        size = (ends[1] - ends[0]).mean(1)
    else:
        assert isinstance(conformal, ConformalSets)
        sets = conformal.sets(predictives, level).cpu()
        hits, size = sets.gather(1, targets.cpu().unsqueeze(1))[:, 0].double(), sets.double().sum(1)
    scores = {"coverage": hits, "set_size" if source.data.classes else "width": size}

    def scored(rows: "Tensor") -> Any:
        return bootstrap(mean_over_rows(lambda pred, y: rows), predictives[0], targets)

    intervals = {name: scored(rows) for name, rows in scores.items()}
    return {
        "level": level,
        "guarantee": conformal.guarantee(level),
        "scores": {name: score.value for name, score in intervals.items()},
        "intervals": {name: [score.lower, score.upper] for name, score in intervals.items()},
    }


def _fitted_rows(opened: "Run", source: "Source") -> int | None:
    """Count the rows that the run was fitted to; None if its folder does not have their hashes."""
    import torch

    from posterity.cli.frame.sources import row_hashes

    if opened.fitted is None:
        return None
    return int(torch.isin(row_hashes(source.data.test), opened.fitted).sum())


def _abstention(predictive: "Predictive", source: "Source") -> dict[str, Any]:
    """Return the risk among the most certain rows, by their share."""
    from posterity.metrics import risk_coverage

    predictive, targets, scale = source.own_units(predictive)
    curve = risk_coverage(predictive, targets)
    return {
        "risk": "error rate" if predictive.classifies else "RMSE",
        "answered": list(COVERAGES),
        "risks": [curve.at(share) * scale for share in COVERAGES],
        "area": curve.area * scale,
    }


def _confusion(predictive: "Predictive", source: "Source", costs: list[list[float]] | None) -> dict[str, Any] | None:
    """Return counts by true class and decision, with 'abstain' as the last if `costs` has it; None for regression."""
    from posterity.metrics import confusion_matrix, decisions

    if source.data.classes is None:
        return None
    names = list(source.data.classes)
    if costs is None or len(costs[0]) == len(names):
        counts = confusion_matrix(predictive, source.data.test.targets, costs).tolist()
        return {"classes": names, "decisions": names, "counts": counts}
    made = decisions(predictive, costs).tolist()
    counts = [[0] * len(costs[0]) for _ in names]
    for label, decision in zip(source.data.test.targets.tolist(), made, strict=True):
        counts[label][decision] += 1
    return {"classes": names, "decisions": [*names, "abstain"], "counts": counts}


def _decisions(predictive: "Predictive", source: "Source", costs: list[list[float]]) -> dict[str, Any]:
    """Return the mean cost of decisions of least expected cost, with their threshold and confusion matrix."""
    from posterity.metrics import bootstrap, cost_threshold, mean_cost
    from posterity.metrics.scores import mean_over_rows

    threshold = None
    if len(costs) == len(costs[0]) == 2:
        with option_values("evaluate"):
            threshold = cost_threshold(costs)
    targets = source.data.test.targets
    value, lower, upper = bootstrap(mean_over_rows(lambda p, y: mean_cost.rows(p, y, costs)), predictive, targets)
    usual = predictive.probs.argmax(1).tolist()
    plain = sum(costs[label][answer] for label, answer in zip(targets.tolist(), usual, strict=True)) / len(usual)
    return {
        "costs": costs,
        "threshold": threshold,
        "mean_cost": value,
        "interval": [lower, upper],
        "mean_cost_of_most_probable": plain,
        "confusion": _confusion(predictive, source, costs),
    }


def _print(document: dict[str, Any], source: "Source") -> None:
    from rich.text import Text

    from posterity.cli.frame.columns import all_columns
    from posterity.cli.frame.options import LEVEL
    from posterity.report.numbers import number

    out, label = console(), o.method_label(document["method"])
    title = f"{document['data']}, {document['rows']:,} rows, {label}, run {document['run']}"
    out.print(Text(title, "bold"), soft_wrap=True)
    rows = table("score", label, f"{100 * LEVEL:g} % interval")
    for column in all_columns(source.data, document["level"]):
        ends = document["intervals"][column.key]
        of_one = column.key == "average_precision" and source.data.classes and len(source.data.classes) == 2
        heading = f"{column.heading} ({source.data.classes[1]})" if of_one else column.heading  # type: ignore[index]
        rows.add_row(heading, column.shown(document["scores"][column.key]), column.interval(ends))
    for key, value in (document["conformal"] or {"scores": {}})["scores"].items():
        lower, upper = document["conformal"]["intervals"][key]
        heading = f"conformal {key.replace('_', ' ')} at {100 * document['level']:g} %"
        rows.add_row(heading, number(value), f"{number(lower)} to {number(upper)}")
    out.print(rows)
    for confusion in (document["confusion"], (document["decisions"] or {}).get("confusion")):
        if confusion is not None and len(confusion["classes"]) <= MOST_CLASSES:
            heading = "true class" if confusion is document["confusion"] else "true class, by costs"
            counts = table(heading, *confusion["decisions"])
            for name, line in zip(confusion["classes"], confusion["counts"], strict=True):
                counts.add_row(name, *map(str, line))
            out.print(counts)
    for line in _lines(document):
        out.print(Text(line), soft_wrap=True)
    if document["importance"] is not None:
        rows = table("permuted column", "rise of NLL", "standard error")
        for row in document["importance"]:
            rows.add_row(row["column"], f"{row['nll_rise']:.4f}", f"{row['standard_error']:.4f}")
        out.print(rows)


def _lines(document: dict[str, Any]) -> list[str]:
    """Return the lines below the table."""
    from posterity.report.numbers import number

    lines, abstention = [], document["abstention"]
    if (conformal := document["conformal"]) is not None:
        lines.append(f"Conformal prediction at {100 * conformal['level']:g} %: {conformal['guarantee']}")
    if document["fitted_rows"]:
        lines.append(_fitted_line(document))
    risks = "; ".join(
        f"{100 * share:g} %: {number(risk)}"
        for share, risk in zip(abstention["answered"], abstention["risks"], strict=True)
    )
    lines.append(f"{abstention['risk']} where only the surest rows are answered: {risks}.")
    if (decided := document["decisions"]) is not None:
        lower, upper = decided["interval"]
        second = decided["confusion"]["classes"][1]
        cut = "" if decided["threshold"] is None else f" ({second} from probability {decided['threshold']:.4g} on)"
        lines.append(
            f"Decisions of least expected cost{cut} cost {number(decided['mean_cost'])} a row (95 % interval "
            f"{number(lower)} to {number(upper)}); the most probable class costs "
            f"{number(decided['mean_cost_of_most_probable'])}."
        )
    return lines
