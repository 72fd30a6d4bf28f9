"""Interleaved comparisons: contenders take turns in one process, so that noise hits all of them alike."""

import argparse
import gc
import json
import os
import platform
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from posterity.report.files import machine

RESULTS = Path(__file__).parent / "results"


@dataclass(frozen=True)
class Contender:
    """One way to do the work.

    `prepare()` imports and builds whatever is needed and gives the call to time. One call does `units` units
    of work (steps, batches), and times are per unit. `checksum` makes a number of what the first call
    returned, off the clock; `compare` holds it against another contender's. A `peer` that cannot be prepared
    or called is a row that says why; without `peer` the error is raised.
    """

    name: str
    prepare: Callable[[], Callable[[], Any]]
    units: int = 1
    checksum: Callable[[Any], float] | None = None
    peer: bool = False


@dataclass(frozen=True)
class Timing:
    """Seconds per unit of one contender, one entry a round, and the checksum of its first call."""

    name: str
    seconds: tuple[float, ...]
    checksum: float | None
    disagrees: bool

    @property
    def median(self) -> float:
        """Median over rounds."""
        return statistics.median(self.seconds)

    @property
    def minimum(self) -> float:
        """Least over rounds."""
        return min(self.seconds)

    @property
    def spread(self) -> float:
        """Distance between the quartiles over rounds; 0 for a single round."""
        if len(self.seconds) < 2:
            return 0.0
        lower, _, upper = statistics.quantiles(self.seconds, n=4, method="inclusive")
        return upper - lower


@dataclass(frozen=True)
class Comparison:
    """The timings of one run, the contender they are measured against, and who was left out and why.

    `columns` are further columns of its table, by title: a number for each contender that has one.
    """

    title: str
    unit: str
    limit: str
    rounds: int
    block: int
    timings: tuple[Timing, ...]
    skipped: Mapping[str, str]
    columns: Mapping[str, Mapping[str, float]] = field(default_factory=dict)

    def __getitem__(self, name: str) -> Timing:
        return next(timing for timing in self.timings if timing.name == name)

    def ratio_of_medians(self, name: str) -> float:
        """Median time of `name` over the median time of the limit."""
        return self[name].median / self[self.limit].median

    def median_of_ratios(self, name: str) -> float:
        """Median over rounds of the time of `name` over the limit's time in the same round."""
        pairs = zip(self[name].seconds, self[self.limit].seconds, strict=True)
        return statistics.median(own / limit for own, limit in pairs)


def compare(
    title: str,
    contenders: Sequence[Contender],
    *,
    limit: str,
    unit: str = "call",
    rounds: int = 15,
    block: int = 1,
    tolerance: float | None = None,
    checked_against: str | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> Comparison:
    """Time the contenders in turn, `rounds` times, each turn one warm-up call and then `block` timed calls in a row.

    The order rotates by one each round, so that nobody always follows the same neighbour. The garbage
    collector is off while the clock runs. Where both a contender and the one `checked_against` (the limit, if
    not given) have checksums, these must agree to the relative `tolerance`: a contender of ours whose checksum
    does not is an error, a peer's row says so.
    """
    reference = limit if checked_against is None else checked_against
    for role, name in (("limit", limit), ("checked_against", reference)):
        if name not in (contender.name for contender in contenders if not contender.peer):
            raise ValueError(f"compare: {role} must name a contender that is not a peer. Got {name!r}.")
    if len({contender.name for contender in contenders}) < len(contenders):
        raise ValueError(f"compare: contenders must have different names. Got {[c.name for c in contenders]}.")
    if rounds < 1 or block < 1:
        raise ValueError(f"compare: rounds and block must be at least 1. Got {rounds} and {block}.")
    calls: dict[str, Callable[[], Any]] = {}
    checksums: dict[str, float | None] = {}
    skipped: dict[str, str] = {}
    for contender in contenders:
        try:
            call = contender.prepare()
            result = call()
            checksum = None if contender.checksum is None else contender.checksum(result)
        except Exception as error:
            if not contender.peer:
                raise
            skipped[contender.name] = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        else:
            calls[contender.name], checksums[contender.name] = call, checksum
    disagree = _disagreements(checksums, reference, tolerance)
    peers = {contender.name for contender in contenders if contender.peer}
    for name in disagree - peers:
        raise ValueError(f"{name}: checksum {checksums[name]} is not {reference}'s {checksums[reference]}.")
    seconds = _measure(calls, rounds, block, clock)
    units = {contender.name: contender.units for contender in contenders}
    timings = tuple(
        Timing(name, tuple(taken / units[name] for taken in seconds[name]), checksums[name], name in disagree)
        for name in calls
    )
    return Comparison(title, unit, limit, rounds, block, timings, skipped)


def _disagreements(checksums: Mapping[str, float | None], reference: str, tolerance: float | None) -> set[str]:
    wanted = checksums[reference]
    if tolerance is None or wanted is None:
        return set()
    # written so that a checksum that is not a number disagrees
    return {
        name
        for name, found in checksums.items()
        if found is not None and not abs(found - wanted) <= tolerance * abs(wanted)
    }


def _measure(
    calls: Mapping[str, Callable[[], object]], rounds: int, block: int, clock: Callable[[], float]
) -> dict[str, list[float]]:
    """Seconds per call, by name, one entry a round."""
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    names = list(calls)
    was_on = gc.isenabled()
    gc.disable()
    try:
        for turn in range(rounds):
            gc.collect()
            first = turn % len(names)
            for name in names[first:] + names[:first]:
                call = calls[name]
                call()  # brings its data back into the cache, as in training
                start = clock()
                for _ in range(block):
                    call()
                seconds[name].append((clock() - start) / block)
    finally:
        if was_on:
            gc.enable()
    return seconds


def parser(description: str) -> argparse.ArgumentParser:
    """The options every benchmark has: threads, rounds, seed, and where the results go."""
    options = argparse.ArgumentParser(description=description)
    options.add_argument("--threads", type=int, default=1, help="threads of torch (default 1)")
    options.add_argument("--rounds", type=int, default=15, help="interleaved rounds (default 15)")
    options.add_argument("--seed", type=int, default=0, help="seed of data and weights (default 0)")
    options.add_argument("--results", type=Path, default=RESULTS, help="folder of the results")
    return options


def context(options: argparse.Namespace, packages: Sequence[str] = ()) -> dict[str, Any]:
    """What a reader needs to repeat the run: command, date, machine, threads, versions, seed."""
    versions = {"python": platform.python_version(), "torch": torch.__version__}
    for package in packages:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            versions[package] = "not installed"
    return {
        "command": _command(sys.argv),
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "machine": machine(),
        "threads": options.threads,
        "seed": options.seed,
        "versions": versions,
    }


def _command(arguments: Sequence[str]) -> str:
    """The command line without the folders of this computer."""
    shown = list(arguments[1:])
    for index, part in enumerate(shown):
        option, equals, value = part.rpartition("=")
        if os.path.isabs(value):
            shown[index] = f"{option}{equals}{Path(value).name}"
    return shlex.join(["python", "-m", f"benchmarks.{Path(arguments[0]).stem}", *shown])


def report(
    comparisons: Sequence[Comparison],
    about: Mapping[str, Any],
    notes: Sequence[str] = (),
    table: Sequence[Sequence[str]] = (),
) -> str:
    """The results as Markdown: one table a comparison, another (its head first), the notes, how they were made."""
    lines: list[str] = []
    for comparison in comparisons:
        lines += [f"## {comparison.title}", ""]
        lines += _table(comparison)
        lines += [
            "",
            f"Per {comparison.unit}; {comparison.rounds} interleaved rounds of 1 warm-up call and {comparison.block} "
            f"timed; limit: {comparison.limit}.",
            "",
        ]
    if table:
        head, *rows = ("| " + " | ".join(cells) + " |" for cells in table)
        lines += [head, "|" + "---|" * len(table[0]), *rows, ""]
    lines += [*(f"- {note}" for note in notes), ""] if notes else []
    ran_on = about["machine"]
    versions = ", ".join(f"{name} {version}" for name, version in about["versions"].items())
    lines += [
        f"Made by `{about['command']}` on {about['date']}: {ran_on['cpu']}, {ran_on['cores']} cores, "
        f"{about['threads']} thread{'' if about['threads'] == 1 else 's'}, seed {about['seed']}; {versions}."
    ]
    return "\n".join(lines) + "\n"


def _table(comparison: Comparison) -> list[str]:
    head = (
        *("contender", "median ms", "minimum ms", "quartile spread ms", "x limit (of medians)", "x limit (by round)"),
        *comparison.columns,
    )
    lines = ["| " + " | ".join((*head, "checksum")) + " |", "|" + "---|" * (len(head) + 1)]
    for timing in comparison.timings:
        numbers = [1e3 * timing.median, 1e3 * timing.minimum, 1e3 * timing.spread]
        ratios = [comparison.ratio_of_medians(timing.name), comparison.median_of_ratios(timing.name)]
        checksum = "" if timing.checksum is None else f"{timing.checksum:.4g}"
        more = (values.get(timing.name) for values in comparison.columns.values())
        cells = [timing.name, *(f"{value:.4g}" for value in numbers), *(f"{value:.3f}" for value in ratios)]
        cells += ["" if value is None else f"{value:.4g}" for value in more]
        lines.append("| " + " | ".join((*cells, checksum + " (disagrees)" * timing.disagrees)) + " |")
    lines += [f"| {name} | skipped: {why} |" + " |" * (len(head) - 1) for name, why in comparison.skipped.items()]
    return lines


def write(
    topic: str,
    comparisons: Sequence[Comparison],
    about: Mapping[str, Any],
    facts: Mapping[str, Any] | None = None,
    notes: Sequence[str] = (),
    folder: Path = RESULTS,
    table: Sequence[Sequence[str]] = (),
) -> None:
    """Write `<topic>.json` with every number and `<topic>.md` for people, and print the latter."""
    results = [
        {
            **asdict(comparison),
            "timings": [
                {
                    **asdict(timing),
                    "median": timing.median,
                    "minimum": timing.minimum,
                    "spread": timing.spread,
                    "ratio_of_medians": comparison.ratio_of_medians(timing.name),
                    "median_of_ratios": comparison.median_of_ratios(timing.name),
                }
                for timing in comparison.timings
            ],
        }
        for comparison in comparisons
    ]
    document = {"topic": topic, **about, "facts": dict(facts or {}), "notes": list(notes), "comparisons": results}
    text = report(comparisons, about, notes, table)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{topic}.json").write_text(json.dumps(document, indent=1) + "\n")
    (folder / f"{topic}.md").write_text(f"# {topic.replace('_', ' ')}\n\n{text}")
    print(text)


def recorded(
    step: Callable[[], None], generators: Callable[[], Sequence[torch.Generator]] = tuple
) -> Callable[[], None]:
    """The step as a CUDA graph, after three calls of it; `generators` then gives those that its noise comes from."""
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call, unused-ignore]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    for generator in generators():
        graph.register_generator_state(generator)
    with torch.cuda.graph(graph):
        step()
    return graph.replay
