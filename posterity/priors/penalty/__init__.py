"""Penalties on weights, the priors that they stand for, and the way back."""

from posterity.priors.penalty.factors import Factors, factors_of, lambda_theory, layer_factors, usual_factors
from posterity.priors.penalty.families import Dirac, Family, Gaussian, Translation
from posterity.priors.penalty.group_lasso import GroupLasso
from posterity.priors.penalty.l1 import L1
from posterity.priors.penalty.penalty import Penalty
from posterity.priors.penalty.squared_l2 import SquaredL2
from posterity.priors.penalty.training import (
    coupled_weight_decay,
    decoupled_weight_decay,
    param_groups,
    penalty_term,
    prior_of,
)

__all__ = [
    "L1",
    "Dirac",
    "Factors",
    "Family",
    "Gaussian",
    "GroupLasso",
    "Penalty",
    "SquaredL2",
    "Translation",
    "coupled_weight_decay",
    "decoupled_weight_decay",
    "factors_of",
    "lambda_theory",
    "layer_factors",
    "param_groups",
    "penalty_term",
    "prior_of",
    "usual_factors",
]
