"""Polynomials: the expectation over mu + X and its inverse, exactly, by the moments of X (theory 002-07)."""

import math
from collections.abc import Sequence

from posterity.priors.penalty.inversion.member import Member


def smooth_polynomial(coefficients: Sequence[float], member: Member) -> tuple[float, ...]:
    """Coefficients, by increasing degree, of mu -> E p(mu + X)."""
    degree = len(coefficients) - 1
    moments = member.moments(degree).tolist()
    return tuple(
        math.fsum(math.comb(n, m) * moments[n - m] * coefficients[n] for n in range(m, degree + 1))
        for m in range(degree + 1)
    )


def invert_polynomial(coefficients: Sequence[float], member: Member) -> tuple[float, ...]:
    """Coefficients of the polynomial g with E g(mu + X) = p(mu): the only one, of the same degree.

    The coefficient of mu^(n-k) in E (mu + X)^n is C(n, k) E X^k, so the system is triangular and is solved from the
    highest degree down. For normal X the result is Hermite's: mu^n becomes sigma^n He_n(t / sigma).

    >>> from posterity.priors.penalty.families import Gaussian
    >>> invert_polynomial((0.0, 0.0, 0.0, 0.0, 1.0), Member(Gaussian(1.0), 1.0))
    (3.0, 0.0, -6.0, 0.0, 1.0)
    """
    degree = len(coefficients) - 1
    moments = member.moments(degree).tolist()
    found = [0.0] * (degree + 1)
    for m in range(degree, -1, -1):
        found[m] = math.fsum(
            [coefficients[m], *(-math.comb(n, m) * moments[n - m] * found[n] for n in range(m + 1, degree + 1))]
        )
    return tuple(found)
