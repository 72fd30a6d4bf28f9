"""The commands in the README, in the pages of docs/ and in the index of topics can be given as they are printed."""

import re
import shlex
from pathlib import Path

import pytest
from typer.main import get_command

import posterity_studies.decks
import posterity_studies.frame
from posterity.cli.main import app
from posterity_studies.topics import topics

ROOT = Path(__file__).parents[2]
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
BLOCK = re.compile(r"^```[a-z]*\n(.*?)^```", re.MULTILINE | re.DOTALL)


def commands():
    """The words of every command line: lines of blocks, and code in the text, which may go on in the next line."""
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        lines = [line for block in BLOCK.findall(text) for line in block.splitlines()]
        lines += [" ".join(code.split()) for code in re.findall(r"`(posterity [^`]+)`", BLOCK.sub("", text))]
        for line in lines:
            if line.startswith("posterity "):
                words = shlex.split(line, comments=True)
                if ">" in words:
                    words = words[: words.index(">")]
                yield pytest.param(words[1:], id=f"{page.stem}: {' '.join(words[1:5])}")
    for name, line in topics().commands.items():
        yield pytest.param(shlex.split(line)[1:], id=f"topics: {name}")


COMMANDS = list(commands())


def test_there_are_commands():
    assert len(COMMANDS) > 30


@pytest.mark.parametrize("words", COMMANDS)
def test_a_printed_command_can_be_given(words, monkeypatch):
    """Options and values are read; what the verb does with them is not run."""
    words = ["logistic" if word == "NAME" and words[0] == "study" else word for word in words]
    group = get_command(app)
    context = group.make_context("posterity", list(words))
    command, rest = group, list(words)
    while hasattr(command, "resolve_command") and rest and not rest[0].startswith("-"):
        name, command, rest = command.resolve_command(context, rest)
        if len(words) == 1:  # the text speaks of the verb
            return
        context = command.make_context(name, rest, parent=context, resilient_parsing="--help" in words)
        rest = list(context.args) + list(getattr(context, "protected_args", ()) or ())
        rest = rest or list(getattr(context, "_protected_args", ()) or ())
    if words[0] == "study" and "--help" not in words and len(words) > 1:
        made = []
        monkeypatch.setattr(posterity_studies.frame, "run_study", lambda name, settings, output: made.append(settings))
        monkeypatch.setattr(posterity_studies.decks, "run_deck", lambda which, out: made.append(which))
        command.invoke(context)
        assert made
