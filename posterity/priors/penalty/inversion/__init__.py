"""The inversion of r_nu(mu) = -Ent(beta_nu) - E log alpha(mu + X_nu): from a penalty to log alpha."""

from posterity.priors.penalty.inversion.expansion import Expansion
from posterity.priors.penalty.inversion.invert import invert, invert_expansions
from posterity.priors.penalty.inversion.member import Member
from posterity.priors.penalty.inversion.polynomial import invert_polynomial, smooth_polynomial
from posterity.priors.penalty.inversion.trigonometric import invert_expansion, smooth_expansion

__all__ = [
    "Expansion",
    "Member",
    "invert",
    "invert_expansion",
    "invert_expansions",
    "invert_polynomial",
    "smooth_expansion",
    "smooth_polynomial",
]
