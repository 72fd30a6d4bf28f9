"""The Gamma density of an unknown precision or rate."""

import math
from dataclasses import dataclass

import torch

from posterity.errors import positive


@dataclass(frozen=True)
class Gamma:
    """Gamma(shape, rate) of a positive number tau: a hyper-prior, or what is known of tau under q.

    **Math**: p(tau) = rate^shape tau^(shape - 1) exp(-rate tau) / Gamma(shape), of mean shape / rate. After `count` log
    tau - tau `total` in the expected log density of all that depends on tau, q(tau) = Gamma(shape + count, rate +
    total).

    **Limit**: conjugate to precisions of normals and to rates of exponential densities, so that q(tau) is exact given
    the rest of q. Small `shape` and `rate` say little about tau.

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
        """That of tau, in nats."""
        return self.shape + math.lgamma(self.shape) - (self.shape - 1.0) * self.mean_log - self.shape * self._log_rate

    def updated(self, count: float, total: float) -> "Gamma":
        """What is known of tau after a term `count` log tau - tau `total`."""
        return Gamma(self.shape + count, self.rate + total)

    def expected_log_density(self, of: "Gamma") -> float:
        """E log p(tau) for tau ~ `of`, p being this density."""
        constant = self.shape * self._log_rate - math.lgamma(self.shape)
        return constant + (self.shape - 1.0) * of.mean_log - self.rate * of.mean

    def bound_terms(self, count: float, mean: float) -> float:
        """What q(tau) = Gamma(shape + count, .) of this mean adds to a bound that has tau fixed at the mean.

        E log p(tau) / q(tau), and `count` (E log tau - log E tau) for the term `count` log tau of that bound.
        """
        shape = self.shape + count
        q = Gamma(shape, shape / mean)
        return self.expected_log_density(q) + q.entropy + count * (q.mean_log - math.log(mean))

    @property
    def _log_rate(self) -> float:
        return math.log(self.rate)
