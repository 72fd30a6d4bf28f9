"""HTML pages of a comparison, a fit or an evaluation."""

import platform
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import posterity
from posterity.cli.frame.columns import best, columns, nll_rows
from posterity.cli.frame.folders import Run, training_rows
from posterity.cli.frame.options import LEVEL, METHODS
from posterity.cli.frame.outcomes import Outcome, run_baselines, shares, stored_outcome, verdict
from posterity.cli.frame.outside import distances, outside
from posterity.cli.frame.pageparts import (
    chains_part,
    curves_part,
    data_part,
    fields,
    fitted_part,
    importance_part,
    rows_part,
)
from posterity.cli.frame.scores import far_lines
from posterity.cli.frame.sources import Source
from posterity.predictive import Predictive
from posterity.report.charts import histogram
from posterity.report.embedded import LEVELS, chosen_rows, class_numbers, number_numbers
from posterity.report.html import page, paragraph, section, settings, table
from posterity.report.numbers import share
from posterity.report.sections import (
    by_method,
    class_sections,
    made_by,
    meanings,
    methods_chooser,
    numbers_sections,
    place,
    scores_table,
    warnings,
)
from posterity.storage import Part
from posterity.storage.disk import write_file

MOST_SHOWN = 3  # methods that figures show at first


@dataclass(frozen=True, eq=False)
class Subject:
    """The contents of a page.

    - `source`: the test rows, and the training rows if they are available.
    - `outcomes`: baselines and methods, in the order of the table; `verdict`: over these, from `outcomes.verdict`.
    - `remarks`: lines below the scores; `cautions`: warnings at the top; `first` and `more`: further sections, before
      and after the sections of the predictions.
    - `reach`: the ranges of the training rows; `level`: the initial level of the intervals.
    - `settings`: all options with their values; `words`: the command line.
    """

    title: str
    lead: str
    source: Source
    outcomes: Sequence[Outcome]
    verdict: Mapping[str, Any] | None
    words: Sequence[str]
    settings: Mapping[str, Any]
    remarks: Sequence[str] = ()
    cautions: Sequence[str] = ()
    more: Sequence[str] = ()
    first: Sequence[str] = ()
    about: Mapping[str, str] = field(default_factory=dict)
    reach: Part | None = None
    level: float = LEVEL

    @property
    def methods(self) -> list[Outcome]:
        """The methods that worked; baselines are not among them."""
        return [outcome for outcome in self.outcomes if outcome.worked and outcome.word in METHODS]

    @property
    def taken(self) -> Outcome | None:
        """The method that the verdict takes, or the one with the lowest NLL if it takes a baseline."""
        by_word = {outcome.word: outcome for outcome in self.methods}
        if self.verdict is not None and self.verdict["take"] in by_word:
            return by_word[self.verdict["take"]]
        return min(self.methods, key=lambda outcome: outcome.numbers.get("test_nll") or 0.0, default=None)


def write_page(path: Path, subject: Subject) -> None:
    """Write the page of a subject atomically."""
    write_file(path, report(subject).encode("utf-8", "replace"))  # a path may hold bytes that are no text


def subject_of_run(path: Path, run: Run, source: Source, words: Sequence[str], **others: Any) -> Subject:
    """Return the page contents of a run scored at the test rows of a source, with baselines if it has training rows."""
    train = training_rows(run)
    if train is None:
        alone = "The training rows are not at hand, so there is no baseline to compare with."
        others["cautions"] = (*others.get("cautions", ()), alone)
        train = source.data.test.rows(torch.arange(0, device=source.data.test.inputs.device))
    source = replace(source, data=replace(source.data, train=train))
    outcome = stored_outcome(str(run.config["method"]), source, run.posterior, path)
    rows = [*(run_baselines(source, debug=False) if len(train) else ()), outcome]
    far = outcome.numbers.get("far")
    remarks = (*others.pop("remarks", ()), *(far_lines(source.data, {outcome.label: far}) if far else ()))
    return Subject(
        f"{outcome.label} of {path} on {source.data.name}",
        f"A finished run, scored on {len(source.data.test):,} rows.",
        source,
        rows,
        verdict(source, {each.word: each for each in rows if each.worked}),
        words,
        run.config,
        remarks=remarks,
        about={"Run folder": str(path)},
        reach=run.reach,
        **others,
    )


def report(subject: Subject, *, asks: bool = False) -> str:
    """Return the page of a subject; with `asks` it may contain a form that queries the server of the page."""
    numbers: dict[str, Any] = {"task": subject.source.data.task, "methods": [], "figures": {}}
    figures = numbers["figures"]
    predicted, packed = _predictions(subject) if len(subject.source.data.test) else ([], {})
    numbers.update(packed)
    chosen = [(outcome.word, outcome.label) for outcome in _by_rank(subject)] if predicted else []
    parts = [
        _heading(subject),
        *subject.first,
        _scores(subject),
        methods_chooser(chosen, _shown_first(subject)) if len(chosen) > 1 else "",
        *predicted,
        importance_part(subject.taken, subject.source, figures),
        _distance(subject, figures),
        *subject.more,
        by_method("How the fits went", "", curves_part(subject.methods, figures)),
        by_method("Chains", "", chains_part(subject.methods, subject.source, figures)),
        by_method("What was fitted", "", fitted_part(subject.methods, subject.source)),
        data_part(subject.source, figures),
        made_by(shlex.join(["posterity", *subject.words]), {**subject.about, **_versions()}),
        settings(subject.settings),
    ]
    return page(subject.title, parts, numbers, asks=asks)


def _heading(subject: Subject) -> str:
    title = f"<h1>{paragraph(subject.title)[3:-4]}</h1>"  # escaped
    verdict = "" if subject.verdict is None else paragraph(subject.verdict["sentence"], "verdict")
    return "\n".join([title, paragraph(subject.lead, "lead"), verdict, warnings(subject.cautions)])


def _versions() -> dict[str, str]:
    """Return the time, and the versions of Python and packages."""
    named = {"posterity": posterity.__version__, "python": platform.python_version()}
    named |= {name: import_module(name).__version__ for name in ("torch", "numpy")}
    made = datetime.now().astimezone().strftime("%Y-%m-%d %H:%M %Z")
    return {"Made": made, "With": ", ".join(f"{name} {version}" for name, version in named.items())}


def _scores(subject: Subject) -> str:
    data = subject.source.data
    shown = {column.key: column.heading for column in columns(data)}
    words = [outcome.word for outcome in subject.methods]
    rows = [
        {
            **outcome.numbers,
            "word": outcome.word,
            "label": outcome.label,
            "is_baseline": outcome.word not in METHODS,
            "failed": outcome.failed,
            "reason": outcome.reason,
            "starts_from": outcome.word in words and shares(outcome.word, words),
        }
        for outcome in subject.outcomes
    ]
    if not rows or not len(data.test):
        return ""
    winners = best({outcome.word: outcome.numbers for outcome in subject.outcomes if outcome.worked}, data)
    remarks = "".join(paragraph(line, "remarks") for line in subject.remarks)
    few = f"{100 * LEVEL:g} % bootstrap intervals over the {len(data.test):,} test rows stand below the scores."
    return section("Scores", paragraph(few, "note"), scores_table(rows, shown, winners), meanings(shown), remarks)


def _by_rank(subject: Subject) -> list[Outcome]:
    """Return methods, then baselines, in the order of their colours."""
    return [*subject.methods, *(each for each in subject.outcomes if each.worked and each.word not in METHODS)]


def _shown_first(subject: Subject) -> list[str]:
    """Return the methods that figures show initially: those that the verdict names, then the best."""
    ranked = sorted(_by_rank(subject), key=lambda outcome: outcome.numbers.get("test_nll") or 0.0)
    named = [] if subject.verdict is None else [subject.verdict["take"], subject.verdict["against"]]
    words = dict.fromkeys([*filter(None, named), *(outcome.word for outcome in ranked if outcome in subject.methods)])
    return [*words][:MOST_SHOWN]


def _predictions(subject: Subject) -> tuple[list[str], dict[str, Any]]:
    """Return the sections on predictions at test rows, and the numbers for their script."""
    source, ranked = subject.source, _by_rank(subject)
    known: dict[str, Predictive] = {}
    for outcome in ranked:
        assert outcome.predictive is not None
        if outcome.predictive.mean.dim() == 2:
            known[outcome.word] = source.affine_units(outcome.predictive)[0]
    if not known or (source.data.classes is None and source.data.test.targets.shape[1:] != (1,)):
        return [], {}
    index = chosen_rows([*known.values()])
    rows = {word: pred.rows(index.to(source.data.test.targets.device)) for word, pred in known.items()}
    targets = source.affine_units(next(iter(known.values())))[1].cpu()[index]
    names = row_names(source, index)
    count, total = len(index), len(source.data.test)
    of_rows = (
        f"All {total:,} test rows." if count == total else f"{count:,} of {total:,} test rows, evenly spaced in order."
    )
    labels = {outcome.word: outcome.label for outcome in ranked}
    more = fields(subject.methods, source, _levels(subject.level))
    if source.data.classes is not None:
        packed = class_numbers(rows, targets)
        packed["classes"] = list(source.data.classes)
        sections = class_sections(source.data.classes, of_rows, has_map="map" in more)
    else:
        levels = _levels(subject.level)
        packed = number_numbers(rows, targets[:, 0].double(), levels, log=source.log_target)
        packed["log"], packed["unit"] = source.log_target, source.unit
        sections = numbers_sections(levels, subject.level, of_rows, has_line="line" in more)
    own: Any = packed["methods"]
    packed["methods"] = [{"word": word, "label": labels[word], **own[word]} for word in known]
    nll = {
        outcome.word: nll_rows(outcome.predictive, source).cpu()[index]
        for outcome in ranked
        if outcome.word in known and outcome.predictive is not None
    }
    taken = None if subject.taken is None else subject.taken.word
    parts = {
        (word, labels[word]): rows_part(labels[word], rows[word], targets, nll[word], names, source, index)
        for word in sorted(rows, key=lambda word: word != taken)
    }
    about = "Where a method is least sure, and where it was most surprised: rows to look at first."
    return [*sections, by_method("Least sure, and worst", about, parts)], {**packed, **more, "rows": names}


def _levels(level: float) -> list[float]:
    return sorted({*LEVELS, level})


def row_names(source: Source, index: Tensor) -> list[str]:
    """Return where test rows come from: `line 17` of the file, or `row 17` of a built-in data set."""
    if source.table is None:
        return [f"row {number + 1}" for number in index.tolist()]
    first = source.table.columns[0]
    return [f"{first.place} {first.lines[source.test[number]]}" for number in index.tolist()]


def _distance(subject: Subject, figures: dict[str, Any]) -> str:
    """Return the section on distances from the training rows, and on the columns that put rows outside."""
    away, blamed = distances(subject.reach, subject.source), outside(subject.reach, subject.source)
    if away is None or blamed is None or not len(away):
        return ""
    names = [name for name in blamed if name]
    counts = sorted(((names.count(name), name) for name in set(names)), reverse=True)[:10]
    rows = f"{len(names):,} of {len(blamed):,} rows ({share(len(names) / len(blamed))}) are"
    text = (
        "A row is as far away as its farthest number is from the middle of the training rows; beyond 1 it lies "
        f"outside them by more than chance allows for about 1 % of rows like them. {rows} outside"
        + (", where a prediction is a guess of the model alone." if names else ".")
    )
    axis = "distance to the training rows; 1 is their border"
    figures["distance"] = histogram(
        "Distances of the rows to the training rows", axis, {"": away.clamp(max=5.0)}, rule=1.0
    )
    blame = table("Columns to blame", ["column", "rows"], [(name, f"{count:,}") for count, name in counts])
    far = int((away > 5.0).sum())
    note = paragraph(f"{far:,} rows are farther out than 5 and stand at 5.", "note") if far else ""
    return section("Like the training rows?", paragraph(text), place("distance"), note, blame if counts else "")
