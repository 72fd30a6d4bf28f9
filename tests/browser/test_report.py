"""The HTML pages in a real browser: nothing to complain about, and no wider than a phone."""

import json
import re
import shutil
import subprocess

import pytest

from posterity.cli.main import main
from posterity.report.canvas import panels, save
from posterity_studies.decks import Shown, deck_page, find_deck

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = [
    pytest.mark.cpu,
    pytest.mark.skipif(BROWSER is None, reason="no chromium, chromium-browser or google-chrome on PATH"),
]
PHONE = 390
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--enable-logging=stderr",
    "--virtual-time-budget=5000",
    "--dump-dom",
)


@pytest.fixture(scope="module", params=["two-moons", "line"])
def report(request, tmp_path_factory):
    """The text of a report, its first picture broad."""
    path = tmp_path_factory.mktemp("report") / "report.html"
    words = ["compare", request.param, "--hidden", "6", "--steps", "20", "--device", "cpu", "--quiet"]
    if request.param == "line":
        words[2:4] = ["--methods", "map,laplace,conjugate"]
    assert main([*words, "--report", str(path)]) == 0
    return path.read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def deck(tmp_path_factory):
    """The text of the page of a deck with broad figures."""
    folder, deck = tmp_path_factory.mktemp("deck"), find_deck("3")
    save(panels(1, 3, size=(4.0, 1.0))[0], folder / "broad.png")
    for path in {path for topic in deck.topics for path in topic.figures}:
        (folder / path).parent.mkdir(exist_ok=True)
        shutil.copy(folder / "broad.png", folder / path)
    printed = {name: "a line of numbers that is broad " * 5 for name in deck.commands}
    return deck_page(deck, Shown(folder, printed, {}))


@pytest.fixture
def browse(tmp_path):
    """A function that opens a page and gives the document it becomes, and what the console said."""

    def call(text):
        page = tmp_path / "page.html"
        page.write_text(text, encoding="utf-8")
        command = [BROWSER, *FLAGS, f"--user-data-dir={tmp_path / 'profile'}", page.as_uri()]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr[-2000:]
        return done.stdout, [line for line in done.stderr.splitlines() if "CONSOLE" in line]

    return call


def overflow(browse, text):
    """By how much the page is too wide for a frame as wide as a phone; windows cannot be that narrow everywhere."""
    quoted = json.dumps(text).replace("</", "<\\/")
    wrapper = f"""<!DOCTYPE html><body><iframe id="frame" style="border: 0; width: {PHONE}px; height: 800px"></iframe>
        <script>const frame = document.getElementById("frame");
        frame.onload = () => {{
            const page = frame.contentDocument;
            const images = [...page.images].every(image => image.complete && image.naturalWidth > 0);
            const root = page.documentElement, beyond = root.scrollWidth - root.clientWidth;
            document.title = [beyond, page.querySelectorAll("h1").length, images].join(" ");
        }};
        frame.srcdoc = {quoted};</script>"""
    dom, console = browse(wrapper)
    assert console == []
    (found,) = re.findall(r"<title>(\d+) (\d+) (\w+)</title>", dom)
    return int(found[0]), int(found[1]), found[2] == "true"


def test_the_console_stays_empty(browse, report):
    dom, console = browse(report)
    assert console == []
    assert dom.count("<h1>") == 1
    assert "</table>" in dom


def test_a_page_that_runs_a_script_is_told_off(browse, report):
    _, console = browse(report.replace("<main>", "<main><script>alert(1)</script>"))
    assert any("Content Security Policy" in line for line in console)


def test_the_page_fits_a_phone_and_its_pictures_are_seen(browse, report):
    assert overflow(browse, report) == (0, 1, True)
    too_wide = report.replace("<main>", '<main><div style="width: 700px">wide</div>')
    assert overflow(browse, too_wide)[0] >= 700 - PHONE


def test_the_page_of_a_deck_fits_a_phone_and_its_figures_are_seen(browse, deck):
    assert overflow(browse, deck) == (0, 1, True)
