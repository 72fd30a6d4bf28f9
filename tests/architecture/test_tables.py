"""Tables in docs/ have the numbers of results/."""

import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = {"CIFAR-10, `ConvNet`": "cifar-10", "MNIST, `ConvNet(width=8)`": "mnist"}


def shown(accuracy, published=None):
    """An accuracy in per cent, with its spread over seeds and the authors' own."""
    spread = accuracy["standard_deviation"]
    text = f"{100 * accuracy['mean']:.2f}" + ("" if spread is None else f" ± {100 * spread:.2f}")
    return text if published is None else f"{text} ({published:.2f})"


def cells(penalty, lines):
    """What the page says of a penalty, from the lines of the study's table by setup."""
    usual, bayesian = lines["usual"], lines["bayesian"]
    there, own = usual["published"] or {}, bayesian["published"] or {}
    ratio = f"{bayesian['theory_over_best']:.3g}" + (f" ({10 ** own['log_ratio']:.3g})" if own else "")
    return (
        f"`{penalty}`",
        shown(usual["accuracy_at_best"], there.get("best")),
        shown(bayesian["accuracy_at_best"], own.get("best")),
        shown(bayesian["accuracy_at_theory"], own.get("at_theory")),
        ratio,
    )


@pytest.mark.parametrize(("title", "folder"), FOLDERS.items(), ids=FOLDERS.values())
def test_the_page_on_penalties_has_the_numbers_of_the_study(title, folder):
    page = (ROOT / "docs" / "penalties.md").read_text(encoding="utf-8")
    body = re.search(rf"^\| {re.escape(title)} \|.*\n\|[-|]+\n((?:\|.*\n)+)", page, re.MULTILINE)
    assert body is not None
    found = [tuple(cell.strip() for cell in line.strip("|").split("|")) for line in body.group(1).splitlines()]
    table = json.loads((ROOT / "results" / "penalties" / folder / "results.json").read_text(encoding="utf-8"))["table"]
    by_penalty: dict[str, dict[str, dict]] = {}
    for line in table:
        by_penalty.setdefault(line["penalty"], {})[line["setup"]] = line
    assert found == [cells(penalty, lines) for penalty, lines in by_penalty.items()]
