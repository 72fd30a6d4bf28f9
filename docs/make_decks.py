"""Writes docs/decks, a page for each deck of the index of topics: python docs/make_decks.py (or make reference)."""

from pathlib import Path

from posterity_studies.topics import Deck, Erratum, Index, Topic, topics

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "docs" / "decks"
HEAD = """\
Every topic with its formula, its name, the tests that check it, and the command and figure that show it, at a small
size. `posterity study --deck {number}` draws all figures of this page into `deck-{number}/index.html`. Errata are slips
that are often seen in print. `make reference` writes this page from `posterity_studies/topics.toml`, and tests compare
the two.
"""


def pages() -> dict[str, str]:
    """Return the text of each page by the name of its file."""
    return {f"deck-{deck.number}.md": page(topics(), deck) for deck in topics().decks}


def page(index: Index, deck: Deck) -> str:
    """Return the page of a deck: a table of its topics, then each of them."""
    rows = (f"| [{topic.id}](#{topic.id}) | {topic.title} | {listed(index, topic)} |" for topic in deck.topics)
    others = " ".join(
        f"[{other.number}: {other.title}](deck-{other.number}.md)." for other in index.decks if other is not deck
    )
    return "\n".join(
        [
            f"# Deck {deck.number}: {deck.title}",
            "",
            HEAD.format(number=deck.number) + f"Other decks: {others}",
            "",
            "| topic | | figure |",
            "|---|---|---|",
            *rows,
            "",
            *(section(index, topic) for topic in deck.topics),
        ]
    )


def section(index: Index, topic: Topic) -> str:
    """Return the part of a page about one topic."""
    source = f" {topic.source}." if topic.source else ""
    tests = ", ".join(f"[{name.partition('::')[2]}](../../{name.partition('::')[0]})" for name in topic.tests)
    parts = [
        f'<a id="{topic.id}"></a>\n\n## {topic.id} {topic.title}',
        f"{topic.kind.capitalize()}.{source}",
        f"```text\n{topic.formula}\n```",
        *(corrected(erratum) for erratum in topic.errata),
        f"- Names: {', '.join(f'`{name}`' for name in topic.names)}\n- Tests: {tests}\n{commands(index, topic)}",
    ]
    return "\n\n".join(parts) + "\n"


def corrected(erratum: Erratum) -> str:
    """Return the paragraph of an erratum."""
    printed, right, why = map(plain, (erratum.printed, erratum.right, erratum.why))
    return f"**{erratum.id}** Often printed: {printed}. **Right:** {right}. {why}"


def plain(text: str) -> str:
    """Return text whose signs Markdown shows as they are."""
    for sign in "\\*_<|":
        text = text.replace(sign, "\\" + sign)
    return text


def commands(index: Index, topic: Topic) -> str:
    """Return a line for each command of a topic: what to type, and what it writes."""
    lines = []
    for name in topic.commands:
        figures = [figure for figure in topic.figures if figure.startswith(f"{name}/")]
        written = " and ".join(linked(index, figure, index.figure_path(figure)) for figure in figures)
        lines.append(f"- Command: `{index.commands[name]}` " + (f"writes {written}" if figures else "prints it"))
    return "\n".join(lines)


def listed(index: Index, topic: Topic) -> str:
    """Return the figures of a topic for the table."""
    return ", ".join(linked(index, item, item) for item in topic.shown)


def linked(index: Index, figure: str, text: str) -> str:
    """Return the name of a figure, with a link where results/ has it."""
    name, _, file = figure.partition("/")
    path = Path("results") / index.results.get(name, name) / file
    return f"[{text}](../../{path.as_posix()})" if file and (ROOT / path).is_file() else text


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for file, text in pages().items():
        (FOLDER / file).write_text(text, encoding="utf-8")
