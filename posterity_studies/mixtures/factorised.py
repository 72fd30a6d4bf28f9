"""Variational EM with a q of two factors, compared with EM: its bound stays below the log-likelihood by a KL.

A point is y = z_1 w_1 + z_2 w_2 + noise, where z_1 and z_2 are fair coins. Given y they depend on each other (either of
the two explains the point), so that no product q_1(z_1) q_2(z_2) is their posterior. With four values of z the
log-likelihood is a sum.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from posterity.evidence import jensen
from posterity.inference import infer
from posterity.methods import CoordinateAscent, ExpectationMaximization
from posterity.model import Density
from posterity.model.density import Positive
from posterity.numerics.random import Key
from posterity_studies.mixtures.example import History, Values

COUNT = 200
ROUNDS = 40
WEIGHTS, NOISE = ((2.0, 1.0), (1.0, 2.0)), 1.0
START, START_VARIANCE = ((2.5, 0.0), (0.0, 2.5)), 2.0
FACTORS: Mapping[str, Mapping[str, tuple[int, ...]]] = {
    "EM": {"q": (0, 1)},
    "variational EM": {"first": (0,), "second": (1,)},
}
HIDDEN = 2


@dataclass(frozen=True, eq=False)
class Ascent:
    """A run: before each round the log-likelihood, after its E-step the bound and KL(q || p(z | y)), (T,) each.

    `covariance` is the mean over the points of |Cov(z_1, z_2)| under p(z | y) at the end.
    """

    log_likelihood: Tensor
    bound: Tensor
    divergence: Tensor
    covariance: float

    @property
    def off(self) -> float:
        """The largest distance of log-likelihood minus bound from the KL, which is computed without them."""
        return float((self.log_likelihood - self.bound - self.divergence).abs().max())

    @property
    def largest_fall(self) -> float:
        """The largest fall of the log-likelihood in a round; 0 if it never fell."""
        return max(0.0, float(-self.log_likelihood.diff().min()))


def points(key: Key) -> Tensor:
    """Draw the points, (COUNT, 2)."""
    coins = (key.fold("coins").uniform((COUNT, 2), torch.float64, "cpu") < 0.5).double()
    noise = key.fold("noise").normal((COUNT, 2), torch.float64, "cpu")
    return coins @ _tensor(WEIGHTS) + NOISE * noise


def ascents(key: Key) -> dict[str, Ascent]:
    """Run both from the same start on the same points."""
    rows = points(key)
    return {name: _ascent(rows, factors) for name, factors in FACTORS.items()}


def log_joint(rows: Tensor, at: Values) -> Tensor:
    """log p(y_n, z_1, z_2 | values), (N, 2, 2)."""
    means = _states() @ at["weights"]  # (4, 2)
    squares = (rows.unsqueeze(1) - means).square().sum(-1) / at["variance"]
    constant = 2.0 * math.log(0.5) - math.log(2.0 * math.pi) - at["variance"].log()
    return (constant - 0.5 * squares).reshape(len(rows), 2, 2)


def table(latent: Values) -> Tensor:
    """q(z_1, z_2) of each point, (N, 2, 2), from its factors."""
    if "q" in latent:
        return latent["q"]
    return latent["first"].unsqueeze(2) * latent["second"].unsqueeze(1)


def maximised(rows: Tensor, q: Tensor) -> dict[str, Tensor]:
    """Weights (2, 2) and variance that maximise E_q log p(y, z | values): a regression of y on z."""
    states, flat = _states(), q.flatten(1)  # (4, 2), (N, 4)
    means = flat @ states
    products = torch.einsum("ns,si,sj->ij", flat, states, states)
    weights = torch.linalg.solve(products, means.mT @ rows)
    squares = (rows.unsqueeze(1) - states @ weights).square().sum(-1)
    return {"weights": weights, "variance": (flat * squares).sum() / rows.numel()}


def _ascent(rows: Tensor, factors: Mapping[str, tuple[int, ...]]) -> Ascent:
    def likelihood(at: Values) -> Tensor:
        return jensen.log_likelihood(log_joint(rows, at), HIDDEN).sum()

    density = Density(
        lambda **at: likelihood(at),
        {"weights": (2, 2), "variance": ()},
        {"variance": Positive()},
        dtype=torch.float64,
        device=torch.device("cpu"),
    )
    method = ExpectationMaximization(
        expectation=CoordinateAscent.discrete(lambda at: log_joint(rows, at), factors),
        maximisation=lambda at, latent: maximised(rows, table(latent)),
        bound=lambda at, latent: jensen.jensen_bound(log_joint(rows, at), table(latent), HIDDEN).sum(),
        rounds=ROUNDS,
        tolerance=0.0,
    )
    first = density.unconstrained({"weights": _tensor(START), "variance": _tensor(START_VARIANCE)})
    history = History()
    _, trace = infer(method, density, None, start=first, callbacks=[history], progress=False)
    thetas = [first, *history.thetas[:-1]]
    tables = [log_joint(rows, density.constrained(theta)) for theta in thetas]
    gaps = [jensen.kl_gap(at, table(latent), HIDDEN).sum() for at, latent in zip(tables, history.latents, strict=True)]
    end = jensen.posterior(tables[-1], HIDDEN)
    both = end[:, 1, 1] - end.sum(2)[:, 1] * end.sum(1)[:, 1]  # Cov(z_1, z_2)
    return Ascent(
        torch.stack([jensen.log_likelihood(at, HIDDEN).sum() for at in tables]),
        trace["bound"][:, 0],
        torch.stack(gaps),
        float(both.abs().mean()),
    )


def _states() -> Tensor:
    """Return the four values of (z_1, z_2), (4, 2)."""
    return _tensor(((0.0, 0.0), (0.0, 1.0), (1.0, 0.0), (1.0, 1.0)))


def _tensor(values: object) -> Tensor:
    return torch.tensor(values, dtype=torch.float64, device="cpu")
