"""Where restarts begin: seeds by k-means++ and its kin, by weights, labels and keys."""

import numpy as np
import pytest
import torch

from posterity.mixtures import Diagonal, Full, Rows, Spherical, Tied, seeding
from posterity.mixtures.seeding import nearest, seeds, shared_at_random, spread_of
from posterity.numerics import Key

KINDS = (Full(), Tied(), Diagonal(), Spherical())


def rows_at(points, weights=None, labels=None):
    points = torch.as_tensor(points)
    weights = None if weights is None else torch.as_tensor(weights)
    labels = None if labels is None else torch.as_tensor(labels)
    return Rows(points, weights, labels, points.mean(0))


def far_blobs(each=20):
    rng = np.random.default_rng(0)
    centres = np.array([[0.0, 0.0], [100.0, 0.0], [0.0, 100.0], [100.0, 100.0]]) + 1e4
    return centres, np.concatenate([m + rng.normal(size=(each, 2)) for m in centres])


@pytest.mark.parametrize("init", ["kmeans", "k-means++"])
def test_every_blob_gets_a_seed_in_every_restart(init):
    centres, points = far_blobs()
    rows = rows_at(points)
    found = seeds(rows, 4, 25, init, Key(0)) + rows.centre  # (R, K, D)
    blob = torch.cdist(found, torch.tensor(centres)).argmin(-1)
    assert bool((blob.sort(-1).values == torch.arange(4)).all())
    if init == "kmeans":
        means = torch.tensor(points).view(4, 20, 2).mean(1)
        torch.testing.assert_close(found, means[blob], rtol=0, atol=1e-5)


@pytest.mark.parametrize("init", ["k-means++", "random_from_data"])
def test_seeds_are_rows_of_positive_weight_and_differ_by_restart_and_key(init):
    points = np.random.default_rng(0).normal(size=(30, 2))
    weights = (np.arange(30) % 2).astype(float)
    rows = rows_at(points, weights)
    found = seeds(rows, 5, 10, init, Key(1)) + rows.centre
    distances = torch.cdist(found.flatten(0, 1), rows.points)
    assert float(distances.amin(1).max()) < 1e-6
    chosen = distances.argmin(1)
    assert bool((chosen % 2 == 1).all())
    assert all(len(set(one.tolist())) == 5 for one in chosen.view(10, 5))
    assert len({tuple(one.tolist()) for one in chosen.view(10, 5)}) > 5
    torch.testing.assert_close(seeds(rows, 5, 10, init, Key(1)), found - rows.centre, rtol=0, atol=0)
    assert not torch.equal(seeds(rows, 5, 10, init, Key(2)), found - rows.centre)


def test_rows_are_chosen_by_weight():
    rows = rows_at(np.arange(4.0)[:, None], np.array([1.0, 2.0, 3.0, 4.0]))
    found = seeds(rows, 1, 20000, "random_from_data", Key(3)) + rows.centre
    shares = torch.bincount(found.flatten().round().long(), minlength=4) / 20000
    wanted = torch.tensor([0.1, 0.2, 0.3, 0.4])
    assert bool(((shares - wanted).abs() < 5 * (wanted * (1 - wanted) / 20000).sqrt()).all())


def test_a_far_row_is_always_a_seed():
    rows = rows_at(np.array([[0.0], [0.0], [0.0], [1.0], [30.0]]))
    found = (seeds(rows, 2, 500, "k-means++", Key(0)) + rows.centre).squeeze(-1)
    assert bool((found.amax(1) == 30).all())


def test_fewer_places_than_components():
    rows = rows_at(np.repeat([[1.0], [2.0]], 3, axis=0))
    for init in ("kmeans", "k-means++", "random_from_data"):
        found = seeds(rows, 4, 3, init, Key(0)) + rows.centre
        assert bool(torch.isfinite(found).all())
        assert float(found.min()) >= 1 - 1e-9
        assert float(found.max()) <= 2 + 1e-9


def test_labelled_components_begin_at_their_rows():
    centres, points = far_blobs()
    labels = np.full(80, -1)
    labels[[0, 1]], labels[[40, 41, 42]] = 3, 1
    rows = rows_at(points, labels=labels)
    for init in ("k-means++", "random_from_data"):
        found = seeds(rows, 4, 6, init, Key(0)) + rows.centre
        torch.testing.assert_close(found[:, 3], torch.tensor(points[:2].mean(0)).expand(6, 2))
        torch.testing.assert_close(found[:, 1], torch.tensor(points[40:43].mean(0)).expand(6, 2))
    found = seeds(rows, 4, 6, "kmeans", Key(0)) + rows.centre
    blob = torch.cdist(found, torch.tensor(centres)).argmin(-1)
    assert bool((blob[:, 3] == 0).all() & (blob[:, 1] == 2).all())
    assert bool((blob.sort(-1).values == torch.arange(4)).all())


@pytest.mark.parametrize("weighted", [False, True])
def test_many_rows_are_looked_at_in_part(monkeypatch, weighted):
    monkeypatch.setattr(seeding, "SUBSET", 64)
    centres, points = far_blobs(each=500)
    weights = np.where(np.arange(2000) < 1500, 1.0, 0.0) if weighted else None
    rows = rows_at(points, weights)
    found = seeds(rows, 3 if weighted else 4, 4, "kmeans", Key(0)) + rows.centre
    blob = torch.cdist(found, torch.tensor(centres)).argmin(-1)
    assert bool((blob.sort(-1).values == torch.arange(3 if weighted else 4)).all())


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_sums_over_the_nearest_rows(kind):
    points = np.random.default_rng(0).normal(size=(50, 2)) + 1e4
    weights = np.random.default_rng(1).exponential(size=50)
    rows = rows_at(points, weights)
    centres = torch.tensor(points[:3])[None] - rows.centre
    sums = nearest(rows, kind, centres, spread_of(rows))
    mine = np.linalg.norm(points[:, None] - points[:3], axis=-1).argmin(1)
    scatter = np.zeros((3, 2, 2))
    for k in range(3):
        own, w = points[mine == k], weights[mine == k]
        mean = (w[:, None] * own).sum(0) / w.sum()
        assert float(sums.counts[0, k]) == pytest.approx(w.sum())
        np.testing.assert_allclose(sums.shifts[0, k].cpu().numpy() + points[k], mean, rtol=1e-12)
        scatter[k] = (w[:, None] * (own - mean)).T @ (own - mean)
    wanted = {"full": scatter, "tied": scatter.sum(0), "diag": np.diagonal(scatter, axis1=1, axis2=2)}
    wanted["spherical"] = np.trace(scatter, axis1=1, axis2=2)
    np.testing.assert_allclose(kind.second_moments(sums)[0].cpu(), wanted[kind.name], rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_random_shares_add_up_to_all_rows(kind):
    points = np.random.default_rng(0).normal(size=(300, 2))
    weights = np.random.default_rng(1).exponential(size=300)
    labels = np.where(np.arange(300) < 100, 1, -1)
    rows = rows_at(points, weights, labels)
    sums = shared_at_random(rows, kind, 3, 2, Key(0))
    torch.testing.assert_close(sums.counts.sum(-1), torch.full((2,), weights.sum(), dtype=torch.float64))
    total = (sums.counts[..., None] * sums.shifts).sum(1) + rows.centre * weights.sum()
    torch.testing.assert_close(total, torch.tensor(weights @ points).expand(2, 2))
    assert not torch.allclose(sums.counts[0], sums.counts[1])
    assert bool((sums.counts[:, 1] > weights[:100].sum()).all())
    spread = ((points - points.mean(0)) ** 2).sum(1) @ weights
    scatters = sums.scatters
    traces = {
        "full": lambda: scatters.diagonal(dim1=-2, dim2=-1).sum((-1, -2)),
        "tied": lambda: scatters.diagonal(dim1=-2, dim2=-1).sum(-1),
        "diag": lambda: scatters.sum((-1, -2)),
        "spherical": lambda: scatters.sum(-1),
    }[kind.name]()
    torch.testing.assert_close(traces, torch.full((2,), spread, dtype=torch.float64))


def test_the_spread_of_rows_is_by_weight():
    rows = rows_at(np.array([[0.0], [2.0], [1e9]]), np.array([1.0, 1.0, 0.0]))._replace(
        centre=torch.tensor([1.0], dtype=torch.float64)
    )
    assert spread_of(rows) == pytest.approx(1.0)
    assert spread_of(rows_at(np.full((3, 2), 5.0))) == 1.0
