"""The code in the README and in the pages of docs/ runs.

POSTERITY_PAGES=whole python -m pytest tests/architecture/test_pages.py runs as many steps and draws as are written.
"""

import inspect
import os
import re
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

import posterity

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
PAGES = sorted((ROOT / "docs").glob("*.md"))
PAGES_WITH_CODE = [page for page in (ROOT / "README.md", *PAGES) if BLOCK.search(page.read_text(encoding="utf-8"))]
OPTIONAL = ("arviz",)
NEEDED = {"hugging-face.md": ("transformers", "peft", "accelerate")}
# Pages whose models are fitted as they should be, without a warning.
SOUND = ("README.md", "tables.md", "start-tables.md", "start-networks.md")
MADE = re.compile(r"(methods|reference|benchmarks)/index\.md$|(gallery|theory)\.md$")  # by the site, whose build checks
COUNTS = re.compile(r"(\b(?:draws|warmup|steps)=|\bmethods\.[A-Za-z]+\()(\d{3,})\b")


def shortened(page):
    """The page with a fifth of the steps and draws, where a hundred or more are written."""
    text = page.read_text(encoding="utf-8")
    if os.environ.get("POSTERITY_PAGES") == "whole":
        return text
    return COUNTS.sub(lambda found: f"{found[1]}{int(found[2]) // 5}", text)


@pytest.mark.cpu
@pytest.mark.filterwarnings("ignore::FutureWarning:transformers.modeling_utils")  # to peft
@pytest.mark.parametrize("page", PAGES_WITH_CODE, ids=lambda page: page.name)
def test_every_block_of_a_page_runs(page, tmp_path, monkeypatch, capsys, caplog):
    for package in NEEDED.get(page.name, ()):
        pytest.importorskip(package)
    if page.name in NEEDED:  # it would take tests/datasets for the package of that name
        monkeypatch.setattr("transformers.trainer.is_datasets_available", lambda: False)
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    with torch.random.fork_rng(devices=[]):
        for number, block in enumerate(BLOCK.findall(shortened(page))):
            if any(f"import {package}" in block and find_spec(package) is None for package in OPTIONAL):
                continue
            exec(compile(block, f"{page.name}, block {number}", "exec"), names)
    assert capsys.readouterr().out
    warned = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert page.name not in SOUND or warned == []


def test_calibrated_probabilities_of_a_trained_model_take_at_most_ten_lines():
    block = BLOCK.findall((ROOT / "docs/hugging-face.md").read_text(encoding="utf-8"))[1]
    lines = [line for line in block.splitlines() if line.strip()]
    assert lines[0] == "import posterity as po"
    assert lines[-1].startswith("probs = ")
    assert len(lines) <= 10


def test_the_readme_links_every_page():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert PAGES
    assert [page.name for page in PAGES if f"(docs/{page.name})" not in text] == []


def test_every_link_and_figure_of_a_page_is_there():
    missing = []
    for page in (*ROOT.glob("*.md"), *PAGES):
        for link in re.findall(r"\]\(([^)#\s]+)", page.read_text(encoding="utf-8")):
            if "://" not in link and not MADE.match(link) and not (page.parent / link).exists():
                missing.append(f"{page.name}: {link}")
    assert missing == []


def test_names_in_pages_exist():
    missing = []
    for page in (ROOT / "README.md", ROOT / "ARCHITECTURE.md", ROOT / "CONTRIBUTING.md", *PAGES):
        for package, name in re.findall(r"`(?:po\.)?([a-z_]+)\.([A-Za-z_0-9]+)", page.read_text(encoding="utf-8")):
            module = getattr(posterity, package, None) if package in posterity.__all__ else None
            if inspect.ismodule(module) and not (hasattr(module, name) or find_spec(f"{module.__name__}.{name}")):
                missing.append(f"{page.name}: {package}.{name}")
    assert missing == []


def test_files_in_the_architecture_exist():
    text = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    paths = re.findall(r"`([a-z_]+/[a-z_/]*(?:\.py)?)`", text)
    assert paths
    assert [
        path for path in paths if not any((ROOT / room / path).exists() for room in ("", "posterity", "tests"))
    ] == []


def test_lines_are_short_enough_to_read():
    assert (ROOT / "README.md").read_text(encoding="utf-8").count("\n") <= 200
    for name in ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md"):
        lines = (ROOT / name).read_text(encoding="utf-8").splitlines()
        assert [line for line in lines if len(line) > 120] == []
