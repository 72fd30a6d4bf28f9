"""Estimators in run folders, without pickle."""

import numpy as np
import pytest
import torch
from tablerows import Linear, classifier, frame, numbers, regressor

from posterity.cli.frame.folders import find_run
from posterity.errors import BadFolder
from posterity.estimators import BayesianClassifier, BayesianRegressor
from posterity.likelihoods import Gaussian
from posterity.methods import MAP
from posterity.storage import Part, RunFolder

pytestmark = pytest.mark.cpu
X, Y = numbers()
TABLE, TARGET = frame()


def test_a_regressor_comes_back_with_its_parameters_and_its_predictions(tmp_path):
    model = regressor("conjugate", network=None, random_state=np.random.RandomState(3), category=["count"])
    model.fit(TABLE, TARGET).save(tmp_path / "run")
    copy = BayesianRegressor.load(tmp_path / "run")
    for found, wanted in zip(copy.predict(TABLE, return_std=True), model.predict(TABLE, return_std=True), strict=True):
        np.testing.assert_array_equal(found, wanted)
    assert copy.feature_names_in_.tolist() == TABLE.columns.tolist()
    assert (copy.encoding_, copy.notes_, copy.category) == (model.encoding_, model.notes_, ["count"])
    assert isinstance(copy.likelihood, Gaussian)
    assert copy.set_params(category=()).fit(X[:, :1], Y).n_features_in_ == 1  # a fit forgets what was stored


def test_a_classifier_with_a_network_of_ones_own(tmp_path):
    labels = np.where(Y > 3, 10, 2)
    model = classifier(MAP(), class_weight={10: 2.0, 2: 1.0}).fit(X, labels)
    model.save(tmp_path / "run")
    copy = BayesianClassifier.load(tmp_path / "run", network=Linear())
    np.testing.assert_array_equal(copy.predict_proba(X), model.predict_proba(X))
    assert copy.classes_.tolist() == [2, 10]
    assert copy.classes_.dtype == model.classes_.dtype
    assert copy.class_weight == {10: 2.0, 2: 1.0}
    assert copy.method == MAP()
    with pytest.raises(BadFolder, match=r"network of your own. Pass it"):
        BayesianClassifier.load(tmp_path / "run")
    with pytest.raises(BadFolder):
        BayesianClassifier.load(tmp_path / "run", network=torch.nn.Linear(3, 5, dtype=torch.float64))
    with pytest.raises(BadFolder, match="It holds a BayesianClassifier, no BayesianRegressor"):
        BayesianRegressor.load(tmp_path / "run")


def test_folders_that_hold_something_else(tmp_path):
    with pytest.raises(BadFolder):
        BayesianRegressor.load(tmp_path / "nowhere")
    model = regressor("conjugate", network=None).fit(X, Y)
    model.save(tmp_path / "run")
    part = RunFolder(tmp_path / "run").read("estimator")
    for change in (
        {"fitted": {"dict": []}},
        {"estimator": 3},
        {"parameters": [1]},
        {"parameters": {"dict": [["methd", "map"]]}},
    ):
        RunFolder(tmp_path / "run").commit({"estimator": Part({**part.config, **change}, part.tensors)})
        with pytest.raises(BadFolder):
            BayesianRegressor.load(tmp_path / "run")


def test_a_folder_holds_the_last_estimator_only(tmp_path):
    first, second = (regressor("conjugate", network=None).fit(X[:, :d], Y) for d in (2, 3))
    for model in (first, second):
        model.save(tmp_path / "run")
        copy = BayesianRegressor.load(tmp_path / "run")
        assert copy.n_features_in_ == model.n_features_in_
    assert set(RunFolder(tmp_path / "run").parts()) == {"estimator", "posterior"}
    with pytest.raises(ValueError, match="not fitted"):
        regressor().save(tmp_path / "other")


def test_each_door_names_the_other(tmp_path):
    from posterity.cli.main import main

    (tmp_path / "rows.csv").write_text("a,y\n" + "".join(f"{i},{i % 7 + i}\n" for i in range(20)))
    words = ("fit", str(tmp_path / "rows.csv"), "--target", "y", "--method", "map", "--hidden", "none", "--quiet")
    assert main([*words, "--out", str(tmp_path / "run")]) == 0
    with pytest.raises(BadFolder, match=r"holds a run of the command line, not a BayesianRegressor. Use it there"):
        BayesianRegressor.load(tmp_path / "run")
    regressor("conjugate", network=None).fit(X, Y).save(tmp_path / "saved")
    with pytest.raises(
        BadFolder, match=r"holds a BayesianRegressor that was saved in Python.*BayesianRegressor.load\("
    ):
        find_run(tmp_path / "saved")


def test_an_estimator_and_a_run_are_not_mixed(tmp_path):
    model = regressor("conjugate", network=None).fit(X, Y)
    model.save(tmp_path / "run")
    model.save(tmp_path / "run")
    with pytest.raises(BadFolder, match="holds an estimator, which would be mixed with what is saved"):
        model.posterior_.save(tmp_path / "run")
    RunFolder(tmp_path / "fitted").commit({"task": Part({})})
    with pytest.raises(BadFolder, match="holds a fitted run, which would be mixed with what is saved"):
        model.save(tmp_path / "fitted")
    assert RunFolder(tmp_path / "fitted").parts() == ("task",)
