"""Options that several studies share, and parsers of lists of names and numbers; without torch."""

import dataclasses
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from posterity import options
from posterity.cli.frame.executors import executor_named, executor_option
from posterity.errors import positive, positive_whole, shown
from posterity.options import comma_separated, flag, option
from posterity_studies.grids import log_grid

if TYPE_CHECKING:
    from posterity.inference import Executor

DATA, NETWORK, METHOD = "Data", "Network", "Method"  # panels of help texts
GRID = "Numbers with commas between them, or low:high:count for an even grid of their logarithms."
Report = Callable[[str], None]
LARGEST = 2**63 - 1  # seed of torch's generators


def silent(line: str) -> None:
    """Ignore a report on the progress."""


def seed_option() -> Any:
    """Return the option --seed."""
    return option(0, help="Fixes everything random.", unit="N", check=_seed, panel=METHOD)


def device_option(default: str = "auto") -> Any:
    """Return the option --device; the frame replaces `auto` by a device."""
    return choice(default, ("auto", "cpu", "cuda"), "Where networks are trained:", METHOD)


def jobs_option(default: int | None, help: str, usual: str = "") -> Any:
    """Return the option --jobs, on which no result depends."""
    return count(default, help, METHOD, usual=usual, identity=False)


def fits_option() -> Any:
    """Return the option --executor of a study."""
    return executor_option("processes, as many as --jobs says", METHOD)


def executor(settings: Any, pieces: int) -> "Executor":
    """Return the executor of --executor and --jobs for so many pieces of work, of one thread each.

    A single piece stays in this process, unless --executor says otherwise.
    """
    word, jobs = settings.executor, settings.jobs
    if word is None:
        jobs = min(jobs or os.cpu_count() or 1, pieces)
    return executor_named(word, jobs, threads=1, gpus=float(getattr(settings, "device", "") == "cuda"))


def count(default: int | None, help: str, panel: str, **about: Any) -> Any:
    """Return an option for a positive whole number."""
    return option(default, help=help, panel=panel, **{"unit": "N", "check": positive_whole, **about})


def amount(default: float | None, help: str, panel: str, **about: Any) -> Any:
    """Return an option for a positive number."""
    return option(default, help=help, panel=panel, **{"unit": "X", "check": positive, **about})


def choice(default: str | None, choices: tuple[str, ...], help: str, panel: str, **about: Any) -> Any:
    """Return an option for one of some names."""
    return option(default, help=help, panel=panel, unit="NAME", choices=choices, **about)


def names(default: tuple[str, ...], **about: Any) -> Any:
    """Return an option for one or more names separated by commas."""
    return option(default, **{"unit": "NAMES", "parse": comma_separated, **about})


def grid(name: str, default: tuple[float, ...] = (), **about: Any) -> Any:
    """Return the option `name` for positive numbers, or low:high:count."""
    return option(default, unit="GRID", parse=lambda text: _grid(name, text), check=positive, **about)


def whole_numbers(name: str, text: str) -> tuple[int, ...]:
    """Parse the whole numbers of the option `name`."""
    return _numbers(name, text, int, "whole numbers with commas between them")


def check(settings: Any) -> None:
    """Check all options; a list must not be empty unless its default is."""
    options.check(settings)
    for field in dataclasses.fields(settings):
        if isinstance(field.default, tuple) and field.default and not getattr(settings, field.name):
            raise ValueError(f"{flag(field.name)} must name at least one. Got none.")


def _seed(name: str, value: int) -> None:
    if isinstance(value, bool) or not 0 <= value <= LARGEST:
        raise ValueError(
            f"{name} must be a whole number from 0 to 2^63 - 1. Got {shown(value)}. Any small one will do."
        )


def _grid(name: str, text: str) -> tuple[float, ...]:
    wanted = "numbers with commas between them, or low:high:count"
    if text.count(":") != 2:
        return _numbers(name, text, float, wanted)
    low, high, count = text.split(":")
    try:
        bounds = float(low), float(high), int(count)
    except ValueError as error:
        raise ValueError(f"{name} must be {wanted}. Got '{text}'.") from error
    return log_grid(*bounds)


def _numbers(name: str, text: str, number: Callable[[str], Any], wanted: str) -> tuple[Any, ...]:
    try:
        values = tuple(dict.fromkeys(number(word) for word in comma_separated(text)))
    except ValueError as error:
        raise ValueError(f"{name} must be {wanted}. Got '{text}'.") from error
    if not values:
        raise ValueError(f"{name} must have at least one number. Got none.")
    return values


@dataclass(frozen=True)
class Settings:
    """The settings of a study in which only the seed can be chosen."""

    seed: int = seed_option()

    def __post_init__(self) -> None:
        check(self)
