"""Writes docs/which-method.md from the results of studies and benchmarks: python docs/make_which.py."""

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "which-method.md"
HEAD = """\
# Which method when

| you have | take | what was measured |
|---|---|---|
{rows}

[Methods](methods/index.md) has a page for each, [scales.md](scales.md) how priors and noise are chosen where they are
left out.
"""


def results(path: str) -> Any:
    """Return the results of a study or benchmark, from its JSON file."""
    return json.loads((ROOT / path).read_text(encoding="utf-8"))
