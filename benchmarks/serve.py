"""`posterity serve` under fuzz, under load, and when it is told to stop.

    python -m benchmarks.serve

A small network with 50 draws of NUTS, fitted to a table with numbers, a boolean and a category, is served in a process
of its own; clients are in this one, on the loopback, and bounded in number and time.

- Fuzz: 10,000 requests, most of them damaged (bodies, headers, methods, paths, bytes that are no HTTP). No status may
  be 500 or more, and the resident memory may grow by at most 4 MB over the last half.
- Load: two clients with keep-alive, one row a request, in turns of 300 requests with a plain server: FastAPI, a
  pydantic model of the row, and the same 50 draws as one batched forward pass; it answers mean and standard deviation.
  p99 is to be below 15 ms, and the throughput at least 0.6 of the plain server's.
- Stop: four clients ask without pause when SIGTERM comes. The server must count as many answers as the clients received
  whole, all of them sound, and exit with 0.
"""

import csv
import http.client
import json
import os
import random
import re
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

from benchmarks.harness import context, parser, write

ROW = {"area": 100.0, "rooms": 3, "garden": "yes", "zone": "A"}
JSON = {"Content-Type": "application/json"}
TURN, CLIENTS, STOPPED = 300, 2, 4
LIMIT_MB = 4.0


def make_run(folder: Path, *, method: tuple[str, ...]) -> Path:
    """Fit a table of 200 rows; return the run folder."""
    draw = random.Random(0)
    with (folder / "houses.csv").open("w") as file:
        lines = csv.writer(file)
        lines.writerow([*ROW, "price"])
        for _ in range(200):
            area, rooms, garden, zone = draw.uniform(40, 200), draw.randint(1, 6), draw.choice(["yes", "no"]), "ABC"
            where = draw.choice(zone)
            price = 1000 * area + 5000 * rooms + 9000 * (garden == "yes") + 10_000 * zone.index(where)
            lines.writerow([f"{area:.1f}", rooms, garden, where, f"{price + draw.gauss(0, 5000):.0f}"])
    command = [sys.executable, "-m", "posterity", "fit", str(folder / "houses.csv"), "--target", "price"]
    command += ["--hidden", "10", "--device", "cpu", "--quiet", "--prior-scale", "1", "--out", str(folder / "run")]
    subprocess.run([*command, *method], check=True, stdout=subprocess.DEVNULL, timeout=1200)
    return folder / "run"


@contextmanager
def server(command: list[str], folder: Path) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """Start a server; yield its process and port, and end it."""
    log = folder / f"log-{len(list(folder.glob('log-*')))}"
    with log.open("wb") as file:
        process = subprocess.Popen(command, stderr=file, stdout=file)
        try:
            port = _port(log, process)
            yield process, port
        finally:
            if process.poll() is None:
                process.terminate()
                with suppress(subprocess.TimeoutExpired):
                    process.wait(20)
            if process.poll() is None:
                process.kill()


def _port(log: Path, process: subprocess.Popen[bytes]) -> int:
    end = time.monotonic() + 120
    while time.monotonic() < end and process.poll() is None:
        found = re.search(r"http://127\.0\.0\.1:(\d+)", log.read_text(errors="replace"))
        if found:
            with suppress(OSError), socket.create_connection(("127.0.0.1", int(found[1])), 1):
                return int(found[1])
        time.sleep(0.05)
    raise RuntimeError(f"The server does not start: {log.read_text(errors='replace')[-2000:]}")


def ours(run: Path) -> list[str]:
    """The command of the server that is measured."""
    return [sys.executable, "-m", "posterity", "serve", str(run), "--port", "0"]


def plain(run: str) -> None:
    """Serve the same draws by FastAPI and torch alone, as one would write it by hand."""
    import torch
    import uvicorn
    from fastapi import FastAPI
    from pydantic import BaseModel

    from posterity.cli.frame.folders import find_run

    opened = find_run(Path(run))
    module, fitted = opened.posterior.module(), opened.preprocessing  # type: ignore[union-attr]
    assert fitted is not None
    torch.set_num_threads(1)
    numbers = {column.name: column for column in fitted.inputs}
    area, rooms, garden, zone = (numbers[name] for name in ROW)
    scale, shift = fitted.target.scale, fitted.target.mean

    class House(BaseModel):
        area: float
        rooms: float
        garden: str
        zone: str

    app = FastAPI()

    @app.post("/predict")
    async def predict(houses: list[House]) -> list[dict[str, float]]:
        inputs = torch.tensor(
            [
                [
                    (h.area - area.mean) / area.scale,
                    (h.rooms - rooms.mean) / rooms.scale,
                    ((h.garden == "yes") - garden.mean) / garden.scale,
                    *(float(h.zone == word) for word in zone.categories),
                ]
                for h in houses
            ]
        )
        with torch.no_grad():
            result = module(inputs)
        pairs = zip(result["mean"][:, 0].tolist(), result["std"][:, 0].tolist(), strict=True)
        return [{"mean": mean * scale + shift, "std": std * scale} for mean, std in pairs]

    place = socket.socket(proto=socket.IPPROTO_TCP)  # else asyncio leaves Nagle's algorithm on, which costs 40 ms
    place.bind(("127.0.0.1", 0))
    print(f"http://127.0.0.1:{place.getsockname()[1]}", flush=True)
    uvicorn.Server(uvicorn.Config(app, log_level="critical", access_log=False)).run([place])


class Fuzzer:
    """Requests that are damaged at random, from a seed."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def body(self) -> bytes:
        """A body: sound, or with wrong values, or with its bytes damaged."""
        draw = self._random
        values: list[Any] = [None, "", "x", -1, 1e308, 10**400, True, [], {}, "\ud800", "NaN", "1,5", "5 %", "A" * 5000]
        rows: list[Any] = [
            {name: draw.choice(values) if draw.random() < 0.05 else value for name, value in ROW.items()}
            for _ in range(draw.choice((0, 1, 1, 1, 3, 50)))
        ]
        if draw.random() < 0.1 and rows:
            draw.choice(rows).pop(draw.choice(list(ROW)), None)
        if draw.random() < 0.1:
            rows.append(draw.choice(values))
        columns = {
            name: [draw.choice((value, *values)) for _ in range(draw.randint(0, 3))] for name, value in ROW.items()
        }
        document: Any = draw.choice((rows, rows, rows, {"rows": rows, "level": draw.choice((0.9, *values))}))
        document = {"columns": columns} if draw.random() < 0.1 else document
        document = draw.choice(values) if draw.random() < 0.03 else document
        data = bytearray(json.dumps(document).encode())
        if draw.random() < 0.15:
            text = ",".join(ROW) + "\n" + "\n".join(",".join(map(str, ROW.values())) for _ in range(draw.randint(0, 9)))
            data = bytearray(text.encode())
        for _ in range(draw.choice((0,) * 6 + (1, 5, 40))):
            if data:
                index = draw.randrange(len(data))
                data[index : index + draw.randint(0, 3)] = draw.randbytes(draw.randint(0, 3))
        special = (b"[" * 100_000, b'{"rows":' * 500, b"\xff\xfe", b"PK\x03\x04" + bytes(50), b"\0" * 100, b"PAR1", b"")
        return draw.choice(special) if draw.random() < 0.03 else bytes(data)

    def request(self) -> bytes:
        """The bytes of a request."""
        draw, body = self._random, self.body()
        kinds = (*("application/json",) * 12, "text/csv", "text/plain", "", "a" * 300)
        methods = ("GET", "PUT", "DELETE", "OPTIONS", "HEAD", "PATCH", "BREW")
        method = "POST" if draw.random() < 0.9 else draw.choice(methods)
        paths = (
            "/",
            "/health",
            "/ready",
            "/metrics",
            "/docs",
            "/openapi.json",
            "/predict/",
            "/../etc",
            "//",
            "/%00",
            "/x?y",
        )
        path = "/predict" if draw.random() < 0.85 else draw.choice(paths)
        path += draw.choice(("", "", "", "?level=0.5", "?level=nan", "?level=2", "?level=%ff", "?x=" + "y" * 2000))
        headers = {"Host": "127.0.0.1", "Content-Type": draw.choice(kinds), "Content-Length": str(len(body))}
        if draw.random() < 0.15:
            odd = {
                "Host": ("evil.example", "", "a:b:c", "[::1]:80", "127.0.0.1:99999", "localhost@x"),
                "Origin": ("http://evil.example", "null", "http://127.0.0.1"),
                "X-Request-ID": ("a b", "x" * 500, "ok-1", "é"),
                "Content-Length": ("-1", "abc", "99999999999", "0", str(len(body) + 5)),
                "Transfer-Encoding": ("chunked", "gzip"),
                "Accept": ("text/csv", "*/*", "\t"),
                "Authorization": ("Bearer x", "Basic !!!", "Basic eA=="),
                "Expect": ("100-continue",),
                "Content-Encoding": ("gzip",),
            }
            name = draw.choice(list(odd))
            headers[name] = draw.choice(odd[name])
        head = f"{method} {path} HTTP/{draw.choice(('1.1',) * 20 + ('1.0', '2.0', 'x'))}\r\n"
        head += "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        data = bytearray(head.encode("latin-1", "replace") + b"\r\n" + body)
        if draw.random() < 0.03:
            data[draw.randrange(len(data))] = draw.randrange(256)
        if draw.random() < 0.02:
            data = data[: draw.randrange(len(data))]
        return bytes(data)


def answered(port: int, data: bytes, seconds: float = 5.0) -> int:
    """Send bytes and the end of the stream; return the status, or 0 where the connection closes without one."""
    with suppress(OSError), socket.create_connection(("127.0.0.1", port), seconds) as link:
        link.settimeout(seconds)
        link.sendall(data)
        link.shutdown(socket.SHUT_WR)
        text = b""
        while b"\r\n" not in text and (part := link.recv(65536)):
            text += part
        while link.recv(65536):
            pass
        words = text.split(b" ", 2)
        return int(words[1]) if len(words) > 1 and words[0].startswith(b"HTTP/") and words[1].isdigit() else 0
    return 0


def resident(process: subprocess.Popen[bytes]) -> float:
    """The resident set of the process in MB."""
    fields = Path(f"/proc/{process.pid}/statm").read_text().split()
    return int(fields[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


def _cpu(process: subprocess.Popen[bytes]) -> float:
    """The seconds of CPU that the process has taken."""
    fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def fuzz(run: Path, folder: Path, count: int, seed: int) -> dict[str, Any]:
    """Send damaged requests; return how many had which status, and the memory on the way."""
    fuzzer, statuses, memory = Fuzzer(seed), Counter[int](), list[float]()
    with server(ours(run), folder) as (process, port):
        for index in range(count):
            statuses[answered(port, fuzzer.request())] += 1
            if index % max(1, count // 20) == count // 20 - 1 or index == count - 1:
                memory.append(resident(process))
        alive = answered(port, b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
    half = memory[len(memory) // 2 :]
    return {
        "requests": count,
        "statuses": {str(status): number for status, number in sorted(statuses.items())},
        "alive": alive == 200,
        "memory_mb": memory,
        "growth_mb": max(half) - half[0],
    }


def _turn(port: int, count: int) -> tuple[float, list[float]]:
    """Ask with two clients; return requests a second, and the seconds of each."""
    seconds: list[float] = []

    def ask() -> None:
        link, body = http.client.HTTPConnection("127.0.0.1", port, timeout=30), json.dumps([ROW])
        for _ in range(count // CLIENTS):
            begin = time.perf_counter()
            link.request("POST", "/predict", body, JSON)
            reply = link.getresponse()
            reply.read()
            seconds.append(time.perf_counter() - begin)
            assert reply.status == 200, reply.status
        link.close()

    begin = time.perf_counter()
    clients = [threading.Thread(target=ask) for _ in range(CLIENTS)]
    for client in clients:
        client.start()
    for client in clients:
        client.join(120)
    return len(seconds) / (time.perf_counter() - begin), seconds


def load(run: Path, folder: Path, rounds: int) -> dict[str, Any]:
    """Measure both servers in turn; return latencies and throughputs."""
    by_hand = [sys.executable, "-c", f"from benchmarks.serve import plain; plain({str(run)!r})"]
    with server(ours(run), folder) as (first, port), server(by_hand, folder) as (second, other):
        for place in (port, other):
            _turn(place, TURN)
        before = [_cpu(process) for process in (first, second)]
        turns = [(_turn(port, TURN), _turn(other, TURN)) for _ in range(rounds)]
        spent = [_cpu(process) - then for process, then in zip((first, second), before, strict=True)]
    result: dict[str, Any] = {}
    for index, name in enumerate(("posterity", "plain")):
        every = sorted(value for turn in turns for value in turn[index][1])
        result[name] = {
            "per_second": statistics.median(turn[index][0] for turn in turns),
            "p50_ms": 1000 * every[len(every) // 2],
            "p99_ms": 1000 * every[int(0.99 * len(every))],
            "cpu_ms": 1000 * spent[index] / len(every),
        }
    result["throughput_ratio"] = statistics.median(own[0] / plain[0] for own, plain in turns)
    return result


def stop(run: Path, folder: Path, seconds: float) -> dict[str, Any]:
    """Send SIGTERM under load; return how many requests the server answered and the clients received."""
    received, sound, over = Counter[str](), [True], threading.Event()

    def ask(port: int) -> None:
        body = json.dumps([ROW] * 20)
        with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=30)) as link:
            while not over.is_set():
                try:
                    link.request("POST", "/predict", body, JSON)
                    reply = link.getresponse()
                    text = reply.read()
                except (OSError, http.client.HTTPException):  # closed before the request was read
                    return
                received[str(reply.status)] += 1
                if reply.status == 200:
                    sound[0] &= len(json.loads(text)["predictions"]) == 20

    with server(ours(run), folder) as (process, port):
        clients = [threading.Thread(target=ask, args=(port,)) for _ in range(STOPPED)]
        for client in clients:
            client.start()
        time.sleep(seconds)
        process.send_signal(signal.SIGTERM)
        code = process.wait(60)
        for client in clients:
            client.join(60)
        over.set()
        refused = answered(port, b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
    logs = sorted(folder.glob("log-*"), key=lambda path: int(path.name.split("-")[1]))
    lines = re.findall(r"POST /predict (\d+) ", logs[-1].read_text())
    return {
        "exit_code": code,
        "server": dict(Counter(lines)),
        "clients": dict(received),
        "sound": sound[0],
        "refused_afterwards": refused == 0,
    }


def main() -> None:
    """Measure, write the results, and fail where a promise is broken."""
    options = parser(__doc__ or "")
    options.add_argument("--requests", type=int, default=10_000, help="fuzzed requests (default 10,000)")
    given = options.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        run = make_run(folder, method=("--method", "nuts", "--draws", "50", "--warmup", "50", "--chains", "1"))
        facts = {"load": load(run, folder, given.rounds), "stop": stop(run, folder, 3.0)}
        facts["fuzz"] = fuzz(run, folder, given.requests, given.seed)
    held = promises(facts)
    measured, ratio = facts["load"], facts["load"]["throughput_ratio"]
    fuzzed, by_hand = facts["fuzz"], measured["plain"]
    notes = [
        f"Fuzz: {given.requests:,} requests, by status {fuzzed['statuses']} (0: closed without an answer); the memory "
        f"grew by {fuzzed['growth_mb']:.1f} MB over the last half, of {fuzzed['memory_mb'][-1]:.0f}.",
        f"Load: {_speeds(measured['posterity'])}; the plain server {_speeds(by_hand)}; throughput ratio {ratio:.2f}.",
        f"Stop: the server answered {facts['stop']['server']}, clients received {facts['stop']['clients']}; exit code "
        f"{facts['stop']['exit_code']}.",
        *(f"{'Held' if kept else 'BROKEN'}: {promise}." for promise, kept in held.items()),
    ]
    write("serve", [], context(given, ["fastapi", "uvicorn"]), facts, notes, given.results)
    if not all(held.values()):
        sys.exit("A promise is broken.")


def _speeds(measured: dict[str, float]) -> str:
    return (
        f"{measured['per_second']:.0f} requests a second, median {measured['p50_ms']:.1f} ms, p99 "
        f"{measured['p99_ms']:.1f} ms, {measured['cpu_ms']:.1f} ms of CPU each"
    )


def promises(facts: dict[str, Any]) -> dict[str, bool]:
    """What was promised, and whether the measurements keep it."""
    fuzzed, measured, stopped = facts["fuzz"], facts["load"], facts["stop"]
    return {
        "no status of 500 or more, and the server is alive": fuzzed["alive"]
        and max(map(int, fuzzed["statuses"])) < 500,
        f"memory flat to {LIMIT_MB:g} MB": fuzzed["growth_mb"] < LIMIT_MB,
        "p99 below 15 ms": measured["posterity"]["p99_ms"] < 15.0,
        "throughput at least 0.6 of the plain server": measured["throughput_ratio"] >= 0.6,
        "no accepted request is lost": stopped["server"] == stopped["clients"] and stopped["sound"],
        "it ends with exit code 0": stopped["exit_code"] == 0 and stopped["refused_afterwards"],
    }


if __name__ == "__main__":
    main()
