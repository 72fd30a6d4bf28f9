"""The outermost layer of the server: access, request ids, metrics, the request log, and draining at shutdown."""

import hmac
import ipaddress
import re
import secrets
import sys
import time
from base64 import b64decode
from collections.abc import Awaitable, Callable, Collection, Mapping, MutableMapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any
from urllib.parse import urlsplit

from posterity.cli.serving.metrics import Metrics

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

OPEN = ("/health", "/ready")
"""Paths that need no token, for probes."""
_REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,128}")
_HEADERS = [
    (b"cache-control", b"no-store"),
    (b"x-content-type-options", b"nosniff"),
    (b"x-frame-options", b"DENY"),
    (b"referrer-policy", b"no-referrer"),
]


@dataclass(frozen=True)
class Access:
    """Access rules: the allowed Host names, and the token that clients must send, if any."""

    hosts: Collection[str]
    token: str | None = None

    def refusal(self, headers: dict[bytes, bytes], path: str) -> tuple[int, str] | None:
        """Return the status and the message if the request is refused, else None.

        A page of another site sends that site's name as Host, or its own Origin.
        """
        host = headers.get(b"host", b"").decode("latin-1")
        if not self._is_ours(host):
            return 421, "The server is not called so. Use its own address, or start it with --allow-host."
        origin = headers.get(b"origin")
        same = (f"http://{host.lower()}", f"https://{host.lower()}")
        if origin is not None and origin.decode("latin-1").lower() not in same:
            return 403, "Requests from pages of other origins are refused."
        if self.token is None or path in OPEN or self._knows(headers.get(b"authorization", b"")):
            return None
        return 401, "A token is needed: Authorization: Bearer TOKEN."

    def _is_ours(self, host: str) -> bool:
        name = _name(host)
        if name is None:
            return False
        if name in self.hosts or name in map(str.lower, self.hosts):
            return True
        try:  # no other site can make an IP address its name; without a token only the listed hosts are allowed
            return self.token is not None and bool(ipaddress.ip_address(name))
        except ValueError:
            return False

    def _knows(self, given: bytes) -> bool:
        """Return whether the header has the token, as a bearer or as a password; compares in constant time."""
        kind, _, value = given.partition(b" ")
        if kind.lower() == b"basic":
            try:
                value = b64decode(value, validate=True).partition(b":")[2]
            except ValueError:
                return False
        elif kind.lower() != b"bearer":
            return False
        return hmac.compare_digest(value.strip(), (self.token or "").encode())


@lru_cache(maxsize=64)
def _name(host: str) -> str | None:
    """Return the name in a Host header, without the port; None for an invalid header."""
    try:
        parts = urlsplit(f"//{host}")
        parts.port  # noqa: B018  raises where it is none
    except ValueError:
        return None
    plain = parts.hostname is not None and parts.netloc == host and parts.username is None
    return parts.hostname if plain and not (parts.path or parts.query or parts.fragment) else None


class Guard:
    """ASGI middleware that checks, counts and logs each request."""

    def __init__(
        self,
        direct: Mapping[tuple[str, str], App],
        app: App,
        access: Access,
        metrics: Metrics,
        paths: Collection[str],
        *,
        quiet: bool,
    ) -> None:
        """Take the applications of single routes (method, path) and of all others, and the paths that metrics name."""
        self._direct, self._app, self._access = direct, app, access
        self._metrics, self._paths, self._quiet = metrics, paths, quiet
        self.draining = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or refuse it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        begin, headers = time.perf_counter(), dict(scope["headers"])
        given = headers.get(b"x-request-id", b"").decode("latin-1")
        identity = given if _REQUEST_ID.fullmatch(given) else secrets.token_hex(8)
        path, status = scope["path"], 500
        extra = [*_HEADERS, (b"x-request-id", identity.encode())]

        async def answer(message: MutableMapping[str, Any]) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message = {**message, "headers": [*message.get("headers", ()), *extra]}
            await send(message)

        self._metrics.in_flight += 1
        try:
            refusal = self._access.refusal(headers, path)
            if refusal is None and self.draining and path != "/health":
                refusal = 503, "The server is stopping and takes no new requests."
            if refusal is None:
                await self._direct.get((scope["method"], path), self._app)(scope, receive, answer)
            else:
                await _refuse(answer, *refusal)
        finally:
            self._metrics.in_flight -= 1
            seconds = time.perf_counter() - begin
            self._metrics.answered(path if path in self._paths else "other", status, seconds)
            if not self._quiet:
                shown = path.encode("ascii", "backslashreplace").decode()[:200]
                printable = "".join(c if c.isprintable() else "?" for c in shown)
                sys.stderr.write(f"{identity} {scope['method'][:10]} {printable} {status} {1000 * seconds:.1f} ms\n")


async def _refuse(send: Send, status: int, sentence: str) -> None:
    body = f'{{"error": "{sentence}"}}\n'.encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    if status == 401:
        headers.append((b"www-authenticate", b'Bearer, Basic realm="posterity"'))
    if status == 503:
        headers += [(b"connection", b"close"), (b"retry-after", b"1")]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
