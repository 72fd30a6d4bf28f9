"""Estimators and mixtures pass scikit-learn's own checks, and work in its tools."""

import pickle
import warnings

import numpy as np
import pytest
from sklearn.base import clone
from sklearn.compose import TransformedTargetRegressor
from sklearn.model_selection import GridSearchCV, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import parametrize_with_checks
from tablerows import classifier, frame, numbers, regressor

from posterity.mixtures import BayesianGaussianMixture, GaussianMixture
from posterity.priors import Normal

pytestmark = pytest.mark.cpu
X, Y = numbers()

with warnings.catch_warnings():  # mixtures inherit nothing, so that a fit needs no scikit-learn
    warnings.filterwarnings("ignore", "Estimator .*GaussianMixture does not inherit")
    # Scales are given: where a method chooses them by leaving rows out, a row twice is two rows to leave out, and a row
    # of weight 2 is one.
    checks = parametrize_with_checks([regressor(), classifier(), GaussianMixture(), BayesianGaussianMixture()])


@checks
def test_scikit_learns_checks(estimator, check):
    check(estimator)


def test_clones_have_the_parameters_and_nothing_fitted():
    fitted = regressor(random_state=3).fit(X, Y)
    copy = clone(fitted)
    assert copy.get_params() == fitted.get_params()
    assert not hasattr(copy, "posterior_")
    np.testing.assert_array_equal(copy.fit(X, Y).predict(X), fitted.predict(X))
    assert "random_state=3" in repr(copy)
    assert copy.set_params(method="map").method == "map"


@pytest.mark.parametrize("make", [regressor, classifier])
def test_fitted_estimators_pickle(make):
    table, target = frame()
    labels = np.where(target > 1, "high", "low")
    fitted = make().fit(table, target if make is regressor else labels)
    copy = pickle.loads(pickle.dumps(fitted))
    np.testing.assert_array_equal(copy.predict(table), fitted.predict(table))


def test_pipelines_and_searches():
    pipeline = make_pipeline(StandardScaler(), regressor())
    np.testing.assert_allclose(pipeline.fit(X, Y).predict(X), regressor().fit(X, Y).predict(X), atol=1e-5)
    assert pipeline.predict(X, return_std=True)[1].shape == (len(X),)
    search = GridSearchCV(regressor(), {"prior": [Normal(0.01), Normal(1.0)]}, cv=3).fit(X, Y)
    assert search.best_params_["prior"].scale == 1.0
    logs = TransformedTargetRegressor(regressor(), func=np.log, inverse_func=np.exp).fit(X, np.exp(Y))
    assert logs.predict(X).min() > 0


def test_cross_validation_in_two_processes_gives_the_same_scores():
    labels = np.median(Y) < Y
    alone = cross_val_score(classifier(), X, labels, cv=2)
    assert alone.min() > 0.7
    np.testing.assert_array_equal(cross_val_score(classifier(), X, labels, cv=2, n_jobs=2), alone)
