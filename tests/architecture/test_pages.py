"""The code in the pages of docs/ runs."""

import re
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
PAGES = sorted((ROOT / "docs").glob("*.md"))
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
OPTIONAL = ("arviz",)


@pytest.mark.cpu
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_block_of_a_page_runs(page, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    with torch.random.fork_rng(devices=[]):
        for number, block in enumerate(BLOCK.findall(page.read_text(encoding="utf-8"))):
            if any(f"import {package}" in block and find_spec(package) is None for package in OPTIONAL):
                continue
            exec(compile(block, f"{page.name}, block {number}", "exec"), names)
    assert capsys.readouterr().out


def test_the_readme_links_every_page():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert PAGES
    assert [page.name for page in PAGES if f"(docs/{page.name})" not in text] == []
