"""The HTML pages in a real browser: nothing to complain about, no request, and no wider than a phone."""

import shutil

import pytest
from chromiumpages import AXE, BROWSER, TINY, asked, dumped, hostile_table

from posterity.cli.frame import columns
from posterity.cli.main import main
from posterity.report.canvas import panels, save
from posterity.report.html import page
from posterity_studies.decks import Shown, deck_page, find_deck

pytestmark = [
    pytest.mark.cpu,
    pytest.mark.skipif(BROWSER is None, reason="no chromium, chromium-browser or google-chrome on PATH"),
]
PHONE = 390


def text_of(folder, *words):
    """The page that a command writes, with fewer resamples for its intervals."""
    path, whole = folder / "report.html", columns.bootstrap
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(columns, "bootstrap", lambda *args, **options: whole(*args, **{**options, "resamples": 40}))
        assert main([*map(str, words), "--report", str(path)]) == 0
    return path.read_text(encoding="utf-8")


@pytest.fixture(scope="module", params=["two-moons", "line", "hostile classes", "hostile numbers"])
def report(request, tmp_path_factory):
    """The text of the page of a comparison, or of a fit to a table of hostile names."""
    folder = tmp_path_factory.mktemp("report")
    if request.param == "two-moons":
        return text_of(folder, "compare", "two-moons", "--methods", "map,laplace", *TINY)
    if request.param == "line":
        chains = ("--draws", "20", "--warmup", "20", "--chains", "2")
        return text_of(folder, "compare", "line", "--methods", "map,hmc", *chains, *TINY)
    path, target = hostile_table(folder / "<b>table.csv", request.param.endswith("numbers"))
    return text_of(folder, "fit", path, "--target", target, "--method", "map", "--out", folder / "run", *TINY)


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


LOOK = """
    const root = document.documentElement;
    const images = [...document.images].every(image => image.complete && image.naturalWidth > 0);
    const looked = { beyond: root.scrollWidth - root.clientWidth, images, title: document.title,
        headings: document.querySelectorAll("h1").length };
"""
EXPLORE = """
    const resources = window.performance.getEntriesByType("resource").map(entry => entry.name);
    const names = { scripts: document.scripts.length, images: document.images.length,
        foreign: document.querySelectorAll("b, i").length };
    const charts = document.querySelectorAll(".chart svg").length;
    const empty = [...document.querySelectorAll("[data-figure]")].filter(place => !place.textContent);

    const chart = document.querySelector(".chart");
    const [tip, said] = [() => chart.querySelector(".tip"), []];
    chart.focus();
    for (const key of ["ArrowRight", "ArrowRight", "End"]) {
        chart.dispatchEvent(new KeyboardEvent("keydown", { key, bubbles: true }));
        said.push(document.getElementById("said").textContent);
    }
    const keys = { focused: document.activeElement === chart, shown: !tip().hidden };
    chart.dispatchEvent(new KeyboardEvent("keydown", { key: "Escape", bubbles: true }));
    keys.hidden = tip().hidden;

    const hovered = { marks: 0, silent: 0 };
    for (const each of document.querySelectorAll(".chart")) {
        for (const shape of each.querySelectorAll("circle.dot, rect.bar")) {
            const mark = shape.getBoundingClientRect();
            if (!mark.width) continue; // of a figure that is folded
            const at = { clientX: mark.x + mark.width / 2, clientY: mark.y + mark.height / 2, bubbles: true };
            each.dispatchEvent(new PointerEvent("pointermove", at));
            hovered.marks += 1;
            const shown = each.querySelector(".tip");
            if (shown.hidden || !/[0-9]/.test(shown.textContent)) hovered.silent += 1;
        }
        each.dispatchEvent(new PointerEvent("pointerleave"));
    }

    const details = [...document.querySelectorAll("details.numbers")];
    for (const each of details) each.open = true;
    await new Promise(done => setTimeout(done, 200));
    const tables = details.filter(each => each.querySelector("tbody th")).length;
    const unreached = [...document.querySelectorAll("input, .chart, summary, .wide")].filter(each => each.tabIndex < 0);
    return { ...looked, resources, names, charts, empty: empty.length, said, keys, hovered, left: tip().hidden,
        tables, behind: details.length, unreached: unreached.length };
"""


def test_the_page_works_on_a_phone_by_pointer_and_by_keys_and_asks_for_nothing(tmp_path, report):
    found, console = asked(tmp_path, report, LOOK + EXPLORE, PHONE)
    assert console == []
    assert [address for address in found["resources"] if not address.startswith("data:")] == []
    assert (found["beyond"], found["headings"]) == (0, 1)
    assert found["title"] not in ("", "broken")
    assert found["names"] == {"scripts": 2, "images": 0, "foreign": 0}
    assert found["empty"] == 0  # each place of a figure is filled
    assert found["keys"] == {"focused": True, "shown": True, "hidden": True}
    assert len(set(found["said"])) == 3
    assert all(found["said"])
    assert found["hovered"]["marks"] > 20
    assert found["hovered"]["silent"] == 0
    assert found["left"]
    assert found["tables"] == found["behind"] == found["charts"] >= 4
    assert found["unreached"] == 0


def test_what_is_folded_is_open_on_paper(tmp_path, report):
    script = """
        const closed = () => document.querySelectorAll("details:not(.numbers):not([open])").length;
        const counts = [closed()];
        for (const name of ["beforeprint", "afterprint"]) {
            window.dispatchEvent(new Event(name));
            counts.push(closed());
        }
        return counts;"""
    before, printed, after = asked(tmp_path, report, script)[0]
    assert before == after > 0
    assert printed == 0


@pytest.mark.parametrize(
    "foreign",
    [
        "<script>alert(1)</script>",
        '<p style="color: red">styled</p>',
        '<img src="http://127.0.0.1:9/x.png" alt="">',
        '<link rel="stylesheet" href="http://127.0.0.1:9/x.css">',
    ],
)
def test_what_is_not_the_pages_own_is_told_off(tmp_path, foreign):
    text = page("page", ["<h1>page</h1>", foreign], {"methods": [], "figures": {}})
    _, console = dumped(tmp_path, text)
    assert any("Content Security Policy" in line for line in console)


def test_a_page_too_wide_for_a_phone_is_seen(tmp_path):
    text = page("page", ['<div><svg width="700" height="9"></svg></div>'])
    assert asked(tmp_path, text, f"{LOOK} return looked.beyond;", PHONE)[0] >= 700 - PHONE


def test_the_page_of_a_deck_fits_a_phone_and_its_figures_are_seen(tmp_path, deck):
    found, console = asked(tmp_path, deck, f"{LOOK} return looked;", PHONE)
    assert console == []
    assert (found["beyond"], found["headings"], found["images"]) == (0, 1, True)


@pytest.mark.skipif(not AXE.is_file(), reason="no axe-core: npm install axe-core, or POSTERITY_AXE=axe.min.js")
def test_axe_finds_no_violation(tmp_path, report):
    policy = report.index('<meta http-equiv="Content-Security-Policy"')
    bare = report[:policy] + report[report.index(">", policy) + 1 :]  # axe is another script
    run = f"<script>{AXE.read_text(encoding='utf-8')}</script></body>"
    script = """
        for (const each of document.querySelectorAll("details")) each.open = true;
        await new Promise(done => setTimeout(done, 300));
        const result = await window.axe.run(document);
        return { passes: result.passes.length,
            violations: result.violations.map(each => [each.id, each.nodes.map(node => node.html)]) };"""
    scheme = 1 if "table" in report[: report.index("</title>")] else 0  # light for hostile tables, dark for others
    flags = (f"--blink-settings=preferredColorScheme={scheme}", "--virtual-time-budget=20000")
    found, _ = asked(tmp_path, bare.replace("</body>", run), script, 1200, *flags)
    assert found["violations"] == []
    assert found["passes"] > 15
