"""The pages and the OpenAPI schema of the server; pages load nothing from other hosts."""

import json
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from shlex import quote
from typing import Any

from posterity.cli.frame.folders import Run, find_rows
from posterity.cli.frame.options import LEVEL, ReadingOptions, method_label
from posterity.cli.frame.pages import report, subject_of_run
from posterity.errors import PosterityError
from posterity.report.html import facts, page, section
from posterity.report.numbers import number
from posterity.report.sections import Field, ask_section, warnings
from posterity.storage import RunFolder

_ANSWER = (
    "Regression: mean, std, lower and upper (between which the target falls with the probability level), "
    "aleatoric_std and epistemic_std. Classes: p_NAME for each, prediction, entropy, aleatoric and epistemic, in nats. "
    "outside is the column that puts a row outside the training rows, empty for others."
)


def run_page(path: Path, run: Run, columns: Sequence[str]) -> str:
    """Return the report of a run on its own test rows, with a form to predict a row.

    Without the test rows it has the form, and the scores stored in the run folder.
    """
    level = None if run.config["classes"] is not None else LEVEL
    form = ask_section(
        _fields(run, columns), level, 'Programs send rows to <code>/predict</code>; <a href="docs">how</a>.'
    )
    try:
        source = find_rows(run, None, ReadingOptions(), "serve", targets=True)
    except PosterityError as error:
        return _without_rows(path, run, form, f"There is no report: {error}")
    subject = subject_of_run(path, run, source, ["serve", str(path)], first=[form])
    return report(subject, asks=True)


def _without_rows(path: Path, run: Run, form: str, caution: str) -> str:
    config, folder = run.config, RunFolder(path)
    scores = dict(folder.read("scores").config) if "scores" in folder.parts() else {}
    about = {"Data": str(config["data"]), "Task": str(config["task"]), "Method": method_label(str(config["method"]))}
    shown = {name.replace("_", " "): number(value) for name, value in scores.items() if isinstance(value, float)}
    title = f"{method_label(str(config['method']))} on {config['data']}"
    parts = [
        f"<h1>{escape(title)}</h1>",
        warnings([caution]),
        form,
        section("Run", facts(about)),
        section("Scores of the test rows", facts(shown)) if shown else "",
    ]
    return page(title, parts, {"methods": [], "figures": {}}, asks=True)


def _fields(run: Run, columns: Sequence[str]) -> list[Field]:
    """Return a form field for each column, prefilled with medians and first categories."""
    if run.preprocessing is None:
        return [Field(name, "0", is_number=True) for name in columns]
    fields: dict[str, Field] = {}
    for column in run.preprocessing.inputs:
        if column.part:
            fields[column.name] = Field(column.name)  # a date
        elif column.kind == "number":
            plain = not column.sign  # else the sign belongs to the value
            fields[column.name] = Field(column.name, f"{column.fill:.15g}" if plain else "", is_number=plain)
        else:
            fields[column.name] = Field(column.name, choices=column.categories)
    return list(fields.values())


def example_row(run: Run, columns: Sequence[str]) -> dict[str, float | str | None]:
    """Return a valid row: medians, first categories, and missing dates."""
    row: dict[str, float | str | None] = {}
    for field in _fields(run, columns):
        text = field.choices[0] if field.choices else field.value
        row[field.name] = float(text) if field.is_number and text else text or None
    return row


def docs_page(schema: Mapping[str, Any], example: Mapping[str, Any], address: str) -> str:
    """Return the page that documents the server at this address."""
    content = quote(json.dumps([example], ensure_ascii=False))
    curl = f"curl -H 'Content-Type: application/json' -d {content} {quote(address)}predict"
    routes = {
        f"{method.upper()} {path}": operation.get("summary", "")
        for path, methods in schema["paths"].items()
        for method, operation in methods.items()
    }
    return page(
        "posterity: how to ask",
        [
            "<h1>How to ask</h1>",
            section("Paths", facts({"GET /": "The report of the run", **routes})),
            section("Rows", f"<pre>{escape(curl)}</pre>", f"<p>{escape(_ANSWER)}</p>"),
            section("Columns", f"<p>{escape(', '.join(example))}</p>"),
            section("Schema", '<p><a href="/openapi.json">OpenAPI</a></p>'),
        ],
    )


def predict_schema(columns: Sequence[str]) -> dict[str, Any]:
    """Return the OpenAPI description of /predict."""
    value = {"type": ["number", "string", "boolean", "null"]}
    row = {"type": "object", "required": list(columns), "properties": dict.fromkeys(columns, value)}
    level = {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1, "default": 0.95}
    by_rows = {"rows": {"type": "array", "items": row}, "level": level}
    lists = {"type": "object", "required": list(columns), "additionalProperties": {"type": "array", "items": value}}
    body = {
        "oneOf": [
            {"type": "array", "items": row},
            {"type": "object", "required": ["rows"], "properties": by_rows},
            {"type": "object", "required": ["columns"], "properties": {"columns": lists, "level": level}},
        ]
    }
    content = {"application/json": {"schema": body}, "text/csv": {"schema": {"type": "string"}}}
    properties = {"error": {"type": "string"}, "rows": {"type": "array", "items": {"type": "object"}}}
    wrong = {"content": {"application/json": {"schema": {"type": "object", "properties": properties}}}}
    return {
        "requestBody": {"required": True, "content": content},
        "parameters": [{"name": "level", "in": "query", "required": False, "schema": level}],
        "responses": {
            "200": {"description": _ANSWER},
            "413": {"description": "Too many rows or bytes", **wrong},
            "415": {"description": "Another content type", **wrong},
            "422": {"description": "Rows that cannot be read, with a sentence for each", **wrong},
            "503": {"description": "Too many requests at once, or the server is stopping: come again", **wrong},
        },
    }
