"""Rounds of EM on random problems: the objective never falls, labels are names only, and bad starts survive.

The tests of random problems together make `PROBLEMS` of them.
"""

import logging

import numpy as np
import pytest
import torch
from hypothesis import assume, example, given, reject, settings
from hypothesis import strategies as st
from scipy.optimize import linear_sum_assignment
from scipy.spatial.distance import cdist

from posterity.errors import BoundFell, NotPositiveDefinite
from posterity.mixtures import Diagonal, Full, GaussianMixture, InverseWishart, Rows, Spherical, Tied, estimator
from posterity.mixtures.rounds import Floor, Rounds
from posterity.numerics import Key

PROBLEMS = 1000
TYPES = ("full", "tied", "diag", "spherical")
KINDS = (Full(), Tied(), Diagonal(), Spherical())
FALL = 1e-10  # of the bound


@pytest.fixture(autouse=True, scope="module")
def _without_the_warning():
    logger = logging.getLogger("posterity")
    level = logger.level
    logger.setLevel(logging.ERROR)
    yield
    logger.setLevel(level)


class Problem:
    """Rows, weights, labels and settings from one seed: small, of any scale, often degenerate, up to 1e4 from 0."""

    def __init__(self, seed):
        rng = np.random.default_rng(seed)
        self.rng = rng
        self.components, dimensions = int(rng.integers(1, 6)), int(rng.integers(1, 5))
        count = self.components + int(rng.integers(0, 40))
        self.scale = 10 ** rng.uniform(-2, 2)
        self.x = rng.normal(size=(count, dimensions)) * self.scale
        if rng.random() < 0.3:
            self.x = self.x.round()  # rows that are equal
        if rng.random() < 0.2:
            self.x[:, 0] = self.x[0, 0]  # a constant column
        if rng.random() < 0.2:
            self.x = self.x[rng.integers(0, count, count)]
        self.x = self.x + rng.choice([0.0, 1.0, 100.0, 1e4])
        self.weights = None if rng.random() < 0.5 else rng.exponential(size=count) * (rng.random(count) < 0.9) + 1e-3
        known = rng.random(count) < rng.choice([0.0, 0.3, 1.0])
        self.labels = np.where(known, rng.integers(0, self.components, count), -1)
        self.type = str(rng.choice(TYPES))
        self.prior = InverseWishart(float(10 ** rng.uniform(-3, 1)), float(10 ** rng.uniform(-1, 1)))

    def fit(self, **more):
        with_defaults = {"reg_covar": self.prior, "max_iter": 8, "tol": 1e-7, "random_state": 0, **more}
        mixture = GaussianMixture(self.components, covariance_type=self.type, **with_defaults)
        return mixture.fit(self.x, sample_weight=self.weights, labels=self.labels)

    def starts(self):
        """Means, weights and precisions at random, the means at rows or near them."""
        dimensions = self.x.shape[1]
        means = self.x[self.rng.integers(0, len(self.x), self.components)]
        means = means + 0.3 * self.scale * self.rng.normal(size=means.shape)
        roots = self.rng.normal(size=(self.components, dimensions, dimensions)) / self.scale
        full = roots @ roots.swapaxes(1, 2) + np.eye(dimensions) / self.scale**2
        precisions = {"full": full, "tied": full[0], "diag": full[:, range(dimensions), range(dimensions)]}
        precisions["spherical"] = full[:, 0, 0]
        return self.rng.dirichlet(np.ones(self.components)), means, precisions[self.type]


def assert_never_falls(mixture):
    bounds = np.array(mixture.lower_bounds_)
    assert np.isfinite(bounds).all()
    assert (bounds[1:] - bounds[:-1] >= -FALL * np.maximum(1, np.abs(bounds[1:]))).all()


def assert_valid(mixture, problem):
    dense = mixture._dense_covariances()
    assert bool((torch.linalg.eigvalsh(dense) > 0).all())
    assert mixture.weights_.sum() == pytest.approx(1, abs=1e-12)
    assert np.isfinite(mixture.score_samples(problem.x)).all()


seeds = st.integers(0, 2**32 - 1)


@settings(max_examples=4 * PROBLEMS // 10, deadline=None)
@given(
    seed=seeds, init=st.sampled_from(["kmeans", "k-means++", "random", "random_from_data"]), restarts=st.integers(1, 3)
)
def test_the_objective_never_falls_from_seeds(seed, init, restarts):
    problem = Problem(seed)
    mixture = problem.fit(init_params=init, n_init=restarts)
    assert_never_falls(mixture)
    assert_valid(mixture, problem)


@settings(max_examples=PROBLEMS // 10, deadline=None)
@given(seed=seeds)
def test_plain_em_never_falls_where_no_component_collapses(seed):
    problem = Problem(seed)
    problem.x = problem.x + problem.scale * problem.rng.normal(size=problem.x.shape)  # no constant column
    problem.components = 1 + (len(problem.x) > 12 * problem.x.shape[1])
    problem.labels = np.where(problem.labels < problem.components, problem.labels, -1)
    assume(len(problem.x) > 3 * problem.x.shape[1])
    try:
        mixture = problem.fit(reg_covar=0.0, n_init=2)
    except NotPositiveDefinite:
        reject()
    assume(torch.linalg.eigvalsh(mixture._dense_covariances()).min() > 1e-4 * problem.scale**2)
    assert_never_falls(mixture)


@settings(max_examples=2 * PROBLEMS // 10, deadline=None)
@given(seed=seeds, case=st.sampled_from(["equal means", "one point", "far away", "weight 0"]))
def test_a_collapsed_start_survives(seed, case):
    problem = Problem(seed)
    weights, means, precisions = problem.starts()
    if case == "equal means":
        means[:] = problem.x.mean(0)
    elif case == "one point":
        means[0] = problem.x[0]
        precisions = precisions * 1e6
    elif case == "far away":
        means[0] += 1e3 * problem.scale
    elif problem.components > 1:
        weights = np.append(0.0, weights[1:] / weights[1:].sum())
    mixture = problem.fit(weights_init=weights, means_init=means, precisions_init=precisions)
    assert_never_falls(mixture)
    assert_valid(mixture, problem)
    floor = problem.fit(weights_init=weights, means_init=means, precisions_init=precisions, reg_covar=1e-6, max_iter=3)
    assert_valid(floor, problem)


@settings(max_examples=3 * PROBLEMS // 10, deadline=None)
@given(seed=seeds)
@example(seed=887)  # two empty components
def test_components_are_names_only(seed):
    problem = Problem(seed)
    weights, means, precisions = problem.starts()
    order = problem.rng.permutation(problem.components)
    start = {"weights_init": weights, "means_init": means, "precisions_init": precisions, "max_iter": 5}
    mixture = problem.fit(**start)
    assert_never_falls(mixture)
    problem.labels = np.where(problem.labels < 0, -1, np.argsort(order)[problem.labels])
    start["weights_init"], start["means_init"] = weights[order], means[order]
    if problem.type != "tied":
        start["precisions_init"] = precisions[order]
    permuted = problem.fit(**start)
    # Of several empty components the first takes the worst row: those may come back under each other's names.
    sides = [np.column_stack([each.means_ / problem.scale, each.weights_]) for each in (permuted, mixture)]
    _, order = linear_sum_assignment(cdist(*sides))
    own = slice(None) if problem.type == "tied" else order
    np.testing.assert_allclose(permuted.lower_bounds_, mixture.lower_bounds_, rtol=1e-9, atol=1e-9)
    np.testing.assert_allclose(permuted.weights_, mixture.weights_[order], atol=1e-7)
    np.testing.assert_allclose(permuted.means_, mixture.means_[order], atol=1e-6 * problem.scale, rtol=1e-10)
    scale = np.abs(mixture.covariances_).max()
    np.testing.assert_allclose(permuted.covariances_, mixture.covariances_[own], atol=1e-6 * scale)


def rounds_at(kind, points, regularisation, labels=None):
    return Rounds(Rows(points, None, labels, points.mean(0)), kind, regularisation)


def any_values(kind, restarts=2, components=3, dimensions=2):
    rng = np.random.default_rng(5)
    roots = torch.tensor(rng.normal(size=(restarts, components, dimensions, dimensions)))
    full = roots @ roots.mT + torch.eye(dimensions, dtype=torch.float64)
    covariances = {"full": full, "tied": full[:, 0], "diag": full.diagonal(dim1=-2, dim2=-1)}
    covariances["spherical"] = full[..., 0, 0]
    return {
        "weights": torch.tensor(rng.dirichlet(np.ones(components), size=restarts)),
        "means": torch.tensor(rng.normal(size=(restarts, components, dimensions))),
        "covariances": covariances[kind.name],
    }


@pytest.mark.parametrize("regularisation", [Floor(0.0), InverseWishart(0.3, 2.0)], ids=["plain", "prior"])
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_the_bound_is_the_expected_log_joint_and_entropy(kind, regularisation):
    points = torch.tensor(np.random.default_rng(0).normal(size=(40, 2)))
    steps = rounds_at(kind, points, regularisation)
    values = any_values(kind)
    latent = steps.expectation(values, {})
    other = {name: value.flip(0) for name, value in values.items()}  # not what q was made at
    found = steps.bound(other, latent)
    for index in range(2):
        log_joints = []
        for one in (values, other):
            dense = kind.dense(one["covariances"], 3, 2)[index]
            normal = torch.distributions.MultivariateNormal(one["means"][index] + points.mean(0), dense)
            log_joints.append(normal.log_prob(points[:, None]) + one["weights"][index].log())
        log_q = torch.log_softmax(log_joints[0], 1)
        wanted = (log_q.exp() * (log_joints[1] - log_q)).sum()
        matrices = dense[:1] if kind.name == "tied" else dense
        if isinstance(regularisation, InverseWishart):
            traces = torch.linalg.inv(matrices).diagonal(dim1=-2, dim2=-1).sum()
            wanted = wanted - 0.5 * (2.0 * torch.logdet(matrices).sum() + 0.3 * traces)
        torch.testing.assert_close(found[index] * 40, wanted, rtol=1e-12, atol=1e-12)
    tight = steps.bound(values, latent)
    torch.testing.assert_close(tight, steps.objective(values), rtol=1e-14, atol=0)
    torch.testing.assert_close(steps.density(3).log_density(steps.density(3).unconstrained(values)), 40 * tight)


@pytest.mark.parametrize("regularisation", [Floor(0.0), InverseWishart(0.3, 2.0)], ids=["plain", "prior"])
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_no_values_near_those_of_the_m_step_have_a_higher_bound(kind, regularisation):
    points = torch.tensor(np.random.default_rng(0).normal(size=(40, 2)))
    steps = rounds_at(kind, points, regularisation)
    values = any_values(kind)
    latent = steps.expectation(values, {})
    best = steps.maximisation(values, latent)
    top = steps.bound(best, latent)
    for draw in range(50):
        noise = {n: 0.01 * Key(draw).fold(n).normal(tuple(v.shape), v.dtype, v.device) for n, v in best.items()}
        near = {name: value + noise[name] for name, value in best.items()}
        near["weights"] = near["weights"] / near["weights"].sum(-1, keepdim=True)
        if kind.name in ("full", "tied"):
            near["covariances"] = (near["covariances"] + near["covariances"].mT) / 2
        assert bool((steps.bound(near, latent) < top).all())


@pytest.mark.parametrize("covariance_type", TYPES)
def test_an_empty_component_is_moved_to_rows_that_need_it(covariance_type):
    rng = np.random.default_rng(1)
    x = np.concatenate([rng.normal(size=(40, 2)), rng.normal(size=(40, 2)) + 30])
    precisions = {
        "full": np.stack([np.eye(2)] * 2),
        "tied": np.eye(2),
        "diag": np.ones((2, 2)),
        "spherical": np.ones(2),
    }
    settings = {"covariance_type": covariance_type, "reg_covar": InverseWishart(0.1, 1.0), "tol": 1e-6}
    mixture = GaussianMixture(
        2,
        weights_init=[0.5, 0.5],
        means_init=[[0.0, 0.0], [-1e5, 0.0]],
        precisions_init=precisions[covariance_type],
        **settings,
    ).fit(x)
    assert_never_falls(mixture)
    assert mixture.weights_.min() > 0.5 / 80
    assert np.abs(mixture.means_).max() < 35
    assert mixture.lower_bound_ > GaussianMixture(1, **settings).fit(x).lower_bound_ + 0.01
    if covariance_type in ("diag", "spherical"):  # with matrices there is a local maximum on the way
        np.testing.assert_allclose(np.sort(mixture.means_[:, 0]), [0, 30], atol=1)


def test_an_empty_component_stays_where_every_row_has_a_label():
    x = np.random.default_rng(0).normal(size=(30, 2))
    mixture = GaussianMixture(3, reg_covar=0.0).fit(x, labels=np.arange(30) % 2)
    assert mixture.weights_.tolist() == [0.5, 0.5, 0.0]
    np.testing.assert_allclose(mixture.means_[0], x[::2].mean(0), rtol=1e-10)
    assert (mixture.predict_proba(x)[:, 2] == 0).all()


def test_a_floor_may_lower_the_likelihood_and_is_no_error():
    y = np.random.default_rng(0).normal(size=(30, 1))
    mixture = GaussianMixture(2, reg_covar=0.5, tol=0.0, max_iter=200).fit(y)
    steps = np.diff(mixture.lower_bounds_)
    assert steps.min() < -1e-9
    assert mixture.covariances_.min() >= 0.5


def test_rounding_in_covariances_close_to_singular_is_no_error():
    rng = np.random.default_rng(3)
    ends = 300 * rng.normal(size=(4, 4))  # two components, each over two of these: thin plates
    rows = ends[rng.integers(0, 4, 100)] + 1e-3 * rng.normal(size=(100, 4))
    mixture = GaussianMixture(2, reg_covar=InverseWishart(1e-8, 0.1), n_init=5, tol=1e-9).fit(rows)
    assert (np.diff(mixture.lower_bounds_) > -1e-3).all()


def test_a_step_that_lowers_the_bound_is_an_error(monkeypatch, caplog):
    right = Rounds.maximisation

    def wrong(self, values, latent):
        moved = right(self, values, latent)
        return {**moved, "means": moved["means"] + 0.5}

    monkeypatch.setattr(Rounds, "maximisation", wrong)
    rows = np.random.default_rng(0).normal(size=(40, 2))
    with pytest.raises(BoundFell, match=r"The M-step of round [0-9]+ lowered the bound"):
        GaussianMixture(2, reg_covar=InverseWishart(0.1, 2.0), tol=0.0).fit(rows)
    GaussianMixture(2, max_iter=5).fit(rows)  # a floor promises nothing
    monkeypatch.setattr(estimator, "COLLINEAR", 1.0)  # as if rounding explained it
    with caplog.at_level(logging.INFO, logger="posterity"):
        GaussianMixture(2, reg_covar=InverseWishart(0.1, 2.0), tol=0.0, max_iter=5).fit(rows)
    assert "so close to singular (condition number" in caplog.text


@pytest.mark.parametrize("regularisation", [1e-6, InverseWishart(1e-6, 1.0)], ids=["floor", "prior"])
def test_a_small_regularisation_is_enough_for_rows_of_a_large_scale(regularisation):
    for seed in range(40):
        rng = np.random.default_rng(seed)
        components, dimensions = int(rng.integers(2, 7)), int(rng.integers(1, 4))
        rows = 1e6 * rng.normal(size=(components + int(rng.integers(0, 8)), dimensions))
        means = 1e6 * rng.normal(size=(components, dimensions)) * 10 ** rng.uniform(-1, 2)
        settings = {"covariance_type": TYPES[seed % 4], "reg_covar": regularisation, "means_init": means}
        mixture = GaussianMixture(components, max_iter=20, **settings).fit(rows)
        assert np.isfinite(mixture.score_samples(rows)).all()
