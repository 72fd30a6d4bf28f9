"""The committed times of the cost model, against the rates of the library and the errors that the file says."""

import json
from pathlib import Path

import pytest
from benchmarkfiles import load

from posterity.inference.rates import ORIGIN, RATES

costs = load("costs")
RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
FOUND = json.loads((RESULTS / "costs.json").read_text())


def test_rates_are_those_of_the_committed_run() -> None:
    assert {kind: list(rates) for kind, rates in RATES.items()} == FOUND["facts"]["rates"]
    assert FOUND["date"][:10] in ORIGIN


@pytest.mark.cpu
def test_predictions_follow_from_the_rates() -> None:
    every = [*costs.FITTED, *costs.FOURTH, *costs.UNSEEN]
    rows = FOUND["facts"]["rows"]
    assert [setting.words for setting in every] == [row["setting"] for row in rows]
    for setting, row in zip(costs.UNSEEN, rows[-len(costs.UNSEEN) :], strict=True):
        assert setting.predicted(RATES) == pytest.approx(row["predicted"], rel=1e-9)


@pytest.mark.cpu
def test_rates_come_from_the_fitted_rows_alone() -> None:
    taken = [row["measured"] for row in FOUND["facts"]["rows"] if row["part"] == "fitted"]
    kinds = ("MAP", "Laplace, Kronecker")
    own = [(s, seconds) for s, seconds in zip(costs.FITTED, taken, strict=True) if s.name in kinds]
    again = costs.fitted([setting for setting, _ in own], [seconds for _, seconds in own])
    assert again == {kind: pytest.approx(RATES[kind], rel=1e-3) for kind in kinds}


def test_the_table_and_its_sentences_say_the_errors() -> None:
    text = (RESULTS / "costs.md").read_text()
    for row in FOUND["facts"]["rows"]:
        off = 100 * (row["predicted"] / row["measured"] - 1)
        line = next(
            line
            for line in text.splitlines()
            if line.startswith(f"| {row['part']} | {row['name']} | {row['setting']} |")
        )
        assert line.split(" | ")[5].strip(" |") == f"{off:+.0f}"
    unseen = [row for row in FOUND["facts"]["rows"] if row["part"] == "unseen"]
    for what, wanted, found in (("Time", "predicted", "measured"), ("Memory", "planned", "peak")):
        errors = [abs(100 * (row[wanted] / row[found] - 1)) for row in unseen]
        within = sum(error <= 30 for error in errors)
        assert f"{what}, unseen: {within} of 6 within 30 %, the worst {max(errors):.0f} % off." in text


def test_a_fit_is_the_best_without_negative_rates() -> None:
    counts = [(1.0, 2.0, 1.0), (2.0, 1.0, 1.0), (4.0, 3.0, 1.0), (1.0, 7.0, 1.0)]
    exact = costs.fit(counts, [0.3 * a + 0.5 * b + 2.0 for a, b, _ in counts])
    assert exact == pytest.approx((0.3, 0.5, 2.0), rel=1e-3)
    bent = costs.fit(counts, [3.0 * a + max(0.1, 5.0 - b) for a, b, _ in counts])  # falls with b, which cannot be
    assert min(bent) >= 0.0
    assert bent[1] == 0.0


def test_the_page_says_what_the_run_found() -> None:
    page = (RESULTS.parents[1] / "docs" / "scale-costs.md").read_text()
    for kind, (product, byte, unit, end) in RATES.items():
        cells = [
            kind,
            *(f"{scale * rate:.3g}" for scale, rate in ((1e12, product), (1e12, byte), (1e6, unit), (1e12, end))),
        ]
        assert "| " + " | ".join(cells) + " |" in page
    for note in FOUND["notes"][:4]:
        assert f"- {note}\n" in page
