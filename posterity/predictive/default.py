"""The integrator used where none is named."""

from torch import Tensor

from posterity.likelihoods.bernoulli import Bernoulli
from posterity.likelihoods.categorical import Categorical
from posterity.likelihoods.gaussian import Gaussian
from posterity.likelihoods.likelihood import Likelihood
from posterity.predictive.exact import Exact
from posterity.predictive.integrator import Integrator
from posterity.predictive.monte_carlo import MonteCarlo
from posterity.predictive.probit import Probit


def default_integrator(likelihood: Likelihood, mean: Tensor) -> Integrator:
    """The integrator for outputs of this mean (N, *event) where the caller names none.

    `Exact()` for Gaussian, Bernoulli and two classes, `Probit()` for more classes (for two it ignores that the logits
    are correlated, which costs more than all else), `MonteCarlo(1000)` for any other likelihood.

    >>> import torch
    >>> default_integrator(Categorical(), torch.zeros(5, 2)), default_integrator(Categorical(), torch.zeros(5, 10))
    (Exact(), Probit())
    """
    if isinstance(likelihood, (Gaussian, Bernoulli)):
        return Exact()
    if isinstance(likelihood, Categorical):
        return Exact() if mean.shape[1:] == (2,) else Probit()
    return MonteCarlo(1000)
