"""Three classes: the softmax of Gaussian logits by mean-field probit and by Monte Carlo, against quadrature."""

from dataclasses import dataclass

import torch
from torch import Tensor

from posterity.datasets.toys import blobs
from posterity.numerics import Key
from posterity.predictive import Exact as ExactIntegral
from posterity.predictive import Probit
from posterity_studies.logistic.fits import PRIOR_SCALE, Regression, fit

NUM_DATA, NOISE = 24, 1.1
REACH = 8.0  # of the map
DRAWS = 10_000
_ROWS = 64  # of the map at a time


@dataclass(frozen=True, eq=False)
class MultiClass:
    """The fitted regression, and class probabilities (N, 3) by method at the points (N, 2) of the map."""

    regression: Regression
    axis: Tensor
    probs: dict[str, Tensor]

    def error(self, method: str) -> Tensor:
        """Total variation distance (N,) of a method's probabilities from the exact integral."""
        return 0.5 * (self.probs[method] - self.probs["Laplace, exact integral"]).abs().sum(1)


def multiclass(points: int, seed: int) -> MultiClass:
    """Fit softmax(W x), x with a 1 appended for the bias, to three overlapping clouds; predict at points x points."""
    rows = blobs(NUM_DATA, NOISE, seed=seed, test=3).train
    regression = fit(with_bias(rows.inputs.double()), rows.targets, PRIOR_SCALE, num_classes=3)
    axis = torch.linspace(-REACH, REACH, points, dtype=torch.float64)
    inputs = with_bias(torch.cartesian_prod(axis, axis))
    laplace = regression.laplace
    probs = {
        "MAP": regression.mode.predict(inputs).probs,
        "Laplace, mean-field probit": laplace.predict(inputs, integrator=Probit()).probs,
        "Laplace, Monte Carlo": softmax_average(laplace.sample(DRAWS, Key(seed).fold("classes")), inputs),
        "Laplace, exact integral": laplace.predict(inputs, integrator=ExactIntegral()).probs,
    }
    return MultiClass(regression, axis, probs)


def softmax_average(draws: Tensor, inputs: Tensor) -> Tensor:
    """(1/S) sum_s softmax(W_s x) over weights (S, P) at inputs (N, D); the rows share the draws, so maps are smooth."""
    weights = draws.reshape(len(draws), -1, inputs.shape[1])  # (S, K, D)
    parts = [torch.einsum("nd,skd->nsk", rows, weights).softmax(-1).mean(1) for rows in torch.split(inputs, _ROWS)]
    return torch.cat(parts)


def with_bias(inputs: Tensor) -> Tensor:
    """Append a column of ones to inputs (N, D), (N, D + 1)."""
    return torch.cat([inputs, torch.ones_like(inputs[:, :1])], dim=1)
