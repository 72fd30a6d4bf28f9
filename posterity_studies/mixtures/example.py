"""A mixture of two normal densities in one dimension: points, complete-data estimates, and EM with its history."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from posterity.evidence import jensen
from posterity.inference import infer
from posterity.inference.callbacks import Callback
from posterity.inference.run import Run
from posterity.methods import ExpectationMaximization
from posterity.model import Density
from posterity.model.density import Positive, Simplex
from posterity.numerics.random import Key

COUNT = 200
UNKNOWN = -1
ROUNDS, TOLERANCE = 2000, 1e-13
SHAPES = {"weights": (2,), "means": (2,), "variances": (2,)}
Values = Mapping[str, Tensor]


def values(weight: float, means: tuple[float, float], variances: tuple[float, float]) -> dict[str, Tensor]:
    """Parameters of the mixture; `weight` is p(z = 1), and component 1 comes first."""
    given = {"weights": (weight, 1.0 - weight), "means": means, "variances": variances}
    return {name: torch.tensor(pair, dtype=torch.float64, device="cpu") for name, pair in given.items()}


TRUTH = values(0.4, (2.0, -1.3), (0.64, 1.0))
START = values(0.5, (0.4, -0.4), (1.0, 1.0))
MINIATURE = (4.3, 6.0, 7.2, 3.8, 4.9, 6.6, 4.1, 7.9, 5.2, 3.5, 6.9, 7.4)
MINIATURE_START = values(0.5, (6.5, 4.5), (1.0, 1.0))


@dataclass(frozen=True, eq=False)
class Sample:
    """Points (N,), and the component of each (0 is z = 1), or UNKNOWN."""

    points: Tensor
    labels: Tensor


def sample(count: int, truth: Values, key: Key) -> Sample:
    """Points of the mixture with the true values, and their components."""
    labels = (key.fold("labels").uniform((count,), torch.float64, "cpu") >= truth["weights"][0]).long()
    noise = key.fold("noise").normal((count,), torch.float64, "cpu")
    return Sample(truth["means"][labels] + truth["variances"][labels].sqrt() * noise, labels)


def miniature() -> Sample:
    """Twelve points with unknown components."""
    points = torch.tensor(MINIATURE, dtype=torch.float64, device="cpu")
    return Sample(points, torch.full((len(points),), UNKNOWN))


def unlabelled(data: Sample) -> Sample:
    """Return the points with unknown components."""
    return Sample(data.points, torch.full_like(data.labels, UNKNOWN))


def log_joint(data: Sample, at: Values) -> Tensor:
    """log p(y_n, z | values), (..., N, 2); minus infinity where a label says that z is another one."""
    weights, means, variances = (at[name].unsqueeze(-2) for name in SHAPES)
    squares = (data.points.unsqueeze(-1) - means).square() / variances
    table = weights.log() - 0.5 * (squares + variances.log() + math.log(2.0 * math.pi))
    other = (data.labels.unsqueeze(-1) != torch.arange(2)) & (data.labels != UNKNOWN).unsqueeze(-1)
    return table.masked_fill(other, -torch.inf)


def log_likelihood(data: Sample, at: Values) -> Tensor:
    """log p(y | values), with the labels that are known, summed over the points."""
    return jensen.log_likelihood(log_joint(data, at)).sum(-1)


def maximised(data: Sample, q: Tensor) -> dict[str, Tensor]:
    """The values that maximise E_q log p(y, z | values): weighted class statistics, q (..., N, 2)."""
    counts, points = q.sum(-2), data.points.unsqueeze(-1)
    means = (q * points).sum(-2) / counts
    variances = (q * (points - means.unsqueeze(-2)).square()).sum(-2) / counts
    return {"weights": counts / q.shape[-2], "means": means, "variances": variances}


def complete(data: Sample) -> dict[str, Tensor]:
    """Return the maximum likelihood for known components: one M-step with the labels as q."""
    return maximised(data, torch.nn.functional.one_hot(data.labels, 2).to(data.points))


@dataclass(frozen=True, eq=False)
class Rounds:
    """A run of EM: the values before each round and after the last, and the bounds after each E- and M-step, (T,)."""

    history: tuple[dict[str, Tensor], ...]
    after_e: Tensor
    after_m: Tensor

    @property
    def end(self) -> dict[str, Tensor]:
        """The values after the last round."""
        return self.history[-1]

    def staircase(self) -> Tensor:
        """The bound after every half-step, (2 T,)."""
        return torch.stack([self.after_e, self.after_m], 1).flatten()


class History(Callback):
    """Records theta and the result of the E-step after every round."""

    def __init__(self) -> None:
        self.thetas: list[Tensor] = []
        self.latents: list[dict[str, Tensor]] = []

    def after_step(self, run: Run) -> None:
        self.thetas.append(run.state.theta[0].clone())
        self.latents.append({name: value[0].clone() for name, value in run.state.latent.items()})


def expectation_maximization(data: Sample, start: Values) -> Rounds:
    """Run EM from `start` until the bound no longer rises."""
    density = Density(
        lambda **at: log_likelihood(data, at),
        SHAPES,
        {"weights": Simplex(), "variances": Positive()},
        dtype=torch.float64,
        device=torch.device("cpu"),
    )
    method = ExpectationMaximization(
        expectation=lambda at, latent: {"q": jensen.posterior(log_joint(data, at))},
        maximisation=lambda at, latent: maximised(data, latent["q"]),
        bound=lambda at, latent: jensen.jensen_bound(log_joint(data, at), latent["q"]).sum(),
        rounds=ROUNDS,
        tolerance=TOLERANCE,
    )
    history, first = History(), density.unconstrained(start)
    _, trace = infer(method, density, None, start=first, callbacks=[history], progress=False)
    result = tuple(density.constrained(theta) for theta in (first, *history.thetas))
    return Rounds(result, trace["bound"][:, 0], trace["bound_after_m"][:, 0])
