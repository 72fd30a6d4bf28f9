"""`posterity serve`: serves the predictions of a finished run over HTTP."""

import os
from dataclasses import dataclass

from posterity.cli.frame import options as o
from posterity.cli.frame.output import UsageError, log, one_thread
from posterity.cli.frame.spread import command
from posterity.errors import positive_whole
from posterity.options import check, comma_separated, option, refused

TOKEN = "POSTERITY_TOKEN"
LOOPBACK = ("localhost", "127.0.0.1", "::1")


def _port(name: str, value: int) -> None:
    if not 0 <= value < 1 << 16:
        raise refused(f"{name} must be from 0 to 65535. Got {value}.", "0 takes a free port and says which.")


def _window(name: str, value: float) -> None:
    if not 0 <= value <= 1000:
        raise refused(f"{name} must be from 0 to 1000 milliseconds. Got {value:g}.", "0 waits for nobody.")


@dataclass(frozen=True)
class ServeOptions:
    """The address of the server, the access to it, and the limits of requests."""

    host: str = option(
        "127.0.0.1", help="The address to listen at; any but this computer's own needs a token.", unit="HOST"
    )
    port: int = option(8000, help="The port; 0 takes a free one.", unit="N", check=_port)
    token: str | None = option(
        None, help="What a client must send: Authorization: Bearer TOKEN.", unit="TOKEN", usual=f"that in {TOKEN}"
    )
    allow_host: tuple[str, ...] = option(
        (), help="Further names by which clients call the server.", unit="NAMES", parse=comma_separated
    )
    max_rows: int = option(10_000, help="Rows of a request.", unit="N", check=positive_whole)
    max_bytes: int = option(10_000_000, help="Bytes of a request.", unit="N", check=positive_whole)
    max_held: int = option(
        40_000_000,
        help="Bytes of all requests under way together; others are told to come again.",
        unit="N",
        check=positive_whole,
    )
    window: float = option(
        1.0,
        help="Milliseconds that a request waits for others on their way, to share a pass.",
        unit="MS",
        check=_window,
    )

    def __post_init__(self) -> None:
        check(self)


@command
def serve(run: o.Run, wanted: ServeOptions, quiet: o.Quiet = False) -> None:
    """Serve the posterior in RUN over HTTP: its page at /, predictions at /predict, and how to ask at /docs.

    Rows come as JSON or CSV, and get what 'posterity predict' prints. SIGTERM ends it when all requests are answered.
    """
    token = (wanted.token or os.environ.get(TOKEN) or "").strip() or None  # a token from a file may end with a newline
    if wanted.host not in LOOPBACK and token is None:
        raise UsageError(
            f"serve: {wanted.host} can be reached from other computers, and needs a token.",
            f"set {TOKEN}, or give --token; or leave --host out.",
        )
    try:
        import fastapi  # noqa: F401  # imported here for one clear message if it is missing
        import uvicorn  # noqa: F401
    except ImportError as error:
        from posterity.errors import PosterityError

        raise PosterityError(f"serve needs {error.name}. Install it with: pip install 'posterity[serve]'.") from error
    from posterity.cli.frame.folders import find_run
    from posterity.cli.serving.app import Limits, make_app
    from posterity.cli.serving.guard import Access
    from posterity.cli.serving.server import listen, run_server

    opened = find_run(run)
    limits = Limits(wanted.max_rows, wanted.max_bytes, wanted.max_held, window=wanted.window / 1000.0)
    access = Access(frozenset({*LOOPBACK, wanted.host, *wanted.allow_host}), token)
    with one_thread():
        app = make_app(run, opened, access, limits, quiet=quiet)
        listener = listen(wanted.host, wanted.port)
        name = f"[{wanted.host}]" if ":" in wanted.host else wanted.host
        log(f"serving {run} at http://{name}:{listener.getsockname()[1]}/ (Ctrl-C ends it)", quiet=quiet)
        run_server(app, listener)
