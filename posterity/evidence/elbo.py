"""The evidence lower bound, in closed form where possible and by draws elsewhere."""

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from posterity.curvature.survey import survey
from posterity.errors import BadData, positive_whole, shown
from posterity.model.data import Data, TensorData
from posterity.model.density import Density
from posterity.model.joint import Joint
from posterity.model.network import Buffers
from posterity.model.problem import Problem, data_of
from posterity.model.scales import random_log_prior
from posterity.model.tempering import Tempering
from posterity.numerics.random import Key
from posterity.posteriors.gaussian import Gaussian
from posterity.posteriors.linearized import Linearized
from posterity.posteriors.posterior import Posterior
from posterity.posteriors.samples import TOGETHER, batches
from posterity.priors import Correlated, Normal

LARGE = 1 << 26  # numbers in the draws held at a time


def whole(joint: Problem, data: object) -> Data:
    """Return all data of the problem, checked, on its device; raise BadData if they do not suit it."""
    rows = data_of(joint, data).to(joint.device)
    if isinstance(rows, TensorData) and rows.rows.per_member:
        raise BadData("The evidence belongs to one data set. Pass the rows of one member, without a member axis.")
    return joint.checked(rows)


def in_blocks(sample: Callable[[int, Key], Tensor], draws: int, size: int, key: Key) -> Iterator[Tensor]:
    """Yield draws in blocks (s, P) of at most `LARGE` numbers, P = `size`."""
    step = max(1, LARGE // max(1, size))
    for low in range(0, draws, step):
        yield sample(min(step, draws - low), key.fold(low))


def log_likelihoods(joint: Problem, thetas: Tensor, data: Data, buffers: Buffers) -> Tensor:
    """sum_n w_n log p(y_n | f(x_n)) over all data at weights (S, P), untempered: (S,) in float64.

    For a `Density`, which has no separate likelihood, it is the whole log density.
    """
    if isinstance(joint, Density):
        return joint.log_density(thetas).to(torch.float64)
    total = torch.zeros(len(thetas), dtype=torch.float64, device=thetas.device)
    for batch in batches(data):
        share, step = batch.size / joint.num_data, max(1, TOGETHER // batch.size)
        for low in range(0, len(thetas), step):
            block = thetas[low : low + step]
            part = joint.log_likelihood(block[0] if step == 1 else block, batch, buffers or None)
            total[low : low + step] += part.to(torch.float64) * share
    return total


@dataclass(frozen=True)
class Elbo:
    """The terms of an evidence lower bound, in nats over all data, with their standard errors.

    `data_fit` is E_q log p(D | w), `kl` is KL(q || prior), both untempered, and `entropy` is H(q). `errors` holds the
    variances of the first two estimates and their covariance, zero for closed forms.
    """

    data_fit: float
    kl: float
    entropy: float
    num_data: int
    tempering: Tempering = dataclasses.field(default_factory=Tempering.bayes)
    errors: tuple[float, float, float] = (0.0, 0.0, 0.0)

    @property
    def elbo(self) -> float:
        """data_fit - kl, at most the log evidence of the untempered problem."""
        return self.data_fit - self.kl

    @property
    def tempered(self) -> float:
        """data_fit - eta kl with the eta of the tempering: the objective of a tempered fit (`elbo` for eta = 1)."""
        return self.data_fit - float(self.tempering.eta) * self.kl

    @property
    def bound(self) -> float:
        """At most the log normaliser of the tempered density, log of the integral of L^lp P0^pp.

        lp E log p(D | w) + pp E log p0(w) + entropy, which `log_evidence` of a tempered Laplace fit approximates.
        """
        likelihood_power, prior_power = self._powers
        return likelihood_power * self.data_fit - prior_power * (self.kl + self.entropy) + self.entropy

    @property
    def data_fit_standard_error(self) -> float:
        """Standard error of `data_fit`, zero for a closed form."""
        return self._standard_error(1.0, 0.0)

    @property
    def kl_standard_error(self) -> float:
        """Standard error of `kl`, zero for a closed form."""
        return self._standard_error(0.0, 1.0)

    @property
    def standard_error(self) -> float:
        """Standard error of `elbo`, zero for a closed form."""
        return self._standard_error(1.0, 1.0)

    @property
    def tempered_standard_error(self) -> float:
        """Standard error of `tempered`."""
        return self._standard_error(1.0, float(self.tempering.eta))

    @property
    def bound_standard_error(self) -> float:
        """Standard error of `bound`."""
        return self._standard_error(*self._powers)

    @property
    def per_datum(self) -> "Elbo":
        """The terms divided by the number of rows."""
        count = self.num_data
        fit, kl, both = (value / count**2 for value in self.errors)
        return Elbo(self.data_fit / count, self.kl / count, self.entropy / count, 1, self.tempering, (fit, kl, both))

    @property
    def _powers(self) -> tuple[float, float]:
        return float(self.tempering.likelihood_power), float(self.tempering.prior_power)

    def _standard_error(self, a: float, b: float) -> float:
        """Standard error of a data_fit - b kl."""
        fit, kl, both = self.errors
        return math.sqrt(max(0.0, a**2 * fit + b**2 * kl - 2.0 * a * b * both))


def elbo(posterior: Posterior, data: object, *, draws: int = 100, seed: int = 0) -> Elbo:
    """The evidence lower bound E_q log p(D | w) - KL(q || prior) of a Gaussian q, in closed form where there is one.

    **Math**: log p(D) = ELBO(q) + KL(q || p(w | D)). The data fit is the mean of log p(D | w_s) over draws w_s ~ q. For
    a network that is linear in its random weights with Gaussian noise it is log p(D | mean) - sum of Var f / (2 s^2).
    KL(q || prior) is in closed form (or by quadrature) for priors of independent weights, and for any prior that has a
    cross-entropy where q is factorised; otherwise it is the mean of log q(w_s) - log p(w_s) over the same draws.

    **Limit**: unbiased, with its standard error, over the whole data, untempered and tempered. A `Linearized`
    posterior is taken as the Gaussian over the weights of the network itself, so that the bound holds for the network.
    Weights that are points are given, and their prior has no part in it. For a `Density`, which has no separate
    likelihood, the data fit is E log density and the KL minus the entropy.

    **Cost**: `draws` forward passes over the data, or one with derivatives for linear models.

    **References**: Graves (2011), Practical variational inference for neural networks; Blei et al. (2017).

    **Example**:

    >>> import posterity as po
    >>> x = torch.linspace(-1, 1, 10, dtype=torch.float64).unsqueeze(1)
    >>> linear = torch.nn.Linear(1, 1, dtype=torch.float64)
    >>> joint = po.Joint(linear, po.likelihoods.Gaussian(scale=0.5), po.priors.Normal(), num_data=10)
    >>> q, _ = po.infer(po.methods.Conjugate(), joint, (x, 2 * x))
    >>> bound = elbo(q, (x, 2 * x))
    >>> abs(bound.elbo - float(q.log_evidence)) < 1e-8, bound.standard_error
    (True, 0.0)
    """
    gaussian = posterior.as_gaussian()
    if gaussian is None:
        raise TypeError(
            f"elbo: the posterior must be a Gaussian over weights. Got {shown(type(posterior).__name__)}. Use that "
            "of Laplace, MeanField or another method that makes one, or one of a mixture's `posteriors`."
        )
    if gaussian.num_members is not None:
        raise TypeError(f"elbo: this holds {gaussian.num_members} separate posteriors. Choose one: elbo(q.member(0)).")
    positive_whole("elbo: draws", draws)
    if draws < 2:
        raise ValueError("elbo: draws must be at least 2, for a standard error. Got 1.")
    rows = whole(gaussian.joint, data)
    with torch.no_grad():
        fit, kl = _exact_fit(gaussian, rows), exact_kl(gaussian)
        columns = [] if fit is not None and kl is not None else _at_draws(gaussian, rows, draws, seed, fit is None)
    return assembled(gaussian, fit, kl, columns)


def assembled(gaussian: Gaussian, fit: float | None, kl: float | None, columns: Sequence[Tensor]) -> Elbo:
    """Assemble the bound from a data fit and a KL in closed form, or else from their values (S,) at draws.

    `columns` are log p(D | w_s) and log q(w_s) - log p(w_s), none where both have closed forms.
    """
    errors = (0.0, 0.0, 0.0)
    if columns and len(columns[0]) > 1:
        pairs = zip(columns, (fit, kl), strict=True)  # a closed form has no variance
        varying = torch.stack([column if exact is None else torch.zeros_like(column) for column, exact in pairs])
        spread = torch.cov(varying) / len(columns[0])
        errors = (float(spread[0, 0]), float(spread[1, 1]), float(spread[0, 1]))
    fit = float(columns[0].mean()) if fit is None else fit
    kl = float(columns[1].mean()) if kl is None else kl
    joint = gaussian.joint
    return Elbo(fit, kl, float(gaussian.entropy), joint.num_data, joint.tempering, errors)


def exact_kl(gaussian: Gaussian) -> float | None:
    """KL(q || prior) over the random weights, in closed form or by one-dimensional quadratures, else None."""
    joint, entropy = gaussian.joint, float(gaussian.entropy)
    if not isinstance(joint, Joint):
        return -entropy
    prior, index, mean = joint.bound_prior, joint.random_indices, gaussian.mean.to(torch.float64)
    factorised = gaussian.precision.is_diagonal
    if not (factorised or prior.factorises):
        return None
    scale = gaussian.variance.sqrt()
    if index is not None:
        if not isinstance(prior, (Normal, Correlated)):  # others would need a quadrature at zero scale
            return None
        points = joint.log_prior(mean) - random_log_prior(joint, mean)
        spread = torch.zeros_like(mean).index_copy(0, index, scale)
        return float(prior.cross_entropy(mean, spread) + points) - entropy
    try:
        factors = float(prior.kl(mean, scale))
    except TypeError:  # no cross-entropy: say, the weights of a tensor share a random scale
        return None
    if factorised:
        return factors
    return factors + float((scale.log() + 0.5 * math.log(2.0 * math.pi * math.e)).sum()) - entropy


def _exact_fit(gaussian: Gaussian, data: Data) -> float | None:
    """E log p(D | w) for a network that is linear in its random weights with Gaussian noise, else None."""
    joint = gaussian.joint
    if not isinstance(joint, Joint) or joint.likelihood.link != "identity":
        return None
    functions, total = Linearized(joint, gaussian), 0.0
    for batch in batches(data):
        if not survey(joint, batch.inputs).only_head:
            return None
        mean, variance = functions.output_moments(batch.inputs, marginal=True)
        by_entry = batch.weights is not None and batch.weights.dim() > 1
        expected = joint.likelihood.expected_entry_log_prob if by_entry else joint.likelihood.expected_log_prob
        each = expected(mean, variance, batch.targets)
        total += float((each if batch.weights is None else each * batch.weights).sum(dtype=torch.float64))
    return total


def _at_draws(gaussian: Gaussian, data: Data, draws: int, seed: int, fit: bool) -> list[Tensor]:
    """Return log p(D | w_s) (zeros without `fit`) and log q(w_s) - log p(w_s), (S,) each."""
    joint, fits, ratios = gaussian.joint, [], []
    for thetas in in_blocks(gaussian.sample, draws, joint.size, Key(seed).fold("elbo")):
        prior = random_log_prior(joint, thetas.to(torch.float64))
        ratios.append(gaussian.log_density(thetas) - prior)
        fits.append(log_likelihoods(joint, thetas, data, gaussian.buffers) if fit else torch.zeros_like(prior))
    return [torch.cat(fits), torch.cat(ratios)]
