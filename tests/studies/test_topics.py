"""The index of topics: it is complete, and every name, test and figure in it is there."""

import ast
import importlib
import re
import runpy
import shlex
from functools import cache
from pathlib import Path

import pytest

from posterity_studies.topics import FIGURE_OPTIONS, KINDS, topics

pytestmark = pytest.mark.cpu
ROOT = Path(__file__).parents[2]
TOPICS = [topic for deck in topics().decks for topic in deck.topics]
ERRATA = {0: 12, 1: 10, 2: 7, 3: 24}
every_topic = pytest.mark.parametrize("topic", TOPICS, ids=lambda topic: topic.id)


def resolve(name):
    """The object behind a dotted name: the longest part that is a module, then its attributes."""
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        try:
            value = importlib.import_module(".".join(parts[:length]))
        except ModuleNotFoundError:
            continue
        for attribute in parts[length:]:
            value = getattr(value, attribute)
        return value
    raise ModuleNotFoundError(name)


@cache
def functions(path):
    """The names of all functions in a file."""
    return {node.name for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef)}


@cache
def written(command):
    """The figures that a command writes: those that the source of the study names, or the file behind --plot."""
    words = shlex.split(command)
    if words[1] != "study":
        return {words[index + 1] for index, word in enumerate(words) if word in FIGURE_OPTIONS}
    sources = [ast.parse(path.read_text()) for path in (ROOT / "posterity_studies" / words[2]).glob("*.py")]
    texts = (node.value for source in sources for node in ast.walk(source) if isinstance(node, ast.Constant))
    return {text for text in texts if isinstance(text, str) and re.fullmatch(r"[\w-]+\.png", text)}


def test_every_topic_and_every_erratum_is_there_once():
    assert [deck.number for deck in topics().decks] == [1, 2, 3, 4]
    wanted = [f"{deck:03d}-{item:02d}" for deck, count in enumerate((21, 23, 19, 23)) for item in range(1, count + 1)]
    assert [topic.id for topic in TOPICS] == wanted
    assert all(topic.id.startswith(f"{deck.number - 1:03d}-") for deck in topics().decks for topic in deck.topics)
    errata = [erratum.id for topic in TOPICS for erratum in topic.errata]
    assert sorted(errata) == sorted(f"E{deck}.{item}" for deck, count in ERRATA.items() for item in range(1, count + 1))


@every_topic
def test_a_topic_has_all_its_parts(topic):
    assert topic.kind in KINDS
    assert topic.title
    assert topic.formula
    assert topic.names
    assert topic.tests
    assert topic.commands
    assert all(erratum.id.startswith(f"E{int(topic.id[:3])}.") for erratum in topic.errata)
    assert all(erratum.printed and erratum.right and erratum.why for erratum in topic.errata)
    assert topic.kind not in ("figure", "experiment") or topic.figures


@every_topic
def test_public_names_resolve(topic):
    for name in topic.names:
        assert name.startswith("posterity.")
        assert "._" not in name
        assert resolve(name) is not None


@every_topic
def test_tests_exist(topic):
    for test in topic.tests:
        path, _, name = test.partition("::")
        assert name.startswith("test_")
        assert name in functions(ROOT / path)


@every_topic
def test_figures_are_those_that_the_command_writes(topic):
    for item in topic.shown:
        name, _, file = item.partition("/")
        assert name in topics().commands
        assert not file or file in written(topics().commands[name])


def test_every_command_shows_a_topic():
    used = {name for topic in TOPICS for name in topic.commands}
    assert used == set(topics().commands)
    assert set(topics().results) <= used


def test_the_pages_are_those_of_the_list():
    pages = runpy.run_path(str(ROOT / "docs" / "make_decks.py"))["pages"]()
    stored = {path.name: path.read_text(encoding="utf-8") for path in (ROOT / "docs" / "decks").glob("*.md")}
    assert stored == pages, "run make reference"


def test_links_of_the_pages_lead_somewhere():
    folder = ROOT / "docs" / "decks"
    for page in folder.glob("*.md"):
        text = page.read_text(encoding="utf-8")
        links = re.findall(r"\]\(([^)\s]+)\)", text)
        assert links
        anchors = {f"#{name}" for name in re.findall(r'<a id="([^"]+)">', text)}
        assert [link for link in links if link not in anchors and not (folder / link).exists()] == []
