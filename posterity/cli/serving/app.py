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
from starlette.datastructures import QueryParams
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from posterity.cli.frame.folders import Run
from posterity.cli.frame.output import finite
from posterity.cli.frame.predictions import csv_text
from posterity.cli.serving import page
from posterity.cli.serving.batching import Batcher, Model
from posterity.cli.serving.guard import Access, Guard, Receive, Scope, Send
from posterity.cli.serving.metrics import Metrics
from posterity.cli.serving.rows import Reader, Refused
from posterity.errors import PosterityError

PATHS = ("/", "/predict", "/health", "/ready", "/metrics", "/docs", "/openapi.json")
KINDS = ("application/json", "text/csv")
LEAST_HELD = 4096  # bytes that a request counts for, however short its body
ENCODER = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"))
LARGE = 1 << 16  # bytes from which a body is read in a thread, so that others need not wait


@dataclass(frozen=True)
class Limits:
    """Limits of requests: rows and bytes of one request, seconds for its body, seconds of the batching window.

    `held` limits the bytes of the bodies of all requests in progress, from their first byte to the answer.
    """

    rows: int = 10_000
    bytes: int = 10_000_000
    held: int = 40_000_000
    seconds: float = 20.0
    window: float = 0.001


class Room:
    """The bytes of request bodies that the server holds, and the most it may hold."""

    def __init__(self, most: int) -> None:
        """Take the limit in bytes."""
        self.most, self.used = most, 0


class Held:
    """The share of one request in the bytes of a `Room`, released at the end of the context."""

    def __init__(self, room: Room) -> None:
        """Take the room."""
        self._room, self._size = room, 0

    def __enter__(self) -> "Held":
        """Take the least bytes that a request counts for."""
        return self.grown(LEAST_HELD)

    def __exit__(self, *error: object) -> None:
        """Release the bytes."""
        self._room.used -= self._size

    def grown(self, size: int) -> "Held":
        """Take further bytes; refuse with 503 if there is no room."""
        self.check(size)
        self._room.used += size
        self._size += size
        return self

    def check(self, size: int) -> None:
        """Refuse with 503 if other requests leave no room for so many bytes."""
        if self._room.used > self._size and self._room.used + size > self._room.most:
            raise Refused(503, "The server holds as many requests as it may. Try again in a second.")


class Predictions:
    """The route /predict as a plain ASGI application: FastAPI would take as long as a forward pass of a few rows."""

    def __init__(self, run: Run, limits: Limits, metrics: Metrics) -> None:
        """Take the run, the limits of requests, and the metrics, to which rows are added."""
        self._limits, self._metrics, self._classifies = limits, metrics, run.config["classes"] is not None
        self._model, self._reader, self._room = Model(run), Reader(run, limits.rows), Room(limits.held)
        self._batcher = Batcher(self._model, limits.window)
        self.columns = self._reader.columns

    @property
    def passes(self) -> int:
        """Number of forward passes."""
        return self._batcher.passes

    def warm_up(self) -> None:
        """Predict one row, so that packages load now what takes half a second."""
        with suppress(Refused, PosterityError):
            asked = self._reader.read(json.dumps([dict.fromkeys(self.columns)]).encode(), KINDS[0], None)
            self._model.answers([asked])

    async def stop(self) -> None:
        """Stop, when all requests have been answered."""
        await self._batcher.stop()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        try:
            response = await self._answer(scope, receive)
        except Refused as error:
            response = _refusal(error)
        except ClientDisconnect:
            response = as_json({"error": "The client went away."}, 400)
        except Exception as error:
            await _failure(error)(scope, receive, send)
            raise
        await response(scope, receive, send)

    async def _answer(self, scope: Scope, receive: Receive) -> Response:
        headers: dict[bytes, bytes] = dict(scope["headers"])
        kind = headers.get(b"content-type", b"").partition(b";")[0].strip().lower().decode("latin-1")
        if kind not in KINDS:
            raise Refused(415, f"The Content-Type must be {' or '.join(KINDS)}.")
        query, batcher = scope["query_string"], self._batcher
        with Held(self._room) as held:
            batcher.arriving += 1
            try:
                body = await _body(receive, int(headers.get(b"content-length") or 0), self._limits, held)
                level = QueryParams(query).get("level") if query else None
                if len(body) < LARGE:
                    asked = self._reader.read(body, kind, level)
                else:
                    asked = await asyncio.to_thread(self._reader.read, body, kind, level)
            finally:
                batcher.arriving -= 1
            columns = await batcher.ask(asked)
        self._metrics.rows += len(asked)
        if b"text/csv" in headers.get(b"accept", b""):
            return Response(csv_text(columns), media_type="text/csv")
        rows = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
        document: dict[str, Any] = {"predictions": rows, "notes": asked.notes}
        return as_json(document if self._classifies else {"level": asked.level, **document})


async def _body(receive: Receive, told: int, limits: Limits, held: Held) -> bytes:
    """Read the body of a request; refuse with 413 if it is too large, 503 without room, 408 if it is too slow."""
    sentence = f"A body may have {limits.bytes:,} bytes. Send fewer rows, or start the server with --max-bytes."
    if told > limits.bytes:
        raise Refused(413, sentence)
    held.check(told)
    parts, size, more = list[bytes](), 0, True
    try:
        async with asyncio.timeout(limits.seconds):
            while more:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise ClientDisconnect
                part, more = message.get("body", b""), message.get("more_body", False)
                size += len(part)
                if size > limits.bytes:
                    raise Refused(413, sentence)
                held.grown(len(part))
                parts.append(part)
    except TimeoutError:
        raise Refused(408, f"The body did not come within {limits.seconds:g} seconds.") from None
    return b"".join(parts)


def make_app(path: Path, run: Run, access: Access, limits: Limits, *, quiet: bool) -> Guard:
    """Return the server of a run, an ASGI application."""
    metrics = Metrics()
    predictions = Predictions(run, limits, metrics)
    drawing, drawn = asyncio.Lock(), list[str]()

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        predictions.warm_up()
        yield
        await predictions.stop()

    app = FastAPI(
        title="posterity",
        description=f"Predictions of {run.config['method']} fitted to {run.config['data']}.",
        docs_url=None,
        redoc_url=None,
        lifespan=lifespan,
    )

    @app.get("/", include_in_schema=False)
    async def root() -> Response:
        async with drawing:  # drawn once, at the first request, in a thread: it takes seconds
            if not drawn:
                drawn.append(await asyncio.to_thread(page.run_page, path, run, predictions.columns))
        return Response(drawn[0], media_type="text/html")

    @app.get("/docs", include_in_schema=False)
    async def docs(request: Request) -> Response:
        example = page.example_row(run, predictions.columns)
        text = page.docs_page(app.openapi(), example, str(request.base_url))
        return Response(text, media_type="text/html")

    @app.get("/health", summary="Whether the server is alive")
    async def health() -> Response:
        return as_json({"status": "ok"})

    @app.get("/ready", summary="Whether the server takes requests")
    async def ready() -> Response:
        return as_json({"status": "ready"})

    @app.get("/metrics", summary="Counts and times, for Prometheus")
    async def counts() -> Response:
        return Response(metrics.text(predictions.passes), media_type="text/plain; version=0.0.4")

    @app.post("/predict", summary="Predictions of rows", openapi_extra=page.predict_schema(predictions.columns))
    async def predict() -> None:
        pass  # for the schema only: the guard passes these requests to `Predictions`

    @app.exception_handler(HTTPException)
    async def unknown(_: Request, error: HTTPException) -> Response:
        return as_json(
            {"error": f"{error.detail}. The paths are {', '.join(PATHS)}."}, error.status_code, error.headers
        )

    @app.exception_handler(Exception)
    async def failed(_: Request, error: Exception) -> Response:
        return _failure(error)

    return Guard({("POST", "/predict"): predictions}, app, access, metrics, PATHS, quiet=quiet)


def _refusal(error: Refused) -> Response:
    document: dict[str, Any] = {"error": str(error)}
    if error.rows:
        document["rows"] = [{"row": index, "error": sentence} for index, sentence in error.rows]
    return as_json(document, error.status, {"Retry-After": "1"} if error.status == 503 else None)


def _failure(error: Exception) -> Response:
    sys.stderr.write(f"error: {type(error).__name__}: {error}\n")
    return as_json({"error": "The server failed, and its log says where."}, 500)


def as_json(document: Any, status: int = 200, headers: Any = None) -> Response:
    """Return a JSON response, with null for numbers that are not finite."""
    try:
        text = ENCODER.encode(document)
    except ValueError:  # a number that JSON does not have
        text = ENCODER.encode(finite(document))
    return Response(text.encode("utf-8", "replace"), status, headers, "application/json")
