"""The scale of a prior that fits a posterior over weights: an M-step of variational EM."""

import dataclasses
from dataclasses import dataclass, field

import torch

from posterity.errors import of_kinds, shown
from posterity.evidence.gamma import Gamma
from posterity.evidence.groups import Groups, PerLayer
from posterity.evidence.maximisation import Expected, Maximisation
from posterity.evidence.rescaled import rescaled_prior
from posterity.evidence.scale_groups import ScaleGroup, expected_penalties, scale_groups
from posterity.model.joint import Joint
from posterity.posteriors.mixture import Mixture
from posterity.posteriors.posterior import Posterior


@dataclass(frozen=True)
class PriorScale(Maximisation):
    """One scale of the prior for each group of weights, in closed form.

    **Math**: a prior with A(w) = log p(mode) - log p(w) homogeneous of degree k (2 for `Normal`, 1 for `Laplace` and
    `GroupLasso`) is p(w | tau) = const tau^(n / k) exp(-tau A1(w)) for the n weights of a group, tau = s^-k. The
    maximum of E_q log p(w | tau) is tau = (n / k) / E_q A1: the precision n / sum E(w - mean)^2 of a normal, the scale
    mean E|w| of a Laplace prior, the group-lasso rate n / sum over g of E||w_g||. With `hyper_prior` = Gamma(a, b) on
    tau, q(tau) = Gamma(a + n / k, b + E_q A1); the joint gets E tau, and `bound_terms` makes the ELBO there that of
    q(w) q(tau).

    Scales that differ inside a group (`FanIn`, `Layerwise`) keep their ratios, and tau goes by their geometric mean;
    means stay. Weights that are points under q keep their prior.

    **Limit**: exact for Gaussian q (any covariance under `Normal` and `Laplace`, a factorised one under `GroupLasso`,
    there to 1e-9), points, and mixtures; for `Samples` the average over their draws. It is unchanged under tempering.
    A point has no spread, so that rounds with it drive the scale of a group that the data do not need to zero.

    **Cost**: one pass over the weights, or over the draws.

    **References**: MacKay (1992); Bishop (2006), eq. 9.63 and section 10.3; Graves (2011), section 4.

    **Example**:

    >>> import posterity as po
    >>> joint = po.Joint(torch.nn.Linear(2, 1), po.likelihoods.Gaussian(), po.priors.Laplace(), num_data=9)
    >>> q = po.posteriors.Point(joint, torch.tensor([0.5, -0.3, 0.1]))
    >>> round(PriorScale()(joint, q, None).prior.scale, 6)  # the mean of |w|
    0.3
    """

    groups: Groups = field(default_factory=PerLayer)
    hyper_prior: Gamma | None = None

    def __post_init__(self) -> None:
        of_kinds(self, groups=Groups)
        if self.hyper_prior is not None:
            of_kinds(self, hyper_prior=Gamma)

    @property
    def needs_residuals(self) -> bool:
        """No."""
        return False

    def check(self, joint: Joint) -> None:
        """Refuse a prior without a scale that is found in closed form."""
        scale_groups(joint, self.groups)

    def __call__(self, joint: Joint, posterior: Posterior, expected: Expected | None = None) -> Joint:
        """The joint with the scales found; see `Maximisation`."""
        random = _random(joint, posterior)
        groups = scale_groups(random, self.groups)
        penalties = expected_penalties(groups, posterior)
        factors = [self._factor(group, total) for group, total in zip(groups, penalties, strict=True)]
        found = torch.tensor(factors, dtype=torch.float64, device=joint.device)
        return dataclasses.replace(joint, prior=rescaled_prior(random, self.groups, found))

    def bound_terms(self, joint: Joint, posterior: Posterior, expected: Expected | None = None) -> float:
        """E log p(tau) / q(tau), and n / k (E log tau - log E tau), over the groups; see `Maximisation`."""
        if self.hyper_prior is None:
            return 0.0
        groups = scale_groups(_random(joint, posterior), self.groups)
        total = sum(self.hyper_prior.bound_terms(group.power, group.tau) for group in groups)
        return float(joint.tempering.prior_power) * total

    def _factor(self, group: ScaleGroup, penalty: float) -> float:
        """What the scales of a group are multiplied by: (tau / new tau)^(1 / k)."""
        power, tau = group.power, group.tau
        if self.hyper_prior is not None:
            after = self.hyper_prior.updated(power, penalty / tau).mean
            return float((tau / after) ** (1.0 / group.degree))
        if not penalty > 0.0:
            raise ValueError(
                f"PriorScale: all weights of {group.name} are at the mean of their prior with no spread, so that their "
                "scale would be zero. Give it a hyper_prior=Gamma(shape, rate)."
            )
        return float((penalty / power) ** (1.0 / group.degree))


def _random(joint: Joint, posterior: Posterior) -> Joint:
    """The joint with those weights random that are so under the posterior."""
    of = posterior.posteriors[0].joint if isinstance(posterior, Mixture) else posterior.joint
    if not isinstance(of, Joint) or of.network.layout != joint.network.layout:
        raise TypeError(f"PriorScale: the posterior must be one of the joint's weights. Got one of {shown(of)}.")
    return dataclasses.replace(joint, random=of.random)
