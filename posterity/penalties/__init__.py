"""Penalties, the priors that they stand for, and the way back.

`conversion` asks which prior a penalty is, `inversion` finds it by numbers, `training` hands penalties to optimisers.
Densities of weights are in `priors`.
"""

from posterity.penalties.composed import Function, Sum
from posterity.penalties.conversion import from_prior, to_prior
from posterity.penalties.divergence import Divergence
from posterity.penalties.explanation import Verdict
from posterity.penalties.families import Dirac, Family, Gaussian, Translation
from posterity.penalties.norms import L1, GroupLasso, SquaredL2
from posterity.penalties.penalty import Penalty
from posterity.penalties.training import (
    Factors,
    coupled_weight_decay,
    decoupled_weight_decay,
    factors_of,
    lambda_theory,
    layer_factors,
    param_groups,
    penalty_term,
    prior_of,
    usual_factors,
)

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
