"""scikit-learn's tools take the mixtures as its own, and the package does not need scikit-learn."""

import pickle
import subprocess
import sys

import numpy as np
import pytest
import torch

from posterity.errors import BadData
from posterity.mixtures import BayesianGaussianMixture, GaussianMixture, InverseWishart

ROWS = np.random.default_rng(0).normal(size=(30, 2))
both = pytest.mark.parametrize("mixture_class", [GaussianMixture, BayesianGaussianMixture])


def test_settings_are_parameters():
    mixture = GaussianMixture(3, tol=0.1, means_init=ROWS[:3])
    assert mixture.get_params()["n_components"] == 3
    assert mixture.get_params(deep=False)["means_init"] is mixture.means_init
    assert mixture.set_params(n_components=2, reg_covar=InverseWishart(1.0, 2.0)) is mixture
    assert mixture.n_components == 2
    with pytest.raises(
        ValueError, match=r"GaussianMixture: Unknown setting 'n_component'. Did you mean 'n_components'"
    ):
        mixture.set_params(tol=1.0, n_component=3)
    assert mixture.tol == 0.1


def test_the_constructor_is_that_of_scikit_learn():
    import inspect

    from sklearn.mixture import GaussianMixture as Peer

    ours, peer = (inspect.signature(each.__init__).parameters for each in (GaussianMixture, Peer))
    assert [(p.name, p.default, p.kind) for p in ours.values()] == [(p.name, p.default, p.kind) for p in peer.values()]
    verbs = [name for name in dir(Peer) if not name.startswith("_") and callable(getattr(Peer, name))]
    assert set(verbs) - set(dir(GaussianMixture)) <= {"get_metadata_routing"}


def test_the_repr_has_what_was_set():
    assert repr(GaussianMixture()) == "GaussianMixture()"
    mixture = GaussianMixture(
        2, covariance_type="diag", reg_covar=InverseWishart(0.1, 2.0), means_init=np.zeros((2, 1))
    )
    assert repr(mixture) == (
        "GaussianMixture(n_components=2, covariance_type='diag', reg_covar=InverseWishart(scale=0.1, degrees=2.0), "
        "means_init=<ndarray of shape (2, 1)>)"
    )


def test_clones_are_unfitted_and_equal():
    from sklearn.base import clone

    mixture = GaussianMixture(2, reg_covar=InverseWishart(0.1, 2.0), means_init=ROWS[:2]).fit(ROWS)
    copy = clone(mixture)
    assert not hasattr(copy, "means_")
    np.testing.assert_array_equal(copy.fit(ROWS).means_, mixture.means_)
    assert clone(GaussianMixture(2, means_init=torch.tensor(ROWS[:2]))).means_init.shape == (2, 2)


def test_pipelines_and_searches():
    from sklearn.model_selection import GridSearchCV
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    pipeline = make_pipeline(StandardScaler(), GaussianMixture(2, random_state=0))
    alone = GaussianMixture(2, random_state=0).fit(StandardScaler().fit_transform(ROWS))
    np.testing.assert_array_equal(pipeline.fit_predict(ROWS), pipeline.predict(ROWS))
    np.testing.assert_allclose(pipeline[-1].means_, alone.means_)
    search = GridSearchCV(GaussianMixture(random_state=0), {"n_components": [1, 2]}, cv=3).fit(ROWS)
    assert search.best_estimator_.n_components in (1, 2)
    assert "GaussianMixture" in repr(pipeline)


def test_fitted_mixtures_pickle():
    mixture = GaussianMixture(2).fit(ROWS)
    np.testing.assert_array_equal(pickle.loads(pickle.dumps(mixture)).predict_proba(ROWS), mixture.predict_proba(ROWS))


def test_answers_agree_with_each_other():
    mixture = GaussianMixture(3).fit(ROWS)
    joint = mixture.log_joint(ROWS)
    np.testing.assert_allclose(np.logaddexp.reduce(joint, axis=1), mixture.score_samples(ROWS), rtol=1e-12)
    np.testing.assert_allclose(
        np.exp(joint - mixture.score_samples(ROWS)[:, None]), mixture.predict_proba(ROWS), rtol=1e-9, atol=1e-15
    )
    np.testing.assert_array_equal(joint.argmax(1), mixture.predict(ROWS))
    assert mixture.score(ROWS) == pytest.approx(mixture.score_samples(ROWS).mean())
    np.testing.assert_array_equal(GaussianMixture(3).fit_predict(ROWS), mixture.predict(ROWS))


@both
def test_the_columns_of_a_data_frame_keep_their_order(mixture_class):
    from pandas import DataFrame

    frame = DataFrame(ROWS, columns=["height", "width"])
    mixture = mixture_class(2).fit(frame)
    assert mixture.feature_names_in_.tolist() == ["height", "width"]
    np.testing.assert_array_equal(mixture.predict(frame), mixture.predict(ROWS))
    for ask in (mixture.predict, mixture.score, mixture.bic if mixture_class is GaussianMixture else mixture.elbo):
        with pytest.raises(BadData, match=r"the columns of fit in their order, height, width. Got width, height. Use"):
            ask(frame[["width", "height"]])
    assert mixture.predict(frame[["width", "height"]][list(mixture.feature_names_in_)]).shape == (30,)
    mixture.fit(ROWS)
    assert not hasattr(mixture, "feature_names_in_")
    assert mixture.predict(frame[["width", "height"]]).shape == (30,)
    assert not hasattr(mixture.fit(DataFrame(ROWS)), "feature_names_in_")  # columns by number


@both
@pytest.mark.parametrize("fitted", ["full", "tied", "diag", "spherical"])
def test_settings_changed_after_a_fit_wait_for_the_next(mixture_class, fitted):
    mixture = mixture_class(2, covariance_type=fitted).fit(ROWS)
    score, rows = mixture.score_samples(ROWS), mixture.sample(3)[0]
    for other in ("full", "tied", "diag", "spherical"):  # 2 components in 2 dimensions: many shapes are the same
        mixture.set_params(covariance_type=other, n_components=4)
        np.testing.assert_array_equal(mixture.score_samples(ROWS), score)
        np.testing.assert_array_equal(mixture.sample(3)[0], rows)
        if other != fitted:
            with pytest.raises(ValueError, match=r"warm_start: .*the last fit"):
                mixture.set_params(n_components=2, warm_start=True).fit(ROWS)


@both
def test_float32_rows_far_from_all_components_have_the_same_answers(mixture_class):
    mixture = mixture_class(3).fit(ROWS)
    for away in (1e2, 1e6, 1e15, 1e25):
        rows = (away * ROWS).astype(np.float32)
        for ask in (mixture.predict_proba, mixture.score_samples, mixture.log_joint, mixture.predict):
            np.testing.assert_array_equal(ask(rows), ask(rows.astype(np.float64)))


def test_a_fit_needs_no_scikit_learn():
    code = (
        "import sys, numpy as np; sys.modules['sklearn'] = None\n"
        "from posterity.mixtures import GaussianMixture\n"
        "x = np.arange(10.0)[:, None]; m = GaussianMixture(2).fit(x)\n"
        "print(m.predict(x).shape, repr(m), m.get_params())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("(10,)")
