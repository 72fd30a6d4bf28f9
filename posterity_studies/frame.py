"""The frame of every study: its command, early checks, figures, results.json and printed tables.

A study is a package in this folder, found by its name:

- `__init__` has a docstring alone: the summary in the first line, then examples, both for --help.
- `settings.Settings` is a dataclass of options. Without this file the seed is the only one.
- `study.run(settings, folder, report)` computes the study and gives an object with `document()`, its numbers as JSON;
  `report` is told lines about the progress.
- `study.PARTS`, if there is one, has the seconds of the parts of `run` on some machine, which reports each as it
  begins, and those of the figures: the bar with the remaining time goes by them. Other studies show bars of their own.
- `study.show(console, study)` prints tables of it, `figures.draw(study, folder)` draws it and names the files.
- `study.read(settings)`, if there is one, reads the data and raises ValueError at settings that do not suit them; `run`
  takes its result as a fourth argument.
"""

import io
import json
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from html import escape
from importlib import import_module
from importlib.util import find_spec
from itertools import accumulate
from pathlib import Path
from typing import Any

from rich.text import Text

import posterity
from posterity.cli.frame.output import Terminal, console, log, one_thread, option_values, print_json
from posterity.cli.frame.spread import command
from posterity.options import option, words

OUTPUT = "Output"
PAGE = 1_300_000  # bytes of the figures in the page of a study


@dataclass(frozen=True)
class Output:
    """The folder of the results, and the form of the output."""

    out: str | None = option(
        None, help="Where figures, report.html and results.json go.", unit="FOLDER", usual="study-NAME", panel=OUTPUT
    )
    quiet: bool = option(False, help="No progress on standard error.", flags=("--quiet", "-q"), panel=OUTPUT)
    as_json: bool = option(False, help="Print one JSON document.", flags=("--json",), panel=OUTPUT)


def make_command(name: str) -> Callable[..., None]:
    """Return the command of a study, made of its settings; its docstring is the summary."""
    package = f"posterity_studies.{name}"
    own = find_spec(f"{package}.settings") is not None
    kind = import_module(f"{package}.settings" if own else "posterity_studies.options").Settings

    def run(settings: Any, output: Output) -> None:
        run_study(name, settings, output)

    run.__annotations__["settings"] = kind
    run.__name__, run.__doc__ = f"study {name}", summary_and_examples(name)[0]
    return command(run)


def summary_and_examples(name: str) -> tuple[str, str]:
    """Return the first line of a study's docstring, and the rest."""
    summary, _, examples = (import_module(f"posterity_studies.{name}").__doc__ or "").partition("\n")
    return summary, examples.strip()


def run_study(name: str, settings: Any, output: Output) -> None:
    """Run a study: check, compute, draw, write results.json, and print its tables or the JSON."""
    from posterity.storage.disk import write_file  # torch comes along

    folder = Path(output.out or f"study-{name}")

    def report(line: str) -> None:
        log(line, quiet=output.quiet)

    with option_values(f"study {name}"):
        check_folder(folder)
        if hasattr(settings, "device"):
            from posterity.cli.frame.tasks import find_device

            settings = replace(settings, device=find_device(settings.device).type)
        study = import_module(f"posterity_studies.{name}.study")
        data = (study.read(settings),) if hasattr(study, "read") else ()
    figures = import_module(f"posterity_studies.{name}.figures")
    with one_thread(), progress(name, getattr(study, "PARTS", ()), quiet=output.quiet) as begins:

        def part(line: str) -> None:
            begins()
            report(line)

        result = study.run(settings, folder, part, *data)
        part(f"drawing into {folder}")
        drawn = figures.draw(result, folder)
        numbers = result.document()
    document = write_results(name, folder, list(words(settings)), drawn, numbers)
    printed = io.StringIO()
    study.show(Terminal(file=printed, width=100), result)
    write_file(folder / "report.html", study_page(name, folder, document, printed.getvalue()).encode())
    if output.as_json:
        print_json(document)
        return
    out = console()
    study.show(out, result)
    notes(out, [f"figures, report.html and results.json: {folder}"])


@contextmanager
def progress(name: str, parts: Sequence[float], *, quiet: bool) -> Iterator[Callable[[], None]]:
    """Show a progress bar of parts that take so many seconds; yields a function to call when a part begins."""
    from posterity.inference.callbacks import bar

    if not parts and not quiet:
        yield lambda: None
        return
    ends = accumulate(parts, initial=0.0)
    with bar(name, sum(parts), wanted=False if quiet else None, in_seconds=True) as shown:
        yield lambda: shown.reach(next(ends, sum(parts)))


def study_page(name: str, folder: Path, document: dict[str, Any], printed: str) -> str:
    """Return the page of a study: its printed tables, and its figures while they take at most PAGE bytes."""
    from posterity.report.html import Picture, facts, figure, page, paragraph, section  # torch comes along

    summary, _ = summary_and_examples(name)
    drawn = [path for file in document["figures"] if (path := folder / file).suffix == ".png" and path.is_file()]
    pictures, left = [], PAGE
    for file in drawn:
        png = _few_colours(file)
        left -= 4 * len(png) // 3
        content = figure(Picture(file.name, png, f"{file.stem.replace('_', ' ')}, a figure of the study", file.name))
        named = paragraph(f"{file.name} lies beside this page, which has no room for it.")
        pictures.append(content if left > 0 else named)
    made = f"{document['date'][:16].replace('T', ' ')} UTC"
    about = {"Made": made, "Machine": f"{document['machine']['cpu']}, {document['machine']['cores']} cores"}
    about |= {"With": ", ".join(f"{package} {version}" for package, version in document["versions"].items())}
    parts = [
        f"<h1>{escape(name.replace('_', ' ').capitalize())}</h1>",
        paragraph(summary, "lead"),
        section("What it says", f'<pre class="printed" tabindex="0">{escape(printed.strip())}</pre>'),
        section("Figures", *pictures) if pictures else "",
        section("Made by", f"<pre><code>{escape(document['command'])}</code></pre>", facts(about)),
        paragraph("results.json, beside this page, has all numbers.", "note"),
    ]
    return page(f"Study {name}", parts)


def _few_colours(file: Path) -> bytes:
    """Return a PNG file in at most 256 colours: a third of its size, without a visible difference."""
    from PIL import Image  # matplotlib needs it too

    small = io.BytesIO()
    with Image.open(file) as picture:
        picture.convert("RGB").quantize(256, dither=Image.Dither.NONE).save(small, "png", optimize=True)
    return min(small.getvalue(), file.read_bytes(), key=len)


def check_folder(folder: Path) -> None:
    """Raise early if the folder is a file, or if figures could not be drawn."""
    from posterity.report.files import check_figure_path

    check_figure_path(folder / "figure.png")
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"--out must be a folder. Got the file '{folder}'. Give another path.")


def write_results(
    name: str, folder: Path, options: Sequence[str], figures: Sequence[str], numbers: dict[str, Any]
) -> dict[str, Any]:
    """Write results.json: numbers, the command that reproduces them, versions, date and machine; return it."""
    import platform
    from importlib.metadata import version

    from posterity.report.files import machine
    from posterity.storage.disk import write_file

    out = folder.name if folder.is_absolute() else str(folder)  # results are published: no paths of this computer
    document = {
        "study": name,
        "command": shlex.join(["posterity", "study", name, "--out", out, *options]),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": machine(),
        "versions": {
            "posterity": posterity.__version__,
            "python": platform.python_version(),
            **{package: version(package) for package in ("torch", "matplotlib")},
        },
        "figures": list(figures),
        **numbers,
    }
    text = json.dumps(document, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    write_file(folder / "results.json", text.encode())
    return document


def title(out: Any, text: str) -> None:
    """Print a bold line."""
    out.print(Text(text, "bold"), soft_wrap=True)


def remark(out: Any, text: str) -> None:
    """Print a dim explanation."""
    out.print(Text(text, "dim"))


def notes(out: Any, lines: Iterable[str]) -> None:
    """Print lines without line breaks inside them."""
    for line in lines:
        out.print(Text(line), soft_wrap=True)


def print_claims(out: Any, claims: dict[str, bool]) -> None:
    """Print each claim, and whether the numbers of this run agree with it."""
    notes(out, [f"{'holds' if holds else 'FAILS'}: {claim}" for claim, holds in claims.items()])


def add_heading(rows: Any, name: str) -> None:
    """Begin a section of the table under a bold name."""
    if rows.row_count:
        rows.add_section()
    rows.add_row(Text(name, "bold"))


def draw_all(figures: Mapping[str, Callable[[Any, Path], None]], study: Any, folder: Path) -> list[str]:
    """Draw each figure of a study into the file of its name in the folder; return the names."""
    for name, figure in figures.items():
        figure(study, folder / name)
    return list(figures)


def mean_curve(
    panel: Any, where: Sequence[float], scores: Sequence[tuple[float, float | None]], alpha: float, **style: Any
) -> None:
    """Draw means over seeds, with a band of one standard deviation (None for one seed) to each side."""
    means, spreads = [mean for mean, _ in scores], [spread or 0.0 for _, spread in scores]
    panel.plot(where, means, marker="o", **style)
    if any(spreads):
        low, high = ([mean + sign * spread for mean, spread in zip(means, spreads, strict=True)] for sign in (-1, 1))
        panel.fill_between(where, low, high, color=style["color"], alpha=alpha, linewidth=0)


def shades(count: int) -> list[str]:
    """Return colours for an ordered sequence of curves, from dark to light."""
    from matplotlib.colors import to_hex

    from posterity.report.canvas import gentle

    colours = gentle("viridis", 0.0, 0.9)
    return [to_hex(colours(index / max(count - 1, 1))) for index in range(count)]
