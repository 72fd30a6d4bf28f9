"""Estimators of the gradient of an ELBO, one file each."""

from posterity.methods.gradients.estimator import DataTerm, Estimator, Factorised
from posterity.methods.gradients.weight_sampling import WeightSampling

__all__ = ["DataTerm", "Estimator", "Factorised", "WeightSampling"]
