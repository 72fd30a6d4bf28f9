"""HTML pages that need no other file: style, pictures and script are inline, allowed by their hashes.

The script is our own, 650 lines of JavaScript that draw SVG (`charts.js`, `statistics.js`, `page.js`). The smallest
libraries that could replace its drawing (uPlot, 50 kB; Chart.js, 200 kB; Vega with Vega-Lite, 700 kB, compressed for
transport a third of it) draw on a canvas, which neither screen readers nor paper can read, or would be half of a page;
each would need an update now and then, and the scores that sliders move would be ours to write all the same.
"""

import base64
import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from html import escape
from importlib.resources import files
from typing import Any

SCRIPTS = ("charts.js", "statistics.js", "page.js")
"""The scripts of a page with numbers, in this order."""
ASKS = "ask.js"
"""The further script of a server's page."""


@dataclass(frozen=True)
class Picture:
    """A PNG image with its heading, alternative text and caption."""

    heading: str
    png: bytes
    alt: str
    caption: str


def page(title: str, parts: Iterable[str], numbers: Mapping[str, Any] | None = None, *, asks: bool = False) -> str:
    """Return a page of HTML parts, without empty ones. The title is escaped here.

    With `numbers`, the data of `page.js`, the page has the scripts that draw them; otherwise it has none. With `asks`
    the scripts may also send a form of the page to the page's own server, and to no other.
    """
    style = _asset("page.css")
    policy = f"default-src 'none'; base-uri 'none'; form-action 'none'; img-src data:; style-src {_hash(style)}"
    promise, script = "it loads nothing and runs no scripts.", ""
    if numbers is not None:
        code = "(() => {\n'use strict';\n" + "\n".join(map(_asset, (*SCRIPTS, *(ASKS,) * asks))) + "})();\n"
        policy += f"; script-src {_hash(code)}" + "; connect-src 'self'" * asks
        promise = "it loads nothing, and the only script that it runs is its own."
        if asks:
            promise = "the only script that it runs is its own, and what is typed goes to the server of the page alone."
        # Escaping < keeps text in the numbers from ending the element or beginning another.
        text = json.dumps(numbers, ensure_ascii=False, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
        script = f'<script type="application/json" id="numbers">{text}</script>\n<script>{code}</script>\n'
    body = "\n".join(part for part in parts if part)
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<title>{escape(title)}</title>
<style>{style}</style>
</head>
<body>
<main>
{body}
</main>
<footer>This page holds all it shows; {promise}</footer>
{script}</body>
</html>
"""


@cache
def _asset(name: str) -> str:
    return (files("posterity.report") / name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    """Return the hash by which the content security policy allows this inline element."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode('ascii')}'"


def section(heading: str, *content: str) -> str:
    """Return a section of HTML content under a heading, which is escaped here."""
    return "\n".join(["<section>", f"<h2>{escape(heading)}</h2>", *(part for part in content if part), "</section>"])


def paragraph(text: str, kind: str = "") -> str:
    """Return a paragraph of text, which is escaped here."""
    return f'<p class="{kind}">{escape(text)}</p>' if kind else f"<p>{escape(text)}</p>"


def facts(values: Mapping[str, str]) -> str:
    """Return a list of names and values, which are escaped here."""
    entries = (f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in values.items())
    return "\n".join(["<dl>", *entries, "</dl>"])


def table(label: str, heads: Sequence[str], rows: Iterable[Sequence[str]], *, text: Sequence[int] = ()) -> str:
    """Return a table of text, which is escaped here; first cells are row headers, columns `text` are left-aligned."""
    kinds = [' class="text"' if index in text else "" for index in range(len(heads))]
    head = "".join(f'<th scope="col"{kind}>{escape(name)}</th>' for name, kind in zip(heads, kinds, strict=True))
    body = (
        f'<tr><th scope="row">{escape(row[0])}</th>'
        + "".join(f"<td{kind}>{escape(cell)}</td>" for cell, kind in zip(row[1:], kinds[1:], strict=True))
        + "</tr>"
        for row in rows
    )
    return wide(label, f"<table>\n<thead><tr>{head}</tr></thead>\n<tbody>\n{chr(10).join(body)}\n</tbody>\n</table>")


def wide(label: str, content: str) -> str:
    """Wrap content that may be wider than a phone in a region that scrolls, also by keyboard."""
    return f'<div class="wide" role="region" tabindex="0" aria-label="{escape(label)}">\n{content}\n</div>'


def settings(values: Mapping[str, Any]) -> str:
    """Return all settings, collapsed."""
    words = {name.replace("_", " "): _value(value) for name, value in values.items()}
    return f"<details>\n<summary>All settings</summary>\n{facts(words)}\n</details>"


def _value(value: Any) -> str:
    """Format a JSON value; "-" for none."""
    if isinstance(value, str):
        return value
    if isinstance(value, list):
        return ", ".join(map(_value, value)) or "-"
    return "-" if value is None else json.dumps(value)


def figure(picture: Picture) -> str:
    """Return a picture with its caption, which scrolls sideways on narrow screens."""
    width, height = (int.from_bytes(picture.png[at : at + 4], "big") for at in (16, 20))  # of the header of a PNG
    width, height = round(width / 1.5), round(height / 1.5)  # drawn at 150 dots an inch, a page has 96 or more
    data = base64.b64encode(picture.png).decode("ascii")
    broad, size = ' class="broad"' if width > 576 else "", f'width="{width}" height="{height}"'
    image = f'<img{broad} src="data:image/png;base64,{data}" {size} alt="{escape(picture.alt)}">'
    caption = f"<figcaption>{escape(picture.caption)}</figcaption>"
    return "\n".join(["<figure>", wide(picture.heading, image), caption, "</figure>"])
