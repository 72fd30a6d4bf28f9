"""The index of the topics of four lecture decks: names in the library, tests and figures of each.

`topics.toml` holds the list. A command has a name there, which is also the folder of its figures; a topic lists what
shows it as "mixtures/bound.png", or as "mixtures" where the tables that the command prints show it.
"""

import shlex
import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

FILE = Path(__file__).parent / "topics.toml"
KINDS = ("algorithm", "formula", "claim", "figure", "experiment")
FIGURE_OPTIONS = ("--plot", "--figure")
"""Options of commands other than studies, before the name of a figure."""


@dataclass(frozen=True)
class Erratum:
    """An error that is often printed, the correct statement, and its derivation in one line."""

    id: str
    printed: str
    right: str
    why: str


@dataclass(frozen=True)
class Topic:
    """An item of a deck: its statement, its names in the library, its tests and its commands."""

    id: str
    kind: str
    title: str
    formula: str
    names: tuple[str, ...]
    tests: tuple[str, ...]
    shown: tuple[str, ...]
    source: str = ""
    errata: tuple[Erratum, ...] = ()

    @property
    def commands(self) -> tuple[str, ...]:
        """The names of the commands that demonstrate the topic."""
        return tuple(dict.fromkeys(item.partition("/")[0] for item in self.shown))

    @property
    def figures(self) -> tuple[str, ...]:
        """The figures of the topic, each in the folder of its command."""
        return tuple(item for item in self.shown if "/" in item)


@dataclass(frozen=True)
class Deck:
    """The topics of a deck."""

    number: int
    title: str
    topics: tuple[Topic, ...]

    @property
    def commands(self) -> tuple[str, ...]:
        """The names of all commands of the deck, each once."""
        return tuple(dict.fromkeys(name for topic in self.topics for name in topic.commands))


@dataclass(frozen=True)
class Index:
    """The decks, the commands by name, and folders of results/ that are not named after their command."""

    commands: dict[str, str]
    results: dict[str, str]
    decks: tuple[Deck, ...]

    def figure_path(self, figure: str) -> str:
        """Return the path to which a listed command writes a figure.

        >>> topics().figure_path("mixtures/bound.png")
        'study-mixtures/bound.png'
        """
        name, _, file = figure.partition("/")
        words = shlex.split(self.commands[name])
        return f"study-{words[2]}/{file}" if words[1] == "study" else file


@cache
def topics() -> Index:
    """Read the index.

    >>> [len(deck.topics) for deck in topics().decks]
    [21, 23, 19, 23]
    """
    table = tomllib.loads(FILE.read_text(encoding="utf-8"))
    decks = [
        Deck(deck["number"], deck["title"], tuple(_topic(**topic) for topic in deck["topics"]))
        for deck in table["decks"]
    ]
    return Index(table["commands"], table["results"], tuple(decks))


def _topic(names: list[str], tests: list[str], shown: list[str], errata: Any = (), **words: str) -> Topic:
    corrected = tuple(Erratum(**erratum) for erratum in errata)
    return Topic(names=tuple(names), tests=tuple(tests), shown=tuple(shown), errata=corrected, **words)
