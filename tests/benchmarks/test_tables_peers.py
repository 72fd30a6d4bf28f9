"""The summary of `benchmarks.tables_peers`, from cells whose numbers are known."""

import json
import math
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("sklearn")

from benchmarks.tables_peers import Table, normal, of_classes, paired, stored, summary


def write(folder: Path, contender: str, split: int, values: list[float], **others: object) -> None:
    cell = {
        "table": "diabetes", "split": split, "contender": contender, "nll": -float(np.mean(values)), "error": 1.0,
        "coverage": 0.9, "log_density": values, "seconds": 2.0, "cpu_seconds": 2.0, **others,
    }  # fmt: skip
    (folder / f"diabetes-{split}-{contender}.json").write_text(json.dumps(cell))


def test_paired_differences_and_verdict(tmp_path: Path) -> None:
    write(tmp_path, "auto", 0, [-1.0, -2.0, -3.0])
    write(tmp_path, "auto", 1, [-1.0])
    write(tmp_path, "ridge", 0, [-1.5, -2.0, -4.0])
    write(tmp_path, "forest", 0, [-9.0, -9.0, -9.0])
    (tmp_path / "diabetes-0-ngboost.json").write_text(
        json.dumps({"table": "diabetes", "split": 0, "contender": "ngboost", "failed": "ValueError: no"})
    )
    cells, failed = stored(tmp_path)
    assert failed == ["ngboost failed on diabetes, split 0: ValueError: no"]
    gap = paired(cells, "diabetes", "auto", "ridge")
    assert gap is not None
    assert math.isclose(gap[0], -0.5)  # of the split that both have
    assert math.isclose(gap[1], 0.5 / math.sqrt(3))
    lines, facts = summary(cells)
    assert facts["wins"] == 1
    assert facts["mean_rank"] == {"auto": 1.0, "ridge": 2.0, "forest": 3.0}
    assert facts["tables"]["diabetes"]["best_peer"] == "ridge"
    assert any("1 of 1" in line for line in lines)


def test_forecasts_are_densities() -> None:
    rows = Table(None, np.array([0, 0, 0, 1]), None, np.array([0, 1]), 2)
    forecast = of_classes(rows, np.array([[1.0, 0.0], [1.0, 0.0]]))
    np.testing.assert_allclose(np.exp(forecast.log_density), [4.75 / 5, 0.25 / 5])
    real = Table(None, None, None, np.array([0.0, 3.0]), 0)
    forecast = normal(real, np.array([0.0, 0.0]), 1.0)
    np.testing.assert_allclose(forecast.log_density, -0.5 * np.log(2 * np.pi) - np.array([0.0, 4.5]))
    assert forecast.inside.tolist() == [True, False]
