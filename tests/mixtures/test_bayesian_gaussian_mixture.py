"""The Bayesian mixture as people call it: against gold numbers, exact evidences, scikit-learn, and bad input."""

import copy
import math
import pickle

import numpy as np
import pytest
import torch
from goldcases import load
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.base import clone
from sklearn.mixture import BayesianGaussianMixture as Peer

from posterity.errors import BoundFell
from posterity.mixtures import BayesianGaussianMixture
from posterity.mixtures.bayesian_gaussian_mixture import VariationalRounds
from posterity.mixtures.covariance import condition_of

KINDS = ("full", "tied", "diag", "spherical")
kinds = pytest.mark.parametrize("kind", KINDS)
CENTRES = np.array([[-6.0, 0.0], [0.0, 5.0], [6.0, -1.0]])


def clusters(count: int = 40, seed: int = 0) -> np.ndarray:
    """Three clusters far apart, (3 count, 2)."""
    rng = np.random.default_rng(seed)
    return np.concatenate([centre + rng.normal(size=(count, 2)) * [1.0, 0.6] for centre in CENTRES])


def exactly(components: int, kind: str = "full", **others: object) -> BayesianGaussianMixture:
    """A mixture that goes on until nothing moves."""
    return BayesianGaussianMixture(components, covariance_type=kind, tol=1e-11, max_iter=2000, **others)


def priors(kind: str, dimensions: int) -> dict[str, object]:
    scale = {"full": np.eye(dimensions) + 0.3, "diag": np.linspace(0.5, 2.0, dimensions), "spherical": 0.8}
    return {
        "weight_concentration_prior": 0.7,
        "mean_precision_prior": 0.4,
        "mean_prior": np.full(dimensions, 0.2),
        "degrees_of_freedom_prior": dimensions + 0.5,
        "covariance_prior": scale.get(kind, scale["full"]),
    }


def theirs_on(rows: np.ndarray, kind: str, prior_type: str = "dirichlet_distribution") -> Peer:
    settings_ = {"weight_concentration_prior_type": prior_type, "tol": 1e-12, "max_iter": 2000}
    return Peer(n_components=3, covariance_type=kind, reg_covar=0.0, random_state=0, **settings_).fit(rows)


def test_limit_is_gold_and_below_the_exact_evidence():
    case = load("bayesian_gmm_vb")
    given_ = case.inputs
    mixture = exactly(
        2,
        weight_concentration_prior=given_["alpha0"],
        mean_precision_prior=given_["beta0"],
        mean_prior=given_["m0"],
        degrees_of_freedom_prior=given_["nu0"],
        covariance_prior=torch.linalg.inv(given_["W0"]),
    ).fit(given_["X"])
    case.check("limit.elbo", mixture.lower_bound_)
    found = mixture.predict_proba(given_["X"])
    first = int(found[5].argmax())  # the component that gold names first has row 5
    case.check("limit.responsibilities", found[:, [first, 1 - first]])
    assert mixture.lower_bound_ <= mixture.elbo(given_["X"]) + 1e-9 < case.at("exact_log_evidence")


PRIOR_TYPES = ("dirichlet_distribution", "dirichlet_process")


@pytest.mark.parametrize(
    ("kind", "dimensions", "prior_type"),
    [(kind, dimensions, PRIOR_TYPES[0]) for kind in KINDS for dimensions in (1, 3)] + [("tied", 2, PRIOR_TYPES[1])],
)
def test_with_all_labels_the_elbo_is_the_evidence(kind, dimensions, prior_type):
    """log p(X, Z) is then known from Student-t predictions of one row after another."""
    rng = np.random.default_rng(1)
    rows, labels = rng.normal(size=(7, dimensions)), np.array([0, 1, 0, 2, 1, 0, 2])
    fixed = {**priors(kind, dimensions), "weight_concentration_prior_type": prior_type}
    # Rows not yet seen have almost no weight; the first fit therefore is the prior.
    chain = []
    for seen in range(7):
        weights = np.r_[np.ones(seen), np.full(7 - seen, 1e-300)]
        mixture = exactly(3, kind, **fixed).fit(rows, sample_weight=weights, labels=labels)
        chain.append(mixture.log_joint(rows)[seen, labels[seen]])
    whole = exactly(3, kind, **fixed).fit(rows, labels=labels)
    assert whole.lower_bound_ == pytest.approx(sum(chain), rel=1e-10)
    assert whole.elbo(rows, labels=labels) == pytest.approx(sum(chain), rel=1e-10)


@settings(max_examples=80, deadline=None)
@given(
    kind=st.sampled_from(KINDS),
    components=st.integers(1, 5),
    dimensions=st.integers(1, 4),
    extra=st.integers(0, 30),
    log_spread=st.floats(-4.0, 4.0),
    copies=st.booleans(),
    init=st.sampled_from(["kmeans", "k-means++", "random", "random_from_data"]),
    prior_type=st.sampled_from(PRIOR_TYPES),
    seed=st.integers(0, 10**6),
)
def test_bound_never_falls(kind, components, dimensions, extra, log_spread, copies, init, prior_type, seed):
    rng = np.random.default_rng(seed)
    count = components + extra
    rows = rng.standard_t(2.0, size=(count, dimensions)) @ rng.normal(size=(dimensions, dimensions))
    rows = rows[rng.integers(0, count, size=count)] if copies else rows
    rows = 10.0**log_spread * rows + 1e3 * rng.normal(size=dimensions)
    mixture = BayesianGaussianMixture(
        components,
        covariance_type=kind,
        weight_concentration_prior_type=prior_type,
        tol=0.0,
        max_iter=5,
        init_params=init,
        random_state=seed,
        n_init=2,
    ).fit(rows, sample_weight=rng.uniform(0.1, 3.0, size=count))
    bounds = np.array(mixture.lower_bounds_)
    prior = mixture.covariance_prior_
    collinear = kind in ("full", "tied") and condition_of(torch.tensor(prior)) > 1e5
    slack = 1e-8 if collinear else 1e-10  # elsewhere a fall raises BoundFell as well
    assert len(bounds) >= 1
    assert np.all(np.diff(bounds) >= -slack * np.maximum(1.0, np.abs(bounds[1:])))


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("prior_type", PRIOR_TYPES)
def test_components_without_need_die_out(prior_type, seed):
    rows = clusters(seed=seed)
    settings_ = {"weight_concentration_prior_type": prior_type, "weight_concentration_prior": 1e-3, "n_init": 3}
    mixture = exactly(10, random_state=seed, **settings_).fit(rows)
    assert int((mixture.weights_ > 0.02).sum()) == 3
    alive = mixture.means_[mixture.weights_ > 0.02]
    assert np.abs(alive[np.argsort(alive[:, 0])] - CENTRES).max() < 0.6


def test_bound_prefers_the_number_of_clusters():
    bounds = [exactly(count, random_state=0, n_init=2).fit(clusters()).lower_bound_ for count in (1, 2, 3, 4)]
    # The bound holds one of K! labellings.
    assert int(np.argmax([bound + math.lgamma(count + 1) for count, bound in enumerate(bounds, 1)])) == 2


@pytest.mark.parametrize(("kind", "dimensions"), [("full", 2), ("full", 1), ("diag", 1), ("spherical", 1)])
def test_posterior_is_that_of_scikit_learn_where_that_is_right(kind, dimensions):
    rows = clusters()[:, :dimensions]
    ours = exactly(3, kind, reg_covar=0.0).fit(rows)
    peer = theirs_on(rows, kind)
    mine, theirs = np.argsort(ours.means_[:, 0]), np.argsort(peer.means_[:, 0])
    for name in (
        "weight_concentration_",
        "mean_precision_",
        "degrees_of_freedom_",
        "means_",
        "covariances_",
        "weights_",
    ):
        np.testing.assert_allclose(getattr(ours, name)[mine], getattr(peer, name)[theirs], rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(ours.predict_proba(rows)[:, mine], peer.predict_proba(rows)[:, theirs], atol=1e-6)
    for name in ("mean_prior_", "covariance_prior_", "mean_precision_prior_", "degrees_of_freedom_prior_"):
        np.testing.assert_allclose(getattr(ours, name), getattr(peer, name), rtol=1e-12, atol=1e-12)


def test_a_dirichlet_process_has_the_components_of_scikit_learn():
    """Its weights differ in the last piece of the stick, and in the order of the components."""
    rows = np.concatenate([clusters(), clusters(10, seed=1)[:20]])
    ours = exactly(3, weight_concentration_prior_type="dirichlet_process", reg_covar=0.0).fit(rows)
    peer = theirs_on(rows, "full", "dirichlet_process")
    mine, theirs = np.argsort(ours.means_[:, 0]), np.argsort(peer.means_[:, 0])
    for name in ("mean_precision_", "degrees_of_freedom_", "means_", "covariances_"):
        np.testing.assert_allclose(getattr(ours, name)[mine], getattr(peer, name)[theirs], rtol=1e-6, atol=1e-6)
    counts = ours.predict_proba(rows).sum(0)
    assert counts[0] > counts[-1]  # large ones first
    first, second = ours.weight_concentration_
    np.testing.assert_allclose(first, 1 + counts, rtol=1e-8)
    np.testing.assert_allclose(second, 1 / 3 + np.array([counts[1] + counts[2], counts[2], 0.0]), rtol=1e-8)
    assert ours.weights_.sum() == pytest.approx(1.0, rel=1e-12)
    again = clone(ours).set_params(warm_start=True).fit(rows)
    assert again.fit(rows).n_iter_ == 2
    with pytest.raises(
        ValueError, match=r"warm_start: the last fit must have concentration of shape \(3,\). Got \(3, 2\)"
    ):
        again.set_params(weight_concentration_prior_type="dirichlet_distribution").fit(rows)


@pytest.mark.parametrize(("kind", "nats"), [("tied", 1.0), ("diag", 1e-6), ("spherical", 0.1)])
def test_scikit_learns_other_posteriors_have_a_lower_bound(kind, nats):
    """They count rows or degrees of freedom wrongly (see the docstring), so that theirs is not the optimum."""
    rows = clusters() / 3 + np.random.default_rng(1).normal(size=(120, 2))  # they overlap
    ours = exactly(3, kind, reg_covar=0.0).fit(rows)
    peer = theirs_on(rows, kind)
    theirs = copy.copy(ours)
    for name in ("weight_concentration_", "mean_precision_", "means_", "covariances_"):
        setattr(theirs, name, getattr(peer, name))
    theirs.degrees_of_freedom_ = np.atleast_1d(peer.degrees_of_freedom_)
    assert theirs.elbo(rows) < ours.elbo(rows) - nats


@kinds
def test_far_data_lose_no_accuracy(kind):
    rows = clusters()
    near, far = (exactly(3, kind, random_state=0).fit(rows + shift) for shift in (0.0, 1e4))
    assert far.lower_bound_ == pytest.approx(near.lower_bound_, rel=1e-9)
    np.testing.assert_allclose(far.means_ - 1e4, near.means_, atol=1e-8)
    np.testing.assert_allclose(far.covariances_, near.covariances_, rtol=1e-7, atol=1e-9)
    np.testing.assert_allclose(far.score_samples(rows + 1e4), near.score_samples(rows), rtol=1e-8)


@kinds
def test_whole_weights_are_copies(kind):
    rows, counts = clusters(8), np.arange(24) % 3
    weighted = exactly(3, kind, init_params="random_from_data", random_state=1).fit(rows, sample_weight=counts)
    copied = exactly(3, kind, init_params="random_from_data", random_state=1, n_init=5).fit(np.repeat(rows, counts, 0))
    assert weighted.lower_bound_ <= copied.lower_bound_ + 1e-6  # the starts differ
    assert weighted.elbo(rows, sample_weight=counts) == pytest.approx(
        weighted.elbo(np.repeat(rows, counts, 0)), rel=1e-12
    )
    np.testing.assert_allclose(weighted.covariance_prior_, copied.covariance_prior_, rtol=1e-10)
    np.testing.assert_allclose(weighted.mean_prior_, copied.mean_prior_, atol=1e-12)


def test_order_and_names_of_components_do_not_matter():
    rows = clusters()
    labels = np.repeat([0, 1, 2], 40)
    labels[5:] = np.where(np.arange(5, 120) % 40 < 5, labels[5:], -1)  # five rows of each cluster tell its name
    first = exactly(3).fit(rows, labels=labels)
    swap = np.array([2, 0, 1])
    second = exactly(3).fit(rows, labels=np.where(labels >= 0, swap[labels], -1))
    assert second.lower_bound_ == pytest.approx(first.lower_bound_, rel=1e-12)
    np.testing.assert_allclose(second.means_[swap], first.means_, rtol=1e-9)
    np.testing.assert_array_equal(first.predict(rows), np.repeat([0, 1, 2], 40))


def test_restarts_run_as_alone_and_the_best_is_kept():
    rows = clusters(15, seed=3) * [1.0, 0.3]
    many = exactly(5, init_params="random", n_init=8, random_state=0).fit(rows)
    one = exactly(5, init_params="random", n_init=1, random_state=0).fit(rows)
    assert many.lower_bound_ >= one.lower_bound_ - 1e-8
    assert many.elbo(rows) == pytest.approx(many.lower_bound_, rel=1e-9)


@kinds
def test_samples_follow_score_samples(kind):
    """E 1/p over a box is its volume."""
    mixture = exactly(2, kind, random_state=0).fit(clusters(4, seed=2))
    rows, components = mixture.sample(20_000)
    low, high = np.array([-7.0, -2.0]), np.array([2.0, 6.0])
    inside = ((rows > low) & (rows < high)).all(1)
    terms = inside * np.exp(-mixture.score_samples(rows))
    assert abs(terms.mean() - np.prod(high - low)) < 5 * terms.std() / math.sqrt(20_000)
    assert terms.std() / math.sqrt(20_000) < 5.0
    share = mixture.weights_[0]
    assert abs((components == 0).mean() - share) < 5 * math.sqrt(share * (1 - share) / 20_000)
    np.testing.assert_array_equal(rows, mixture.sample(20_000)[0])


def test_predictions_are_wider_than_plugged_in_gaussians():
    mixture = exactly(1).fit(clusters(2))
    far = np.array([[200.0, 200.0]])
    apart = far[0] - mixture.means_[0]
    plugged = -0.5 * apart @ np.linalg.inv(mixture.covariances_[0]) @ apart
    assert mixture.score_samples(far)[0] > 0.05 * plugged


def test_a_warm_start_goes_on_where_the_last_fit_ended():
    rows = clusters(15, seed=3) * [1.0, 0.3]
    whole = BayesianGaussianMixture(4, tol=0.0, max_iter=9, random_state=0).fit(rows)
    parts = BayesianGaussianMixture(4, tol=0.0, max_iter=4, random_state=0, warm_start=True).fit(rows)
    parts.set_params(max_iter=5).fit(rows)
    np.testing.assert_allclose(parts.means_, whole.means_, rtol=1e-10)
    assert parts.lower_bounds_[-1] == pytest.approx(whole.lower_bounds_[-1], rel=1e-12)
    with pytest.raises(ValueError, match="warm_start: the last fit must have means of shape"):
        parts.set_params(n_components=3).fit(rows)
    with pytest.raises(ValueError, match="warm_start: the last fit must have inverse scales of shape"):
        parts.set_params(n_components=4, covariance_type="diag").fit(rows)


def test_no_rounds_give_the_start():
    rows = clusters()
    start = BayesianGaussianMixture(3, max_iter=0, n_init=4, random_state=0).fit(rows)
    assert (start.n_iter_, start.converged_, start.lower_bounds_) == (0, False, [])
    assert start.lower_bound_ == pytest.approx(start.elbo(rows), rel=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@kinds
def test_tensors_give_tensors(kind, dtype):
    rows = torch.tensor(clusters(), dtype=dtype)
    mixture = BayesianGaussianMixture(3, covariance_type=kind, random_state=0).fit(rows)
    reference = BayesianGaussianMixture(3, covariance_type=kind, random_state=0).fit(clusters())
    for name in ("weights_", "means_", "covariances_", "precisions_", "degrees_of_freedom_", "mean_prior_"):
        found = getattr(mixture, name)
        assert found.dtype == torch.float64
        assert found.device == rows.device
    assert mixture.lower_bound_ == pytest.approx(reference.lower_bound_, rel=1e-5)
    for answer in (mixture.score_samples(rows), mixture.predict_proba(rows), mixture.predict(rows), *mixture.sample(3)):
        assert isinstance(answer, torch.Tensor)
        assert answer.device == rows.device


def test_it_is_an_estimator_for_scikit_learn():
    assert set(BayesianGaussianMixture().get_params()) == set(Peer().get_params())
    mixture = BayesianGaussianMixture(3, mean_prior=[0.0, 0.0], random_state=4)
    fresh = clone(mixture)
    assert fresh is not mixture
    assert fresh.get_params() == mixture.get_params()
    fitted = fresh.fit(clusters())
    again = pickle.loads(pickle.dumps(fitted))
    np.testing.assert_array_equal(again.predict(clusters()), fitted.predict(clusters()))
    np.testing.assert_array_equal(clone(fitted).fit_predict(clusters()), fitted.predict(clusters()))


def test_a_fall_by_rounding_is_borne(caplog):
    rng = np.random.default_rng(0)
    line = rng.normal(size=(6, 1)) * [1.0, 2.0, -1.0] + 1e-9 * rng.normal(size=(6, 3))
    caplog.set_level("INFO", logger="posterity")
    for seed in range(4):
        mixture = BayesianGaussianMixture(2, tol=0.0, max_iter=30, reg_covar=1e-12, random_state=seed).fit(line)
        assert np.isfinite(mixture.lower_bound_)
    assert "so close to singular (condition number" in caplog.text


def test_a_wrong_step_is_found(monkeypatch):
    right = VariationalRounds.maximisation
    wrong = lambda self, values, latent: right(self, values, {**latent, "counts": latent["counts"] + 1.0})  # noqa: E731
    monkeypatch.setattr(VariationalRounds, "maximisation", wrong)
    with pytest.raises(BoundFell, match="lowered the bound"):
        exactly(3).fit(clusters())


def test_a_constant_column_and_equal_rows_have_a_proper_prior():
    rows = clusters(10)
    rows[:, 1] = 3.0
    assert np.isfinite(BayesianGaussianMixture(2).fit(rows).lower_bound_)
    same = BayesianGaussianMixture(3).fit(np.ones((5, 2)))
    np.testing.assert_allclose(same.means_, 1.0)
    with pytest.raises(ValueError, match=r"covariance of the rows.*singular.*covariance_prior"):
        BayesianGaussianMixture(2, reg_covar=0.0).fit(rows)


BAD_SETTINGS = [
    ({"n_components": 0}, "n_components must be a positive whole number"),
    ({"covariance_type": "round"}, "covariance_type must be one of 'full'"),
    ({"weight_concentration_prior_type": "chinese"}, "must be one of 'dirichlet_distribution', 'dirichlet_process'"),
    ({"weight_concentration_prior": 0.0}, "weight_concentration_prior must be a positive number or None"),
    ({"mean_precision_prior": -1.0}, "mean_precision_prior must be a positive number or None"),
    ({"degrees_of_freedom_prior": 1.0}, "degrees_of_freedom_prior must be greater than 1"),
    ({"mean_prior": [1e200, 0.0]}, r"mean_prior must lie within 1e\+140 of 0"),
    ({"mean_prior": [0.0]}, r"mean_prior must have shape \(2,\)"),
    ({"covariance_prior": np.eye(3)}, r"covariance_prior must have shape \(2, 2\)"),
    ({"covariance_prior": [[1.0, 0.5], [0.0, 1.0]]}, "covariance_prior must be symmetric"),
    ({"covariance_prior": [[1.0, 2.0], [2.0, 1.0]]}, "covariance_prior must be positive definite"),
    ({"covariance_prior": -1.0, "covariance_type": "spherical"}, "covariance_prior must be positive definite"),
    ({"reg_covar": -1.0}, "reg_covar must be a number of at least 0"),
    ({"tol": -1.0}, "tol must be a number of at least 0"),
    ({"n_components": 200}, "at least n_components = 200 rows"),
    ({"init_params": "best"}, "init_params must be one of"),
]


@pytest.mark.parametrize(("bad", "message"), BAD_SETTINGS)
def test_bad_settings_are_refused_by_name(bad, message):
    with pytest.raises(ValueError, match=message):
        BayesianGaussianMixture(**bad).fit(clusters())


@pytest.mark.parametrize(
    ("rows", "others", "message"),
    [
        (np.array([[1.0, np.nan], [0.0, 1.0]]), {}, "X must be finite"),
        (np.zeros((0, 2)), {}, "0 sample"),
        (clusters(2), {"sample_weight": np.zeros(6)}, "sample_weight must have a positive sum"),
        (clusters(2), {"sample_weight": -np.ones(6)}, "sample_weight must be finite and at least 0"),
        (clusters(2), {"labels": np.full(6, 7)}, "labels must lie between 0 and"),
    ],
)
def test_bad_rows_are_refused(rows, others, message):
    with pytest.raises(ValueError, match=message):
        BayesianGaussianMixture(1).fit(rows, **others)


def test_questions_before_a_fit_and_other_columns_are_refused():
    for question in ("predict", "score_samples", "elbo"):
        with pytest.raises(ValueError, match="not fitted yet"):
            getattr(BayesianGaussianMixture(1), question)(clusters())
    with pytest.raises(ValueError, match="X has 1 features"):
        BayesianGaussianMixture(1).fit(clusters()).elbo(np.ones((3, 1)))
