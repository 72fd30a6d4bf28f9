"""`posterity study --deck N`: each command once, a page from topics to figures, and what is refused."""

import io
import re
from pathlib import Path

import pytest

from posterity.errors import BadData
from posterity_studies import decks
from posterity_studies.topics import topics

pytestmark = pytest.mark.cpu


@pytest.fixture
def commands(monkeypatch):
    """The names of the commands that a deck runs; in their place small figures are written."""
    from matplotlib.figure import Figure

    file = io.BytesIO()
    Figure((0.1, 0.1)).savefig(file)
    names = []

    def write(name: str, folder: Path) -> str:
        names.append(name)
        folder.mkdir(parents=True)
        for figure in (figure for deck in topics().decks for topic in deck.topics for figure in topic.figures):
            if figure.startswith(f"{name}/"):
                (folder / figure.partition("/")[2]).write_bytes(file.getvalue())
        return f"tables of <{name}>"

    monkeypatch.setattr(decks, "run_command", write)
    return names


@pytest.mark.parametrize("which", ["1", "2", "3", "4", "all"])
def test_every_command_runs_once_and_every_topic_is_on_the_page(run, commands, tmp_path, which):
    result = run("study", "--deck", which, "--out", tmp_path / "out")
    assert result.code == 0
    assert result.out == f"topics and figures: {tmp_path / 'out' / 'index.html'}\n"
    deck = decks.find_deck(which)
    assert commands == list(deck.commands)
    page = (tmp_path / "out" / "index.html").read_text(encoding="utf-8")
    assert page.count("<h1>") == 1
    anchors = re.findall(r' id="([^"]+)"', page)
    assert len(anchors) == len(set(anchors))
    assert set(anchors) == {topic.id for topic in deck.topics} | {
        path for topic in deck.topics for path in topic.figures
    }
    assert set(re.findall(r'href="#([^"]+)"', page)) <= set(anchors)
    assert page.count("data:image/png") == len({path for topic in deck.topics for path in topic.figures})
    assert all(name in page for topic in deck.topics for name in (*topic.names, *topic.tests))
    assert all(erratum.id in page for topic in deck.topics for erratum in topic.errata)
    tables = {item for topic in deck.topics for item in topic.shown if "/" not in item}
    assert all(f"tables of &lt;{name}&gt;" in page for name in tables)


def test_a_command_that_fails_is_told_and_the_others_are_drawn(run, commands, tmp_path, monkeypatch):
    write = decks.run_command

    def run_command(name, folder):
        if name == "logistic":
            raise BadData("no <rows> here")
        return write(name, folder)

    monkeypatch.setattr(decks, "run_command", run_command)
    result = run("study", "--deck", "1", "--out", tmp_path)
    assert result.code == 3
    assert result.err.splitlines()[-2] == "error: no <rows> here"
    assert f"{tmp_path / 'index.html'} shows what the other commands gave" in result.err
    page = (tmp_path / "index.html").read_text(encoding="utf-8")
    assert "logistic/evidence.png is not here: no &lt;rows&gt; here" in page
    assert 'id="mixtures/bound.png"' in page


def test_a_figure_that_no_command_writes_is_an_error(run, commands, tmp_path, monkeypatch):
    write = decks.run_command

    def run_command(name, folder):
        printed = write(name, folder)
        (folder / "bound.png").unlink(missing_ok=True)
        return printed

    monkeypatch.setattr(decks, "run_command", run_command)
    result = run("study", "--deck", "1", "--out", tmp_path)
    assert result.code == 1
    assert "error: 'posterity study mixtures' wrote no mixtures/bound.png." in result.err.splitlines()


@pytest.mark.parametrize(
    ("name", "said", "figure"),
    [("lasso", "r = sum of |w|", "l1.png"), ("linearised", "sine, network 1-20-1 tanh", "linearised.png")],
)
def test_a_listed_command_is_run_with_its_figures_in_the_folder(tmp_path, name, said, figure):
    printed = decks.run_command(name, tmp_path / name)
    assert printed.startswith(said)
    assert [path.name for path in (tmp_path / name).iterdir()] == [figure]


def test_the_folder_of_its_own_accord(run, commands, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert run("study", "--deck", "3").out == "topics and figures: deck-3/index.html\n"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--deck", "5"), "Unknown deck '5'. Known: 1, 2, 3, 4, all."),
        (("--deck", "1", "mixtures"), "--deck takes no study, and --out stands behind one."),
        (("--out", "here", "mixtures"), "--deck takes no study, and --out stands behind one."),
        (("--out", "here"), "--out is the folder of --deck, which is not given."),
        ((), "Missing command."),
    ],
)
def test_what_is_refused(run, commands, words, said):
    result = run("study", *words)
    assert result.code == 2
    error, hint = result.err.splitlines()
    assert said in error
    assert hint.startswith("hint: ")
    assert commands == []


def test_a_file_is_refused_as_folder(run, commands, tmp_path):
    (tmp_path / "file").write_text("mine")
    assert "--out must be a folder" in run("study", "--deck", "1", "--out", tmp_path / "file").err
    assert commands == []
