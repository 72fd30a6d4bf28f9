"""What the studies share on the command line: their options, the folder they write into, and its results.json."""

import json
import platform
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any, Protocol, TypeVar

import typer

import posterity
from posterity.cli.frame.output import one_thread

Out = Annotated[Path, typer.Option(metavar="FOLDER", help="Where figures and results.json go.")]
Seed = Annotated[int, typer.Option(metavar="N", help="Fixes everything random.")]
GRID = "Numbers with commas between them, or low:high:count for an even grid of their logarithms."


class Found(Protocol):
    """What a study found."""

    def document(self) -> dict[str, Any]:
        """Every number of it, ready for JSON."""
        ...


F = TypeVar("F", bound=Found)


@dataclass(frozen=True)
class Frame:
    """What is the same around every study; a seed or folder that cannot be used is refused before all else."""

    name: str
    folder: Path
    seed: int
    quiet: bool
    as_json: bool

    def __post_init__(self) -> None:
        check_seed(self.seed)
        check_folder(self.folder)

    def log(self, line: str) -> None:
        """A line about the progress."""
        from posterity.cli.frame.output import log

        log(line, quiet=self.quiet)

    def finish(
        self,
        found: F,
        draw: Callable[[F, Path], Sequence[str]],
        show: Callable[[Any, F], None],
        options: Mapping[str, object] | None = None,
    ) -> None:
        """Draw, write results.json, and print it, or what `show` prints on a console.

        `options` are those that, beside the folder and the seed, give these results again: a value of True stands for
        a flag, one of None or False for an option that is not given.
        """
        from rich.text import Text

        from posterity.cli.frame.output import console, print_json

        self.log(f"drawing into {self.folder}")
        with one_thread():
            figures = draw(found, self.folder)
            numbers = found.document()
        given = [
            word
            for name, value in {**(options or {}), "--seed": self.seed}.items()
            if value is not None and value is not False
            for word in ((name,) if value is True else (name, str(value)))
        ]
        document = write_results(self.name, self.folder, given, figures, numbers)
        if self.as_json:
            print_json(document)
            return
        out = console()
        show(out, found)
        out.print(Text(f"figures and results.json: {self.folder}"), soft_wrap=True)


def check_seed(seed: int) -> None:
    """`UsageError` at a seed that no generator takes."""
    from posterity.cli.frame.output import UsageError

    if not 0 <= seed < 2**63:
        raise UsageError(f"--seed must be a whole number from 0 to 2^63 - 1. Got {seed}.", "any small number will do.")


def check_folder(folder: Path) -> None:
    """Refuse, before anything is computed, a folder that is a file, and figures that could not be drawn."""
    from posterity.cli.frame.output import option_values
    from posterity.report.files import check_figure_path

    with option_values("study"):
        check_figure_path(folder / "figure.png")
        if folder.exists() and not folder.is_dir():
            raise ValueError(f"--out must be a folder. Got the file '{folder}'. Give another path.")


def write_results(
    name: str, folder: Path, options: Sequence[str], figures: Sequence[str], found: dict[str, Any]
) -> dict[str, Any]:
    """Write results.json: what was found, with which command and versions, when and on what machine; give it back."""
    from posterity.report.files import machine
    from posterity.storage.disk import write_file

    document = {
        "study": name,
        "command": shlex.join(["posterity", "study", name, "--out", _told(folder), *options]),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": machine(),
        "versions": {
            "posterity": posterity.__version__,
            "python": platform.python_version(),
            **{package: version(package) for package in ("torch", "matplotlib")},
        },
        "figures": list(figures),
        **found,
    }
    text = json.dumps(document, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    write_file(folder / "results.json", text.encode())
    return document


def _told(folder: Path) -> str:
    """The folder as given, but for places of this computer only its name: results are passed on."""
    return folder.name if folder.is_absolute() else str(folder)


def add_heading(rows: Any, name: str) -> None:
    """Begin a part of the table, under a bold name."""
    from rich.text import Text

    if rows.row_count:
        rows.add_section()
    rows.add_row(Text(name, "bold"))


def words(text: str) -> tuple[str, ...]:
    """The names in a list with commas, each once."""
    return tuple(dict.fromkeys(word.strip() for word in text.split(",") if word.strip()))


def grid(option: str, text: str | None) -> tuple[float, ...]:
    """The numbers that an option names, as 1,0.1 or low:high:count; none where it is not given."""
    if text is None:
        return ()
    from posterity_studies.grids import log_grid

    parts = [word.strip() for word in text.split(":")]
    try:
        bounds = (float(parts[0]), float(parts[1]), int(parts[2])) if len(parts) == 3 else None
        listed = tuple(float(word) for word in words(text)) if bounds is None else ()
    except ValueError as error:
        message = f"{option} must be numbers with commas between them, or low:high:count. Got '{text}'."
        raise ValueError(message) from error
    found = listed if bounds is None else log_grid(*bounds)
    if not found:
        raise ValueError(f"{option} must have at least one number. Got none.")
    return tuple(dict.fromkeys(found))
