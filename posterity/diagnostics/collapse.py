"""Collapse of a variational posterior to its prior."""

from dataclasses import dataclass

import torch
from torch import Tensor

from posterity.errors import positive, shown
from posterity.evidence.marginal import PerTensor, grouped
from posterity.model.joint import Joint
from posterity.model.tempering import Tempering
from posterity.posteriors.posterior import Posterior
from posterity.priors import Normal


@dataclass(frozen=True, eq=False)
class Collapse:
    """The distance of the marginals of a Gaussian over weights from the prior, by tensor.

    `kl_per_weight` (R,) is in nats, `at_prior` (R,) marks weights within the tolerance of the prior, and `index` (R,)
    is the index in `names` of the tensor of each weight.
    """

    names: tuple[str, ...]
    index: Tensor
    kl_per_weight: Tensor
    at_prior: Tensor
    tolerance: float
    num_data: int
    tempering: Tempering

    @property
    def sizes(self) -> Tensor:
        """Number of random weights of each tensor, (G,)."""
        return self._sums(torch.ones_like(self.kl_per_weight))

    @property
    def kl(self) -> Tensor:
        """Sum of the KL over the weights of each tensor, (G,): KL(q || prior) where q is factorised."""
        return self._sums(self.kl_per_weight)

    @property
    def shares(self) -> Tensor:
        """Share of the weights of each tensor that are at the prior, (G,)."""
        return self._sums(self.at_prior.to(torch.float64)) / self.sizes

    @property
    def share(self) -> float:
        """Share of all weights that are at the prior."""
        return float(self.at_prior.double().mean())

    @property
    def collapsed(self) -> bool:
        """Whether more than half of the weights are at the prior."""
        return self.share > 0.5

    @property
    def suggested(self) -> Tempering:
        """The balanced temperature with tau = 1 and the weights for units: eta = num_data / R."""
        return Tempering.balanced(1.0, self.num_data, len(self.kl_per_weight))

    def _sums(self, values: Tensor) -> Tensor:
        return torch.zeros(len(self.names), dtype=values.dtype, device=values.device).index_add(0, self.index, values)

    def __str__(self) -> str:
        width = max(len(name) for name in (*self.names, "all weights"))
        count, total = len(self.kl_per_weight), float(self.kl_per_weight.sum())
        rows = [
            *zip(self.names, self.sizes.tolist(), self.kl.tolist(), self.shares.tolist(), strict=True),
            ("all weights", count, total, self.share),
        ]
        lines = [f"{'':<{width}}  {'weights':>9}  {'KL':>10}  {'KL/weight':>10}  at the prior"]
        lines += [
            f"{name:<{width}}  {int(size):>9,}  {kl:>10.4g}  {kl / size:>10.3g}  {share:>12.1%}"
            for name, size, kl, share in rows
        ]
        return "\n".join([*lines, self._advice()])

    def _advice(self) -> str:
        within = f"{self.share:.1%} of the weights are within {self.tolerance:.0%} of the prior"
        if not self.collapsed:
            return f"{within}: no collapse."
        eta, suggested = float(self.tempering.eta), float(self.suggested.eta)
        if suggested < eta:
            return (
                f"{within}: the posterior has collapsed at eta = {eta:.3g}.\nLower the temperature: "
                f"Tempering.balanced(1.0, num_data={self.num_data}, units={len(self.kl_per_weight)}) is "
                f"eta = {suggested:.3g}; choose tau on validation rows."
            )
        return (
            f"{within}, although eta = {eta:.3g} is not above the balanced {suggested:.3g}. Train longer, or look at "
            "the scales of the prior."
        )


def collapse(posterior: Posterior, *, tolerance: float = 0.01) -> Collapse:
    """Measure how far a Gaussian over weights is from its normal prior, weight by weight.

    **Math**: for a weight with marginal N(m, s^2) and prior N(m0, s0^2), KL = log(s0 / s) + (s^2 + (m - m0)^2) /
    (2 s0^2) - 1/2. It is at the prior where |m - m0| <= tolerance s0 and |s / s0 - 1| <= tolerance. In wide networks
    with the untempered bound this happens to all weights: KL(q* || prior) falls as 1 / width, and the predictive
    becomes the prior predictive. A temperature eta = tau num_data / units keeps the balance of data and prior at every
    width; `suggested` counts the weights as units and takes tau = 1.

    **Limit**: exact for a factorised Gaussian; of correlated weights the marginals are compared. Normal priors only.

    **Cost**: the marginal variances.

    **References**: Coker et al. (2022), Wide mean-field Bayesian neural networks ignore the data; Huix et al. (2022),
    Variational inference of overparameterized Bayesian neural networks.

    **Example**:

    >>> import posterity as po
    >>> from posterity.precisions import Diagonal
    >>> net = torch.nn.Linear(3, 1)
    >>> joint = po.Joint(net, po.likelihoods.Gaussian(), po.priors.Normal(scale=0.5), num_data=2)
    >>> mean, precision = torch.tensor([0.0, 0.001, 0.9, 0.0]), Diagonal(torch.tensor([4.0, 4.0, 100.0, 4.0]))
    >>> q = po.posteriors.Gaussian(joint, mean, precision)
    >>> print(collapse(q))
                   weights          KL   KL/weight  at the prior
    weight               3       2.749       0.916         66.7%
    bias                 1           0           0        100.0%
    all weights          4       2.749       0.687         75.0%
    75.0% of the weights are within 1% of the prior: the posterior has collapsed at eta = 1.
    Lower the temperature: Tempering.balanced(1.0, num_data=2, units=4) is eta = 0.5; choose tau on validation rows.
    """
    positive("collapse: tolerance", tolerance)
    gaussian = posterior.as_gaussian()
    if gaussian is None or not isinstance(gaussian.joint, Joint):
        raise TypeError(
            f"collapse: q must be a Gaussian over a network's weights. Got {shown(type(posterior).__name__)}. "
            "Use the posterior of MeanField or Laplace, or another Gaussian."
        )
    if gaussian.num_members is not None:
        raise TypeError(f"collapse: this holds {gaussian.num_members} posteriors. Choose one: collapse(q.member(0)).")
    joint = gaussian.joint
    prior, mean = joint.bound_prior, gaussian.mean.to(torch.float64)
    if not isinstance(prior, Normal):
        raise TypeError(
            f"collapse needs a Normal prior, to which a Gaussian can be equal. Got {type(joint.prior).__name__}. "
            "Look at evidence.elbo(q, data).kl instead."
        )
    own_scale = prior.variance(mean).sqrt()
    shift = -prior.value_and_grad(mean)[1] * own_scale  # (m - m0) / s0
    if joint.random_indices is not None:
        own_scale, shift = own_scale[joint.random_indices], shift[joint.random_indices]
    ratio = gaussian.variance.sqrt() / own_scale
    exponent = 2.0 * ratio.log()
    kl = 0.5 * (exponent.expm1() - exponent + shift.square())  # free of cancellation near the prior
    near = (shift.abs() <= tolerance) & ((ratio - 1.0).abs() <= tolerance)
    names, index = grouped(joint, PerTensor())
    return Collapse(names, index.to(kl.device), kl, near, tolerance, joint.num_data, joint.tempering)
