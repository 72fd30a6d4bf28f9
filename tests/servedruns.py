"""Requests to a served run inside the test's own process, without a socket."""

import asyncio
import json
from contextlib import asynccontextmanager
from types import SimpleNamespace

HOST = (b"host", b"localhost:8000")


async def ask(app, method="GET", path="/", body=b"", headers=(), query=b""):
    """Send a request to an application of ASGI; return its status, headers and body."""
    parts, waiting = [], [{"type": "http.request", "body": body, "more_body": False}]

    async def receive():
        return waiting.pop() if waiting else {"type": "http.disconnect"}

    async def send(message):
        parts.append(message)

    own = dict(headers)
    given = [HOST, (b"content-length", str(len(body)).encode())]
    given = [(name, value) for name, value in given if name not in own] + [*own.items()]
    scope = {
        "type": "http",
        "http_version": "1.1",
        "asgi": {"version": "3.0"},
        "method": method,
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": query,
        "root_path": "",
        "headers": given,
        "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 8000),
    }
    await app(scope, receive, send)
    start, text = parts[0], b"".join(part.get("body", b"") for part in parts[1:])
    names = {name.decode().lower(): value.decode() for name, value in start["headers"]}
    return SimpleNamespace(status=start["status"], headers=names, body=text, json=lambda: json.loads(text))


@asynccontextmanager
async def running(app):
    """A context in which the application has started."""
    given, said = asyncio.Queue(), asyncio.Queue()
    task = asyncio.create_task(app({"type": "lifespan", "asgi": {"version": "3.0"}}, given.get, said.put))
    await given.put({"type": "lifespan.startup"})
    assert (await said.get())["type"] == "lifespan.startup.complete"
    try:
        yield app
    finally:
        await given.put({"type": "lifespan.shutdown"})
        await said.get()
        await task


async def predict(app, document, headers=(), query=b""):
    """Ask for predictions of a document of JSON."""
    body = document if isinstance(document, bytes) else json.dumps(document).encode()
    named = {b"content-type": b"application/json", **dict(headers)}
    return await ask(app, "POST", "/predict", body, named.items(), query)
