"""Expected held-out NLL of tempered posteriors, averaged over all weights and data sets in closed form or by sums.

Two ways to temper: the likelihood to the power 1/eta beside the prior as it is, and likelihood and prior both to the
power 1/T. The weights that make the data are drawn from the prior of the model. What is right or wrong is how targets
follow from them.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from posterity.model import Tempering
from posterity.numerics.random import Key

ROWS, INPUTS, PLACES = 20, 10, 200  # of the linear model
CLEAN, EASY = 0.25, 0.5  # variance of clean targets and share of easy rows; the model assumes 1 and 0
LABELS, REACH, SCALE = 8, 2.5, 2.0  # rows of the logistic model, where they lie, and the prior's scale
AGREEING, FLIPPED = 3, 0.15  # annotators that must agree on each row, and share of wrong labels
WEIGHTS, BEYOND = 301, 6.0  # quadrature over the weight, up to so many prior scales
WELL, CLEANER, NOISIER = "as the model says", "cleaner than the model says", "noisier than the model says"


@dataclass(frozen=True, eq=False)
class Linear:
    """y = <w, x> + noise with w ~ N(0, I); the model assumes N(0, 1) noise.

    **Math**: the posterior at powers (l, p) is N(m, S) with S^-1 = l X^T X + p I and m = K y, K = l S X^T. With noise
    of variances v_i at the rows and v at a new x, the squared error has the mean |x - x K X|^2 + sum_i v_i (x K)_i^2 +
    v, and the NLL of N(m x, x S x + 1) follows.
    """

    name: str
    design: Tensor  # (N, D)
    noise: Tensor  # variances of the targets, (N,)
    places: Tensor  # (K, D)
    new_noise: Tensor  # (K,)

    def posterior(self, tempering: Tempering) -> tuple[Tensor, Tensor]:
        """Return K (D, N), such that the mean is K y, and the covariance (D, D)."""
        power, eye = tempering.likelihood_power, torch.eye(self.design.shape[1], dtype=torch.float64, device="cpu")
        covariance = torch.linalg.inv(power * self.design.mT @ self.design + tempering.prior_power * eye)
        return power * covariance @ self.design.mT, covariance

    def nll(self, tempering: Tempering) -> float:
        """Return the expected NLL of a new target, over weights, noise and inputs."""
        gain, covariance = self.posterior(tempering)
        bias = self.places - self.places @ gain @ self.design
        squares = bias.square().sum(-1) + (self.places @ gain).square() @ self.noise + self.new_noise
        variance = ((self.places @ covariance) * self.places).sum(-1) + 1.0
        return float((0.5 * (2.0 * math.pi * variance).log() + 0.5 * squares / variance).mean())


@dataclass(frozen=True, eq=False)
class Logistic:
    """p(y = 1 | x, w) = sigmoid(w x) with w ~ N(0, SCALE^2): sums over all labels of the rows and a grid of weights.

    `truth` are the probabilities (N, G) with which labels of the rows are 1 at each weight, `new_truth` (K, G) those of
    new ones.
    """

    name: str
    design: Tensor  # (N,)
    truth: Tensor
    places: Tensor  # (K,)
    new_truth: Tensor

    def nll(self, tempering: Tempering) -> float:
        """Return the expected NLL of a new label, over weights, all 2^N labels of the rows, and inputs."""
        weights, prior = weight_grid()
        labels = all_labels(len(self.design))  # (2^N, N)
        scores = torch.nn.functional.logsigmoid(self.design.unsqueeze(1) * weights)  # log p(y = 1), (N, G)
        against = torch.nn.functional.logsigmoid(-self.design.unsqueeze(1) * weights)
        log_likelihood = labels @ scores + (1.0 - labels) @ against  # (2^N, G)
        powers = tempering.likelihood_power, tempering.prior_power
        posterior = torch.softmax(powers[0] * log_likelihood + powers[1] * prior.log(), -1)
        predicted = posterior @ torch.sigmoid(self.places.unsqueeze(1) * weights).mT  # (2^N, K)
        chances = (labels @ self.truth.log() + (1.0 - labels) @ (-self.truth).log1p()).exp() * prior  # p(labels, w)
        ones = chances @ self.new_truth.mT  # p(labels, y = 1), (2^N, K)
        zeros = chances.sum(-1, keepdim=True) - ones
        return float(-(ones * predicted.log() + zeros * (-predicted).log1p()).sum(0).mean())


Model = Linear | Logistic


def weight_grid() -> tuple[Tensor, Tensor]:
    """Weights of the logistic model and their prior probabilities, (G,) each."""
    weights = BEYOND * SCALE * torch.linspace(-1.0, 1.0, WEIGHTS, dtype=torch.float64, device="cpu")
    return weights, torch.softmax(-0.5 * (weights / SCALE).square(), -1)


def all_labels(rows: int) -> Tensor:
    """Return all labellings of N rows, (2^N, N)."""
    return torch.cartesian_prod(*[torch.tensor([0.0, 1.0], dtype=torch.float64, device="cpu")] * rows)


def linear_models(key: Key) -> dict[str, Model]:
    """Return the linear model with targets of three kinds; rows and inputs are drawn once."""
    design = key.fold("rows").normal((ROWS, INPUTS), torch.float64, "cpu")
    inputs = key.fold("places").normal((PLACES, INPUTS), torch.float64, "cpu")
    rows, new = torch.ones(ROWS, dtype=torch.float64), torch.ones(PLACES, dtype=torch.float64)
    # Grunwald and van Ommen: easy rows have x = 0 and no noise, so that the others have more than the mean of 1
    hard = (torch.arange(ROWS) >= EASY * ROWS).double()
    louder = 1.0 / (1.0 - EASY)
    return {
        WELL: Linear("noise variance 1", design, rows, inputs, new),
        CLEANER: Linear(f"noise variance {CLEAN:g}", design, CLEAN * rows, inputs, CLEAN * new),
        NOISIER: Linear(
            f"{EASY:.0%} of rows easy, the others with variance {louder:g}",
            design * hard.unsqueeze(1),
            louder * hard,
            inputs,
            louder * new,
        ),
    }


def logistic_models() -> dict[str, Model]:
    """Return the logistic model with labels of three kinds."""
    design = torch.linspace(-REACH, REACH, LABELS, dtype=torch.float64, device="cpu")
    inputs = torch.linspace(-REACH, REACH, 41, dtype=torch.float64, device="cpu")
    weights, _ = weight_grid()

    def made(name: str, power: float, flipped: float) -> Logistic:
        truths = [
            flipped + (1.0 - 2.0 * flipped) * torch.sigmoid(power * at.unsqueeze(1) * weights)
            for at in (design, inputs)
        ]
        return Logistic(name, design, truths[0].clamp(1e-300, 1.0 - 1e-16), inputs, truths[1])

    return {
        WELL: made("one labeller", 1.0, 0.0),
        CLEANER: made(f"labels on which {AGREEING} labellers agree", AGREEING, 0.0),
        NOISIER: made(f"{FLIPPED:.0%} of labels wrong", 1.0, FLIPPED),
    }
