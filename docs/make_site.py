"""The documentation site beside the pages of docs/: a hook of mkdocs that makes pages of the rest of the repository.

A page for each method and each package comes from docstrings, the gallery from results/, theory from the index of
topics, benchmarks from their tables; `make docs` builds all of it into site/. Links to files that are not on the site
become plain text.
"""

import json
import posixpath
import re
import runpy
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import griffe
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

import posterity
from posterity import methods
from posterity.inference import Method
from posterity_studies.topics import topics

ROOT = Path(__file__).parents[1]
REFERENCE = runpy.run_path(str(Path(__file__).parent / "make_reference.py"))
LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s]+)\)")
MOVED = {
    "README.md": "index.md",
    "ARCHITECTURE.md": "architecture.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "docs/reference.md": "reference/index.md",
    "docs/decks": "theory.md",
    "benchmarks/README.md": "benchmarks/index.md",
    "results": "gallery.md",
}
UNSEARCHED = "---\nsearch:\n  exclude: true\n---\n\n"
"""The head of pages of tables, whose headings would stand before what they are about in a search."""
DRAWN = {"ExpectationMaximization": "mixtures/staircase.png", "CoordinateAscent": "mixtures/factorised.png"}
"""Methods that are no posteriors of networks, and the figures of studies that show them."""


class Doctests(griffe.Extension):
    """Turn the examples of docstrings into blocks of code, which Markdown would take for quotations."""

    def on_object(self, *, obj: griffe.Object, **others: object) -> None:
        """Rewrite the docstring of an object once."""
        if obj.docstring is not None:
            obj.docstring.value = plain("\n".join(fenced(obj.docstring.value.splitlines())))


def fenced(lines: list[str]) -> Iterator[str]:
    """Put fences around examples, which end at an empty line."""
    inside = False
    for line in lines:
        begins = line.startswith(">>>") and not inside
        if begins or (inside and not line.strip()):
            yield from ("", "```pycon") if begins else ("```",)
            inside = begins
        yield line
    if inside:
        yield "```"


def plain(text: str) -> str:
    """Return the prose of a docstring whose formulas Markdown shows as they are; bold words and code stay."""
    parts = re.split(r"(^```.*?^```$|`[^`]*`)", text, flags=re.MULTILINE | re.DOTALL)
    for index in range(0, len(parts), 2):
        parts[index] = re.sub(r"(?<=\w)\*\*(?=\w)|(?<!\*)\*(?!\*)", lambda sign: "\\*" * len(sign[0]), parts[index])
        parts[index] = parts[index].replace("<", "&lt;")
    return "".join(parts)


def site_path(path: str) -> str | None:
    """Return where a file or folder of the repository is on the site; None if it is not."""
    if path in MOVED:
        return MOVED[path]
    folder, _, rest = path.partition("/")
    if folder == "docs":
        return rest
    if folder == "results" and path.endswith(".png"):
        return path
    if folder == "results" and (ROOT / path / "results.json").is_file():
        return f"gallery.md#{anchor(path)}"
    if path.startswith("benchmarks/results/") and path.endswith(".md"):
        return f"benchmarks/{Path(path).name}"
    return None


def title_of(file: str) -> str:
    """Return the heading of a page of the repository, by which a reader of the site knows it."""
    return (ROOT / file).read_text(encoding="utf-8").partition("# ")[2].splitlines()[0]


def anchor(path: str) -> str:
    """Return the anchor of a folder of results in the gallery."""
    return path.replace("/", "-")


def relinked(text: str, source: str, page: str) -> str:
    """Return Markdown of the file `source` of the repository as the page `page` of the site, with its links."""

    def link(match: re.Match[str]) -> str:
        sign, words, target = match.groups()
        file, mark, part = target.partition("#")
        if "://" in target or target.startswith("mailto:") or not file:
            return match[0]
        path = posixpath.normpath(posixpath.join(posixpath.dirname(source), file))
        place = site_path(path)
        if place is None:
            return f"`{words}`" if re.fullmatch(r"\w+_\w+", words) else words
        inner = title_of(path) if words.endswith(".md") and not part else relinked(words, source, page)
        return f"{sign}[{inner}]({posixpath.relpath(place, posixpath.dirname(page) or '.')}{mark}{part})"

    parts = re.split(r"(^```.*?^```)", text, flags=re.MULTILINE | re.DOTALL)  # code stays
    return "".join(part if part.startswith("```") else LINK.sub(link, part).replace("\\<", "&lt;") for part in parts)


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Adapt the links of a page of docs/, and let the lines of formulas wrap."""
    markdown = markdown.replace("\n```text\n", "\n``` { .text .wraps }\n")
    return markdown if page.file.generated_by else relinked(markdown, f"docs/{page.file.src_uri}", page.file.src_uri)


def on_page_content(html: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Keep the words of code in lines whole where they fit, and open a figure at its full size by a click."""
    parts = re.split(r"(<pre.*?</pre>)", html, flags=re.DOTALL)
    for index in range(0, len(parts), 2):
        parts[index] = re.sub(r"(?<=<code>)[^<]+(?=</code>)", lambda text: whole_words(text[0]), parts[index])
        parts[index] = re.sub(r'<img alt="[^"]*" src="([^"]*)"[^>]*>', r'<a href="\1">\g<0></a>', parts[index])
    return "".join(parts)


def on_post_page(output: str, *, page: Page, config: MkDocsConfig) -> str:
    """Name the dialog of the search, which the theme leaves unnamed."""
    return output.replace('role="dialog"', 'role="dialog" aria-label="Search"')


def whole_words(text: str) -> str:
    """Return code whose lines end between words, such as options, or within long ones between their parts."""
    words = (
        f'<span class="word">{word}</span>'
        if len(word) <= 24
        else re.sub(r"(?<=\w)[_./=,(]+(?=\w)", r"\g<0><wbr>", word)
        for word in text.split(" ")
    )
    return " ".join(words)


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Fill in the parts of the navigation that are made of what there is."""
    made: dict[str, list[Any]] = {"Methods": ["methods/index.md", *(f"methods/{name}.md" for name in method_names())]}
    made["Reference"] = ["reference/index.md", *(f"reference/{short(package)}.md" for package in packages())]
    tables = sorted(path.stem for path in (ROOT / "benchmarks" / "results").glob("*.md"))
    made["Benchmarks"] = [
        "benchmarks/index.md",
        *({name.replace("_", " "): f"benchmarks/{name}.md"} for name in tables),
    ]
    for entry in config.nav or []:
        title = next(iter(entry))
        if title in made:
            entry[title] = made[title]
    return config


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Add the pages that are made, and the figures of results/."""
    for name, text in pages().items():
        files.append(File.generated(config, name, content=text))
    for figure in sorted((ROOT / "results").rglob("*.png")):
        uri = figure.relative_to(ROOT).as_posix()
        files.append(File(uri, str(ROOT), config.site_dir, config.use_directory_urls))
    return files


def on_post_build(*, config: MkDocsConfig) -> None:
    """Remove the page of a missing address: its links begin at the root of a server, which a folder does not have."""
    (Path(config.site_dir) / "404.html").unlink(missing_ok=True)


def pages() -> dict[str, str]:
    """Return the text of each page that is made, by its path."""
    made = {"gallery.md": gallery(), "theory.md": theory(), "methods/index.md": method_list()}
    made["reference/index.md"] = "\n".join(
        ["# Reference", "", "Every public name, by package.", "", *map(package_line, packages())]
    )
    made |= {f"methods/{name}.md": method_page(name) for name in method_names()}
    made |= {f"reference/{short(package)}.md": package_page(package) for package in packages()}
    for source, page in MOVED.items():
        if source.endswith(".md") and source not in ("README.md", "docs/reference.md"):
            made[page] = relinked((ROOT / source).read_text(encoding="utf-8"), source, page)
    for table in sorted((ROOT / "benchmarks" / "results").glob("*.md")):
        source, page = f"benchmarks/results/{table.name}", f"benchmarks/{table.name}"
        made[page] = UNSEARCHED + relinked(table.read_text(encoding="utf-8"), source, page)
    return made


def packages() -> list[ModuleType]:
    """Return the packages whose names users import, and then the others."""
    return [posterity, *REFERENCE["public_packages"](), *REFERENCE["inner_packages"]()]


def short(package: ModuleType) -> str:
    """Return the name of a package's page."""
    return package.__name__.removeprefix("posterity.")


def package_line(package: ModuleType) -> str:
    """Return the line of a package in the list of packages."""
    prose = plain((package.__doc__ or "").strip().splitlines()[0])
    return f"- [{package.__name__}]({short(package)}.md): {prose}"


def package_page(package: ModuleType) -> str:
    """Return the page of a package: its docstring, and all of its names."""
    prose = plain("\n".join(fenced((package.__doc__ or "").strip().splitlines())))
    parts = [f"# {package.__name__}", prose]
    for name in sorted(REFERENCE["exported"](package), key=str.lower):
        path, home = canonical(package, name)
        if package is methods and name in method_names():
            parts.append(f"## [{name}](../methods/{name}.md)\n\n{first_line(package, name)}")
        elif package is posterity and home is not None:
            parts.append(f"## [{name}]({short(home)}.md#{path})\n\n{first_line(package, name)}")
        else:
            parts.append(f"::: {path}")
    return "\n\n".join(parts) + "\n"


def canonical(package: ModuleType, name: str) -> tuple[str, ModuleType | None]:
    """Return the path at which a name is defined, and the package other than this one that exports it."""
    value = getattr(package, name)
    path = f"{getattr(value, '__module__', '')}.{name}"
    if not path.startswith("posterity.") or getattr(value, "__name__", name) != name:
        path = f"{REFERENCE['home'](package, name)}.{name}"
    homes = [
        other for other in packages()[1:] if name in REFERENCE["exported"](other) and getattr(other, name) is value
    ]
    return path, homes[0] if homes else None


def method_names() -> list[str]:
    """Return the names of all inference methods."""
    values = {name: getattr(methods, name) for name in methods.__all__}
    return sorted(
        (name for name, value in values.items() if isinstance(value, type) and issubclass(value, Method)), key=str.lower
    )


def method_list() -> str:
    """Return the page that shows all methods side by side."""
    head = (
        "# Methods\n\nEach on the same 40 rows, with the same noise and the same prior: the mean, 95 % of the targets, "
        "and the part of that which comes from the weights. `python docs/make_pictures.py` draws them.\n"
    )
    lines = [f"## [{name}]({name}.md)\n\n{first_line(methods, name)}\n\n{picture(name)}\n" for name in method_names()]
    return "\n".join([head, *lines])


def first_line(package: ModuleType, name: str) -> str:
    """Return the first line of the docstring of a name."""
    return plain(REFERENCE["first_line"](package, name))


def picture(name: str) -> str:
    """Return the picture of a method."""
    if name in DRAWN:
        return f"![{name}](../results/{DRAWN[name]})"
    return f"![{name}: mean and 95 % band on 40 rows](../pictures/{name}.png)"


def method_page(name: str) -> str:
    """Return the page of a method: its picture and its docstring."""
    return f"# {name}\n\n{picture(name)}\n\n::: {canonical(methods, name)[0]}\n"


def gallery() -> str:
    """Return the page of all figures, with the command, date and machine that made each."""
    parts = ["# Gallery", "Every figure of `results/`, with the command that made it."]
    for folder in sorted(results.parent for results in (ROOT / "results").rglob("results.json")):
        about = json.loads((folder / "results.json").read_text(encoding="utf-8"))
        path = folder.relative_to(ROOT).as_posix()
        made = ", ".join(filter(None, (str(about.get("date") or "")[:10], machine_words(about.get("machine")))))
        parts.append(f'<a id="{anchor(path)}"></a>\n\n## {folder.relative_to(ROOT / "results").as_posix()}')
        parts.append(f"```text\n{about['command']}\n```\n\n{made}")
        parts += [f"![{figure.stem}]({path}/{figure.name})" for figure in sorted(folder.glob("*.png"))]
    return "\n\n".join(parts) + "\n"


def machine_words(machine: Any) -> str:
    """Return what results say of the machine that made them: a name, or the parts of one."""
    if not isinstance(machine, dict):
        return str(machine or "")
    return ", ".join(
        f"{value} {name}" if name in ("cores", "threads") else str(value) for name, value in machine.items()
    )


def theory() -> str:
    """Return the table from each formula of the four decks to its public name and its tests."""
    lines = [
        "# Theory",
        "",
        "Each formula with its public name and the test that checks it; the decks have the rest.",
        "",
    ]
    for deck in topics().decks:
        lines += [f"## [Deck {deck.number}: {deck.title}](decks/deck-{deck.number}.md)", ""]
        lines += ["| topic | name | test |", "|---|---|---|"]
        for topic in deck.topics:
            names = ", ".join(f"`{name.removeprefix('posterity.')}`" for name in topic.names)
            tests = ", ".join(f"`{test.partition('::')[2]}`" for test in topic.tests)
            lines.append(f"| [{topic.title}](decks/deck-{deck.number}.md#{topic.id}) | {names} | {tests} |")
        lines.append("")
    return "\n".join(lines)
