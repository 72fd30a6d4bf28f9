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
from torch.utils._python_dispatch import TorchDispatchMode

from posterity.mixtures import (
    Full,
    Rows,
    log_densities,
    responsibilities,
    rows_of,
    score_chunks,
    scores,
    statistics,
    sweeps,
)

by_kind = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
by_size = pytest.mark.parametrize(
    ("restarts", "components", "dimensions"), [(1, 3, 2), (2, 2, 1), (3, 1, 4), (2, 5, 3)]
)


@by_kind
@by_size
@pytest.mark.usefixtures("way")
def test_statistics_are_those_of_the_dense_formulas(kind, restarts, components, dimensions):
    given = mixture(kind, restarts, components, dimensions)
    points = points_near(given.means[0], 300)
    rows = rows_of(points)
    got = statistics(rows, kind, components_of(kind, given, rows))
    assert_statistics(got, naive_statistics(kind, given, points), 1e-12)


@by_kind
@by_size
@pytest.mark.usefixtures("way")
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
@pytest.mark.usefixtures("way")
def test_rows_may_have_weights_and_labels(kind):
    given = mixture(kind, 2, 4, 3)
    points = points_near(given.means[0], 200)
    weights = torch.linspace(0.0, 2.0, 200, dtype=torch.float64)
    labels = torch.arange(200) % 9 - 1
    labels[labels >= 4] = -1
    rows = rows_of(points, weights, labels)
    own = components_of(kind, given, rows)
    assert_statistics(statistics(rows, kind, own), naive_statistics(kind, given, points, weights, labels), 1e-12)
    known = labels >= 0
    hot = torch.nn.functional.one_hot(labels[known], 4).double()
    assert torch.equal(responsibilities(rows, kind, own)[:, known], hot.expand(2, -1, -1))
    assert torch.equal(log_densities(rows, kind, own), log_densities(rows_of(points), kind, own))


def test_labels_name_the_component_even_where_another_is_far_nearer():
    means = torch.tensor([[[-400.0], [400.0]]], dtype=torch.float64)
    given = Mixture(torch.full((1, 2), 0.5, dtype=torch.float64), means, torch.ones(1, 2, 1, 1, dtype=torch.float64))
    rows = rows_of(torch.tensor([[-400.0], [400.0]], dtype=torch.float64), labels=torch.tensor([1, 0]))
    got = statistics(rows, Full(), components_of(Full(), given, rows))
    wanted = naive_statistics(Full(), given, rows.points, labels=rows.labels)
    assert_statistics(got, wanted, 1e-12)
    assert torch.equal(got.shifts, torch.tensor([[[800.0], [-800.0]]], dtype=torch.float64))


def test_the_first_round_of_the_gold_mixture():
    case = load("em_gmm_2d_k3")
    values = (case.inputs[name][None].to(torch.get_default_device()) for name in ("weights", "means", "covs"))
    given = Mixture(*values)
    rows = rows_of(case.inputs["Y"].to(torch.get_default_device()))
    own = components_of(Full(), given, rows)
    found = statistics(rows, Full(), own)
    case.check("log_lik0", found.log_likelihood[0])
    case.check("iterations.0.responsibilities", responsibilities(rows, Full(), own)[0])
    case.check("iterations.0.weights", found.counts[0] / len(rows.points))
    case.check("iterations.0.means", (given.means + found.shifts)[0])
    case.check("iterations.0.covs", (Full().second_moments(found) / found.counts[..., None, None])[0])


@by_kind
@pytest.mark.usefixtures("way")
def test_rows_of_weight_zero_change_nothing(kind):
    given = mixture(kind, 2, 3, 2)
    points = points_near(given.means[0], 300)
    rows = rows_of(points)
    more = Rows(torch.cat([points, points[:50] * 40]), torch.ones(350, dtype=torch.float64), None, rows.centre)
    more.weights[300:] = 0.0
    own = components_of(kind, given, rows)
    assert_statistics(statistics(more, kind, own), statistics(rows, kind, own), 1e-13)


@by_kind
@pytest.mark.usefixtures("way")
def test_a_row_of_weight_two_is_two_rows(kind):
    given = mixture(kind, 2, 3, 2)
    points = points_near(given.means[0], 300)
    rows = rows_of(points, torch.ones(300))
    rows.weights[100:] = 2.0
    twice = Rows(torch.cat([points, points[100:]]), None, None, rows.centre)
    own = components_of(kind, given, rows)
    assert_statistics(statistics(rows, kind, own), statistics(twice, kind, own), 1e-13)


@by_kind
@pytest.mark.usefixtures("way")
def test_chunks_add_up_to_one_chunk(kind, monkeypatch):
    given = mixture(kind, 2, 3, 2)
    points = points_near(given.means[0], 1000)
    rows = rows_of(points, torch.linspace(0.5, 1.5, 1000), torch.arange(1000) % 7 - 4)
    rows = rows._replace(labels=rows.labels.clamp_min(-1))
    own = components_of(kind, given, rows)
    whole, wanted = statistics(rows, kind, own), scores(rows, kind, own)
    monkeypatch.setattr(sweeps, "CPU_BYTES", 1)
    monkeypatch.setattr(sweeps, "GPU_BYTES", 1)
    assert kind.sweep(own, 1000).rows == 64
    assert_statistics(statistics(rows, kind, own), whole, 1e-12)
    torch.testing.assert_close(scores(rows, kind, own), wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", KINDS[:2], ids=lambda kind: kind.name)
@pytest.mark.parametrize("dimensions", [3, 4])
@pytest.mark.usefixtures("way")
def test_scatters_are_symmetric_to_the_bit(kind, dimensions):
    given = mixture(kind, 2, 3, dimensions)
    rows = rows_of(points_near(given.means[0], 300))
    scatters = statistics(rows, kind, components_of(kind, given, rows)).scatters
    assert torch.equal(scatters, scatters.mT)


@by_kind
@pytest.mark.usefixtures("way")
def test_restarts_together_are_each_alone(kind):
    given = mixture(kind, 4, 3, 2)
    rows = rows_of(points_near(given.means[0], 300))
    together = statistics(rows, kind, components_of(kind, given, rows))
    for index in range(4):
        alone = Mixture(*(each[index : index + 1] for each in given))
        got = statistics(rows, kind, components_of(kind, alone, rows))
        assert_statistics(got, type(got)(*(each[index : index + 1] for each in together)), 1e-12)


@by_kind
@pytest.mark.usefixtures("way")
def test_the_order_of_rows_and_components_is_free(kind):
    given = mixture(kind, 1, 4, 3)
    points = points_near(given.means[0], 300)
    labels = (torch.arange(300) % 11 - 7).clamp_min(-1)
    rows = rows_of(points, labels=labels)
    own = components_of(kind, given, rows)
    wanted = statistics(rows, kind, own)
    order = torch.randperm(300, generator=torch.Generator(points.device).manual_seed(0))
    mixed = rows._replace(points=points[order], labels=labels[order])
    assert_statistics(statistics(mixed, kind, own), wanted, 1e-12)
    swap = torch.tensor([2, 0, 3, 1])
    covariances = given.covariances if kind.name == "tied" else given.covariances[:, swap]
    swapped = components_of(kind, Mixture(given.weights[:, swap], given.means[:, swap], covariances), rows)
    renamed = torch.where(labels < 0, labels, swap.argsort()[labels.clamp_min(0)])
    got = statistics(rows._replace(labels=renamed), kind, swapped)
    scatters = wanted.scatters if kind.name == "tied" else wanted.scatters[:, swap]
    expected = wanted._replace(counts=wanted.counts[:, swap], shifts=wanted.shifts[:, swap], scatters=scatters)
    assert_statistics(got, expected, 1e-12)


@by_kind
@pytest.mark.usefixtures("way")
def test_a_component_of_weight_zero_takes_no_part(kind):
    given = mixture(kind, 1, 3, 2)
    given = given._replace(weights=torch.tensor([[0.4, 0.0, 0.6]], dtype=torch.float64))
    rows = rows_of(points_near(given.means[0], 200))
    own = components_of(kind, given, rows)
    got = statistics(rows, kind, own)
    assert got.counts[0, 1] == 0.0
    assert torch.equal(got.shifts[0, 1], torch.zeros(2, dtype=torch.float64))
    assert_statistics(got, naive_statistics(kind, given, rows.points)._replace(shifts=got.shifts), 1e-12)
    assert bool((responsibilities(rows, kind, own)[..., 1] == 0.0).all())
    assert bool((scores(rows, kind, own)[..., 1] == -torch.inf).all())


class _Largest(TorchDispatchMode):
    """The largest storage that any operation has made or written to, in bytes."""

    def __init__(self, given: set[int]):
        super().__init__()
        self.given, self.bytes = given, 0

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        found = function(*arguments, **(options or {}))
        for each in found if isinstance(found, (list, tuple)) else [found]:
            if isinstance(each, torch.Tensor) and each.untyped_storage().data_ptr() not in self.given:
                self.bytes = max(self.bytes, each.untyped_storage().nbytes())
        return found


@by_kind
@pytest.mark.usefixtures("way")
def test_a_pass_makes_no_tensor_as_long_as_the_data(kind, monkeypatch):
    given = mixture(kind, 2, 3, 4)
    points = points_near(given.means[0], 20000)
    rows = rows_of(points)
    own = components_of(kind, given, rows)
    monkeypatch.setattr(sweeps, "CPU_BYTES", 1 << 16)
    monkeypatch.setattr(sweeps, "GPU_BYTES", 1 << 16)
    before = points.clone()
    with _Largest({points.untyped_storage().data_ptr()}) as largest:
        statistics(rows, kind, own)
    assert 0 < largest.bytes <= 1 << 16
    assert torch.equal(points, before)


def test_points_that_want_gradients_are_only_read():
    given = mixture(Full(), 1, 2, 2)
    points = points_near(given.means[0], 50).requires_grad_()
    rows = rows_of(points)
    got = statistics(rows, Full(), components_of(Full(), given, rows))
    assert not got.log_likelihood.requires_grad
    assert not rows.centre.requires_grad


@by_kind
@pytest.mark.usefixtures("way")
def test_no_rows_add_up_to_nothing(kind):
    given = mixture(kind, 2, 3, 2)
    rows = Rows(torch.zeros(0, 2, dtype=torch.float64), None, None, torch.zeros(2, dtype=torch.float64))
    own = components_of(kind, given, rows)
    assert all(float(each.abs().max()) == 0.0 for each in statistics(rows, kind, own))
    assert scores(rows, kind, own).shape == (2, 0, 3)
    assert log_densities(rows, kind, own).shape == (2, 0)


@by_kind
def test_chunks_of_scores_are_the_scores(kind, monkeypatch):
    monkeypatch.setattr(sweeps, "CPU_BYTES", 1)
    monkeypatch.setattr(sweeps, "GPU_BYTES", 1)
    given = mixture(kind, 2, 3, 2)
    rows = rows_of(points_near(given.means[0], 150))
    own = components_of(kind, given, rows)
    pieces = [(piece, chunk.clone()) for piece, chunk in score_chunks(rows, kind, own)]
    assert [(piece.start, piece.stop) for piece, _ in pieces] == [(0, 64), (64, 128), (128, 150)]
    assert torch.equal(torch.cat([chunk for _, chunk in pieces], 2).mT, scores(rows, kind, own))


@pytest.mark.parametrize(
    ("components", "dimensions", "wanted"), [(1, 4, True), (1, 8, False), (7, 40, False), (8, 40, True)]
)
def test_products_are_made_where_enough_components_share_them(components, dimensions, wanted):
    given = mixture(Full(), 1, components, dimensions)
    rows = rows_of(points_near(given.means[0] / 2, 30))
    own = components_of(Full(), given._replace(means=given.means / 2), rows)
    assert isinstance(Full().sweep(own, 30), sweeps.MomentSweep) is wanted


def test_chunks_of_scores_need_no_gradients():
    given = mixture(Full(), 1, 2, 2)
    rows = rows_of(points_near(given.means[0], 20))
    own = components_of(Full(), given, rows)
    own = own._replace(means=own.means.requires_grad_())
    assert [chunk.requires_grad for _, chunk in score_chunks(rows, Full(), own)] == [False]
