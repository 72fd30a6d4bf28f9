"""Sections of a report in HTML: scores with intervals, controls, and placeholders of figures that scripts draw."""

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any, NamedTuple

from posterity.report.html import facts, paragraph, section, wide
from posterity.report.numbers import number, with_ends

MOST_CONFUSED = 12  # most classes of a confusion matrix
MEANINGS = {
    "test_nll": "NLL, the negative log-likelihood, is how surprised the method was by the test rows: it grows when a "
    "wrong answer was held for sure, and when a right one was doubted. Less is better, and a difference of 0.1 means "
    "that a row was on average about 10 % less probable.",
    "ece": "ECE, the expected calibration error, is how far confidence and accuracy lie apart: at 0.05, answers given "
    "with 90 % confidence might be right 85 % of the time. 0 is ideal; a finite test set never quite gets there.",
    "accuracy": "Accuracy is the share of the test rows whose most probable class was the right one. It does not see "
    "how sure the method was.",
    "auroc": "AUROC is the chance that a row of a class is given a larger probability of it than a row of another: 0.5 "
    "is guessing, 1 is perfect. It does not depend on how frequent the classes are, nor on a threshold.",
    "rmse": "RMSE, the root mean squared error, is the typical distance between the predicted mean and the target. "
    "It does not see the intervals; NLL does.",
    "r2": "R2 is the share of the targets' variance that the predicted means explain: 1 is perfect, and predicting the "
    "mean of the test rows has 0.",
    "coverage": "Coverage is the share of test rows whose target lies in its interval, of 95 % unless another level is "
    "named. Below the level the intervals are too narrow, above it too wide.",
}
"""Explanations of the scores."""


class Field(NamedTuple):
    """A field of the form for a row: a number, a choice or text, with the initial `value`."""

    name: str
    value: str = ""
    choices: Sequence[str] = ()
    is_number: bool = False


def scores_table(
    rows: Sequence[Mapping[str, Any]], scores: Mapping[str, str], best: Mapping[str, Sequence[str]]
) -> str:
    """Return the table of scores of baselines and methods with their intervals; `best` names the best rows by score.

    `scores` has headings by key. A row has the keys word, label, is_baseline, failed, reason, intervals, seconds and
    starts_from, and the keys of its scores.
    """
    headings = ["method", *scores.values(), "seconds"]
    head = "".join(f'<th scope="col">{escape(heading)}</th>' for heading in headings)
    body = []
    for row in rows:
        cells = [f'<th scope="row">{escape(row["label"])}</th>']
        if row["failed"]:
            cells.append(f'<td class="failed" colspan="{len(headings) - 1}">{escape(row["reason"])}</td>')
        else:
            cells += [_cell(row, key, row["word"] in best.get(key, ())) for key in scores]
            seconds = row.get("seconds")
            text = "-" if seconds is None else number(seconds, 2) if seconds >= 0.01 else "under 0.01"
            cells.append(f"<td>{'+' * bool(row.get('starts_from'))}{text}</td>")
        kind = ' class="baseline"' if row["is_baseline"] else ""
        body.append(f"<tr{kind}>{''.join(cells)}</tr>")
    lines = ["<table>", f"<thead><tr>{head}</tr></thead>", "<tbody>", *body, "</tbody>", "</table>"]
    return wide("Scores", "\n".join(lines))


def _cell(row: Mapping[str, Any], key: str, is_best: bool) -> str:
    value, ends = with_ends(row[key], (row.get("intervals") or {}).get(key))
    if not ends:  # a score without an interval, such as ECE: as many decimals as the command line prints
        value = f"{row[key]:.4f}" if row[key] is not None and abs(row[key]) < 1 else number(row[key], 3)
    small = f"<small>{ends}</small>" if ends else ""
    if not is_best:
        return f"<td>{value}{small}</td>"
    mark = '<span class="mark" aria-hidden="true">*</span><span class="unseen"> best</span>'
    return f'<td class="best">{value}{mark}{small}</td>'


def meanings(scores: Iterable[str]) -> str:
    """Return the explanations of the scores, collapsed."""
    paragraphs = "\n".join(paragraph(MEANINGS[key]) for key in scores if key in MEANINGS)
    return f"<details>\n<summary>How to read these scores</summary>\n{paragraphs}\n</details>"


def methods_chooser(methods: Sequence[tuple[str, str]], shown: Sequence[str]) -> str:
    """Return checkboxes of the methods (word, label) that figures show; `shown` are checked initially."""
    boxes = (
        f'<label><input type="checkbox" id="show-{escape(word)}"{" checked" * (word in shown)}>'
        f'<span class="swatch c{index % 8}"></span>{escape(label)}</label>'
        for index, (word, label) in enumerate(methods)
    )
    return (
        '<fieldset class="controls sticky" id="methods" data-script hidden>\n<legend>Show</legend>\n'
        + "\n".join(boxes)
        + "\n</fieldset>\n<noscript><p>The figures of this page are drawn by its script, which is off."
        "</p></noscript>"
    )


def _slider(name: str, label: str, least: int, most: int, value: int) -> str:
    return (
        f'<label for="{name}">{escape(label)}</label>\n'
        f'<input type="range" id="{name}" min="{least}" max="{most}" step="1" value="{value}">\n'
        f'<output id="{name}-shown" for="{name}"></output>'
    )


def _controls(*content: str) -> str:
    return "\n".join(['<div class="controls" data-script hidden>', *content, "</div>"])


def place(name: str, kind: str = "single") -> str:
    """Return the placeholder of a figure, or of panels side by side."""
    return f'<div class="{kind}" data-figure="{escape(name)}"></div>'


def numbers_sections(levels: Sequence[float], level: float, of_rows: str, *, has_line: bool) -> list[str]:
    """Return the sections for regression: predicted against true, coverage and sharpness, with a slider of levels."""
    start = min(range(len(levels)), key=lambda index: abs(levels[index] - level))
    line = [
        section(
            "Over the input",
            paragraph("The band should hold its level of new targets, and widen where there are no training rows."),
            place("line", "panels"),
        )
    ]
    return [
        section(
            "Predicted and true",
            paragraph(f"{of_rows} On the dashed line predicted is true: intervals that miss it are drawn in another "
                      "colour. The slider sets the level of all intervals on this page."),
            _controls(_slider("level", "Level of the intervals", 0, len(levels) - 1, start)),
            place("observed", "panels"),
        ),
        section(
            "Coverage and sharpness",
            paragraph("Intervals should hold as many targets as their level says, and be as narrow as that allows. "
                      "Below the dashed line they are too narrow: the method is too sure."),
            place("levels"),
            '<div class="panels">\n' + place("coverage", "panel") + "\n" + place("width", "panel") + "\n</div>",
        ),
        *(line if has_line else ()),
    ]  # fmt: skip


def class_sections(classes: Sequence[str], of_rows: str, *, has_map: bool) -> list[str]:
    """Return the sections for classes: calibration with a temperature, decisions, and confusion."""
    parts = [
        section(
            "Is confidence earned?",
            paragraph(f"{of_rows} Each dot is a bin of rows, its area their number. On the dashed line confidence is "
                      "what it claims to be; below it the method is too sure. A temperature above 1 makes every "
                      "answer less sure. One that is chosen by these rows would flatter: choose it by other rows."),
            _controls(_slider("temperature", "Temperature", -16, 16, 0)),
            place("scaled"),
            place("reliability", "panels"),
            place("confidence", "panels"),
        ),
    ]  # fmt: skip
    if len(classes) == 2:
        costs = "\n".join(
            f"<label>{escape(label)}\n"
            f'<input type="number" id="{name}" min="0" step="any" value="1" inputmode="decimal"></label>'
            for name, label in (("alarm", "Cost of a false alarm"), ("miss", "Cost of a miss"))
        )
        parts.append(
            section(
                "What to decide",
                paragraph(f"A row is called {classes[1]} where its probability of that is above the threshold. A false "
                          f"alarm is {classes[0]} taken for {classes[1]}, a miss the other way round."),
                _controls(_slider("threshold", "Threshold", 1, 99, 50), costs),
                '<p class="note" data-figure="wise"></p>',
                place("decided"),
                place("costs"),
            )
        )  # fmt: skip
    if len(classes) <= MOST_CONFUSED:
        parts.append(
            section(
                "What is taken for what",
                paragraph("Test rows by true class, one a line, and by most probable class, one a column."),
                place("confusion", "tables"),
            )
        )
    if has_map:
        parts.append(
            section(
                "Over the inputs",
                paragraph("Colours reach well beyond the data: there, a method that knows its limits is less sure, and "
                          "its colours are paler."),
                place("map", "panels"),
            )
        )  # fmt: skip
    return parts


def ask_section(fields: Sequence[Field], level: float | None, note: str) -> str:
    """Return the form of a row, which `ask.js` sends to the server of the page.

    `level` is the initial level of intervals, None for classes; `note` is HTML.
    """
    rows = "\n".join(_field(f"ask-{index}", field) for index, field in enumerate(fields))
    wanted = (
        '<div><label for="ask-level">Level of the interval</label>\n<input type="number" id="ask-level" min="0.01" '
        f'max="0.99" step="any" value="{level:g}"></div>'
        if level is not None
        else ""
    )
    return section(
        "Predict a row",
        f'<p class="note">{note}</p>',
        f'<form id="ask" data-script hidden>\n<div class="fields">\n{rows}\n{wanted}</div>\n'
        '<button type="submit">Predict</button>\n</form>\n<div id="answer" role="status"></div>',
    )


def _field(name: str, field: Field) -> str:
    label = f'<label for="{name}">{escape(field.name)}</label>'
    column = f'id="{name}" data-column="{escape(field.name)}"'
    if field.choices:
        words = (f'<option value="{escape(word)}">{escape(word)}</option>' for word in field.choices)
        return f'<div>{label}\n<select {column}>{"".join(words)}<option value="">(missing)</option></select></div>'
    kind = ' inputmode="decimal" data-number' if field.is_number else ""
    return f'<div>{label}\n<input type="text" {column}{kind} value="{escape(field.value)}" placeholder="missing"></div>'


def by_method(heading: str, about: str, parts: Mapping[tuple[str, str], str]) -> str:
    """Return a section with a part for each method (word, label); the script shows the parts of checked methods.

    Only the first part is expanded initially.
    """
    divided = (
        f'<details data-method="{escape(word)}"{" open" * (at == 0)}>\n<summary><strong>{escape(label)}</strong>'
        f"</summary>\n{content}\n</details>"
        for at, ((word, label), content) in enumerate(parts.items())
    )
    return section(heading, paragraph(about) if about else "", *divided) if parts else ""


def warnings(lines: Sequence[str]) -> str:
    """Return a box for each warning."""
    return "\n".join(paragraph(line, "warning") for line in lines)


def made_by(command: str, about: Mapping[str, str]) -> str:
    """Return the command that made the page, with versions and time."""
    return section("Made by", f"<pre><code>{escape(command)}</code></pre>", facts(about))
