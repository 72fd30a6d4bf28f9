"""Bad input has one clear line; awkward input works as documented."""

import re

import numpy as np
import pytest
import torch

from posterity.errors import BadData, NotPositiveDefinite
from posterity.mixtures import BayesianGaussianMixture, GaussianMixture, InverseWishart
from posterity.mixtures.checks import as_key, as_points, as_rows
from posterity.numerics import Key

ROWS = np.random.default_rng(0).normal(size=(20, 2))


def with_bad(value, *places):
    rows = ROWS.copy()
    for place in places:
        rows[place, 1] = value
    return rows


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (np.zeros((0, 2)), "X has 0 sample(s) (shape=(0, 2)) while a minimum of 1 is required."),
        (np.zeros((3, 0)), "X has 0 feature(s) (shape=(3, 0)) while a minimum of 1 is required."),
        (np.zeros(3), "X must have rows and columns, (N, D). Got shape (3,). Reshape your data: X.reshape(-1, 1)"),
        (np.zeros((3, 2, 2)), "Got shape (3, 2, 2)"),
        (3.0, "X must be a tensor or an array. Got 3.0"),
        (None, "X must be a tensor or an array. Got None"),
        (with_bad(np.nan, 3), "X must be finite. Got NaN or infinity in row 3. Drop or impute them."),
        (with_bad(np.inf, 3, 7), "in rows 3, 7."),
        (with_bad(np.nan, *range(8)), "in rows 0, 1, 2, 3, 4 and 3 more."),
        (with_bad(-1e150, 3), "X must lie within 1e+140 of 0. Got larger numbers in row 3. Rescale it."),
        (with_bad(1e37, 3).astype(np.float32), "X must lie within 1e+30 of 0. Got larger numbers in row 3."),
        (np.ma.masked_greater(ROWS, 1.0), "X must have no masked numbers. Got a masked array. Drop or impute them."),
        (ROWS.astype(str), "X must hold numbers"),
        (np.array([[1, "a"]], dtype=object), "X must hold numbers"),
        (ROWS + 1j, "Complex data not supported: X must hold numbers"),
        (torch.tensor(ROWS) + 1j, "Complex data not supported: X must hold real numbers. Got torch.complex128"),
        (torch.tensor(ROWS).to_sparse(), "X must be dense. Got a sparse tensor. Use X.to_dense()."),
        ([[1.0, 2.0], [3.0]], "X must have rows of equal length"),
    ],
)
def test_bad_rows(rows, message):
    with pytest.raises(BadData, match=re.escape(message)):
        GaussianMixture(2).fit(rows)
    fitted = GaussianMixture(2).fit(ROWS)
    with pytest.raises(BadData, match=re.escape(message)):
        fitted.predict(rows)


def test_sparse_matrices():
    from scipy.sparse import csr_matrix

    with pytest.raises(BadData, match=r"X must be dense. Got a sparse matrix. Use X.toarray\(\)"):
        GaussianMixture(2).fit(csr_matrix(ROWS))


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        (np.ones(19), "sample_weight must have one number for each row, (20,). Got (19,)."),
        (np.ones((20, 1)), "Got (20, 1)."),
        (-np.ones(20), "sample_weight must be finite and at least 0. Got something else in rows 0, 1,"),
        (np.where(np.arange(20) == 4, np.nan, 1.0), "in row 4."),
        (np.zeros(20), "sample_weight must have a positive sum. Got zeros only."),
        (np.full(20, 1e308), "sample_weight must have a sum of at most 1e+20. Got inf. Divide the weights by their"),
        (np.full(20, 1e20), "sample_weight must have a sum of at most 1e+20. Got 2e+21."),
        (np.eye(20)[0], "X must have at least n_components = 2 rows of positive weight. Got 1."),
    ],
)
def test_bad_row_weights(weights, message):
    with pytest.raises(BadData, match=re.escape(message)):
        GaussianMixture(2).fit(ROWS, sample_weight=weights)


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        (np.full(19, -1), "labels must have one number for each row"),
        (
            np.full(20, 2),
            "labels must lie between 0 and n_components - 1 = 1, or be -1 where unknown. Got 2 in rows 0,",
        ),
        (np.where(np.arange(20) == 6, -2, -1), "Got -2 in row 6."),
        (np.full(20, np.nan), "labels must be whole numbers, -1 where unknown. Got torch.float64."),
        (np.full(20, "cat"), "labels must hold numbers"),
    ],
)
def test_bad_labels(labels, message):
    with pytest.raises(BadData, match=re.escape(message)):
        GaussianMixture(2).fit(ROWS, labels=labels)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"n_components": 0}, "n_components must be a positive whole number. Got 0."),
        ({"n_components": 2.0}, "n_components must be a positive whole number. Got 2.0."),
        ({"n_components": True}, "n_components must be a positive whole number. Got True."),
        ({"n_components": 21}, "X must have at least n_components = 21 rows. Got 20. Ask for fewer components."),
        ({"covariance_type": "diagonal"}, "covariance_type must be one of 'full', 'tied', 'diag', 'spherical'. Got"),
        ({"covariance_type": ["full"]}, "covariance_type must be one of 'full', 'tied', 'diag', 'spherical'. Got ['f"),
        ({"tol": -1.0}, "tol must be a number of at least 0. Got -1.0."),
        ({"tol": np.nan}, "tol must be a number of at least 0. Got nan."),
        ({"max_iter": -1}, "max_iter must be a whole number of at least 0. Got -1."),
        ({"n_init": 0}, "n_init must be a positive whole number. Got 0."),
        ({"init_params": "kmean"}, "init_params must be one of 'kmeans', 'k-means++', 'random', 'random_from_data'."),
        ({"reg_covar": -1e-6}, "reg_covar must be a number of at least 0, or an InverseWishart. Got -1e-06."),
        ({"reg_covar": "big"}, "reg_covar must be a number of at least 0, or an InverseWishart. Got 'big'."),
        ({"warm_start": "yes"}, "warm_start must be True or False. Got 'yes'."),
        ({"random_state": "a"}, "random_state must be a whole number of at least 0. Got 'a'."),
        ({"weights_init": [0.5, 0.6]}, "weights_init must be at least 0 and sum to 1."),
        ({"weights_init": [1.5, -0.5]}, "weights_init must be at least 0 and sum to 1."),
        ({"weights_init": [1.0]}, "weights_init must have shape (2,). Got (1,)."),
        ({"means_init": np.zeros((3, 2))}, "means_init must have shape (2, 2). Got (3, 2)."),
        ({"means_init": np.full((2, 2), np.nan)}, "means_init must be finite. Got NaN or infinity."),
        ({"means_init": np.full((2, 2), 1e200)}, "means_init must lie within 1e+140 of 0. Got larger numbers."),
        ({"precisions_init": np.stack([np.eye(2)] * 2) * 1e-310}, "precisions_init must have finite inverses."),
        ({"precisions_init": np.full((2, 2), 1e-310), "covariance_type": "diag"}, "must have finite inverses. Got one"),
        ({"precisions_init": np.eye(2)}, "precisions_init must have shape (2, 2, 2). Got (2, 2)."),
        ({"precisions_init": np.ones((2, 2, 2))}, "precisions_init must be symmetric and positive definite matrices."),
        ({"precisions_init": np.array([[[1.0, 0.5], [0.0, 1.0]]] * 2)}, "precisions_init must be symmetric"),
        ({"precisions_init": np.zeros((2, 2)), "covariance_type": "diag"}, "precisions_init must be positive."),
        ({"precisions_init": -np.eye(2), "covariance_type": "tied"}, "precisions_init must be symmetric and positive"),
    ],
)
def test_bad_settings(settings, message):
    mixture = GaussianMixture(**{"n_components": 2, **settings})
    with pytest.raises(ValueError, match=re.escape(message)):
        mixture.fit(ROWS)
    assert not hasattr(mixture, "means_")


def test_questions_before_and_after_a_fit():
    mixture = GaussianMixture(2)
    for ask in (mixture.predict, mixture.predict_proba, mixture.score_samples, mixture.score, mixture.bic, mixture.aic):
        with pytest.raises(ValueError, match=r"This GaussianMixture is not fitted yet. Call fit\(X\) first."):
            ask(ROWS)
    with pytest.raises(ValueError, match="is not fitted yet"):
        mixture.sample()
    mixture.fit(ROWS)
    with pytest.raises(BadData, match=r"X has 3 features, but GaussianMixture is expecting 2 features as input"):
        mixture.predict(np.zeros((4, 3)))
    with pytest.raises(BadData, match=r"Got shape \(4,\). Reshape your data"):
        mixture.predict(np.zeros(4))
    with pytest.raises(ValueError, match=r"n_samples must be a positive whole number. Got 0."):
        mixture.sample(0)


@pytest.mark.parametrize("covariance_type", ["full", "tied", "diag", "spherical"])
@pytest.mark.parametrize("init", ["kmeans", "k-means++", "random", "random_from_data"])
@pytest.mark.parametrize("regularisation", [1e-6, InverseWishart(0.1, 2.0)], ids=["floor", "prior"])
def test_rows_that_are_all_equal_have_the_variance_of_the_regularisation(covariance_type, init, regularisation):
    rows = np.full((6, 2), 3.7)
    settings = {"covariance_type": covariance_type, "init_params": init, "reg_covar": regularisation}
    mixture = GaussianMixture(2, **settings).fit(rows)
    np.testing.assert_allclose(mixture.means_[mixture.weights_ > 1e-6], 3.7, rtol=1e-12)
    dense = mixture._dense_covariances()[mixture.weights_.argmax()]
    variance = float(dense[0, 0])
    if regularisation == 1e-6:
        assert variance == pytest.approx(1e-6, rel=1e-6)
    else:
        assert 0.1 / (6 + 2) - 1e-9 <= variance <= 0.1 / 2 + 1e-9
    assert np.isfinite(mixture.score(rows))


def test_without_regularisation_columns_must_vary():
    with pytest.raises(BadData, match=r"X must vary in every column if reg_covar is 0. Got one value in columns 0, 1"):
        GaussianMixture(2, reg_covar=0.0).fit(np.full((6, 2), 3.7))
    rows = ROWS.copy()
    rows[:, 1] = 0.1
    with pytest.raises(BadData, match=r"Got one value in column 1. Drop it, or give reg_covar a positive number."):
        GaussianMixture(2, reg_covar=0.0).fit(rows)
    mixture = GaussianMixture(2, covariance_type="diag").fit(rows)
    np.testing.assert_allclose(mixture.covariances_[:, 1], 1e-6, rtol=1e-9)


def test_without_regularisation_a_collapse_is_an_error_that_names_the_component():
    y = np.array([[0.0], [0.1], [0.2], [0.3], [50.0]])
    start = {"means_init": [[0.1], [50.0]], "weights_init": [0.8, 0.2], "precisions_init": [[[1.0]], [[1.0]]]}
    with pytest.raises(NotPositiveDefinite, match=r"covariance of component 1 .*larger reg_covar"):
        GaussianMixture(2, reg_covar=0.0, **start).fit(y)
    assert GaussianMixture(2, **start).fit(y).covariances_[1, 0, 0] == pytest.approx(1e-6)
    assert GaussianMixture(2, reg_covar=0.0).fit(np.append(y, [[51.0]], 0)).converged_


def test_as_many_components_as_rows():
    mixture = GaussianMixture(5).fit(ROWS[:5])
    np.testing.assert_allclose(mixture.weights_, 0.2)
    np.testing.assert_allclose(np.sort(mixture.means_[:, 0]), np.sort(ROWS[:5, 0]))


@pytest.mark.parametrize("covariance_type", ["full", "tied", "diag", "spherical"])
@pytest.mark.parametrize("scale", [1e-140, 1e140 / 4])
def test_numbers_of_any_size_up_to_the_limit(covariance_type, scale):
    settings = {"covariance_type": covariance_type, "random_state": 0}
    for mixture_class, more in (
        (GaussianMixture, {"reg_covar": 0.0}),
        (GaussianMixture, {"reg_covar": InverseWishart(0.1, 2.0)}),
        (BayesianGaussianMixture, {}),
    ):
        usual = mixture_class(2, **settings, **more).fit(ROWS)
        if isinstance(more.get("reg_covar"), InverseWishart):
            more = {"reg_covar": InverseWishart(0.1 * scale**2, 2.0)}
        found = mixture_class(2, **settings, **more).fit(ROWS * scale, sample_weight=np.ones(20))
        np.testing.assert_allclose(found.means_ / scale, usual.means_, rtol=1e-6)
        np.testing.assert_allclose(found.score(ROWS * scale) + 2 * np.log(scale), usual.score(ROWS), rtol=1e-6)


def test_rows_are_centred_whatever_the_size_of_their_weights():
    rows = (ROWS + 1e4).astype(np.float32)
    for size in (1e-200, 1e-50, 1.0, 1e18):
        centre = as_rows(rows, np.full(20, size), None, 2).centre
        np.testing.assert_allclose(centre.cpu(), rows.mean(0, dtype=np.float64), rtol=1e-6)


def test_rows_of_many_kinds_are_the_same_rows():
    import pandas

    wanted = GaussianMixture(2).fit(ROWS).means_
    read_only = ROWS.copy()
    read_only.flags.writeable = False
    for rows in (ROWS.tolist(), pandas.DataFrame(ROWS), read_only, np.asfortranarray(ROWS), ROWS.astype(">f8")):
        np.testing.assert_allclose(GaussianMixture(2).fit(rows).means_, wanted, rtol=1e-12)
    graph = torch.tensor(ROWS, requires_grad=True)
    assert not GaussianMixture(2).fit(graph).means_.requires_grad
    assert as_points([[1, 2], [3, 4]]).dtype == torch.float64
    assert as_points(torch.ones(3, 2, dtype=torch.float16)).dtype == torch.float32


def test_data_frames_of_several_types_of_numbers():
    from pandas import DataFrame

    frame = DataFrame(ROWS, columns=["a", "b"])
    mixed = np.column_stack([ROWS, ROWS[:, 0] > 0])
    np.testing.assert_array_equal(as_points(frame.assign(c=frame.a > 0)), mixed)
    np.testing.assert_array_equal(as_points(frame.astype("Float64")), ROWS)
    assert as_points(frame.astype(np.float32)).dtype == torch.float32
    with pytest.raises(BadData, match=r"X must be finite. Got NaN or infinity in row 3"):
        as_points(DataFrame(with_bad(np.nan, 3)).astype("Float64"))
    with pytest.raises(BadData, match=r"X must hold numbers. Got an array of object"):
        as_points(frame.assign(c="x"))


def test_keys_of_random_states():
    assert as_key(None) == Key(0)
    assert as_key(np.int64(3)) == as_key(3) == Key(3)
    assert as_key(Key(5)) == Key(5)
    assert as_key(np.random.RandomState(1)) == as_key(np.random.RandomState(1))
    generator = np.random.default_rng(1)
    assert as_key(generator) != as_key(generator)


def test_the_rows_are_not_changed():
    rows, weights, labels = ROWS.copy(), np.ones(20), np.full(20, -1)
    GaussianMixture(3, n_init=2).fit(rows, sample_weight=weights, labels=labels)
    np.testing.assert_array_equal(rows, ROWS)
    assert (weights == 1).all()
    assert (labels == -1).all()
