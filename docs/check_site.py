"""Looks at the site that `make docs` built: every name, no dead link, no request, a search that finds.

python docs/check_site.py [--browser]
"""

import re
import runpy
import shutil
import subprocess
import sys
import tempfile
import zlib
from collections import Counter
from html import unescape
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote

ROOT = Path(__file__).parents[1]
SITE = ROOT / "site"
LOADED = re.compile(r"<(?:script|link|img|iframe)[^>]*?(?:src|href)=\"?(https?:[^\s\">]+)")
LINK = re.compile(r"\s(?:href|src)=(?:\"([^\"]*)\"|([^\s>]+))")
ANCHOR = re.compile(r"\s(?:id|name)=\"?([^\"\s>]+)")
SEARCHES = {"KFAC": "Kronecker", "temperature": "emperature", "LoRA": "LoRA"}
"""What is searched for, and a word that the results must have."""


def missing_names() -> list[str]:
    """Return the public names that the site has no entry for."""
    site = runpy.run_path(str(ROOT / "docs" / "make_site.py"))
    body = (SITE / "objects.inv").read_bytes().split(b"\n", 4)[4]
    known = {line.split(" ")[0] for line in zlib.decompress(body).decode().splitlines()}
    exported = runpy.run_path(str(ROOT / "docs" / "make_reference.py"))["exported"]
    names = [(package, name) for package in site["packages"]() for name in exported(package)]
    return [f"{package.__name__}.{name}" for package, name in names if site["canonical"](package, name)[0] not in known]


def dead_links(site: Path) -> list[str]:
    """Return links to files that a site lacks, or to places that a page lacks, each with the page it is on."""
    pages = {path.resolve(): path.read_text(encoding="utf-8") for path in site.rglob("*.html")}
    anchors = {path: set(ANCHOR.findall(text)) for path, text in pages.items()}
    dead = []
    for path, text in pages.items():
        for link in {unescape(quoted or bare) for quoted, bare in LINK.findall(text)}:
            if re.match(r"[a-z]+:|//", link):
                continue
            file, _, place = unquote(link).partition("#")
            target = (path.parent / file.partition("?")[0]).resolve() if file else path
            if not target.is_file() or (place and target in anchors and place not in anchors[target]):
                dead.append(f"{link} on {path.relative_to(site.resolve())}")
    return sorted(dead)


class Tags(HTMLParser):
    """Which tags of a page are never closed: text such as <b, x> that was taken for one."""

    VOID = ("area", "base", "br", "col", "embed", "hr", "img", "input", "link", "meta", "source", "track", "wbr")

    def __init__(self, text: str) -> None:
        """Read a page."""
        super().__init__()
        self.opened: Counter[str] = Counter()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: object) -> None:
        """Count a tag that must be closed."""
        self.opened[tag] += tag not in self.VOID

    def handle_startendtag(self, tag: str, attrs: object) -> None:
        """Pass a tag that closes itself."""

    def handle_endtag(self, tag: str) -> None:
        """Count it off."""
        self.opened[tag] -= tag not in self.VOID


def taken_for_tags(site: Path) -> list[str]:
    """Return the text of pages that a browser takes for tags and does not show, each with its page."""
    pages = {path: Tags(path.read_text(encoding="utf-8")).opened for path in sorted(site.rglob("*.html"))}
    return [f"<{tag}> on {path.relative_to(site)}" for path, tags in pages.items() for tag in tags if tags[tag] > 0]


def loaded_from_elsewhere() -> list[str]:
    """Return the addresses outside the site that its pages would load."""
    pages = SITE.rglob("*.html")
    return sorted({address for page in pages for address in LOADED.findall(page.read_text(encoding="utf-8"))})


def results(browser: str, words: str) -> str:
    """Return the results of a search in the site, opened from its folder in headless Chromium."""
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"]
    with tempfile.TemporaryDirectory() as folder:
        command = [browser, *options, f"--user-data-dir={folder}", "--virtual-time-budget=20000", "--dump-dom"]
        page = f"{(SITE / 'index.html').as_uri()}?q={words}"
        shown = subprocess.run([*command, page], capture_output=True, text=True, timeout=300, check=True).stdout
    return shown.partition("md-search-result__list")[2]


def main() -> None:
    """Check the site, and end with an error that names what is wrong."""
    wrong = [f"{name} has no entry" for name in missing_names()]
    wrong += [f"{link} leads nowhere" for link in dead_links(SITE)]
    wrong += [f"{text} is taken for a tag" for text in taken_for_tags(SITE)]
    wrong += [f"{address} is loaded from elsewhere" for address in loaded_from_elsewhere()]
    if "--browser" in sys.argv:
        browser = shutil.which("chromium")
        if browser is None:
            raise SystemExit("check_site: --browser needs Chromium, and there is none. Install the package chromium.")
        wrong += [f"{words!r} finds nothing" for words, word in SEARCHES.items() if word not in results(browser, words)]
    if wrong:
        raise SystemExit("check_site: " + "; ".join(wrong))
    found = ", and its search finds" if "--browser" in sys.argv else ""
    print(f"The site has every public name and no dead link, loads nothing from elsewhere{found}.")


if __name__ == "__main__":
    main()
