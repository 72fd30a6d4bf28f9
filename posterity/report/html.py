"""HTML pages that need no other file: style and pictures are inside, scripts are not; the report of a comparison."""

import base64
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any, Protocol

_STYLE = """
:root { color-scheme: light dark; --ink: #1d2430; --soft: #5b6675; --line: #d9dee5; --page: #ffffff; --card: #f5f7fa;
  --best: #0b6b3a; --best-back: #e4f5ea; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e9ee; --soft: #a3adba; --line: #343c48; --page: #14181e;
  --card: #1c222b; --best: #7fdca4; --best-back: #15331f; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink); line-height: 1.55; overflow-wrap: anywhere;
  font-family: system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", sans-serif; }
main { max-width: 52rem; margin: 0 auto; padding: 2rem 1.25rem 3rem; }
h1 { font-size: 1.7rem; line-height: 1.2; margin: 0 0 .3rem; }
h2 { font-size: 1.15rem; margin: 2.2rem 0 .7rem; }
p, ul { max-width: 40rem; }
ul { padding-left: 1.2rem; }
.lead, figcaption, footer, .remarks { color: var(--soft); }
.lead { margin-top: 0; }
.remarks, figcaption, footer { font-size: .9rem; }
dl { display: grid; grid-template-columns: minmax(6.5rem, max-content) minmax(0, 1fr); gap: .3rem 1.2rem; margin: 0; }
dt { color: var(--soft); }
dd { margin: 0; white-space: pre-line; }
code, pre { font-family: ui-monospace, "SF Mono", Menlo, Consolas, monospace; font-size: .88em; }
pre { background: var(--card); padding: .8rem 1rem; border-radius: 6px; white-space: pre-wrap; margin: 0; }
section > pre, section > dl { margin-bottom: 1rem; }
a { color: inherit; }
.wide { overflow-x: auto; position: relative; }
table { border-collapse: collapse; min-width: 60%; overflow-wrap: normal; font-variant-numeric: tabular-nums; }
th, td { padding: .45rem .9rem; text-align: right; border-bottom: 1px solid var(--line); white-space: nowrap; }
th:first-child { text-align: left; }
thead th { color: var(--soft); font-weight: 600; border-bottom-width: 2px; }
.best { color: var(--best); background: var(--best-back); font-weight: 700; }
.baseline th, .baseline td { color: var(--soft); font-weight: 400; }
.baseline td.best { color: var(--best); font-weight: 700; }
.failed { color: var(--soft); font-style: italic; }
.verdict { font-weight: 600; }
.mark { position: absolute; }
.unseen { position: absolute; width: 1px; height: 1px; overflow: hidden; clip-path: inset(50%); }
figure { margin: 0 0 1.4rem; }
img { display: block; max-width: 100%; height: auto; background: #ffffff; border-radius: 6px; }
figcaption { margin-top: .5rem; max-width: 40rem; }
details { margin-top: 1rem; }
summary { cursor: pointer; margin-bottom: .6rem; }
footer { border-top: 1px solid var(--line); margin-top: 2.5rem; padding-top: .8rem; }
@media (max-width: 600px) { .wide img.broad { max-width: none; width: 36rem; } th, td { padding: .4rem .55rem; } }
"""

_FOOTER = "<footer>This page holds all it shows; it loads nothing and runs no scripts.</footer>"

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
    "coverage": "Coverage is the share of test rows whose target lies in its 95 % interval. Below 0.95 the intervals "
    "are too narrow, above it too wide.",
}
"""What each score says, in plain words."""


class Score(Protocol):
    """A column of the table: the key of its values in the document, its heading, and the format of a value."""

    @property
    def key(self) -> str:
        """The key of its values in the document."""
        ...

    @property
    def heading(self) -> str:
        """The heading of the column."""
        ...

    def shown(self, value: float) -> str:
        """Format a value for the table."""
        ...


@dataclass(frozen=True)
class Picture:
    """A PNG image with its heading, what it shows for those who do not see it, and how to read it."""

    heading: str
    png: bytes
    alt: str
    caption: str


def comparison_page(
    document: Mapping[str, Any],
    scores: Sequence[Score],
    labels: Mapping[str, str],
    pictures: Sequence[Picture] = (),
    *,
    network: str,
    remarks: Sequence[str] = (),
    command: str,
    date: str,
    versions: Mapping[str, str],
) -> str:
    """Write the page of a comparison.

    Takes the document of `posterity compare --json`, the scores that are its columns, the methods' names as people
    write them, pictures, the network in a few words, remarks on the table, the command line that made it, when, and
    with which versions of what. Every word of it is escaped.
    """
    title = f"{_enumerated([labels[row['method']] for row in document['methods']])} on {document['data']}"
    about = {
        "Data": document["data"],
        "Task": document["task"],
        "Rows": f"{document['train_rows']} for training, {document['test_rows']} for the test",
        "Network": network,
        "Seed": str(document["settings"]["seed"]),
        "Made": date,
        "With": ", ".join(f"{name} {version}" for name, version in versions.items()),
    }
    notes, remark = document["notes"], "<br>".join(escape(line) for line in remarks)
    remark = f'\n<p class="remarks">{remark}</p>' if remarks else ""
    verdict = f'\n<p class="verdict">{escape(document["verdict"]["sentence"])}</p>' if document["verdict"] else ""
    parts = [
        f"<h1>{escape(title)}</h1>",
        '<p class="lead">Methods fitted to the same training rows, scored on the same test rows.</p>',
        section("Scores", _table((*document["baselines"], *document["methods"]), scores, labels) + verdict + remark),
        section("How to read them", *(f"<p>{escape(MEANINGS[score.key])}</p>" for score in scores)),
        *(section(picture.heading, figure(picture)) for picture in pictures),
        section("How the file was read", "<ul>", *(f"<li>{escape(note)}</li>" for note in notes), "</ul>")
        if notes
        else "",
        section("What was compared", facts(about), _settings(document["settings"])),
        section("Made by", f"<pre><code>{escape(command)}</code></pre>"),
    ]
    return page(title, parts)


def page(title: str, parts: Iterable[str]) -> str:
    """Write a page of parts that are HTML already; empty ones are left out. The title is escaped here."""
    body = "\n".join(part for part in (*parts, _FOOTER) if part)
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; img-src data:; style-src 'unsafe-inline'">
<title>{escape(title)}</title>
<style>{_STYLE}</style>
</head>
<body>
<main>
{body}
</main>
</body>
</html>
"""


def _enumerated(names: Sequence[str]) -> str:
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


def section(heading: str, *content: str) -> str:
    """Put a heading, which is escaped here, over content that is HTML already."""
    return "\n".join(["<section>", f"<h2>{escape(heading)}</h2>", *content, "</section>"])


def _table(rows: Sequence[Mapping[str, Any]], scores: Sequence[Score], labels: Mapping[str, str]) -> str:
    headings = ["method", *(score.heading for score in scores), "seconds"]
    head = "".join(f'<th scope="col">{escape(heading)}</th>' for heading in headings)
    body = []
    for row in rows:
        is_method = "method" in row
        cells = [f'<th scope="row">{escape(labels[row["method" if is_method else "baseline"]])}</th>']
        kind = "" if is_method else ' class="baseline"'
        if row["failed"]:
            cells.append(f'<td class="failed" colspan="{len(headings) - 1}">{escape(row["reason"])}</td>')
            body.append(f"<tr{kind}>{''.join(cells)}</tr>")
            continue
        for score in scores:
            value = escape(score.shown(row[score.key]))
            if score.key in row["best"]:
                mark = '<span class="mark" aria-hidden="true">*</span><span class="unseen"> best</span>'
                cells.append(f'<td class="best">{value}{mark}</td>')
            else:
                cells.append(f"<td>{value}</td>")
        cells.append(f"<td>{'+' if row.get('starts_from') else ''}{row['seconds']:.2f}</td>")
        body.append(f"<tr{kind}>{''.join(cells)}</tr>")
    lines = ["<table>", f"<thead><tr>{head}</tr></thead>", "<tbody>", *body, "</tbody>", "</table>"]
    return _wide("Scores", "\n".join(lines))


def _wide(label: str, content: str) -> str:
    """Wrap content that may be wider than a phone in a region that scrolls, also by the keyboard."""
    return f'<div class="wide" role="region" tabindex="0" aria-label="{escape(label)}">\n{content}\n</div>'


def facts(values: Mapping[str, str]) -> str:
    """List values, which are escaped here, beside their names."""
    entries = (f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in values.items())
    return "\n".join(["<dl>", *entries, "</dl>"])


def _settings(settings: Mapping[str, Any]) -> str:
    words = {name.replace("_", " "): _value(value) for name, value in settings.items()}
    return f"<details>\n<summary>All settings</summary>\n{facts(words)}\n</details>"


def _value(value: Any) -> str:
    """A value of JSON in words; a dash where nothing was given."""
    if isinstance(value, str):
        return value
    if isinstance(value, list):
        return ", ".join(map(_value, value)) or "-"
    return "-" if value is None else json.dumps(value)


def figure(picture: Picture) -> str:
    """Show a picture with its caption; it scrolls sideways where a phone is too narrow for it."""
    width, height = (int.from_bytes(picture.png[at : at + 4], "big") for at in (16, 20))  # of the header of a PNG
    width, height = round(width / 1.5), round(height / 1.5)  # drawn at 150 dots an inch, a page has 96 or more
    data = base64.b64encode(picture.png).decode("ascii")
    broad, size = ' class="broad"' if width > 576 else "", f'width="{width}" height="{height}"'
    image = f'<img{broad} src="data:image/png;base64,{data}" {size} alt="{escape(picture.alt)}">'
    caption = f"<figcaption>{escape(picture.caption)}</figcaption>"
    return "\n".join(["<figure>", _wide(picture.heading, image), caption, "</figure>"])
