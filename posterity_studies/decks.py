"""`posterity study --deck N`: every figure of a deck in one folder, with a page that leads from topics to figures."""

import io
import shlex
from collections.abc import Iterator, Mapping
from contextlib import redirect_stdout
from dataclasses import dataclass, field
from html import escape
from itertools import pairwise
from pathlib import Path

from typer.main import get_command

from posterity.cli.frame.output import console, log, option_values
from posterity.errors import PosterityError, unknown
from posterity.report.html import Picture, facts, figure, page, section
from posterity.storage.disk import write_file
from posterity_studies.frame import check_folder, notes
from posterity_studies.topics import FIGURE_OPTIONS, Deck, Erratum, Topic, topics

ALL = "all"


@dataclass(frozen=True)
class Shown:
    """The output of the commands of a deck: its folder, printed text, and failures."""

    folder: Path
    printed: Mapping[str, str]
    failures: Mapping[str, PosterityError]
    pictures: set[str] = field(default_factory=set)  # on the page already


def run_deck(which: str, out: str | None) -> None:
    """Run each command of a deck ("1" to "4", or "all") once, with its figures in a folder, and write index.html there.

    A command that fails, as where its data are absent, is told on the page. The first such error is raised at the end.
    """
    with option_values("study"):
        deck = find_deck(which)
        folder = Path(out or ("decks" if which == ALL else f"deck-{which}"))
        check_folder(folder)
    printed: dict[str, str] = {}
    failures: dict[str, PosterityError] = {}
    for number, name in enumerate(deck.commands, 1):
        log(f"{number} of {len(deck.commands)}: {topics().commands[name]}")
        try:
            printed[name] = run_command(name, folder / name)
            missing = [path for topic in deck.topics for path in topic.figures if _is_missing(path, name, folder)]
            if missing:
                raise PosterityError(f"'{topics().commands[name]}' wrote no {', '.join(dict.fromkeys(missing))}.")
        except PosterityError as error:
            failures[name] = error
            log(f"{name} failed: {error}")
    path = folder / "index.html"
    write_file(path, deck_page(deck, Shown(folder, printed, failures)).encode())
    notes(console(), [f"topics and figures: {path}"])
    if failures:
        first = next(iter(failures.values()))
        first.add_note(f"{path} shows what the other commands gave. Run the same command again for the rest.")
        raise first


def find_deck(which: str) -> Deck:
    """The deck of this number; with "all" the topics of all decks together."""
    decks = {str(deck.number): deck for deck in topics().decks}
    if which == ALL:
        return Deck(0, "All topics", tuple(topic for deck in decks.values() for topic in deck.topics))
    if which not in decks:
        raise ValueError(unknown("deck", which, (*decks, ALL)))
    return decks[which]


def run_command(name: str, folder: Path) -> str:
    """Run a command of the index with its figures in a folder, and return its output."""
    from posterity.cli.main import app

    words = shlex.split(topics().commands[name])[1:]
    folder.mkdir(parents=True, exist_ok=True)
    if words[0] == "study":
        words += ["--out", str(folder)]
    words = [str(folder / word) if before in FIGURE_OPTIONS else word for before, word in pairwise(["", *words])]
    printed = io.StringIO()
    with redirect_stdout(printed):
        get_command(app).main(args=words, prog_name="posterity", standalone_mode=False, obj=words)
    return printed.getvalue()


def deck_page(deck: Deck, shown: Shown) -> str:
    """Write the page: a list of topics, then each with its formula, errata, names, tests, commands and figures."""
    heading = f"Deck {deck.number}: {deck.title}" if deck.number else deck.title
    links = (f'<li><a href="#{topic.id}">{topic.id} {escape(topic.title)}</a></li>' for topic in deck.topics)
    parts = [
        f"<h1>{escape(heading)}</h1>",
        f'<p class="lead">{len(deck.topics)} topics, {len(deck.commands)} commands at a small size.</p>',
        section("Topics", "<ul>", *links, "</ul>"),
        *(_topic(topic, shown) for topic in deck.topics),
    ]
    return page(heading, parts)


def _is_missing(path: str, name: str, folder: Path) -> bool:
    """Return whether the figure at `path` is of this command, and missing."""
    return path.startswith(f"{name}/") and not (folder / path).is_file()


def _topic(topic: Topic, shown: Shown) -> str:
    about = {
        "Command": "\n".join(topics().commands[name] for name in topic.commands),
        "Names": "\n".join(topic.names),
        "Tests": "\n".join(topic.tests),
        "Source": topic.source,
    }
    content = [
        f"<pre>{escape(topic.formula)}</pre>",
        *(_erratum(erratum) for erratum in topic.errata),
        *_figures(topic, shown),
        facts({name: text for name, text in about.items() if text}),
    ]
    return f'<div id="{topic.id}">\n{section(f"{topic.id} {topic.title}", *content)}\n</div>'


def _erratum(erratum: Erratum) -> str:
    return (
        f"<p><strong>{erratum.id}</strong> Often printed: {escape(erratum.printed)}. <strong>Right:</strong> "
        f"{escape(erratum.right)}. {escape(erratum.why)}</p>"
    )


def _figures(topic: Topic, shown: Shown) -> Iterator[str]:
    """Return the figures of a topic; a picture that is already on the page is only linked."""
    for item in topic.shown:
        name, _, file = item.partition("/")
        if name in shown.failures:
            yield f'<p class="failed">{escape(f"{item} is not here: {shown.failures[name]}")}</p>'
        elif not file:
            tables = f"<pre>{escape(shown.printed[name])}</pre>"
            yield f"<details>\n<summary>What {escape(topics().commands[name])} prints</summary>\n{tables}\n</details>"
        elif item in shown.pictures:
            yield f'<p>Figure: <a href="#{item}">{item}</a>, above.</p>'
        else:
            shown.pictures.add(item)
            picture = Picture(item, (shown.folder / item).read_bytes(), f"Figure of {topic.title}", item)
            yield f'<div id="{item}">\n{figure(picture)}\n</div>'
