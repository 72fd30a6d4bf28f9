"""Penalties on weights, the priors that they stand for, and the way back."""

from posterity.priors.penalty.families import Dirac, Family, Gaussian, Translation
from posterity.priors.penalty.group_lasso import GroupLasso
from posterity.priors.penalty.l1 import L1
from posterity.priors.penalty.penalty import Penalty
from posterity.priors.penalty.squared_l2 import SquaredL2

__all__ = ["L1", "Dirac", "Family", "Gaussian", "GroupLasso", "Penalty", "SquaredL2", "Translation"]
