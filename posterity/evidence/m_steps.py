"""M-steps of variational EM: prior scales and noise in closed form, with Gamma hyper-priors."""

import dataclasses
import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from posterity.errors import of_kinds, positive, shown
from posterity.evidence.marginal import GIVEN, Groups, PerLayer, grouped, rescaled_prior
from posterity.likelihoods import Gaussian
from posterity.model.joint import Joint
from posterity.numerics.layout import Layout, Slice
from posterity.posteriors.mixture import Mixture
from posterity.posteriors.posterior import Posterior
from posterity.priors import Normal, Prior


@dataclass(frozen=True)
class Gamma:
    """The Gamma(shape, rate) distribution of a positive tau: a hyper-prior, or the factor q(tau).

    **Math**: p(tau) = rate^shape tau^(shape - 1) exp(-rate tau) / Gamma(shape), of mean shape / rate. With a term
    `count` log tau - tau `total` in the expected log joint, q(tau) = Gamma(shape + count, rate + total).

    **Limit**: conjugate to precisions of normals and to rates of exponential densities, so that q(tau) is exact given
    the rest of q. Small `shape` and `rate` make it vague.

    **Cost**: none.

    **References**: Bishop (2006), Pattern Recognition and Machine Learning, section 10.3.

    **Example**:

    >>> Gamma(1.0, 2.0).updated(count=5.0, total=1.0)
    Gamma(shape=6.0, rate=3.0)
    """

    shape: float
    rate: float

    def __post_init__(self) -> None:
        positive("Gamma.shape", self.shape)
        positive("Gamma.rate", self.rate)

    @property
    def mean(self) -> float:
        """E tau."""
        return self.shape / self.rate

    @property
    def mean_log(self) -> float:
        """E log tau."""
        return float(torch.digamma(torch.tensor(self.shape, dtype=torch.float64))) - math.log(self.rate)

    @property
    def entropy(self) -> float:
        """Entropy of tau, in nats."""
        log_rate = math.log(self.rate)
        return self.shape + math.lgamma(self.shape) - (self.shape - 1.0) * self.mean_log - self.shape * log_rate

    def updated(self, count: float, total: float) -> "Gamma":
        """The distribution of tau after a term `count` log tau - tau `total`."""
        return Gamma(self.shape + count, self.rate + total)

    def expected_log_density(self, q: "Gamma") -> float:
        """E log p(tau) for tau ~ q, p being this density."""
        constant = self.shape * math.log(self.rate) - math.lgamma(self.shape)
        return constant + (self.shape - 1.0) * q.mean_log - self.rate * q.mean

    def bound_terms(self, count: float, mean: float) -> float:
        """The change of a bound with tau fixed at `mean` when tau gets q(tau) = Gamma(shape + count, .) of that mean.

        It is E log p(tau) / q(tau), plus `count` (E log tau - log E tau) for the bound's term `count` log tau.
        """
        shape = self.shape + count
        q = Gamma(shape, shape / mean)
        return self.expected_log_density(q) + q.entropy + count * (q.mean_log - math.log(mean))


class Expected(NamedTuple):
    """Expectations under q from a pass over all rows, untempered; w_n are the rows' weights."""

    log_likelihood: Tensor  # (S,) log p(D | w_s) over all data at draws w_s ~ q; S = 1 where in closed form
    squares: Tensor  # (E,) sum_n w_n E_q (y_n - f_n)^2, for each of the E entries of an output row
    count: Tensor  # type: ignore[assignment]  # () sum_n w_n, (E,) where entries differ; a tuple has such a method


class Maximisation(ABC):
    """An M-step: the prior or likelihood that maximises the expected log joint under a fixed posterior q.

    Tempering changes nothing: it multiplies the log-likelihood and the log prior by powers, and each M-step maximises
    one of the two.
    """

    needs_residuals: ClassVar[bool] = False
    """Whether `Expected.squares` are used, so that a pass over the data is needed."""

    climbs: ClassVar[bool] = True
    """Whether the step maximises the expected log joint, so that the bound cannot fall."""

    def check(self, joint: Joint) -> None:  # noqa: B027  most have nothing to refuse
        """Raise a ValueError before the run where the problem has no such hyper-parameters."""

    @abstractmethod
    def __call__(self, joint: Joint, posterior: Posterior, expected: Expected | None) -> Joint:
        """Return the joint with new hyper-parameters; `expected` may be None unless `needs_residuals`."""

    def bound_terms(self, joint: Joint, posterior: Posterior, expected: Expected | None = None) -> float:
        """Terms of hyper-priors in the ELBO at the joint's hyper-parameters, in nats: 0 without hyper-priors.

        Under tempering they are multiplied by the power of the term that the hyper-parameters are in, so that the
        M-step maximises `Elbo.bound` plus these. A hyper-prior of the noise needs the row count of `expected`.
        """
        return 0.0


class Family(NamedTuple):
    """The random weights of one tensor: their prior with its mode moved to zero, -log p homogeneous of `degree`."""

    indices: Tensor  # (n,) in theta
    prior: Prior
    mode: float | Tensor
    degree: int
    log_scales: float  # summed over the weights


class ScaleGroup(NamedTuple):
    """A group of n weights with p(w | tau) = const tau^(n / k) exp(-tau A1(w)); tau = s^-k of degree k.

    s is the geometric mean of the weights' scales: tau is the precision of a normal, 1 / b of a Laplace prior, the rate
    of a group lasso. A1 is A = log p(mode) - log p(w) at tau = 1, with the same ratios of scales.
    """

    name: str
    families: tuple[Family, ...]

    @property
    def degree(self) -> int:
        """The degree k."""
        return self.families[0].degree

    @property
    def power(self) -> float:
        """The power n / k of tau."""
        return sum(len(family.indices) for family in self.families) / self.degree

    @property
    def tau(self) -> float:
        """tau at the present scales."""
        total = torch.tensor(sum(family.log_scales for family in self.families), dtype=torch.float64)
        return float(torch.exp(-total / self.power))


def scale_groups(joint: Joint, groups: Groups) -> tuple[ScaleGroup, ...]:
    """Group the joint's random weights; raise a ValueError where a prior has no scale in closed form."""
    if joint.num_members is not None:
        raise ValueError(
            f"PriorScale is for one problem. Got a joint of {joint.num_members} members. Use joint.member(i) for each."
        )
    names, group = grouped(joint, groups)
    layout = joint.network.layout
    random = torch.arange(layout.size, device=group.device) if joint.random_indices is None else joint.random_indices
    ends = torch.searchsorted(random, torch.tensor([p.offset + p.size for p in layout], device=group.device)).tolist()
    members: list[list[Family]] = [[] for _ in names]
    for own, part, low, high in zip(joint.prior.by_tensor(layout), layout, [0, *ends], ends, strict=False):
        if low < high:
            members[int(group[low])].append(_family(own, part, random[low:high]))
    for name, families in zip(names, members, strict=True):
        if len({family.degree for family in families}) > 1:
            raise ValueError(
                f"PriorScale: the weights of {name} have priors of several kinds, whose scales have no closed form "
                "together. Use groups=PerTensor()."
            )
    return tuple(ScaleGroup(name, tuple(families)) for name, families in zip(names, members, strict=True))


def _family(prior: Prior, part: Slice, indices: Tensor) -> Family:
    if prior.degree is None:
        raise ValueError(
            f"PriorScale: a Normal, Laplace or GroupLasso has a scale that is found in closed form. Got {shown(prior)} "
            f"for '{part.name}'. Use one of these for it, or leave PriorScale out."
        )
    if len(indices) < part.size and not isinstance(prior, Normal):
        raise ValueError(
            f"PriorScale: only part of '{part.name}' is random, and its other weights keep their scale, which takes a "
            f"Normal prior. Got {shown(prior)}. Choose whole tensors by Joint.random."
        )
    own, mode = prior.bound(Layout.of({part.name: part.shape})).centred()
    inside = indices - part.offset
    if isinstance(own, Normal) and isinstance(own.scale, Tensor) and own.scale.dim() == 2:
        own = Normal(own.scale.to(indices.device)[:, inside])
    if isinstance(mode, Tensor) and mode.dim():
        mode = mode.reshape(-1).to(indices.device)[inside]
    return Family(indices, own, mode, prior.degree, float(own.log_scale.mean()) * len(indices))


def expected_penalties(groups: tuple[ScaleGroup, ...], posterior: Posterior) -> list[float]:
    """E_q A(w) of each group, at its present scale."""
    families = [family for group in groups for family in group.families]
    total = torch.zeros(len(families), dtype=torch.float64)
    with torch.no_grad():
        for share, weights, spread, independent in posterior.weight_parts():
            for index, family in enumerate(families):
                if spread is not None and not independent and not family.prior.factorises:
                    raise TypeError(
                        f"PriorScale: {shown(family.prior)} needs the weights of a group to be independent under q. "
                        "Use a factorised Gaussian (MeanField), samples, or a Normal or Laplace prior."
                    )
                away = weights[..., family.indices] - family.mode
                own = None if spread is None else spread[family.indices]
                total[index] += share * float(family.prior.penalty(away, own)[1].mean())
    penalties = iter(total.tolist())
    return [sum(next(penalties) for _ in group.families) for group in groups]


@dataclass(frozen=True)
class PriorScale(Maximisation):
    """One scale of the prior for each group of weights, in closed form.

    **Math**: a prior with A(w) = log p(mode) - log p(w) homogeneous of degree k (2 for `Normal`, 1 for `Laplace` and
    `GroupLasso`) is p(w | tau) = const tau^(n / k) exp(-tau A1(w)) for the n weights of a group, tau = s^-k. The
    maximum of E_q log p(w | tau) is tau = (n / k) / E_q A1: the precision n / sum E(w - mean)^2 of a normal, the scale
    mean E|w| of a Laplace prior, the group-lasso rate n / sum over g of E||w_g||. With `hyper_prior` = Gamma(a, b) on
    tau, q(tau) = Gamma(a + n / k, b + E_q A1); the joint gets E tau, and ELBO + `bound_terms` is the bound of
    q(w) q(tau).

    Scales that differ inside a group (`FanIn`, `Layerwise`) keep their ratios, and tau scales their geometric mean;
    means stay. Weights that are points under q keep their prior.

    **Limit**: exact for Gaussian q (any covariance under `Normal` and `Laplace`, a factorised one under `GroupLasso`,
    there to 1e-9), points, and mixtures; for `Samples` the average over their draws. It is unchanged under tempering.
    A point has no spread, so that repeated steps drive the scale of a group that the data do not need to zero.

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

    def check(self, joint: Joint) -> None:
        scale_groups(joint, self.groups)

    def __call__(self, joint: Joint, posterior: Posterior, expected: Expected | None = None) -> Joint:
        random = _random(joint, posterior)
        groups = scale_groups(random, self.groups)
        penalties = zip(groups, expected_penalties(groups, posterior), strict=True)
        factors = [1.0 if group.name == GIVEN else self._factor(group, penalty) for group, penalty in penalties]
        multipliers = torch.tensor(factors, dtype=torch.float64, device=joint.device)
        return dataclasses.replace(joint, prior=rescaled_prior(random, self.groups, multipliers))

    def bound_terms(self, joint: Joint, posterior: Posterior, expected: Expected | None = None) -> float:
        """E log p(tau) / q(tau), and n / k (E log tau - log E tau), over the groups; see `Maximisation`."""
        if self.hyper_prior is None:
            return 0.0
        groups = scale_groups(_random(joint, posterior), self.groups)
        total = sum(self.hyper_prior.bound_terms(group.power, group.tau) for group in groups)
        return float(joint.tempering.prior_power) * total

    def _factor(self, group: ScaleGroup, penalty: float) -> float:
        """The factor (tau / new tau)^(1 / k) of a group's scales."""
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
    """The joint with the random weights of the posterior."""
    fitted = posterior.posteriors[0].joint if isinstance(posterior, Mixture) else posterior.joint
    if not isinstance(fitted, Joint) or fitted.network.layout != joint.network.layout:
        raise TypeError(f"PriorScale: the posterior must be one of the joint's weights. Got one of {shown(fitted)}.")
    return dataclasses.replace(joint, random=fitted.random)


@dataclass(frozen=True)
class NoiseScale(Maximisation):
    """The scale of Gaussian noise from the expected squares of the residuals, in closed form.

    **Math**: 1 / scale^2 = sum_n w_n D / sum_n w_n E_q |y_n - f(x_n)|^2, for N rows of weights w_n and D entries of an
    output row; for a likelihood with a scale for each output, each from its own entries. With `hyper_prior` =
    Gamma(a, b) on the noise precision beta = 1 / scale^2, q(beta) = Gamma(a + count / 2, b + squares / 2); the joint
    gets E beta, and ELBO + `bound_terms` is the bound of q(w) q(beta).

    **Limit**: exact given the expected squares; unchanged under tempering. A learnt noise scale becomes a fixed one.
    Likelihoods that are not Gaussian are refused.

    **Cost**: none beyond the pass over the data that computes the squares.

    **References**: Bishop (2006), eq. 9.68 and section 10.3.

    **Example**:

    >>> import posterity as po
    >>> joint = po.Joint(torch.nn.Linear(2, 1), po.likelihoods.Gaussian(), po.priors.Normal(), num_data=8)
    >>> q = po.posteriors.Point(joint, torch.zeros(3))
    >>> expected = Expected(torch.zeros(1), squares=torch.tensor([2.0]), count=torch.tensor(8.0))
    >>> NoiseScale()(joint, q, expected).likelihood.scale
    0.5
    """

    hyper_prior: Gamma | None = None

    def __post_init__(self) -> None:
        if self.hyper_prior is not None:
            of_kinds(self, hyper_prior=Gamma)

    needs_residuals = True

    def check(self, joint: Joint) -> None:
        _shared(joint)

    def __call__(self, joint: Joint, posterior: Posterior, expected: Expected | None) -> Joint:
        scales = [self._scale(count, squares) for count, squares in _sums(joint, expected)]
        scale, chosen = scales[0] if _shared(joint) else tuple(scales), joint.likelihood.chosen
        return dataclasses.replace(joint, likelihood=Gaussian(scale=scale, chosen=chosen))

    def bound_terms(self, joint: Joint, posterior: Posterior, expected: Expected | None = None) -> float:
        """E log p(beta) / q(beta), and count / 2 (E log beta - log E beta), over the scales; see `Maximisation`."""
        _shared(joint)
        if self.hyper_prior is None:
            return 0.0
        assert isinstance(joint.likelihood, Gaussian)
        scales = torch.as_tensor(joint.likelihood.scale, dtype=torch.float64).reshape(-1).tolist()
        sums = zip(_sums(joint, expected), scales, strict=True)
        total = sum(self.hyper_prior.bound_terms(0.5 * count, scale**-2) for (count, _), scale in sums)
        return float(joint.tempering.likelihood_power) * total

    def _scale(self, count: float, squares: float) -> float:
        if self.hyper_prior is not None:
            return float(self.hyper_prior.updated(0.5 * count, 0.5 * squares).mean ** -0.5)
        if not (squares > 0.0 and count > 0.0):
            raise ValueError(
                f"NoiseScale: the residuals must have positive squares. Got {squares:g} over {count:g} rows. Does the "
                "network know the targets exactly? Give a hyper_prior=Gamma(shape, rate), or leave NoiseScale out."
            )
        return float((squares / count) ** 0.5)


def _shared(joint: Joint) -> bool:
    """Whether all outputs share one noise scale; raise a ValueError where it has no closed form."""
    likelihood = joint.likelihood
    if not isinstance(likelihood, Gaussian):
        raise ValueError(
            f"NoiseScale is for a Gaussian likelihood. Got {shown(likelihood)}. Leave NoiseScale out, and let the "
            "likelihood learn its scale (learn=True) where it has one."
        )
    if likelihood.num_members is not None:
        raise ValueError(
            f"NoiseScale is for one problem. Got noise of {likelihood.num_members} members. Use joint.member(i)."
        )
    if likelihood.log_scale_prior is not None:
        raise ValueError(
            "NoiseScale: a normal prior on the log of the noise has no closed form. Give NoiseScale a "
            "hyper_prior=Gamma(shape, rate) instead of log_scale_prior, or leave NoiseScale out."
        )
    return torch.as_tensor(likelihood.scale).dim() == 0


def _sums(joint: Joint, expected: Expected | None) -> Sequence[tuple[float, float]]:
    """Number of residuals and sum of their expected squares, for each noise scale."""
    shared = _shared(joint)
    if expected is None:
        raise ValueError("NoiseScale needs the expected squares of the residuals. Pass expected=Expected(...).")
    squares = expected.squares.double().reshape(-1).tolist()
    counts = expected.count.double().expand(len(squares)).tolist()
    if shared:
        return [(sum(counts), sum(squares))]
    assert isinstance(joint.likelihood, Gaussian)
    scales = torch.as_tensor(joint.likelihood.scale).numel()
    if len(squares) != scales:
        raise ValueError(f"NoiseScale: the noise has {scales} scales. Got squares of {len(squares)} outputs.")
    return list(zip(counts, squares, strict=True))
