"""Writes docs/notebooks from the start pages and runs every cell: python docs/make_notebooks.py (or make pictures)."""

import re
from pathlib import Path

import nbformat
from nbclient import NotebookClient

DOCS = Path(__file__).parent
PAGES = {"start-tables.md": "tables.ipynb", "start-networks.md": "own-network.ipynb"}
BLOCK = re.compile(r"^```python\n(.*?)^```\n", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[([^\]]*)\]\((?!\w+://)[^)]*\)")


def notebook(page: str) -> nbformat.NotebookNode:
    """Return a page as a notebook: its blocks of Python as code, the rest as text without links to other pages."""
    made, names = nbformat.v4, ("new_markdown_cell", "new_code_cell")
    cells = []
    for number, part in enumerate(BLOCK.split((DOCS / page).read_text(encoding="utf-8"))):
        text = part.strip() if number % 2 else LINK.sub(r"\1", part).strip()
        if text:
            cells.append(getattr(made, names[number % 2])(text, id=f"cell-{number}"))
    return made.new_notebook(cells=cells, metadata={"kernelspec": {"name": "python3", "display_name": "Python 3"}})


if __name__ == "__main__":
    (DOCS / "notebooks").mkdir(exist_ok=True)
    for source, file in PAGES.items():
        made = notebook(source)
        NotebookClient(made, timeout=600, record_timing=False).execute()
        nbformat.write(made, DOCS / "notebooks" / file)
