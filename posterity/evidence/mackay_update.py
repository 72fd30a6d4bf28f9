"""One step of MacKay's fixed point for each round of variational EM."""

import dataclasses
import math
from dataclasses import dataclass, field

from posterity.errors import of_kinds
from posterity.evidence.m_steps import Expected, Maximisation
from posterity.evidence.marginal import Groups, Shared
from posterity.evidence.retuned import marginal_likelihood
from posterity.evidence.tuning import MacKay, Tuned, tuned_joint
from posterity.model.joint import Joint
from posterity.posteriors.gaussian import Gaussian, Linearized
from posterity.posteriors.posterior import Posterior


@dataclass(frozen=True)
class MacKayUpdate(Maximisation):
    """Prior precision and noise re-estimated once from a Laplace posterior: faster than the M-steps of EM.

    **Math**: gamma_g = n_g - alpha_g tr Sigma_gg, alpha_g = gamma_g / |m|^2_g and 1 / scale^2 = (N - gamma) / RSS(m),
    from the posterior N(m, Sigma): one step of `MacKay`, so that a round finds a new mode before the next one.

    **Limit**: its fixed point is that of EM for linear models, reached in fewer rounds. A step is no maximum of the
    expected log joint, so that the bound may fall. It takes the posterior of `Laplace`, and tunes `Normal` priors and
    Gaussian noise of one scale; `noise=False` leaves the noise.

    **Cost**: one log determinant with its gradient.

    **References**: MacKay (1992), Bayesian interpolation, eq. 4.9-4.14; Bishop (2006), eq. 3.91-3.95.

    **Example**:

    >>> MacKayUpdate(noise=False).climbs
    False
    """

    groups: Groups = field(default_factory=Shared)
    noise: bool = True

    def __post_init__(self) -> None:
        of_kinds(self, groups=Groups)

    climbs = False

    def __call__(self, joint: Joint, posterior: Posterior, expected: Expected | None = None) -> Joint:
        """The joint with the hyper-parameters after one step; see `Maximisation`."""
        if not isinstance(posterior, (Gaussian, Linearized)):
            raise TypeError(f"MacKayUpdate needs the posterior of Laplace. Got {type(posterior).__name__}.")
        marginal = marginal_likelihood(posterior, self.groups)
        noise = marginal.noise.scale if self.noise and marginal.noise is not None else None
        if not marginal.names and noise is None:
            raise ValueError("MacKayUpdate: there is neither a Normal prior nor Gaussian noise to estimate.")
        found = MacKay(self.groups).step(marginal, marginal.prior_precision, noise)
        scale = None if found.noise_scale is None else float(found.noise_scale)
        tuned = Tuned(self.groups, marginal.names, found.prior_precision, scale, math.nan, math.nan, 1)
        assert isinstance(posterior.joint, Joint)
        after = tuned_joint(dataclasses.replace(joint, random=posterior.joint.random), tuned)
        return dataclasses.replace(after, random=joint.random)
