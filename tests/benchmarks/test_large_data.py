"""The benchmark of rows in files, at a million rows and in this process."""

import pytest
import torch
from benchmarkfiles import load

large_data = load("large_data")
pytestmark = pytest.mark.cpu


def test_fits_to_a_million_rows_in_files_are_those_of_the_rows_in_memory(tmp_path):
    rows = 1_000_000
    measured = []
    square, cross = large_data.generate(tmp_path, rows, seed=3)
    for name in ("GaussianMixture, 5 rounds", "Conjugate (exact)", "linear Laplace"):
        own, held = (large_data.measured(tmp_path, name, count) for count in (None, rows))
        assert own["rows"] == held["rows"] == rows
        tolerance = 1e-9 if "Mixture" in name else 1e-6
        assert own["values"] == pytest.approx(held["values"], rel=tolerance, abs=tolerance)
        measured.append(own["values"])
    assert measured[1] == pytest.approx(large_data.exact(square, cross).tolist(), abs=1e-6)  # float32 weights
    assert large_data.apart(tmp_path, "linear Laplace", None, threads=1)["peak"] < large_data.LIMIT
    truth = [*large_data.WEIGHTS.tolist(), 0.25]
    errors = torch.linalg.inv(square).diagonal().sqrt() * large_data.SCALE
    assert all(abs(a - b) < 5 * e for a, b, e in zip(measured[1], truth, errors.tolist(), strict=True))


def test_rows_are_the_same_whatever_was_made_before():
    assert torch.equal(large_data.shard(1, 4, 50)[0], large_data.shard(1, 4, 50)[0])
    assert not torch.equal(large_data.shard(1, 5, 50)[0], large_data.shard(1, 4, 50)[0])
