"""The summary of `benchmarks.peers_quality` from cells whose numbers are known, and its batches and densities."""

import json
import math
from pathlib import Path

import pytest
import torch

pytest.importorskip("sklearn")

from benchmarks.peers_quality import HEAD, sources, stored, summary
from benchmarks.peers_quality_parts import batches
from benchmarks.peers_quality_tables import mixture


def write(folder: Path, contender: str, values: list[float], **others: object) -> None:
    cell = {
        "table": "energy", "split": 0, "contender": contender, "nll": -sum(values) / len(values), "error": 1.0,
        "point_seconds": 2.0, "fit_seconds": 3.0, "predict_seconds": 0.5, "log_density": values, **others,
    }  # fmt: skip
    (folder / f"energy-0-{contender}.json").write_text(json.dumps(cell))


def test_peers_are_held_against_our_contender_of_the_same_work(tmp_path: Path) -> None:
    write(tmp_path, "po.laplace", [-1.0, -2.0])
    write(tmp_path, "laplace-torch", [-2.0, -2.0])
    write(tmp_path, "auto", [0.0, 0.0])
    failed = {"table": "energy", "split": 0, "contender": "ivon-opt README", "failed": "ValueError: no"}
    (tmp_path / "failed.json").write_text(json.dumps(failed))
    cells, lines = stored(tmp_path)
    assert lines == ["ivon-opt README failed on energy, split 0: ValueError: no"]
    table, facts, reading = summary(cells)
    rows = {row[2]: dict(zip(HEAD, row, strict=True)) for row in table[1:]}
    assert rows["laplace-torch"]["NLL minus ours"] == "+0.5000 +- 0.5000"
    assert rows["laplace-torch"]["fit CPU s"] == "2.0 + 3.0"  # the point comes first
    assert rows["auto"]["fit CPU s"] == "3.0"
    assert rows["auto"]["NLL minus default's"] == rows["po.laplace"]["NLL minus ours"] == ""
    assert facts["energy"]["po.laplace"]["minus_default"] == (1.5, 0.5)
    assert reading == [
        "energy, splits 1: lowest NLL of the peers laplace-torch, of ours auto; ours - theirs = -2.0000 +- 0.0000."
    ]


def test_every_contender_says_where_its_settings_come_from() -> None:
    assert all(not line.endswith(": ") for line in sources())


def test_batches_pass_over_all_rows_before_any_comes_again() -> None:
    rows = torch.arange(10)
    found = list(batches(rows, rows, 4, 5, seed=1))
    assert [len(part) for part, _ in found] == [4, 4, 2, 4, 4]
    assert torch.equal(torch.cat([part for part, _ in found[:3]]).sort().values, rows)


def test_mixtures_of_normals_are_densities() -> None:
    targets = torch.zeros(1, 1)
    log_density, mean = mixture(torch.tensor([[[0.0]], [[2.0]]]), torch.ones(2, 1, 1), targets)
    expected = math.log((1.0 + math.exp(-2.0)) / 2.0) - 0.5 * math.log(2.0 * math.pi)
    torch.testing.assert_close(log_density, torch.tensor([expected], dtype=torch.float64))
    assert float(mean) == 1.0
