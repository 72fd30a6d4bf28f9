"""p(y = 1 | c x) along rays: what each approximation gives, and where theory says it ends."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from posterity.numerics import Key
from posterity.posteriors import Linearized
from posterity.predictive import Exact as ExactIntegral
from posterity.predictive import Integrator, Probit, ProbitPhi
from posterity_studies.logistic.exact import ray_marginal
from posterity_studies.logistic.regression import Regression

DIRECTIONS = ((0.5, 0.5), (-1.0, 1.0), (-0.2, -0.9))
FAR = 1e4
INTEGRATORS: dict[str, Integrator] = {
    "Laplace, exact integral": ExactIntegral(),
    "Laplace, probit Φ": ProbitPhi(),
    "Laplace, probit κ": Probit(),
}


@dataclass(frozen=True, eq=False)
class Ray:
    """One ray: its direction, distances c (C,), and by method the probabilities (C,), the far value and the limit.

    `monte_carlo_error` is the standard error of the far Monte Carlo value.
    """

    direction: tuple[float, float]
    distance: Tensor
    probability: dict[str, Tensor]
    far: dict[str, float]
    limit: dict[str, float]
    monte_carlo_error: float


def rays(regression: Regression, variational: Mapping[str, Linearized], draws: Tensor, far_draws: Tensor) -> list[Ray]:
    """Every direction of the study, with Monte Carlo averages over weight `draws` (S, 2), far away `far_draws`.

    Those far away are more, so that the average tells the limits apart.
    """
    return [_ray(regression, variational, direction, draws, far_draws) for direction in DIRECTIONS]


def _ray(
    regression: Regression,
    variational: Mapping[str, Linearized],
    direction: tuple[float, float],
    draws: Tensor,
    far_draws: Tensor,
) -> Ray:
    x = torch.tensor(direction, dtype=torch.float64)
    distance = torch.logspace(-1, 3, 161, dtype=torch.float64)
    places = torch.cat([distance, torch.tensor([FAR], dtype=torch.float64)])
    inputs = places[:, None] * x  # (C + 1, 2)
    normal, kappa = ray_limits(regression, x)
    marginal = ray_marginal(regression, x)
    found = {"MAP": regression.mode.predict(inputs).probs[:, 1]}
    found["Laplace, Monte Carlo"] = weight_average(draws, inputs)
    for name, integrator in INTEGRATORS.items():
        found[name] = regression.laplace.predict(inputs, integrator=integrator).probs[:, 1]
    for name, q in variational.items():
        found[name] = q.predict(inputs, integrator=ExactIntegral()).probs[:, 1]
    found["Exact posterior"] = marginal.probability(places)
    limit = {
        "MAP": float(regression.mode.theta @ x > 0),
        "Laplace, Monte Carlo": normal,
        "Laplace, exact integral": normal,
        "Laplace, probit Φ": normal,
        "Laplace, probit κ": kappa,
        **{name: float(torch.special.ndtr(_ratio(q, x))) for name, q in variational.items()},
        "Exact posterior": marginal.limit,
    }
    far = {name: float(values[-1]) for name, values in found.items()}
    far["Laplace, Monte Carlo"] = float(torch.sigmoid(far_draws @ inputs[-1]).mean())
    error = math.sqrt(normal * (1 - normal) / len(far_draws))  # far away each draw gives 0 or 1
    return Ray(direction, distance, {name: values[:-1] for name, values in found.items()}, far, limit, error)


def ray_limits(regression: Regression, direction: Tensor) -> tuple[float, float]:
    """Limits along c x under the Laplace Gaussian, where w . x ~ N(mu, s^2): of the integral and of the kappa form.

    Phi(mu / s) is where the exact integral and the Phi form end, sigmoid(mu / (s sqrt(pi / 8))) the kappa form.
    """
    ratio = _ratio(regression.laplace, direction)
    return float(torch.special.ndtr(ratio)), float(torch.sigmoid(ratio / math.sqrt(math.pi / 8)))


def _ratio(posterior: Linearized, direction: Tensor) -> Tensor:
    """mu / s of w . x ~ N(mu, s^2)."""
    covariance = posterior.gaussian.precision.covariance()
    return (posterior.point() @ direction) / (direction @ covariance @ direction).sqrt()


def weight_draws(regression: Regression, draws: int, seed: int) -> Tensor:
    """Weights (S, 2) of the Laplace posterior."""
    return regression.laplace.sample(draws, Key(seed).fold("weights"))


def weight_average(draws: Tensor, inputs: Tensor) -> Tensor:
    """(1/S) sum_s sigmoid(w_s . x) over weights (S, 2) at inputs (N, 2); the rows share the draws."""
    return torch.cat([torch.sigmoid(rows @ draws.T).mean(1) for rows in torch.split(inputs, 256)])
