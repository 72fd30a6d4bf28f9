"""The summary of `benchmarks.tables_peers`, from cells whose numbers are known."""

import json
import math
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("sklearn")

from benchmarks.tables_peers import Table, keep, normal, of_classes, paired, stored, summary, unpack


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


def test_cells_of_peers_are_kept_in_one_file(tmp_path: Path) -> None:
    for contender in ("auto", "ridge"):
        write(tmp_path, contender, 0, [-1.0, -2.0])
    keep(tmp_path, tmp_path / "kept.json.gz")
    unpack(tmp_path / "kept.json.gz", tmp_path / "new")
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["diabetes-0-ridge.json"]
    assert stored(tmp_path / "new")[0]["diabetes", "ridge"] == stored(tmp_path)[0]["diabetes", "ridge"]
    unpack(tmp_path / "not there", tmp_path / "new")


def test_forecasts_are_densities() -> None:
    rows = Table(None, np.array([0, 0, 0, 1]), None, np.array([0, 1]), 2)
    forecast = of_classes(rows, np.array([[1.0, 0.0], [1.0, 0.0]]))
    np.testing.assert_allclose(np.exp(forecast.log_density), [4.75 / 5, 0.25 / 5])
    real = Table(None, None, None, np.array([0.0, 3.0]), 0)
    forecast = normal(real, np.array([0.0, 0.0]), 1.0)
    np.testing.assert_allclose(forecast.log_density, -0.5 * np.log(2 * np.pi) - np.array([0.0, 4.5]))
    assert forecast.inside.tolist() == [True, False]
