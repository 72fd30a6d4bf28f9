"""Estimators and mixtures pass scikit-learn's own checks."""

import warnings
from dataclasses import dataclass

import pytest
import torch
from sklearn.utils.estimator_checks import parametrize_with_checks
from torch import nn

from posterity.estimators import BayesianClassifier, BayesianRegressor
from posterity.likelihoods import Gaussian
from posterity.mixtures import BayesianGaussianMixture, GaussianMixture
from posterity.priors import Normal

pytestmark = pytest.mark.cpu


@dataclass(frozen=True)
class Linear:
    """A linear model in float64; its repr, of which the names of the tests are made, is always the same."""

    def __call__(self, inputs: int, outputs: int) -> nn.Module:
        return nn.Linear(inputs, outputs, dtype=torch.float64)


# Scales are given: where the method chooses them by leaving rows out, a row twice is two rows to leave out, and a
# weight of 2 is one.
FAST = {"network": Linear(), "prior": Normal(1.0), "device": "cpu"}


with warnings.catch_warnings():  # mixtures inherit nothing, so that a fit needs no scikit-learn
    warnings.filterwarnings("ignore", "Estimator .*GaussianMixture does not inherit")
    checks = parametrize_with_checks(
        [
            BayesianRegressor("laplace", likelihood=Gaussian(scale=0.5), **FAST),
            BayesianClassifier("laplace", **FAST),
            GaussianMixture(),
            BayesianGaussianMixture(),
        ]
    )


@checks
def test_scikit_learns_checks(estimator, check):
    check(estimator)
