"""From the posterior of one data set to the problem of the next."""

import dataclasses

from posterity.model.joint import Joint
from posterity.posteriors.gaussian import Gaussian
from posterity.posteriors.linearized import Linearized
from posterity.posteriors.posterior import Posterior
from posterity.priors.correlated import Correlated


def continued(joint: Joint, posterior: Posterior) -> Joint:
    """The problem `joint` of new data with the posterior of earlier data for its prior.

    - `joint`: the network, likelihood and number of rows of the new data; its prior is replaced.
    - `posterior`: a Gaussian over all weights of the same network, as `Laplace` and `Conjugate` give it.

    Start the next run there, too: `infer(MAP(...), joint, data, start=posterior)`. A tempered posterior is taken as it
    is; the tempering of `joint` then acts on it as on any prior.

    >>> import torch, posterity as po
    >>> x = torch.linspace(-1, 1, 8).unsqueeze(1)
    >>> noise = po.likelihoods.Gaussian(scale=0.5)
    >>> joint = po.Joint(torch.nn.Linear(1, 1), noise, po.priors.Normal(), num_data=4)
    >>> q, _ = po.infer(po.methods.Laplace(tuning=None), joint, (x[:4], x[:4]))
    >>> type(po.continued(joint, q).prior).__name__
    'Correlated'
    """
    gaussian = posterior.gaussian if isinstance(posterior, Linearized) else posterior
    if not isinstance(joint, Joint):
        raise TypeError(f"continued: the problem must be a Joint. Got {type(joint).__name__}.")
    if not isinstance(gaussian, Gaussian):
        raise TypeError(
            f"continued: the posterior must be a Gaussian over weights. Got {type(posterior).__name__}, which says "
            "nothing about how far they may go. Use the posterior of Laplace or Conjugate."
        )
    if not isinstance(gaussian.joint, Joint):
        raise TypeError("continued: the posterior of a Density is not one over a network's weights.")
    if gaussian.joint.random_indices is not None:
        raise ValueError(
            f"continued: the posterior must be over all {gaussian.joint.num_weights} weights. Got one over "
            f"{gaussian.precision.size} of them, the others being points. Use Laplace with subset=AllWeights(), and a "
            "joint with random='*'."
        )
    return dataclasses.replace(joint, prior=Correlated(gaussian.mean, gaussian.precision))
