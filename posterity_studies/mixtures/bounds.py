"""Checks of EM's bound: where it touches the log-likelihood, that it is never above, and printed forms that fail."""

import math
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from posterity.evidence import jensen
from posterity.numerics.random import Key
from posterity_studies.mixtures.example import TRUTH, UNKNOWN, Rounds, Sample, Values, log_joint, log_likelihood

FIRST = 3  # rounds whose bounds are drawn
GRID = 301
MARGIN, LEAST = 0.8, 0.2  # of a curve beyond what EM moves through, in lengths of that; and the least such length
WIDE = 6.0  # reach of the curves on which the bound is checked
TRIES = 200  # of q at random


@dataclass(frozen=True, eq=False)
class Curve:
    """Log-likelihood and bound (G,) over the mean of component 1, at the other values and the q of one round."""

    at: float
    value: float
    best: float
    grid: Tensor
    log_likelihood: Tensor
    bound: Tensor


@dataclass(frozen=True)
class Checks:
    """Numbers of a run of EM on a sample, in nats; at its start unless stated otherwise.

    `touching` is the largest distance of bound and log-likelihood right after an E-step, in any round;
    `highest_above` the largest amount by which the bound is above it, over all curves and for q at random (0 or less
    but for rounding); `decomposition` the largest distance of log-likelihood minus bound from the sum of KL(q_n ||
    p(z | y_n)), and `two_forms` its distance from E_q log p(y | z) - KL(q || p(z)); `smallest_step` the least
    that a half-step added. `fisher` is the largest distance of the gradient by Fisher's identity from automatic
    differentiation, `end_gradient` the largest entry of the gradient where EM ended. The last three are bounds as
    printed: with the best q common to all points, with the KL of the first point alone, and with its entropy alone.
    """

    rounds: int
    log_likelihood_start: float
    log_likelihood_end: float
    touching: float
    highest_above: float
    decomposition: float
    two_forms: float
    smallest_step: float
    fisher: float
    end_gradient: float
    common_q: float
    one_divergence: float
    one_entropy: float


def curves(data: Sample, history: tuple[Values, ...]) -> list[Curve]:
    """Return the curve of each of the first rounds, around the means that the round moves between."""
    means = [float(at["means"][0]) for at in history[: FIRST + 1]]
    return [_curve(data, at, _around(*pair)) for at, pair in zip(history, pairwise(means), strict=False)]


def one_mean(data: Sample, start: Values) -> list[Curve]:
    """Return the curves of EM that moves only the mean of component 1, so that the log-likelihood is one curve."""
    history = [dict(start)]
    for _ in range(FIRST):
        q = jensen.posterior(log_joint(data, history[-1]))
        history.append(_moved(history[-1], _best(data, q)))
    grid = _around(*(float(history[index]["means"][0]) for index in (0, -1)))
    return [_curve(data, at, grid) for at in history[:FIRST]]


def checks(data: Sample, run: Rounds, key: Key) -> Checks:
    """Compute all numbers of a run."""
    start, end = run.history[0], run.end
    table, grid = log_joint(data, start), torch.linspace(-WIDE, WIDE, GRID, dtype=torch.float64)
    wide = [_curve(data, at, at["means"][0] + grid) for at in run.history[:FIRST]]
    q, total = jensen.posterior(table), float(log_likelihood(data, start))
    likelihoods = torch.stack([log_likelihood(data, at) for at in run.history[:-1]])
    above = [float((curve.bound - curve.log_likelihood).max()) for curve in wide]
    random = torch.softmax(3.0 * key.normal((TRIES, *table.shape), torch.float64, "cpu"), -1)  # (T, N, 2)
    gaps = total - jensen.jensen_bound(table, random).sum(-1)
    divergences = jensen.kl_gap(table, random).sum(-1)
    expected = jensen.q_function(table - start["weights"].log(), q)  # sum_z q_n(z) log p(y_n | z), (N,)
    divergence = -jensen.entropy(q) - (q * start["weights"].log()).sum(-1)  # KL(q_n || p(z)), (N,)
    by_fisher = jensen.fisher_gradient(lambda moved: log_joint(data, moved), start)
    return Checks(
        rounds=len(run.after_e),
        log_likelihood_start=total,
        log_likelihood_end=float(log_likelihood(data, end)),
        touching=float((run.after_e - likelihoods).abs().max()),
        highest_above=max(*above, float(-gaps.min())),
        decomposition=float((gaps - divergences).abs().max()),
        two_forms=abs(float(jensen.jensen_bound(table, q).sum() - (expected - divergence).sum())),
        smallest_step=float(run.staircase().diff().min()),
        fisher=float((_along(by_fisher) - _differentiated(data, start)).abs().max()),
        end_gradient=float(_differentiated(data, end).abs().max()),
        common_q=float(len(table) * torch.logsumexp(table.mean(0), -1)),
        one_divergence=float(expected.sum() - divergence[0]),
        one_entropy=float(jensen.q_function(table, q).sum() + jensen.entropy(q)[0]),
    )


POINT, CHOSEN = 0.4, 0.8  # y, and q(z = 1) for the drawn sides of Jensen's inequality


@dataclass(frozen=True, eq=False)
class Jensen:
    """The bound of one point over q(z = 1) = `q` (G,), in nats, at the true parameters.

    `joint` is p(y, z) for z = 1 and z = 0, (2,). At q = `CHOSEN` the ratios p(y, z) / q(z) have the mean p(y), whose
    log is at least the mean of their logs.
    """

    q: Tensor
    bound: Tensor
    joint: Tensor

    @property
    def log_mean(self) -> float:
        """log p(y)."""
        return float(self.joint.sum().log())

    @property
    def responsibility(self) -> float:
        """p(z = 1 | y)."""
        return float(self.joint[0] / self.joint.sum())

    @property
    def ratios(self) -> Tensor:
        """p(y, z) / q(z) at the chosen q, (2,)."""
        return self.joint / self.joint.new_tensor([CHOSEN, 1.0 - CHOSEN])

    @property
    def mean_log(self) -> float:
        """The bound at the chosen q."""
        return float(CHOSEN * self.ratios[0].log() + (1.0 - CHOSEN) * self.ratios[1].log())

    @property
    def divergence(self) -> float:
        """KL(q || p(z | y)) at the chosen q, by its definition."""
        right = self.joint / self.joint.sum()
        return CHOSEN * math.log(CHOSEN / right[0]) + (1.0 - CHOSEN) * math.log((1.0 - CHOSEN) / right[1])


def one_point() -> Jensen:
    """Compute Jensen's inequality for one point of the mixture."""
    data = Sample(torch.tensor([POINT], dtype=torch.float64, device="cpu"), torch.tensor([UNKNOWN], device="cpu"))
    table = log_joint(data, TRUTH)  # (1, 2)
    q = torch.linspace(0.0, 1.0, GRID, dtype=torch.float64, device="cpu")
    bound = jensen.jensen_bound(table.expand(GRID, 2), torch.stack([q, 1.0 - q], -1))
    return Jensen(q, bound, table[0].exp())


def _around(first: float, last: float) -> Tensor:
    """Return means around two given ones, (GRID,)."""
    low, high = min(first, last), max(first, last)
    beyond = MARGIN * max(high - low, LEAST)
    return torch.linspace(low - beyond, high + beyond, GRID, dtype=torch.float64, device="cpu")


def _curve(data: Sample, at: Values, grid: Tensor) -> Curve:
    q = jensen.posterior(log_joint(data, at))
    tables = log_joint(data, _moved(at, grid))  # (G, N, 2)
    bound = jensen.jensen_bound(tables, q.expand_as(tables)).sum(-1)
    value = float(log_likelihood(data, at))
    total = jensen.log_likelihood(tables).sum(-1)
    return Curve(float(at["means"][0]), value, float(_best(data, q)), grid, total, bound)


def _moved(at: Values, mean: Tensor) -> dict[str, Tensor]:
    """Return the values with another mean of component 1, or with each of many (G,)."""
    others = {name: value.expand(*mean.shape, 2) for name, value in at.items()}
    return {**others, "means": torch.stack([mean, others["means"][..., 1]], -1)}


def _best(data: Sample, q: Tensor) -> Tensor:
    """Return the mean of component 1 that maximises the bound at q; it does not depend on the other values."""
    return (q[:, 0] * data.points).sum() / q[:, 0].sum()


def _differentiated(data: Sample, at: Values) -> Tensor:
    """The gradient of the log-likelihood itself, (3, 2)."""
    leaves = {name: value.clone().requires_grad_() for name, value in at.items()}
    result = torch.autograd.grad(log_likelihood(data, leaves), list(leaves.values()))
    return _along(dict(zip(leaves, result, strict=True)))


def _along(gradient: Values) -> Tensor:
    """Stack a gradient (3, 2): weights, projected to keep their sum, means and variances."""
    weights = gradient["weights"] - gradient["weights"].mean()
    return torch.stack([weights, gradient["means"], gradient["variances"]])
