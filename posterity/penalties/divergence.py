"""The KL divergence to a prior, as a penalty on the mean and scale of a posterior."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from posterity.errors import positive, shown
from posterity.numerics.layout import Layout
from posterity.penalties.families import Dirac, Family, Gaussian
from posterity.penalties.penalty import Penalty, checked_shape, density_of, matched_factor
from posterity.priors.group_lasso import GroupLasso
from posterity.priors.independent import Independent, check_members
from posterity.priors.normal import Normal
from posterity.priors.prior import Prior


@dataclass(frozen=True)
class Divergence(Penalty):
    """r(mu, nu) = KL(beta_{mu, nu} || target), for beta of `family`; for points its finite part, -log p.

    It is exact where the prior's `kl` is, and by the trapezoid rule elsewhere. Called with weights it is
    -log p(w), the reading by points.

    **Math**: KL = -H(beta_nu) - E log p(mu + X), X of the family's density at nu.

    **Limit**: priors that differ from weight to weight are refused: they have no r(mu, nu) of one weight. A group lasso
    has its KL for points and Gaussians only.

    **Cost**: a closed form, or a sum over about 2,000 nodes for each weight.

    **References**: Wolinski, Charpiat and Ollivier (2020), An equivalence between Bayesian priors and penalties in
    variational inference.

    **Example**:

    >>> r = Divergence(Normal(0.5), Gaussian())
    >>> r.of(torch.tensor([[0.5]]), torch.tensor([[0.5]]))
    tensor(0.5000)
    """

    target: Prior
    family: Family

    def __post_init__(self) -> None:
        if not isinstance(self.target, Prior):
            raise TypeError(f"from_prior needs a prior of posterity.priors. Got {shown(self.target)}.")
        if not isinstance(self.family, Family):
            raise TypeError(
                f"from_prior needs a family: Dirac(), Gaussian(...) or Translation(...). Got {self.family}."
            )
        name = type(self.target).__name__
        if self.target.num_members is not None:
            raise ValueError(
                f"{name} has hyper-parameters for {self.target.num_members} members. Take one: prior.member(i)."
            )
        if isinstance(self.target, GroupLasso):
            if not isinstance(self.family, (Dirac, Gaussian)):
                raise ValueError("The KL to a GroupLasso prior is known for Dirac() and Gaussian(...) only.")
        elif not isinstance(self.target, (Normal, Independent)) or (
            isinstance(self.target, Normal)
            and any(isinstance(value, Tensor) and value.dim() > 0 for value in (self.target.scale, self.target.mean))
        ):
            raise ValueError(
                f"{name} is not the same for every weight, so it is no penalty r(mu, nu) of one weight. "
                "Give the prior of one tensor, such as Normal(scale)."
            )

    def __call__(self, weight: Tensor) -> Tensor:
        return -self._bound(weight).log_prob(weight.reshape(-1))

    def of(self, mean: Tensor, scale: Tensor) -> Tensor:
        if self.separates:
            return self.each(mean, scale).sum()
        if isinstance(self.family, Dirac):
            return self(mean)
        return self._bound(mean).kl(mean.reshape(-1), scale.reshape(-1))

    @property
    def separates(self) -> bool:
        return self.target.factorises

    def each(self, mean: Tensor, scale: Tensor) -> Tensor:
        if not self.separates:
            raise TypeError("The KL to a GroupLasso prior is no sum over single weights. Use of(mean, scale).")
        if isinstance(self.family, Dirac):
            return -self.target.log_prob(mean.unsqueeze(-1))
        if isinstance(self.family, Gaussian):
            return self.target.kl(mean.unsqueeze(-1), scale.unsqueeze(-1))
        points, weights = (part.to(mean) for part in self.family.nodes(1.0))
        log_density = self.target.log_prob((mean.unsqueeze(-1) + scale.unsqueeze(-1) * points).unsqueeze(-1))
        return -(self.family.entropy(1.0) + scale.log()) - (weights * log_density).sum(-1)

    def prior(self, factor: float | Tensor = 1.0) -> Prior:
        """The prior itself; p^factor / Z with a factor other than 1."""
        check_members("factor", factor)
        if not isinstance(factor, Tensor) and factor == 1.0:
            return self.target
        power = self.target.degree
        if power is not None:
            return self.target.rescaled(factor ** (-1.0 / power))
        return density_of(lambda w: -self.target.log_prob(w.unsqueeze(-1)), factor, type(self.target).__name__)

    def factor(self, variance: float, shape: tuple[int, ...]) -> float:
        """In closed form where -log p is homogeneous, else by bisection; a ValueError where p has no variance."""
        positive("variance", variance)
        checked_shape(shape)
        like = torch.zeros(shape, dtype=torch.float64, device="cpu")
        own = float(self._bound(like).variance(like.reshape(-1))[0])
        if not math.isfinite(own):
            raise ValueError(
                f"{type(self.target).__name__} has no variance to match. Choose its scale by hand, or a prior with one."
            )
        power = self.target.degree
        if power is not None:
            return float((own / variance) ** (0.5 * power))
        weight = torch.zeros(1, dtype=torch.float64, device="cpu")
        return matched_factor(lambda factor: float(self.prior(factor).variance(weight)), variance)

    @property
    def formula(self) -> str:
        return f"KL({self.family} || {self.target})" if not isinstance(self.family, Dirac) else f"-log {self.target}"

    def _bound(self, like: Tensor) -> Prior:
        return self.target.bound(Layout.of({"weight": tuple(like.shape)}))
