"""Penalties, the priors that they stand for, and the way back.

Densities of weights are in `priors`; removing units that a penalty has set to zero is in `pruning`.
"""

from posterity.penalties.composed import Function, Sum
from posterity.penalties.conversion import from_prior, to_prior
from posterity.penalties.divergence import Divergence
from posterity.penalties.factors import Factors, factors_of, lambda_theory, layer_factors, usual_factors
from posterity.penalties.families import Dirac, Family, Gaussian, Translation
from posterity.penalties.norms import L1, GroupLasso, SquaredL2
from posterity.penalties.penalty import Penalty
from posterity.penalties.training import (
    coupled_weight_decay,
    decoupled_weight_decay,
    param_groups,
    penalty_term,
    prior_of,
)
from posterity.penalties.verdict import Verdict

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
