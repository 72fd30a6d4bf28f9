"""The inversion of r_nu(mu) = -Ent(beta_nu) - E log alpha(mu + X_nu): from a penalty to log alpha."""

from posterity.penalties.inversion.expansion import (
    Expansion,
    Member,
    invert_expansion,
    invert_polynomial,
    smooth_expansion,
    smooth_polynomial,
)
from posterity.penalties.inversion.invert import invert, invert_expansions, log_alpha_up_to_constant

__all__ = [
    "Expansion",
    "Member",
    "invert",
    "invert_expansion",
    "invert_expansions",
    "invert_polynomial",
    "log_alpha_up_to_constant",
    "smooth_expansion",
    "smooth_polynomial",
]
