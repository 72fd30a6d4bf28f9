"""Mixtures of rows in files: the sums and fits of the rows in memory."""

import numpy as np
import pyarrow as pa
import pytest
import torch
from pyarrow import parquet

from posterity.datasets import read_shards, shards
from posterity.errors import BadData
from posterity.mixtures import BayesianGaussianMixture, Full, GaussianMixture, InverseWishart
from posterity.mixtures.checks import as_rows
from posterity.mixtures.rounds import Rounds, worst_rows


@pytest.fixture
def points():
    generator = torch.Generator("cpu").manual_seed(0)
    rows = torch.randn(700, 2, generator=generator, device="cpu")
    rows[:300] += 4.0
    return rows[torch.randperm(700, generator=generator, device="cpu")]


@pytest.fixture
def stored(points, tmp_path, monkeypatch):
    """The points in 15 shards."""
    monkeypatch.setattr(shards, "SHARD_BYTES", 400)
    for number, part in enumerate(points.split(250)):
        columns = {"u": part[:, 0].numpy(), "v": part[:, 1].numpy()}
        parquet.write_table(pa.table(columns), tmp_path / f"{number}.parquet", row_group_size=50)
    return read_shards(tmp_path)


def weights_of(count):
    return np.linspace(0.2, 2.0, count)


@pytest.mark.parametrize("kind", ["full", "tied", "diag", "spherical"])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("estimator", [GaussianMixture, BayesianGaussianMixture])
def test_fits_are_those_of_the_rows_in_memory(points, stored, kind, weighted, estimator):
    given = {"sample_weight": weights_of(700), "labels": np.maximum(np.arange(700) % 9 - 6, -1)} if weighted else {}
    settings = {"n_components": 3, "covariance_type": kind, "max_iter": 8, "tol": 0.0, "n_init": 2}
    own, wanted = (estimator(**settings).fit(rows, **given) for rows in (stored, points.numpy()))
    for name in ("weights_", "means_", "covariances_"):
        np.testing.assert_allclose(getattr(own, name), getattr(wanted, name), rtol=1e-9, atol=1e-10)
    assert own.lower_bound_ == pytest.approx(wanted.lower_bound_, rel=1e-11)
    assert own.feature_names_in_.tolist() == ["u", "v"]
    assert own.score(stored) == pytest.approx(wanted.score(points.numpy()), rel=1e-10)
    for verb in ("predict", "predict_proba", "score_samples"):
        np.testing.assert_allclose(getattr(own, verb)(stored), getattr(wanted, verb)(points.numpy()), atol=1e-8)


def test_criteria_are_those_of_the_rows_in_memory(points, stored):
    mixture = GaussianMixture(2).fit(points)
    assert mixture.bic(stored) == pytest.approx(mixture.bic(points), rel=1e-12)
    assert mixture.aic(stored) == pytest.approx(mixture.aic(points), rel=1e-12)


def test_starts_from_a_subset_are_the_same(points, stored, monkeypatch):
    from posterity.mixtures import seeding

    monkeypatch.setattr(seeding, "SUBSET", 64)
    own, wanted = (GaussianMixture(3, max_iter=0, random_state=4).fit(rows) for rows in (stored, points.numpy()))
    np.testing.assert_allclose(own.means_, wanted.means_, rtol=1e-10)


def test_random_responsibilities_share_all_rows(stored, points):
    mixture = GaussianMixture(2, init_params="random", max_iter=0).fit(stored)
    np.testing.assert_allclose(mixture.weights_ @ mixture.means_, points.double().mean(0), rtol=1e-10)


def test_rows_of_lowest_density_are_found_among_all_blocks(points, stored):
    mixture = GaussianMixture(2, random_state=0).fit(points)
    given = {"sample_weight": (np.arange(700) % 5 > 0).astype(float), "labels": np.arange(700) % 3 - 1}
    lowest = mixture.score_samples(points.double()).clone()
    lowest[torch.from_numpy((given["sample_weight"] == 0) | (given["labels"] >= 0))] = torch.inf
    wanted = points[lowest.topk(4, largest=False).indices].double()
    for rows in (stored, points):
        rounds = Rounds(as_rows(rows, given["sample_weight"], given["labels"], 3), Full(), InverseWishart(0.1, 2.0))
        values = {
            "weights": mixture.weights_[None],
            "means": mixture.means_[None] - rounds.rows.centre,
            "covariances": mixture.covariances_[None],
        }
        held = worst_rows(rounds.rows, Full(), rounds.components(values), 4)
        torch.testing.assert_close(held[0] + rounds.rows.centre, wanted, rtol=1e-6, atol=1e-6)
        assert worst_rows(rounds.rows, Full(), rounds.components(values), 600) is None


def test_what_files_lack_or_hold_too_much_of_is_refused(points, stored, tmp_path_factory):
    tmp_path = tmp_path_factory.mktemp("others")
    with pytest.raises(BadData, match=r"has 2 features, but GaussianMixture is expecting 1"):
        GaussianMixture(1).fit(points[:, :1]).score(stored)
    with pytest.raises(BadData, match=r"sample_weight must have one number for each row"):
        GaussianMixture(1).fit(stored, sample_weight=np.ones(699))
    large = np.zeros(100, dtype=np.float32)
    large[70] = 1e35
    parquet.write_table(pa.table({"u": large, "v": large}), tmp_path / "large", row_group_size=50)
    with pytest.raises(BadData, match=r"X, from row 50 on, must lie within 1e.30 of 0. Got larger numbers in row 20"):
        GaussianMixture(1).fit(read_shards(tmp_path / "large"))
    parquet.write_table(pa.table({"u": np.ones(100), "w": np.ones(100)}), tmp_path / "one", row_group_size=50)
    with pytest.raises(BadData, match=r"X must vary in every column if reg_covar is 0"):
        GaussianMixture(1, reg_covar=0.0).fit(read_shards(tmp_path / "one"))
    with pytest.raises(BadData, match=r"without a column of weights"):
        GaussianMixture(1).fit(read_shards(tmp_path / "one", weights="w"))
