"""The pages that the documentation site makes of other files. `make docs` builds all of it, and looks at it."""

import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
pytest.importorskip("mkdocs")


@pytest.fixture(scope="module")
def site():
    return runpy.run_path(str(ROOT / "docs" / "make_site.py"))


@pytest.mark.parametrize(
    ("source", "page", "text", "wanted"),
    [
        ("docs/a.md", "a.md", "[x](../results/moons/entropy.png)", "[x](results/moons/entropy.png)"),
        ("docs/decks/a.md", "decks/a.md", "[x](../../tests/cli/test_a.py)", "x"),
        ("docs/decks/a.md", "decks/a.md", "[test_x](../../tests/cli/test_a.py)", "`test_x`"),
        ("docs/a.md", "a.md", "[docs/faq.md](faq.md)", "[Questions](faq.md)"),
        ("docs/a.md", "a.md", "[x](../results/logistic)", "[x](gallery.md#results-logistic)"),
        ("docs/a.md", "a.md", "[`x[0]`](reference.md)", "[`x[0]`](reference/index.md)"),
        ("README.md", "index.md", "[x](docs/tables.md#files)", "[x](tables.md#files)"),
        ("CONTRIBUTING.md", "contributing.md", "[x](ARCHITECTURE.md)", "[x](architecture.md)"),
        ("docs/a.md", "a.md", "[x](https://a.b/c)", "[x](https://a.b/c)"),
        ("docs/a.md", "a.md", "```\na[0](../b.py)\n```", "```\na[0](../b.py)\n```"),
    ],
)
def test_links_lead_to_the_site_or_become_text(site, source: str, page: str, text: str, wanted: str) -> None:
    assert site["relinked"](text, source, page) == wanted


def test_options_stay_whole_and_long_names_break_between_their_parts(site) -> None:
    html = "<p><code>fit --out run</code> <code>a.longer.name_than_a_line_has</code></p><pre><code>--out x</code></pre>"
    word = '<span class="word">{}</span>'.format
    long = "a.<wbr>longer.<wbr>name_<wbr>than_<wbr>a_<wbr>line_<wbr>has"
    wanted = f"<p><code>{word('fit')} {word('--out')} {word('run')}</code> <code>{long}</code></p>"
    assert site["on_page_content"](html, page=None, config=None, files=None) == wanted + html.partition("</p>")[2]
    image = '<img alt="what it shows" src="x.png" />'
    assert site["on_page_content"](image, page=None, config=None, files=None) == f'<a href="x.png">{image}</a>'


def test_examples_become_blocks_of_code(site) -> None:
    lines = ["What it does.", "", ">>> 1 + 1", "2", "", "More."]
    wanted = ["What it does.", "", "", "```pycon", ">>> 1 + 1", "2", "```", "", "More."]
    assert list(site["fenced"](lines)) == wanted
    assert list(site["fenced"](lines[2:4])) == ["", "```pycon", ">>> 1 + 1", "2", "```"]


def test_formulas_are_not_taken_for_markup(site, tmp_path) -> None:
    text = "**Math**: <b, x> at theta* and q*, x**2.\n\n```pycon\n>>> 2 * 3 < 4 * 5\n```\n`a * b` <c"
    wanted = "**Math**: &lt;b, x> at theta\\* and q\\*, x\\*\\*2.\n\n```pycon\n>>> 2 * 3 < 4 * 5\n```\n`a * b` &lt;c"
    assert site["plain"](text) == wanted
    assert site["relinked"]("sigma(\\<b, x>) `\\n`", "docs/a.md", "a.md") == "sigma(&lt;b, x>) `\\n`"
    check = runpy.run_path(str(ROOT / "docs" / "check_site.py"))
    (tmp_path / "one.html").write_text("<p>sigma(<b_j, x>)<br>and <svg><path d=M0 /></svg></p>")
    (tmp_path / "two.html").write_text("<p>sigma(&lt;b_j, x>) <b>bold</b></p>")
    assert check["taken_for_tags"](tmp_path) == ["<b_j,> on one.html"]


def test_dead_links_are_found(tmp_path) -> None:
    check = runpy.run_path(str(ROOT / "docs" / "check_site.py"))
    (tmp_path / "decks").mkdir()
    (tmp_path / "decks" / "one.html").write_text(
        '<h2 id="here">x</h2> <a href="../two.html#there">y</a> <img src=../no.png>'
    )
    (tmp_path / "two.html").write_text(
        '<a id=there href="decks/one.html#here">x</a> <a href="decks/one.html#gone">y</a>'
    )
    (tmp_path / "three.html").write_text('<a href="https://a.b/c">x</a> <a href="decks">y</a> <a href="#nowhere">z</a>')
    assert check["dead_links"](tmp_path) == [
        "#nowhere on three.html",
        "../no.png on decks/one.html",
        "decks on three.html",
        "decks/one.html#gone on two.html",
    ]


def test_machines_are_told_in_words(site) -> None:
    told = site["machine_words"]
    assert told({"cpu": "AMD EPYC", "cores": 2}) == "AMD EPYC, 2 cores"
    assert (told("one H200"), told(None)) == ("one H200", "")


def test_every_method_has_a_page_and_a_picture(site) -> None:
    pages = site["pages"]()
    for name in site["method_names"]():
        drawn = site["DRAWN"].get(name)
        assert (ROOT / "results" / drawn if drawn else ROOT / "docs" / "pictures" / f"{name}.png").is_file(), name
        assert f"methods/{name}.md" in pages


def test_the_gallery_shows_every_study_with_its_command(site) -> None:
    text, studies = site["gallery"](), list((ROOT / "results").rglob("results.json"))
    for results in studies:
        assert f'id="{site["anchor"](results.parent.relative_to(ROOT).as_posix())}"' in text
    assert text.count("```text") == len(studies)


def test_notebooks_are_their_pages(site) -> None:
    """The cells of docs/notebooks are the blocks of the start pages; `make pictures` runs them again."""
    nbformat = pytest.importorskip("nbformat")
    made = runpy.run_path(str(ROOT / "docs" / "make_notebooks.py"))
    for page, file in made["PAGES"].items():
        kept = nbformat.read(ROOT / "docs" / "notebooks" / file, 4)
        assert [cell.source for cell in kept.cells] == [cell.source for cell in made["notebook"](page).cells]
        assert all(cell.outputs for cell in kept.cells if cell.cell_type == "code")
