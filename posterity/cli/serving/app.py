"""The routes of the server: page, predictions, health, metrics and documentation."""

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from posterity.cli.frame.folders import Run
from posterity.cli.frame.predictions import csv_text, json_value
from posterity.cli.serving import page
from posterity.cli.serving.batching import Batcher, Model
from posterity.cli.serving.guard import Access, Guard
from posterity.cli.serving.metrics import Metrics
from posterity.cli.serving.rows import Asked, Reader, Refused
from posterity.errors import PosterityError

PATHS = ("/", "/predict", "/health", "/ready", "/metrics", "/docs", "/openapi.json")
KINDS = ("application/json", "text/csv")
LARGE = 1 << 16  # bytes from which a body is read in a thread, so that others need not wait


@dataclass(frozen=True)
class Limits:
    """What a request may have, and how long its body may take; the window is in seconds, too."""

    rows: int = 10_000
    bytes: int = 10_000_000
    seconds: float = 20.0
    window: float = 0.001


def make_app(path: Path, run: Run, access: Access, limits: Limits, *, quiet: bool) -> Guard:
    """The server of a run, as an application of ASGI."""
    metrics, reader, model = Metrics(), Reader(run, limits.rows), Model(run)
    batcher = Batcher(model, limits.window)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        _warm_up(model, reader)
        yield
        await batcher.stop()

    app = FastAPI(
        title="posterity",
        description=f"Predictions of {run.config['method']} fitted to {run.config['data']}.",
        docs_url=None,
        redoc_url=None,
        lifespan=lifespan,
    )
    guard = Guard(app, access, metrics, PATHS, quiet=quiet)

    @app.get("/", include_in_schema=False)
    async def root() -> Response:
        return Response(page.run_page(path, run), media_type="text/html")

    @app.get("/docs", include_in_schema=False)
    async def docs() -> Response:
        return Response(page.docs_page(app.openapi(), reader.columns), media_type="text/html")

    @app.get("/health", summary="Whether the server is alive")
    async def health() -> Response:
        return _json({"status": "ok"})

    @app.get("/ready", summary="Whether the server takes requests")
    async def ready() -> Response:
        return _json({"status": "ready"})

    @app.get("/metrics", summary="Counts and times, for Prometheus")
    async def counts() -> Response:
        return Response(metrics.text(batcher.passes), media_type="text/plain; version=0.0.4")

    @app.post("/predict", summary="Predictions of rows", openapi_extra=page.predict_schema(reader.columns))
    async def predict(request: Request) -> Response:
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind not in KINDS:
            raise Refused(415, f"The Content-Type must be {' or '.join(KINDS)}.")
        batcher.arriving += 1
        try:
            body = await _body(request, limits)
            level = request.query_params.get("level")
            if len(body) < LARGE:
                asked = reader.read(body, kind, level)
            else:
                asked = await asyncio.to_thread(reader.read, body, kind, level)
        finally:
            batcher.arriving -= 1
        columns = await batcher.ask(asked)
        metrics.rows += len(asked)
        if "text/csv" in request.headers.get("accept", ""):
            return Response(csv_text(columns), media_type="text/csv")
        return _answer(asked, columns, classifies=run.config["classes"] is not None)

    @app.exception_handler(Refused)
    async def refused(_: Request, error: Refused) -> Response:
        document: dict[str, Any] = {"error": str(error)}
        if error.rows:
            document["rows"] = [{"row": index, "error": sentence} for index, sentence in error.rows]
        return _json(document, error.status)

    @app.exception_handler(HTTPException)
    async def unknown(_: Request, error: HTTPException) -> Response:
        return _json({"error": f"{error.detail}. The paths are {', '.join(PATHS)}."}, error.status_code, error.headers)

    @app.exception_handler(ClientDisconnect)
    async def gone(_: Request, error: ClientDisconnect) -> Response:
        return _json({"error": "The client went away."}, 400)

    @app.exception_handler(Exception)
    async def failed(request: Request, error: Exception) -> Response:
        sys.stderr.write(f"error: {type(error).__name__}: {error}\n")
        return _json({"error": "The server failed, and its log says where."}, 500)

    return guard


def _warm_up(model: Model, reader: Reader) -> None:
    """Let packages load what a first request needs, which takes half a second."""
    with suppress(Refused, PosterityError):
        model.answers([reader.read(json.dumps([dict.fromkeys(reader.columns)]).encode(), KINDS[0], None)])


async def _body(request: Request, limits: Limits) -> bytes:
    """The body of a request; 413 where it is too large, 408 where it does not come."""
    sentence = f"A body may have {limits.bytes:,} bytes. Send fewer rows, or start the server with --max-bytes."
    if int(request.headers.get("content-length") or 0) > limits.bytes:
        raise Refused(413, sentence)
    parts, size = list[bytes](), 0
    try:
        async with asyncio.timeout(limits.seconds):
            async for part in request.stream():
                size += len(part)
                if size > limits.bytes:
                    raise Refused(413, sentence)
                parts.append(part)
    except TimeoutError:
        raise Refused(408, f"The body did not come within {limits.seconds:g} seconds.") from None
    return b"".join(parts)


def _answer(asked: Asked, columns: dict[str, list[Any]], *, classifies: bool) -> Response:
    names = list(columns)
    rows = [dict(zip(names, map(json_value, row), strict=True)) for row in zip(*columns.values(), strict=True)]
    document: dict[str, Any] = {"predictions": rows, "notes": list(asked.notes)}
    return _json(document if classifies else {"level": asked.level, **document})


def _json(document: Any, status: int = 200, headers: Any = None) -> Response:
    text = json.dumps(document, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return Response(text.encode("utf-8", "replace"), status, headers, "application/json")
