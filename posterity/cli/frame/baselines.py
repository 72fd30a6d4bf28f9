"""Baselines without a network, which every comparison shows.

Regression: the mean of the targets, and Bayesian linear regression. Classes: their frequencies, and logistic
regression. Each chooses its scales by the evidence, is fitted to the training rows as methods see them, and predicts.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, one_hot

from posterity.datasets import DataSet, LabelledData
from posterity.evidence.ridge import SMALLEST_NOISE, best_ridge
from posterity.predictive import ClassPredictive, GaussianPredictive, Predictive

Predictor = Callable[[Tensor], Predictive]
PRIOR_SCALES = tuple(2.0**power for power in range(-8, 7))  # of the weights of logistic regression
NEWTON_STEPS, CG_STEPS = 50, 50  # at most, of a fit of logistic regression


@dataclass(frozen=True)
class Baseline:
    """A baseline: its word in JSON, its label, and a function (rows, number of classes) that fits it."""

    word: str
    label: str
    fit: Callable[[LabelledData, int], Predictor]


class _Axes(NamedTuple):
    """Principal axes of inputs (N, D): mean (D,), directions (D, R), squared singular values (R,), scores (N, R)."""

    mean: Tensor
    directions: Tensor
    squares: Tensor
    scores: Tensor


def baselines(data: DataSet) -> tuple[Baseline, ...]:
    """The baselines that suit the data, the simplest first."""
    return _NUMBERS if data.classes is None else _CLASSES


def constant(rows: LabelledData, classes: int = 0) -> Predictor:
    """Predict the normal distribution with mean and standard deviation of the training targets, whatever the input."""
    targets = rows.targets.double()
    mean, variance = targets.mean(0), targets.var(0, correction=0)
    return lambda inputs: GaussianPredictive(
        mean.expand(len(inputs), -1), torch.zeros(len(inputs), len(mean), dtype=torch.float64), variance
    )


def linear(rows: LabelledData, classes: int = 0) -> Predictor:
    """Fit Bayesian linear regression to each output, with the noise and prior scale of the largest evidence.

    The intercept has a flat prior, the weights N(0, s^2 / ridge) for noise of variance s^2. With squared singular
    values d of the centred inputs and the targets' coordinates u along them, the best s^2 for a ridge is
    (rest + sum u^2 ridge / (d + ridge)) / (N - 1), and the log evidence is, up to a constant,
    -(N - 1) / 2 log s^2 - 1/2 sum log(1 + d / ridge). The ridge is searched on a grid, then on a finer one. Exact for
    more columns than rows, too. Bishop (2006), section 3.5.
    """
    axes, targets = _axes(rows.inputs), rows.targets.double()
    centre = targets.mean(0)
    centred = targets - centre
    products = axes.scores.T @ centred  # (R, outputs)
    rest = (centred - axes.scores @ (products / axes.squares[:, None])).square().sum(0)
    floors = SMALLEST_NOISE**2 * centred.square().mean(0)
    fits = [
        best_ridge(axes.squares, products[:, index], float(rest[index]), len(targets) - 1, float(floors[index]))
        for index in range(targets.shape[1])
    ]
    ridge, noise = (torch.tensor(values, dtype=torch.float64) for values in zip(*fits, strict=True))
    weights = products / (axes.squares[:, None] + ridge)  # (R, outputs)

    def predict(inputs: Tensor) -> Predictive:
        away = inputs.double() - axes.mean
        scores = away @ axes.directions
        beyond = (away.square().sum(1) - scores.square().sum(1)).clamp_min(0.0)  # where no training row reached
        known = scores.square() @ (1.0 / (axes.squares[:, None] + ridge))
        variance = noise * (known + beyond[:, None] / ridge + 1.0 / len(targets))
        return GaussianPredictive(centre + scores @ weights, variance, noise)

    return predict


def frequencies(rows: LabelledData, classes: int) -> Predictor:
    """Predict the frequencies of the classes, whatever the input; one more row of each keeps them above 0."""
    counts = torch.bincount(rows.targets.cpu(), minlength=classes).double() + 1.0
    return lambda inputs: ClassPredictive((counts / counts.sum()).expand(len(inputs), -1))


def logistic(rows: LabelledData, classes: int) -> Predictor:
    """Fit multinomial logistic regression by its mode, with the prior scale of the largest evidence.

    The intercepts have a flat prior, the weights N(0, scale^2). The evidence is Laplace's, log p(y | w) - |w|^2 / (2
    scale^2) - 1/2 log det(1 + scale^2 H), with the curvature H in Kronecker form: the average over rows of
    diag(p) - p p^T, times the sum of x x^T. Scales grow by factors of 2 until the evidence has fallen twice.
    """
    axes = _axes(rows.inputs)
    labels = rows.targets.cpu()
    start = torch.zeros(1 + len(axes.squares), classes, dtype=torch.float64)
    start[0] = frequencies(rows, classes)(axes.mean[None]).probs[0].log()
    best, chosen, falls = -math.inf, (PRIOR_SCALES[0], start), 0
    for scale in PRIOR_SCALES:
        start = _logistic_mode(axes, labels, scale, start, tolerance=0.01)
        value = _logistic_evidence(axes, labels, scale, start)
        if value > best:
            best, chosen, falls = value, (scale, start), 0
        else:
            falls += 1
        if falls == 2:
            break
    weights = _logistic_mode(axes, labels, *chosen, tolerance=1e-6)

    def predict(inputs: Tensor) -> Predictive:
        scores = (inputs.double() - axes.mean) @ axes.directions
        return ClassPredictive.of_log_probs((weights[0] + scores @ weights[1:]).log_softmax(-1)[None], torch.float64)

    return predict


def _logistic_mode(axes: _Axes, labels: Tensor, scale: float, start: Tensor, tolerance: float) -> Tensor:
    """Return the intercepts and weights (1 + R, C) at the mode, by Newton steps from `start`.

    The search ends where the next step would gain less than `tolerance` nats. A step is halved until it lowers the
    loss. torch's own L-BFGS loads torch's compiler, which takes seconds.
    """
    count, classes = len(labels), start.shape[1]
    # The Hessian of the softmax is at most 1 / 2, so in these units the whole Hessian is at most 1, and mostly near it.
    units = torch.cat([torch.tensor([2.0 / count]), 1.0 / (0.5 * axes.squares + scale**-2)]).sqrt()[:, None]
    design = torch.cat([torch.ones(count, 1, dtype=torch.float64), axes.scores], 1) * units.T
    prior = (units / scale).square()
    prior[0] = 0.0
    wanted = one_hot(labels, classes).double()

    def loss(at: Tensor) -> float:
        return float(cross_entropy(design @ at, labels, reduction="sum") + 0.5 * (prior * at.square()).sum())

    at = start / units
    value = loss(at)
    for _ in range(NEWTON_STEPS):
        probs = (design @ at).softmax(-1)
        slope = design.T @ (probs - wanted) + prior * at

        def curved(vector: Tensor, probs: Tensor = probs) -> Tensor:
            outputs = probs * (design @ vector)
            return design.T @ (outputs - probs * outputs.sum(1, keepdim=True)) + prior * vector

        step = _conjugate_gradients(curved, slope)
        decrement = float((step * slope).sum())
        if 0.5 * decrement < tolerance:
            break
        size = 1.0
        while (lower := loss(at - size * step)) > value - 0.1 * size * decrement and size > 1e-6:
            size *= 0.5
        at, value = at - size * step, lower
    return at * units


def _conjugate_gradients(curved: Callable[[Tensor], Tensor], wanted: Tensor) -> Tensor:
    """Solve curved(x) = wanted by conjugate gradients, to a tenth of its norm, or better where `wanted` is small."""
    x, rest = torch.zeros_like(wanted), wanted
    direction, square = rest, float(rest.square().sum())
    limit = square * min(0.01, square)
    for _ in range(CG_STEPS):
        if square <= limit or square == 0.0:
            break
        moved = curved(direction)
        size = square / float((direction * moved).sum())
        x, rest = x + size * direction, rest - size * moved
        before, square = square, float(rest.square().sum())
        direction = rest + square / before * direction
    return x


def _logistic_evidence(axes: _Axes, labels: Tensor, scale: float, weights: Tensor) -> float:
    logits = weights[0] + axes.scores @ weights[1:]
    probs = logits.softmax(-1)
    curvature = torch.diag(probs.mean(0)) - probs.T @ probs / len(probs)  # (C, C)
    values = torch.linalg.eigvalsh(curvature).clamp_min(0.0)
    occam = torch.log1p(scale**2 * values[:, None] * axes.squares).sum()
    prior = (weights[1:] / scale).square().sum()
    return float(-cross_entropy(logits, labels, reduction="sum") - 0.5 * prior - 0.5 * occam)


def _axes(inputs: Tensor) -> _Axes:
    """Return the principal axes of the inputs about their mean, without those of zero variance."""
    inputs = inputs.detach().cpu().double()
    mean = inputs.mean(0)
    away = inputs - mean
    wide = away.shape[1] > away.shape[0]
    squares, vectors = torch.linalg.eigh(away @ away.T if wide else away.T @ away)
    some = squares > 1e-12 * squares[-1].clamp_min(1e-300) * max(away.shape)
    squares, vectors = squares[some], vectors[:, some]
    directions = away.T @ vectors / squares.sqrt() if wide else vectors
    return _Axes(mean, directions, squares, away @ directions)


_NUMBERS = (Baseline("mean", "mean", constant), Baseline("linear", "linear", linear))
_CLASSES = (
    Baseline("frequencies", "class frequencies", frequencies),
    Baseline("logistic", "logistic regression", logistic),
)
