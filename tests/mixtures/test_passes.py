import pytest
import torch
from goldcases import load
from mixturecases import (
    KINDS,
    Mixture,
    assert_statistics,
    components_of,
    mixture,
    naive_scores,
    naive_statistics,
    points_near,
)

from posterity.mixtures import Full, Rows, log_densities, responsibilities, rows_of, scores, statistics
from posterity.mixtures import rows as sizes

by_kind = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
by_size = pytest.mark.parametrize(
    ("restarts", "components", "dimensions"), [(1, 3, 2), (2, 2, 1), (3, 1, 4), (2, 5, 3)]
)


@by_kind
@by_size
def test_statistics_are_those_of_the_dense_formulas(kind, restarts, components, dimensions):
    given = mixture(kind, restarts, components, dimensions)
    points = points_near(given.means[0], 300)
    rows = rows_of(points)
    got = statistics(rows, kind, components_of(kind, given, rows))
    assert_statistics(got, naive_statistics(kind, given, points), 1e-12)


@by_kind
@by_size
def test_scores_densities_and_responsibilities_are_those_of_the_dense_formulas(kind, restarts, components, dimensions):
    given = mixture(kind, restarts, components, dimensions)
    points = points_near(given.means[0], 300)
    rows = rows_of(points)
    own = components_of(kind, given, rows)
    wanted = naive_scores(kind, given, points)
    torch.testing.assert_close(scores(rows, kind, own), wanted, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(log_densities(rows, kind, own), torch.logsumexp(wanted, -1), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(responsibilities(rows, kind, own), torch.softmax(wanted, -1), rtol=1e-11, atol=1e-13)


@by_kind
def test_weights_and_labels(kind):
    given = mixture(kind, 2, 4, 3)
    points = points_near(given.means[0], 200)
    weights = torch.linspace(0.0, 2.0, 200, dtype=torch.float64)
    labels = torch.arange(200) % 9 - 1
    labels[labels >= 4] = -1
    rows = rows_of(points, weights, labels)
    got = statistics(rows, kind, components_of(kind, given, rows))
    assert_statistics(got, naive_statistics(kind, given, points, weights, labels), 1e-12)


def test_a_point_500_scales_away_has_a_density_and_responsibilities():
    case = load("em_gmm_2d_k3")
    given = Mixture(*(case.inputs[name][None] for name in ("weights", "means", "covs")))
    rows = Rows(case.inputs["far_point"][None], None, None, torch.zeros(2, dtype=torch.float64))
    own = components_of(Full(), given, rows)
    case.check("far_log_density", log_densities(rows, Full(), own)[0, 0])
    case.check("far_responsibilities", responsibilities(rows, Full(), own)[0, 0])
    torch.testing.assert_close(
        statistics(rows, Full(), own).counts.sum(), torch.tensor(1.0, dtype=torch.float64), rtol=1e-14, atol=0.0
    )


@by_kind
def test_chunks_add_up_to_one_chunk(kind, monkeypatch):
    given = mixture(kind, 2, 3, 2)
    rows = rows_of(points_near(given.means[0], 1000))
    own = components_of(kind, given, rows)
    whole = statistics(rows, kind, own)
    monkeypatch.setattr(sizes, "CPU_BYTES", 1)
    monkeypatch.setattr(sizes, "GPU_BYTES", 1)
    assert_statistics(statistics(rows, kind, own), whole, 1e-12)
