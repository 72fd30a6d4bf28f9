"""Penalties on weights, the priors that they stand for, and the way back."""

from posterity.priors.penalty.conversion import from_prior, to_prior
from posterity.priors.penalty.divergence import Divergence
from posterity.priors.penalty.families import Dirac, Family, Gaussian, Translation
from posterity.priors.penalty.function import Function
from posterity.priors.penalty.group_lasso import GroupLasso
from posterity.priors.penalty.l1 import L1
from posterity.priors.penalty.penalty import Penalty
from posterity.priors.penalty.squared_l2 import SquaredL2
from posterity.priors.penalty.sum import Sum
from posterity.priors.penalty.verdict import Verdict

__all__ = [
    "L1",
    "Dirac",
    "Divergence",
    "Family",
    "Function",
    "Gaussian",
    "GroupLasso",
    "Penalty",
    "SquaredL2",
    "Sum",
    "Translation",
    "Verdict",
    "from_prior",
    "to_prior",
]
