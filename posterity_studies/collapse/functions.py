"""Functions drawn from priors of networks, before and after matching to a Gaussian process."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from posterity.numerics.random import Key
from posterity.theory import FunctionPrior, matched_prior, wasserstein_distance

REACH, POINTS, MATCHED = 3.0, 121, 25  # inputs of the curves, and how many of them priors are matched at
LENGTH = 1.8  # of the Gaussian process
WIDTH, DRAWS = 1000, 8
NARROW, MANY = 5, 20_000  # networks whose covariance is compared with the formula


@dataclass(frozen=True, eq=False)
class Functions:
    """Draws (DRAWS, POINTS) and covariances (POINTS, POINTS) by name, at inputs `x` (POINTS,).

    `distances` are 2-Wasserstein distances from the process per input. `narrow_error` is how far the variances of many
    networks of five neurons are from the formula, in standard errors, at most.
    """

    x: Tensor
    draws: dict[str, Tensor]
    covariances: dict[str, Tensor]
    distances: dict[str, float]
    prior: FunctionPrior
    narrow_error: float

    def claims(self) -> dict[str, bool]:
        """Claims about function priors, and whether they hold here."""
        plain, matched = self.distances[PLAIN], self.distances[CLOSE]
        return {
            "matched scales bring the prior nearer to the Gaussian process": matched < 0.8 * plain,
            "the covariance is that of the wide limit at every width": self.narrow_error < 5.0,
        }


PLAIN, CLOSE, PROCESS = "scales of 1", "matched scales", "Gaussian process"


def functions(key: Key) -> Functions:
    """Draw functions of each prior; only the draws are random."""
    x = torch.linspace(-REACH, REACH, POINTS, dtype=torch.float64, device="cpu").unsqueeze(1)
    wanted = _squared_exponential(x)
    few = x[:: (POINTS - 1) // (MATCHED - 1)]
    plain, close = FunctionPrior(), matched_prior(few, _squared_exponential(few))
    covariances = {PLAIN: plain.covariance(x), CLOSE: close.covariance(x), PROCESS: wanted}
    draws = {name: prior.draw(x, WIDTH, DRAWS, key.fold(name)) for name, prior in ((PLAIN, plain), (CLOSE, close))}
    values, vectors = torch.linalg.eigh(wanted)
    noise = key.fold(PROCESS).normal((DRAWS, POINTS), torch.float64, "cpu")
    draws[PROCESS] = noise * values.clamp_min(0.0).sqrt() @ vectors.mT
    distances = {name: float(wasserstein_distance(own, wanted)) for name, own in covariances.items()}
    return Functions(x.squeeze(1), draws, covariances, distances, close, _narrow_error(close, few, key.fold("narrow")))


def _squared_exponential(x: Tensor) -> Tensor:
    return (-0.5 * ((x - x.mT) / LENGTH).square()).exp()


def _narrow_error(prior: FunctionPrior, x: Tensor, key: Key) -> float:
    """The largest distance of mean squares of f from the formula, in standard errors."""
    squares = prior.draw(x, NARROW, MANY, key).square()
    off = squares.mean(0) - prior.covariance(x).diagonal()
    return float((off / (squares.std(0) / math.sqrt(MANY))).abs().max())
