"""Penalties on weights, the priors that they stand for, and the way back."""

from posterity.priors.penalty.conversion import from_prior, to_prior
from posterity.priors.penalty.divergence import Divergence
from posterity.priors.penalty.factors import Factors, factors_of, lambda_theory, layer_factors, usual_factors
from posterity.priors.penalty.families import Dirac, Family, Gaussian, Translation
from posterity.priors.penalty.function import Function
from posterity.priors.penalty.group_lasso import GroupLasso
from posterity.priors.penalty.l1 import L1
from posterity.priors.penalty.penalty import Penalty
from posterity.priors.penalty.squared_l2 import SquaredL2
from posterity.priors.penalty.sum import Sum
from posterity.priors.penalty.training import (
    coupled_weight_decay,
    decoupled_weight_decay,
    param_groups,
    penalty_term,
    prior_of,
)
from posterity.priors.penalty.verdict import Verdict

__all__ = [
    "L1",
    "Dirac",
    "Divergence",
    "Factors",
    "Family",
    "Function",
    "Gaussian",
    "GroupLasso",
    "Penalty",
    "SquaredL2",
    "Sum",
    "Translation",
    "Verdict",
    "coupled_weight_decay",
    "decoupled_weight_decay",
    "factors_of",
    "from_prior",
    "lambda_theory",
    "layer_factors",
    "param_groups",
    "penalty_term",
    "prior_of",
    "to_prior",
    "usual_factors",
]
