"""Gaussian mixtures against gold numbers, scikit-learn, classes that are known, and the truth of simulated rows."""

import logging

import numpy as np
import pytest
import torch
from goldcases import load

from posterity.evidence.jensen import jensen_bound
from posterity.mixtures import GaussianMixture, InverseWishart

TYPES = ("full", "tied", "diag", "spherical")
ATTRIBUTES = ("weights_", "means_", "covariances_", "precisions_", "precisions_cholesky_")


@pytest.fixture(autouse=True)
def _without_the_warning(caplog):
    caplog.set_level(logging.ERROR, logger="posterity")


def unit_precisions(covariance_type, components, dimensions):
    return {
        "full": np.stack([np.eye(dimensions)] * components),
        "tied": np.eye(dimensions),
        "diag": np.ones((components, dimensions)),
        "spherical": np.ones(components),
    }[covariance_type]


def blobs(seed=0, each=60, dimensions=3):
    rng = np.random.default_rng(seed)
    centres = 4 * rng.normal(size=(3, dimensions))
    scales = rng.uniform(0.5, 1.5, size=(3, dimensions))
    return np.concatenate([m + s * rng.normal(size=(each, dimensions)) for m, s in zip(centres, scales, strict=True)])


def gold_1d(rounds, tol=0.0):
    case = load("em_gmm_1d")
    pi = case.inputs["pi"]
    return case, GaussianMixture(
        2,
        tol=tol,
        reg_covar=0.0,
        max_iter=rounds,
        weights_init=torch.tensor([pi, 1 - pi], dtype=torch.float64),
        means_init=case.inputs["mu"][:, None],
        precisions_init=1 / case.inputs["var"][:, None, None],
    ).fit(case.inputs["y"][:, None])


def test_gold_in_one_dimension_at_the_start():
    case, start = gold_1d(0)
    y = case.inputs["y"][:, None]
    r = start.predict_proba(y)
    case.check("log_lik0", start.score(y) * len(y))
    case.check("bound_at_posterior", jensen_bound(start.log_joint(y), r).sum())
    # Fisher's identity: the gradient of the log-likelihood is the expected gradient of the joint one
    case.check("grad_mu0", (r * (y - case.inputs["mu"]) / case.inputs["var"]).sum(0))
    assert start.n_iter_ == 0
    assert not start.converged_


@pytest.mark.parametrize("rounds", [1, 2, 3])
def test_gold_in_one_dimension_round_by_round(rounds):
    case, mixture = gold_1d(rounds)
    y, path = case.inputs["y"][:, None], f"iterations.{rounds - 1}"
    case.check(f"{path}.responsibility_component1", gold_1d(rounds - 1)[1].predict_proba(y)[:, 0])
    case.check(f"{path}.pi", mixture.weights_[0])
    case.check(f"{path}.mu", mixture.means_[:, 0])
    case.check(f"{path}.var", mixture.covariances_[:, 0, 0])
    case.check(f"{path}.log_lik_after", mixture.score(y) * len(y))
    case.check("log_lik0", mixture.lower_bounds_[0] * len(y))


def test_gold_in_one_dimension_at_the_limit():
    case, mixture = gold_1d(5000, tol=1e-15)
    case.check("limit.pi", mixture.weights_[0])
    case.check("limit.mu", mixture.means_[:, 0])
    case.check("limit.var", mixture.covariances_[:, 0, 0])
    case.check("limit.log_lik", mixture.lower_bound_ * 12)
    assert mixture.converged_


def gold_2d(rounds):
    case = load("em_gmm_2d_k3")
    given = case.inputs
    return case, GaussianMixture(
        3,
        tol=0.0,
        reg_covar=0.0,
        max_iter=rounds,
        weights_init=given["weights"],
        means_init=given["means"],
        precisions_init=torch.linalg.inv(given["covs"]),
    ).fit(given["Y"])


def test_gold_in_two_dimensions_at_the_start():
    case, start = gold_2d(0)
    far = case.inputs["far_point"][None]
    case.check("log_lik0", start.score(case.inputs["Y"]) * 18)
    case.check("far_log_density", start.score_samples(far)[0])
    case.check("far_responsibilities", start.predict_proba(far)[0])


@pytest.mark.parametrize("rounds", [1, 2])
def test_gold_in_two_dimensions_round_by_round(rounds):
    case, mixture = gold_2d(rounds)
    path = f"iterations.{rounds - 1}"
    case.check(f"{path}.responsibilities", gold_2d(rounds - 1)[1].predict_proba(case.inputs["Y"]))
    case.check(f"{path}.weights", mixture.weights_)
    case.check(f"{path}.means", mixture.means_)
    case.check(f"{path}.covs", mixture.covariances_)
    case.check(f"{path}.log_lik_after", mixture.score(case.inputs["Y"]) * 18)


@pytest.mark.parametrize("rounds", [1, 7])
@pytest.mark.parametrize("covariance_type", TYPES)
@pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")
def test_equals_scikit_learn_from_equal_starts(covariance_type, rounds):
    from sklearn.mixture import GaussianMixture as Peer

    x = blobs(1)
    settings = {
        "covariance_type": covariance_type,
        "weights_init": np.array([0.2, 0.3, 0.5]),
        "means_init": x[[0, 70, 130]],
        "precisions_init": unit_precisions(covariance_type, 3, 3),
        "max_iter": rounds,
        "tol": 0.0,
        "reg_covar": 1e-3,
    }
    ours, peer = GaussianMixture(3, **settings).fit(x), Peer(3, **settings).fit(x)
    for name in ATTRIBUTES:
        np.testing.assert_allclose(getattr(ours, name), getattr(peer, name), rtol=1e-8, atol=1e-8, err_msg=name)
    new = x[::7] + 0.3
    for verb in ("predict_proba", "score_samples", "predict", "score", "bic", "aic"):
        np.testing.assert_allclose(getattr(ours, verb)(new), getattr(peer, verb)(new), rtol=1e-8, err_msg=verb)
    np.testing.assert_allclose(ours.lower_bound_, peer.lower_bound_, rtol=1e-10)
    assert ours.n_iter_ == peer.n_iter_ == rounds
    assert len(ours.lower_bounds_) == rounds
    assert not ours.converged_


@pytest.mark.parametrize("covariance_type", TYPES)
def test_stops_in_the_same_round_as_scikit_learn(covariance_type):
    from sklearn.mixture import GaussianMixture as Peer

    x = blobs(2)
    settings = {
        "covariance_type": covariance_type,
        "weights_init": np.full(3, 1 / 3),
        "means_init": x[[0, 70, 130]],
        "precisions_init": unit_precisions(covariance_type, 3, 3),
        "max_iter": 200,
        "tol": 1e-5,
    }
    ours, peer = GaussianMixture(3, **settings).fit(x), Peer(3, **settings).fit(x)
    assert ours.converged_
    assert ours.n_iter_ == peer.n_iter_
    np.testing.assert_allclose(ours.means_, peer.means_, rtol=1e-8)
    np.testing.assert_array_equal(ours.fit_predict(x), peer.fit_predict(x))


def test_far_from_the_origin_nothing_is_lost():
    x = blobs(3)
    start = {"weights_init": np.full(3, 1 / 3), "precisions_init": np.stack([np.eye(3)] * 3), "max_iter": 8, "tol": 0.0}
    moved = np.round(x * 2**20) / 2**20 + 1e4  # numbers that the offset does not round
    x = moved - 1e4
    near = GaussianMixture(3, means_init=x[[0, 70, 130]], **start).fit(x)
    far = GaussianMixture(3, means_init=moved[[0, 70, 130]], **start).fit(moved)
    np.testing.assert_allclose(far.covariances_, near.covariances_, rtol=1e-9, atol=1e-11)
    np.testing.assert_allclose(far.means_ - 1e4, near.means_, atol=1e-10)
    np.testing.assert_allclose(far.lower_bounds_, near.lower_bounds_, rtol=1e-11)
    np.testing.assert_allclose(far.score_samples(moved), near.score_samples(x), rtol=1e-9)


@pytest.mark.parametrize("covariance_type", TYPES)
def test_complete_labels_give_the_statistics_of_the_classes_in_one_round(covariance_type):
    x, labels = blobs(4), np.repeat([2, 0, 1], [80, 60, 40])
    mixture = GaussianMixture(3, covariance_type=covariance_type, reg_covar=0.0, max_iter=1, init_params="random")
    mixture.fit(x, labels=labels)
    classes = [x[labels == k] for k in range(3)]
    scatters = np.stack([np.cov(c.T, bias=True) for c in classes])
    wanted = {
        "full": scatters,
        "tied": np.einsum("k,kij->ij", mixture.weights_, scatters),
        "diag": np.diagonal(scatters, axis1=1, axis2=2),
        "spherical": np.trace(scatters, axis1=1, axis2=2) / 3,
    }[covariance_type]
    np.testing.assert_allclose(mixture.weights_, [60 / 180, 40 / 180, 80 / 180], rtol=1e-12)
    np.testing.assert_allclose(mixture.means_, np.stack([c.mean(0) for c in classes]), rtol=1e-10, atol=1e-12)
    np.testing.assert_allclose(mixture.covariances_, wanted, rtol=1e-9, atol=1e-12)


def test_a_few_labels_name_the_components():
    x, truth = blobs(5), np.repeat([0, 1, 2], 60)
    order = np.array([2, 0, 1])  # the component that each blob shall be
    labels = np.full(180, -1)
    labels[[0, 1, 60, 61, 120, 121]] = order[truth[[0, 1, 60, 61, 120, 121]]]
    mixture = GaussianMixture(3, random_state=3).fit(x, labels=labels)
    assert (mixture.predict(x) == order[truth]).mean() > 0.95


def test_labels_stay_in_a_responsibility_that_the_rows_deny():
    y = np.array([[0.0], [0.1], [0.2], [5.0], [5.1], [5.2]])
    mixture = GaussianMixture(2, random_state=0).fit(y, labels=[0, 0, 0, 0, 1, 1])
    assert mixture.weights_[0] == pytest.approx(4 / 6, abs=1e-12)
    assert mixture.means_[0, 0] == pytest.approx(5.3 / 4, abs=1e-12)


@pytest.mark.parametrize("covariance_type", TYPES)
def test_row_weights_are_copies(covariance_type):
    x = blobs(6, each=20)
    copies = np.random.default_rng(0).integers(0, 4, len(x))
    start = {
        "covariance_type": covariance_type,
        "weights_init": np.full(3, 1 / 3),
        "means_init": x[[1, 25, 45]],
        "precisions_init": unit_precisions(covariance_type, 3, 3),
        "max_iter": 5,
    }
    weighted = GaussianMixture(3, **start).fit(x, sample_weight=copies)
    copied = GaussianMixture(3, **start).fit(np.repeat(x, copies, axis=0))
    for name in ATTRIBUTES:
        np.testing.assert_allclose(getattr(weighted, name), getattr(copied, name), rtol=1e-9, atol=1e-11)
    np.testing.assert_allclose(weighted.lower_bounds_, copied.lower_bounds_, rtol=1e-12)


@pytest.mark.parametrize("covariance_type", TYPES)
def test_finds_the_parameters_of_simulated_rows(covariance_type):
    rng = np.random.default_rng(7)
    weights, means = np.array([0.5, 0.3, 0.2]), np.array([[0.0, 0.0], [5.0, 0.0], [0.0, 6.0]])
    truth = rng.choice(3, size=4000, p=weights)
    x = means[truth] + rng.normal(size=(4000, 2))  # unit covariances: right for every type
    mixture = GaussianMixture(3, covariance_type=covariance_type, n_init=3, random_state=0).fit(x)
    first, second = mixture.means_[:, 0].argmax(), mixture.means_[:, 1].argmax()
    order = [3 - first - second, first, second]
    counts = 4000 * weights
    error = 5 / np.sqrt(counts)  # five standard errors of a mean, and more than five of a variance over sqrt 2
    assert (np.abs(mixture.weights_[order] - weights) < 5 * np.sqrt(weights / 4000)).all()
    assert (np.abs(mixture.means_[order] - means) < error[:, None]).all()
    wide = mixture._dense_covariances().numpy()[order]
    assert (np.abs(wide - np.eye(2)) < 1.5 * error[:, None, None]).all()


@pytest.mark.parametrize("covariance_type", TYPES)
def test_samples_have_the_moments_of_the_mixture(covariance_type):
    mixture = GaussianMixture(3, covariance_type=covariance_type, random_state=0).fit(blobs(8))
    rows, components = mixture.sample(20000)
    assert rows.shape == (20000, 3)
    assert components.shape == (20000,)
    dense = mixture._dense_covariances().numpy()
    for k in range(3):
        own = rows[components == k]
        share = mixture.weights_[k]
        assert abs(len(own) / 20000 - share) < 5 * np.sqrt(share * (1 - share) / 20000)
        deviation = np.abs(own.mean(0) - mixture.means_[k]) / np.sqrt(np.diagonal(dense[k]) / len(own))
        assert deviation.max() < 5
        scale = np.sqrt(np.outer(np.diagonal(dense[k]), np.diagonal(dense[k])))
        assert (np.abs(np.cov(own.T) - dense[k]) / scale).max() < 5 * np.sqrt(2 / len(own))
    np.testing.assert_array_equal(rows, mixture.sample(20000)[0])


def test_restarts_run_together_and_the_best_is_kept():
    x = blobs(9, each=30)
    settings = {"init_params": "random_from_data", "random_state": 4, "tol": 1e-6, "max_iter": 300}
    alone = GaussianMixture(4, n_init=1, **settings).fit(x)
    together = GaussianMixture(4, n_init=8, **settings).fit(x)
    assert together.lower_bound_ > alone.lower_bound_ + 1e-3
    assert together.score(x) == pytest.approx(together.lower_bound_, abs=1e-5)
    again = GaussianMixture(4, n_init=8, **settings).fit(x)
    np.testing.assert_array_equal(again.means_, together.means_)


def test_warm_start_goes_on_where_the_last_fit_ended():
    x = blobs(10)
    mixture = GaussianMixture(3, init_params="random", max_iter=3, tol=0.0, warm_start=True).fit(x)
    mixture.fit(x)
    whole = GaussianMixture(3, init_params="random", max_iter=6, tol=0.0).fit(x)
    np.testing.assert_allclose(mixture.means_, whole.means_, rtol=1e-9)
    with pytest.raises(ValueError, match=r"warm_start: means_ of the last fit must have shape \(3, 2\)"):
        mixture.fit(x[:, :2])


def test_tensors_give_tensors_and_float32_rows_nearly_the_same():
    x = torch.tensor(blobs(11))
    wide = GaussianMixture(3, random_state=0).fit(x)
    narrow = GaussianMixture(3, random_state=0, reg_covar=InverseWishart(0.1, 1.0)).fit(x.float())
    wide_prior = GaussianMixture(3, random_state=0, reg_covar=InverseWishart(0.1, 1.0)).fit(x)
    for name in ATTRIBUTES:
        assert isinstance(getattr(wide, name), torch.Tensor)
        assert getattr(narrow, name).dtype == torch.float64
        torch.testing.assert_close(getattr(narrow, name), getattr(wide_prior, name), rtol=1e-3, atol=1e-3)
    assert isinstance(wide.predict(x), torch.Tensor)
    assert isinstance(wide.predict(x.cpu().numpy()), np.ndarray)
    assert wide.sample(3)[0].shape == (3, 3)
    np.testing.assert_allclose(wide.score_samples(x).cpu(), wide.score_samples(x.cpu().numpy()), rtol=1e-9)


def test_says_when_it_has_not_converged(caplog):
    with caplog.at_level(logging.WARNING, logger="posterity"):
        GaussianMixture(3, max_iter=1).fit(blobs(0))
    assert "has not converged after max_iter = 1 rounds" in caplog.text


def test_the_fit_reads_and_moves_no_global_randomness():
    x, before = blobs(0), torch.get_rng_state()
    np.random.seed(1)
    first = GaussianMixture(3, n_init=2).fit(x)
    np.random.seed(2)
    torch.manual_seed(9)
    second = GaussianMixture(3, n_init=2).fit(x)
    np.testing.assert_array_equal(first.means_, second.means_)
    torch.set_rng_state(before)
