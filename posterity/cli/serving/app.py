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
LEAST_HELD = 4096  # bytes that a request counts for, however short its body
LARGE = 1 << 16  # bytes from which a body is read in a thread, so that others need not wait


@dataclass(frozen=True)
class Limits:
    """What a request may have, and how long its body may take; the window is in seconds, too.

    `held` is for the bodies of all requests under way together, from their first byte to the answer.
    """

    rows: int = 10_000
    bytes: int = 10_000_000
    held: int = 40_000_000
    seconds: float = 20.0
    window: float = 0.001


class Room:
    """How many bytes of bodies the server holds, and may hold."""

    def __init__(self, most: int) -> None:
        """Take the most bytes."""
        self.most, self.used = most, 0


class Held:
    """The bytes of one request in the room of all, given back at the end of the context."""

    def __init__(self, room: Room) -> None:
        """Take the room."""
        self._room, self._size = room, 0

    def __enter__(self) -> "Held":
        """Begin with the bytes that each request counts for."""
        return self.grown(LEAST_HELD)

    def __exit__(self, *error: object) -> None:
        """Give back the bytes."""
        self._room.used -= self._size

    def grown(self, size: int) -> "Held":
        """Hold bytes until the end; 503 where there is no room for them."""
        self.check(size)
        self._room.used += size
        self._size += size
        return self

    def check(self, size: int) -> None:
        """Refuse bytes for which there is no room beside those of others."""
        if self._room.used > self._size and self._room.used + size > self._room.most:
            raise Refused(503, "The server holds as many requests as it may. Try again in a second.")


def make_app(path: Path, run: Run, access: Access, limits: Limits, *, quiet: bool) -> Guard:
    """The server of a run, as an application of ASGI."""
    metrics, reader, model = Metrics(), Reader(run, limits.rows), Model(run)
    room = Room(limits.held)
    batcher, drawing, drawn = Batcher(model, limits.window), asyncio.Lock(), list[str]()

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
        async with drawing:  # once, by the first who asks, in a thread: it takes seconds
            if not drawn:
                drawn.append(await asyncio.to_thread(page.run_page, path, run, reader.columns))
        return Response(drawn[0], media_type="text/html")

    @app.get("/docs", include_in_schema=False)
    async def docs(request: Request) -> Response:
        example = page.example_row(run, reader.columns)
        text = page.docs_page(app.openapi(), example, str(request.base_url))
        return Response(text, media_type="text/html")

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
        with Held(room) as held:
            batcher.arriving += 1
            try:
                body = await _body(request, limits, held)
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
        return _json(document, error.status, {"Retry-After": "1"} if error.status == 503 else None)

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


async def _body(request: Request, limits: Limits, held: Held) -> bytes:
    """The body of a request; 413 where it is too large, 503 where there is no room, 408 where it does not come."""
    sentence = f"A body may have {limits.bytes:,} bytes. Send fewer rows, or start the server with --max-bytes."
    told = int(request.headers.get("content-length") or 0)
    if told > limits.bytes:
        raise Refused(413, sentence)
    held.check(told)
    parts, size = list[bytes](), 0
    try:
        async with asyncio.timeout(limits.seconds):
            async for part in request.stream():
                size += len(part)
                if size > limits.bytes:
                    raise Refused(413, sentence)
                held.grown(len(part))
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
