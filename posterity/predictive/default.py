"""The integrator used where none is named."""

from posterity.likelihoods.bernoulli import Bernoulli
from posterity.likelihoods.categorical import Categorical
from posterity.likelihoods.gaussian import Gaussian
from posterity.likelihoods.likelihood import Likelihood
from posterity.predictive.exact import Exact
from posterity.predictive.integrator import Integrator
from posterity.predictive.monte_carlo import MonteCarlo
from posterity.predictive.probit import Probit


def default_integrator(likelihood: Likelihood) -> Integrator:
    """`Exact()` for Gaussian, `Probit()` for Bernoulli and Categorical, `MonteCarlo(1000)` for any other likelihood.

    >>> default_integrator(Gaussian())
    Exact()
    """
    if isinstance(likelihood, Gaussian):
        return Exact()
    return Probit() if isinstance(likelihood, (Bernoulli, Categorical)) else MonteCarlo(1000)
