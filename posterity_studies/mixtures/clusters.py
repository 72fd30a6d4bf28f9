"""Five clusters in the plane: the maxima that random starts of EM reach, and the choice of the number of components."""

from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch import Tensor

from posterity.mixtures import BayesianGaussianMixture, GaussianMixture
from posterity.numerics.random import Key

COUNT = 500
CENTRES = ((-3.0, -2.5), (3.2, -2.0), (-3.4, 2.6), (2.6, 2.8), (0.2, 0.2))
SCALES = ((0.9, 0.6), (0.5, 1.1), (0.8, 0.8), (1.1, 0.6), (0.7, 0.7))
STARTS = 50
INITS = {"rows at random": "random_from_data", "k-means++": "k-means++"}
MOST = 8  # components
RESTARTS = 10  # of each number of components
ROUNDS, TOLERANCE = 1000, 1e-6
CONCENTRATION = 0.01  # of the Dirichlet prior: small, so that superfluous components vanish
NEAR = 0.1  # nats within which two ends count as the same maximum
ALIVE = 1.0  # least rows of a component that counts as alive


@dataclass(frozen=True)
class Starts:
    """Final log-likelihoods of EM from each start of one kind, in nats over all rows."""

    kind: str
    ends: tuple[float, ...]

    @property
    def worst(self) -> float:
        """The lowest log-likelihood."""
        return min(self.ends)

    @property
    def middle(self) -> float:
        """The median log-likelihood."""
        return median(self.ends)

    def share_at(self, best: float) -> float:
        """Return the share of starts that reached the maximum `best`."""
        return sum(end > best - NEAR for end in self.ends) / len(self.ends)


@dataclass(frozen=True)
class Components:
    """A number of components: BIC of EM (lower is better), ELBO of the Bayesian mixture, and its components alive."""

    components: int
    bic: float
    elbo: float
    alive: int


@dataclass(frozen=True, eq=False)
class Clusters:
    """The rows (N, 2), ends of the starts, results by number of components, and the Bayesian fit with the most.

    `weights` (K,), `means` (K, 2) and `covariances` (K, 2, 2) belong to its live components.
    """

    rows: Tensor
    starts: tuple[Starts, ...]
    components: tuple[Components, ...]
    weights: Tensor
    means: Tensor
    covariances: Tensor

    @property
    def best(self) -> float:
        """The highest log-likelihood that any start reached."""
        return max(end for start in self.starts for end in start.ends)


def clusters(key: Key) -> Clusters:
    """Run all fits on rows that the key determines."""
    rows = sample(key.fold("rows"))
    starts = tuple(Starts(name, _ends(rows, init, key.fold(init))) for name, init in INITS.items())
    result, fit = [], BayesianGaussianMixture()
    for count in range(1, MOST + 1):
        settings: dict[str, Any] = {"n_init": RESTARTS, "init_params": "k-means++", "random_state": key.fold(count)}
        point = GaussianMixture(count, max_iter=ROUNDS, tol=TOLERANCE, **settings).fit(rows)
        fit = BayesianGaussianMixture(
            count, weight_concentration_prior=CONCENTRATION, max_iter=ROUNDS, tol=TOLERANCE * COUNT, **settings
        ).fit(rows)
        result.append(Components(count, float(point.bic(rows)), float(fit.lower_bound_), int(_alive(fit).sum())))
    alive = _alive(fit)
    return Clusters(rows, starts, tuple(result), fit.weights_[alive], fit.means_[alive], fit.covariances_[alive])


def sample(key: Key) -> Tensor:
    """Draw rows (COUNT, 2) of five clusters of equal weight."""
    where = torch.arange(COUNT) % len(CENTRES)
    centres, scales = (torch.tensor(pairs, dtype=torch.float64, device="cpu")[where] for pairs in (CENTRES, SCALES))
    return centres + scales * key.normal((COUNT, 2), torch.float64, "cpu")


def _ends(rows: Tensor, init: str, key: Key) -> tuple[float, ...]:
    settings: dict[str, Any] = {"init_params": init, "max_iter": ROUNDS, "tol": TOLERANCE}
    fits = (GaussianMixture(len(CENTRES), random_state=key.fold(number), **settings) for number in range(STARTS))
    return tuple(float(mixture.fit(rows).score(rows)) * len(rows) for mixture in fits)


def _alive(fit: BayesianGaussianMixture) -> Tensor:
    """Return a mask (K,) of the components that are alive."""
    held: Tensor = fit.weight_concentration_ - fit.weight_concentration_prior_
    return held > ALIVE
