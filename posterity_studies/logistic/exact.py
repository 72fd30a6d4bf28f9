"""The exact posterior by quadrature, its ELBOs, and predictions along rays."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from posterity.model import Batch
from posterity.numerics import Key
from posterity.posteriors import Linearized
from posterity.predictive import Exact as ExactIntegral
from posterity.predictive import Integrator, Probit, ProbitPhi
from posterity_studies.logistic.fits import Regression

LOW, HIGH, POINTS = -9.0, 15.0, 361  # range of each weight: the posterior is skewed to the right
NEGLIGIBLE = 1e-12  # relative to the largest mass; dropping such points changes probabilities by less than 1e-8
NODES = 240  # on each side of a ray
_ROWS = 100_000  # weights at a time
_PRODUCTS = 2_000_000  # of inputs and weights at a time


@dataclass(frozen=True, eq=False)
class Exact:
    """The posterior as masses `mass` (G,) at weights `points` (G, 2) of area `cell`, and the model's log evidence."""

    points: Tensor
    mass: Tensor
    cell: float
    log_evidence: float

    @property
    def mean(self) -> Tensor:
        """Posterior mean (2,)."""
        return self.mass @ self.points

    @property
    def covariance(self) -> Tensor:
        """Posterior covariance (2, 2)."""
        centred = self.points - self.mean
        return centred.T @ (self.mass[:, None] * centred)

    def levels(self, shares: Sequence[float]) -> list[float]:
        """Densities at the borders of the smallest regions that hold these shares of the mass."""
        mass = self.mass.sort(descending=True).values
        indices = torch.searchsorted(mass.cumsum(0), mass.new_tensor(shares))
        return (mass[indices] / self.cell).tolist()

    def probability(self, inputs: Tensor) -> Tensor:
        """p(y = 1 | x) at inputs (N, 2): the sigmoid averaged over the masses."""
        parts = [self.mass @ torch.sigmoid(self.points @ rows.T) for rows in torch.split(inputs, 64)]
        return torch.cat(parts)


def exact_posterior(regression: Regression) -> Exact:
    """The trapezoid rule on a product grid, which converges exponentially for smooth densities that vanish outside."""
    axis = torch.linspace(LOW, HIGH, POINTS, dtype=torch.float64)
    grid = torch.cartesian_prod(axis, axis)  # (G, 2)
    log_joint = log_density(regression, grid)
    total = torch.logsumexp(log_joint, 0)
    mass = (log_joint - total).exp()
    kept = mass > NEGLIGIBLE * mass.max()
    cell = float(axis[1] - axis[0]) ** 2
    return Exact(grid[kept], mass[kept] / mass[kept].sum(), cell, float(total) + math.log(cell))


def log_density(regression: Regression, weights: Tensor) -> Tensor:
    """log p(y, w) of the regression at weights (G, 2)."""
    batch = Batch(regression.inputs, regression.targets.unsqueeze(-1))
    with torch.no_grad():
        return torch.cat([regression.joint.log_density(rows, batch) for rows in torch.split(weights, _ROWS)])


@dataclass(frozen=True, eq=False)
class RayMarginal:
    """The exact posterior of w . x for one input x: masses (S,) at `logits` (S,), fine around 0.

    Far along the ray the sigmoid becomes a step at 0, for which a fixed grid of weights is too coarse.
    """

    logits: Tensor
    mass: Tensor

    def probability(self, distance: Tensor) -> Tensor:
        """p(y = 1 | c x) for each multiple c of `distance` (C,)."""
        return torch.sigmoid(distance[:, None] * self.logits) @ self.mass

    @property
    def limit(self) -> float:
        """The limit of p(y = 1 | c x) as c grows: the posterior probability of w . x > 0."""
        return float(self.mass[self.logits > 0].sum())


def ray_marginal(regression: Regression, direction: Tensor) -> RayMarginal:
    """Integrate the posterior over the weights across the input `direction` (2,).

    Along it: Gauss-Legendre in u on each side of 0 for s = reach u^3; across it: the trapezoid rule.
    """
    length = direction.norm()
    along = direction / length
    across = torch.stack([-along[1], along[0]])
    nodes, weights = _legendre(NODES)
    reach = HIGH
    side, jacobian = reach * nodes**3, 3 * reach * nodes**2 * weights
    position = torch.cat([-side, side])  # (S,)
    width = torch.cat([jacobian, jacobian])
    offset = torch.linspace(-HIGH, HIGH, 241, dtype=torch.float64)
    grid = position[:, None, None] * along + offset[:, None] * across  # (S, T, 2)
    log_joint = log_density(regression, grid.reshape(-1, 2)).reshape(len(position), -1)
    density = width * (log_joint - log_joint.max()).exp().sum(1)
    return RayMarginal(position * length, density / density.sum())


def _legendre(count: int) -> tuple[Tensor, Tensor]:
    """Gauss-Legendre nodes and weights on (0, 1), by the eigenvalues of the Jacobi matrix (Golub and Welsch)."""
    order = torch.arange(1, count, dtype=torch.float64)
    beside = order / (4 * order**2 - 1).sqrt()
    values, vectors = torch.linalg.eigh(torch.diag(beside, 1) + torch.diag(beside, -1))
    return 0.5 * (values + 1), vectors[0].square()


_REACH, _POINTS = 9.0, 181  # standard deviations of q, points of an axis


@dataclass(frozen=True)
class Decomposition:
    """The terms of a Gaussian q, in nats: ELBO = E_q log p(y, w) + entropy, and KL(q || p(w | y))."""

    name: str
    expected_log_joint: float
    entropy: float
    divergence: float

    @property
    def elbo(self) -> float:
        """The lower bound of the log evidence."""
        return self.expected_log_joint + self.entropy


def decompositions(regression: Regression, exact: Exact, fitted: Mapping[str, Linearized]) -> list[Decomposition]:
    """Decompose the ELBO of Laplace's Gaussian, narrower and wider ones, fitted ones, and one with exact moments."""
    mode, covariance = regression.mode.theta, regression.covariance
    return [
        _decomposition("Laplace,\ncovariance / 4", regression, exact, mode, covariance / 4),
        _decomposition("Laplace,\ncovariance \N{MULTIPLICATION SIGN} 4", regression, exact, mode, covariance * 4),
        _decomposition("Laplace", regression, exact, mode, covariance),
        *(
            _decomposition(name.replace(" ", "\n"), regression, exact, q.point(), q.gaussian.precision.covariance())
            for name, q in fitted.items()
        ),
        _decomposition("Exact\nmoments", regression, exact, exact.mean, exact.covariance),
    ]


def _decomposition(name: str, regression: Regression, exact: Exact, mean: Tensor, covariance: Tensor) -> Decomposition:
    """E_q log p(y, w) on a grid along the axes of q; the divergence from E_q [log q - log p(w | y)] on a shifted one.

    The entropy is the closed form, and the log evidence inside log p(w | y) comes from the grid of the posterior, so
    that ELBO + KL meets the log evidence only if all of them are right.
    """
    factor = torch.linalg.cholesky(covariance)
    size = len(mean)
    log_scale = float(factor.diagonal().log().sum())
    weights, mass, _ = _grid(mean, factor, _POINTS)
    expected_log_joint = float(mass @ log_density(regression, weights))
    entropy = 0.5 * size * math.log(2 * math.pi * math.e) + log_scale
    weights, mass, noise = _grid(mean, factor, _POINTS + 20)
    log_q = -0.5 * noise.square().sum(1) - 0.5 * size * math.log(2 * math.pi) - log_scale
    log_posterior = log_density(regression, weights) - exact.log_evidence
    return Decomposition(name, expected_log_joint, entropy, float(mass @ (log_q - log_posterior)))


def _grid(mean: Tensor, factor: Tensor, points: int) -> tuple[Tensor, Tensor, Tensor]:
    """Weights (G, 2), their masses under q (G,), and the standardised weights (G, 2)."""
    axis = torch.linspace(-_REACH, _REACH, points, dtype=torch.float64)
    noise = torch.cartesian_prod(axis, axis)
    mass = torch.exp(-0.5 * noise.square().sum(1))
    return mean + noise @ factor.T, mass / mass.sum(), noise


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


def rays(regression: Regression, fitted: Mapping[str, Linearized], draws: Tensor, far_draws: Tensor) -> list[Ray]:
    """Compute predictions along all rays, with Monte Carlo averages over weights `draws` (S, 2), far away `far_draws`.

    Those far away are more, so that the average tells the limits apart.
    """
    return [_ray(regression, fitted, direction, draws, far_draws) for direction in DIRECTIONS]


def _ray(
    regression: Regression,
    fitted: Mapping[str, Linearized],
    direction: tuple[float, float],
    draws: Tensor,
    far_draws: Tensor,
) -> Ray:
    x = torch.tensor(direction, dtype=torch.float64)
    distance = torch.logspace(-1, 3, 81, dtype=torch.float64)
    indices = torch.cat([distance, torch.tensor([FAR], dtype=torch.float64)])
    inputs = indices[:, None] * x  # (C + 1, 2)
    normal, kappa = ray_limits(regression, x)
    marginal = ray_marginal(regression, x)
    results = {"MAP": regression.mode.predict(inputs).probs[:, 1]}
    results["Laplace, Monte Carlo"] = weight_average(draws, inputs)
    for name, integrator in INTEGRATORS.items():
        results[name] = regression.laplace.predict(inputs, integrator=integrator).probs[:, 1]
    for name, q in fitted.items():
        results[name] = q.predict(inputs, integrator=ExactIntegral()).probs[:, 1]
    results["Exact posterior"] = marginal.probability(indices)
    limit = {
        "MAP": float(regression.mode.theta @ x > 0),
        "Laplace, Monte Carlo": normal,
        "Laplace, exact integral": normal,
        "Laplace, probit Φ": normal,
        "Laplace, probit κ": kappa,
        **{name: float(torch.special.ndtr(_ratio(q, x))) for name, q in fitted.items()},
        "Exact posterior": marginal.limit,
    }
    far = {name: float(values[-1]) for name, values in results.items()}
    far["Laplace, Monte Carlo"] = float(torch.sigmoid(far_draws @ inputs[-1]).mean())
    error = math.sqrt(normal * (1 - normal) / len(far_draws))  # far away each draw gives 0 or 1
    return Ray(direction, distance, {name: values[:-1] for name, values in results.items()}, far, limit, error)


def ray_limits(regression: Regression, direction: Tensor) -> tuple[float, float]:
    """Return limits along c x under Laplace's Gaussian, w . x ~ N(mu, s^2), of the integral and of the kappa form.

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
    together = max(1, _PRODUCTS // len(draws))
    return torch.cat([torch.sigmoid(rows @ draws.T).mean(1) for rows in torch.split(inputs, together)])
