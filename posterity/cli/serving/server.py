"""The server process: listening, serving, and a shutdown that loses no request."""

import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

import uvicorn

from posterity.cli.frame.output import UsageError, log
from posterity.cli.serving.guard import Guard

LONGEST_END = 30.0
"""Seconds after a signal in which requests in progress may still be answered."""
IDLE = 75
"""Seconds after which an idle connection is closed."""


class _Server(uvicorn.Server):
    """A uvicorn server that leaves signals to `run_server`."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def listen(host: str, port: int) -> socket.socket:
    """Return a socket bound to the address; raise a `UsageError` if that fails."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        reason = error.strerror or str(error)
        raise UsageError(f"Cannot listen at {host} port {port}: {reason}.", "give another --port, or --host.") from None
    return listener


def run_server(app: Guard, listener: socket.socket) -> None:
    """Serve until a signal; then answer accepted requests and refuse new ones. A second signal ends it at once."""
    config = uvicorn.Config(
        app,
        log_config=None,
        access_log=False,
        server_header=False,
        lifespan="on",
        ws="none",
        timeout_keep_alive=IDLE,
        timeout_graceful_shutdown=int(LONGEST_END),
        h11_max_incomplete_event_size=1 << 16,
    )
    server = _Server(config)

    def stop(number: int, frame: FrameType | None) -> None:
        server.force_exit = server.should_exit
        app.draining = server.should_exit = True

    wakeup = signal.set_wakeup_fd(-1)  # the command line's own would end the process after a few seconds
    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        server.run([listener])
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(wakeup)
        listener.close()
    log("stopped")
