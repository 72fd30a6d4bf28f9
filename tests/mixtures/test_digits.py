"""What passes keep of the digits: wherever the data lie, however far apart or correlated the components are."""

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

from posterity.mixtures import (
    Components,
    Full,
    Rows,
    log_densities,
    responsibilities,
    rows_of,
    scores,
    statistics,
    sweeps,
)
from posterity.mixtures.sweeps import SharedSweep

by_kind = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)


def test_a_point_500_scales_away_has_a_density_and_responsibilities():
    case = load("em_gmm_2d_k3")
    given = Mixture(*(case.inputs[name][None] for name in ("weights", "means", "covs")))
    given = Mixture(*(each.to(torch.get_default_device()) for each in given))
    far = case.inputs["far_point"][None].to(torch.get_default_device())
    rows = Rows(far, None, None, torch.zeros(2, dtype=torch.float64))
    own = components_of(Full(), given, rows)
    case.check("far_log_density", log_densities(rows, Full(), own)[0, 0])
    case.check("far_responsibilities", responsibilities(rows, Full(), own)[0, 0])
    found = statistics(rows, Full(), own)
    case.check("far_log_density", found.log_likelihood[0])
    assert float(found.counts.sum()) == pytest.approx(1.0, rel=1e-14)


@by_kind
@pytest.mark.parametrize("far", [1e4, 1e6])
@pytest.mark.usefixtures("way")
def test_where_the_data_lie_makes_no_difference(kind, far):
    given = mixture(kind, 2, 3, 2)
    near = (points_near(given.means[0], 500) * 2**12).round() / 2**12  # adding 1e6 loses nothing
    given = given._replace(means=(given.means * 2**12).round() / 2**12)
    rows, moved = rows_of(near), rows_of(near + far)
    wanted = statistics(rows, kind, components_of(kind, given, rows))
    got = statistics(moved, kind, components_of(kind, given._replace(means=given.means + far), moved))
    assert_statistics(got, wanted, 1e-9)


@by_kind
def test_components_far_apart_lose_no_digits(kind):
    given = mixture(kind, 1, 3, 2)
    given = given._replace(means=given.means * 1e5)
    points = points_near(given.means[0], 400)
    rows = rows_of(points)
    got = statistics(rows, kind, components_of(kind, given, rows))
    assert_statistics(got, naive_statistics(kind, given, points), 1e-9)


@by_kind
def test_products_of_coordinates_lose_the_digits_that_decide_against_them(kind, monkeypatch):
    """What a pass may lose where they are used grows as the square of the distance, as the limit supposes."""
    given = mixture(kind, 1, 3, 2)
    errors = []
    monkeypatch.setattr(sweeps, "TOLERATED", torch.inf)
    for far in (1e2, 1e5):
        moved = given._replace(means=given.means * far)
        points = points_near(moved.means[0], 400)
        rows = rows_of(points)
        own = components_of(kind, moved, rows)
        wanted = naive_scores(kind, moved, points).amax(-1)
        errors.append(float((scores(rows, kind, own).amax(-1) - wanted).abs().max()))
    assert errors[0] < 1e-10
    assert errors[1] > 1e-8


@by_kind
@pytest.mark.parametrize(("distance", "wanted"), [(0.0, True), (200.0, True), (300.0, False), (1e5, False)])
def test_products_are_used_up_to_two_hundred_scales(kind, distance, wanted):
    means = torch.tensor([[[0.0, 0.0], [0.0, 7.0 * distance]]], dtype=torch.float64)
    covariances = {"full": 49 * torch.eye(2).expand(1, 2, 2, 2), "tied": 49 * torch.eye(2)[None]}
    given = covariances.get(kind.name, torch.full((1, *kind.shape(2, 2)), 49.0)).double()
    own = Components(torch.zeros(1, 2, dtype=torch.float64), means, kind.factors(given))
    assert isinstance(kind.sweep(own, 10), (sweeps.MomentSweep, SharedSweep)) is wanted


@pytest.mark.parametrize("kind", KINDS[:2], ids=lambda kind: kind.name)
@pytest.mark.parametrize(("small", "wanted"), [(1e-2, True), (1e-6, False), (1e-10, False)])
def test_strong_correlations_lose_no_digits(kind, small, wanted):
    turn = torch.tensor([[0.6, -0.8], [0.8, 0.6]], dtype=torch.float64)
    matrix = turn @ torch.diag(torch.tensor([1.0, small], dtype=torch.float64)) @ turn.mT
    covariances = matrix.expand(1, *kind.shape(1, 2)).contiguous()
    normal = points_near(torch.zeros(1, 2, dtype=torch.float64), 300) / 1.3
    points = normal @ (turn * torch.tensor([1.0, small**0.5], dtype=torch.float64)).mT
    rows = Rows(points, None, None, torch.zeros(2, dtype=torch.float64))
    own = Components(
        torch.zeros(1, 1, dtype=torch.float64), torch.zeros(1, 1, 2, dtype=torch.float64), kind.factors(covariances)
    )
    if kind.name == "full":  # one matrix for all is whitened first
        assert isinstance(kind.sweep(own, 300), sweeps.MomentSweep) is wanted
    whitened = points @ own.factors.reshape(2, 2)
    torch.testing.assert_close(scores(rows, kind, own)[0, :, 0], -0.5 * whitened.square().sum(1), rtol=0.0, atol=1e-10)


@by_kind
@pytest.mark.usefixtures("way")
def test_float32_rows_cost_only_their_own_rounding(kind):
    given = mixture(kind, 2, 3, 2)
    points = points_near(given.means[0], 500)
    rounded = points.float()
    rows = rows_of(rounded)
    own = components_of(kind, given, rows)
    got = statistics(rows, kind, own)
    assert_statistics(got, naive_statistics(kind, given, rounded), 1e-12)
    assert_statistics(got, naive_statistics(kind, given, points), 1e-5)
    assert log_densities(rows, kind, own).dtype == torch.float32
