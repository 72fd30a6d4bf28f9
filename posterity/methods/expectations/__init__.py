"""Ways in which methods serve as E-steps of variational EM."""

from posterity.errors import shown
from posterity.methods.chains import Chains
from posterity.methods.conjugate import Conjugate
from posterity.methods.expectations.continued_chains import ContinuedChains
from posterity.methods.expectations.continued_fit import ContinuedFit
from posterity.methods.expectations.expectation_run import ExpectationRun
from posterity.methods.expectations.whole_runs import WholeRuns
from posterity.methods.full_rank import FullRank
from posterity.methods.laplace import Laplace
from posterity.methods.low_rank_gaussian import LowRankGaussian
from posterity.methods.maximum_a_posteriori import MAP
from posterity.methods.mean_field import MeanField
from posterity.methods.natural_gradient import NaturalGradient

__all__ = ["ExpectationRun", "expectation_run"]

_FITS = (MAP, MeanField, FullRank, LowRankGaussian, NaturalGradient)


def expectation_run(method: object, fit: object, burn_in: float, rounds: int) -> ExpectationRun:
    """The way in which the method serves; a one-line error where it cannot."""
    if fit is not None and not isinstance(fit, MAP):
        raise TypeError(f"VariationalEM.fit must be a MAP, or None. Got {shown(fit)}.")
    if isinstance(method, Laplace) and method.tuning is not None:
        raise ValueError(
            f"VariationalEM.expectation must leave hyper-parameters to the M-steps. Got Laplace with {method.tuning}. "
            "Use Laplace(tuning=None)."
        )
    if isinstance(method, (Conjugate, Laplace)):
        return WholeRuns(method, fit, burn_in, rounds)
    if not isinstance(method, (*_FITS, Chains)):
        hint = f" Call it: {method.__name__}()." if isinstance(method, type) else ""
        names = ", ".join(kind.__name__ for kind in (Conjugate, Laplace, *_FITS))
        raise TypeError(f"VariationalEM.expectation must be a sampler or one of {names}. Got {shown(method)}.{hint}")
    if fit is not None:
        raise ValueError(
            "VariationalEM.fit goes on between the runs of Laplace or Conjugate. "
            f"{type(method).__name__} has steps of its own. Leave it out."
        )
    return ContinuedChains(method, rounds) if isinstance(method, Chains) else ContinuedFit(method, burn_in, rounds)
