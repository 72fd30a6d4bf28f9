"""Densities around held-out means: pooled means, scales that depend on the inputs, and the shape of the noise."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import combinations
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from posterity.estimators.gaussian_process import GaussianProcess, Moments, minimise, principal_directions, projected
from posterity.likelihoods.scaled import HALF_LOG_TWO_PI
from posterity.numerics.random import Key
from posterity.predictive.classes import ClassPredictive

NARROWEST = 0.05  # least scale of a component of the noise, in root mean squares of the scaled residuals
ROUNDS = 60  # of EM for the shape
EVALUATIONS = 60  # of the search for a calibration
OFFSET = 0.5  # standard deviation of the prior of the offsets of a calibration
USUAL = 0.95  # share of the rows that tell how targets are rounded
LEAST = 0.01  # share of the median squared residual that is added to all before the logarithm


class Normals(NamedTuple):
    """Means and scales (S, N, T) of a mixture with weights (S,)."""

    means: Tensor
    scales: Tensor
    weights: Tensor


@dataclass(frozen=True, eq=False)
class Pool:
    """The weighted average of the candidates' means, with the smallest held-out squared error.

    **Math**: m(x) = sum_k w_k m_k(x) with w_k >= 0 of sum 1 that minimise sum_n v_n (y_n - m(x_n))^2 over held-out rows
    of weights v_n. `moments` are of the mixture of the candidates: variances w_k (s_k^2 + (m_k - m)^2) add up.

    **Limit**: the exact minimum, found among all subsets of the candidates, of which there must be few.
    """

    weights: dict[str, float]
    name: ClassVar[str] = "pooled means"

    @classmethod
    def of(cls, moments: Mapping[str, Moments], targets: Tensor, weights: Tensor) -> "Pool":
        """Minimise the squared error over all subsets of the candidates."""
        names = list(moments)
        errors = torch.stack([(targets - moments[name].mean).flatten().double() for name in names])  # (K, n T)
        shares = weights.double().repeat_interleave(targets.shape[1]) / weights.sum()
        products = (errors * shares) @ errors.T
        jitter = 1e-10 * products.diagonal().mean() + 1e-30  # errors of candidates may be equal, or zero
        products = products + jitter * torch.eye(len(names)).to(products)
        best, least = {}, math.inf
        for size in range(1, len(names) + 1):
            for subset in combinations(range(len(names)), size):
                index = torch.tensor(subset, device=products.device)
                solved = torch.linalg.solve(products[index][:, index], products.new_ones(size))
                solved = solved / solved.sum()
                error = float(solved @ products[index][:, index] @ solved)
                if bool((solved >= 0).all()) and error < least * (1.0 - 1e-3):
                    best, least = {names[i]: float(w) for i, w in zip(subset, solved, strict=True)}, error
        return cls(best)

    def moments(self, moments: Mapping[str, Moments]) -> Moments:
        """Moments of the mixture of the candidates."""
        means, variances, epistemics = (
            torch.stack(column) for column in zip(*(moments[name] for name in self.weights), strict=True)
        )  # (K, N, T)
        weights = torch.tensor([*self.weights.values()]).to(means).view(-1, 1, 1)
        mean = (weights * means).sum(0)
        away = (means - mean).square()
        return Moments(mean, (weights * (variances + away)).sum(0), (weights * (epistemics + away)).sum(0))


@dataclass(frozen=True, eq=False)
class Scale:
    """The scale of the noise around a mean: a constant, the predictive scale, or the latter times a fitted function.

    **Math**: s(x)^2 = c^2 + max(0, v(x) - u), with c the root mean square of held-out residuals, v(x) the epistemic
    variance and u its mean in these rows; or s(x) = own(x) exp(g(x)), with g a Gaussian process fitted to half the
    logarithms of the squared residuals in units of own(x).

    **Limit**: logarithms of squares are low on average; `Shape` makes up for the constant that is lost.
    """

    constant: Tensor | None = None  # (T,)
    usual: Tensor | None = None  # (T,), epistemic variance of these rows
    process: GaussianProcess | None = None
    basis: Tensor | None = None

    @classmethod
    def around(
        cls, moments: Moments, inputs: Tensor, targets: Tensor, weights: Tensor, several: bool
    ) -> Iterator[tuple[str, "Scale"]]:
        """Yield the scales to try and their names; the predictive scale only if the mean is of several candidates."""
        residuals = targets - moments.mean
        shares = weights / weights.sum()
        yield (
            "a constant scale",
            cls((shares @ residuals.square()).sqrt().clamp_min(1e-6), shares.to(moments.epistemic) @ moments.epistemic),
        )
        if several:
            yield "their own scale", cls()
        squares, basis = residuals.square() / moments.variance, principal_directions(inputs)
        logs = 0.5 * (squares + LEAST * squares.median() + 1e-12).log()
        columns = features(moments, inputs, basis)
        process = GaussianProcess.of(False, columns, logs - logs.mean(0), weights)
        yield "a fitted scale", cls(process=process, basis=basis)

    def settled(self, rows: Tensor, most: int, evaluations: int) -> "Scale":
        """Return the scale fitted to these rows."""
        if self.process is None:
            return self
        return replace(self, process=self.process.on(rows).settled(most, evaluations, Key(0).fold("scale")))

    def at(self, moments: Moments, inputs: Tensor) -> Tensor:
        """Return the scale at inputs, (N, T)."""
        if self.constant is not None and self.usual is not None:
            return (self.constant.square() + (moments.epistemic - self.usual).clamp_min(0.0)).sqrt()
        own = moments.variance.sqrt()
        if self.process is None:
            return own
        return own * self.process.predict(features(moments, inputs, self.basis)).mean.exp()


def features(moments: Moments, inputs: Tensor, basis: Tensor | None) -> Tensor:
    """Return the inputs of the process of the log scale: columns, means and logs of predictive scales."""
    return torch.cat([projected(inputs, basis), moments.mean, 0.5 * moments.variance.log()], 1)


@dataclass(frozen=True, eq=False)
class Shape:
    """The density of the residuals in units of their scale: a mixture of normals with mean 0.

    **Math**: h(z) = sum_k pi_k N(z | m_k, s_k^2), fitted by EM, then shifted so that sum_k pi_k m_k = 0.

    **Limit**: one component below 100 rows, two below 300, else three; none is narrower than a twentieth of the root
    mean square.
    """

    weights: Tensor
    means: Tensor
    scales: Tensor

    @classmethod
    def of(cls, values: Tensor, weights: Tensor) -> "Shape":
        """Fit values (n,) by EM; fewer components for fewer rows."""
        size = 1 if len(values) < 100 else 2 if len(values) < 300 else 3
        shares = (weights / weights.sum()).to(values)
        spread = (shares @ values.square()).sqrt().clamp_min(0.01)
        scales = spread * torch.logspace(-0.5, 0.5, size, base=2.0 if size < 3 else 4.0).to(values)
        scales = spread.reshape(1) if size == 1 else scales
        means, mixture = torch.zeros_like(scales), torch.full_like(scales, 1.0 / size)
        for _ in range(ROUNDS):
            each = cls(mixture, means, scales)._each(values)
            resp = each.softmax(0) * shares  # (S, n)
            counts = resp.sum(1).clamp_min(1e-8)
            mixture, means = counts / counts.sum(), (resp @ values) / counts
            scales = ((resp * (values - means.unsqueeze(1)).square()).sum(1) / counts).sqrt()
            scales = scales.clamp_min(NARROWEST * float(spread))
        return cls(mixture, means - mixture @ means, scales)

    @classmethod
    def normal(cls, device: torch.device) -> "Shape":
        """Return a standard normal."""
        one = torch.ones(1, dtype=torch.float64, device=device)
        return cls(one, torch.zeros_like(one), one)

    def _each(self, values: Tensor) -> Tensor:
        """Log densities of the components at values, (S, *values)."""
        away = (values - self._lead(self.means, values)) / self._lead(self.scales, values)
        return self._lead(self.weights.log() - self.scales.log(), values) - 0.5 * away.square() - HALF_LOG_TWO_PI

    def _lead(self, tensor: Tensor, values: Tensor) -> Tensor:
        return tensor.reshape(-1, *(1,) * values.dim())

    def log_prob(self, values: Tensor) -> Tensor:
        """Log density of values, shaped as they are."""
        return self._each(values).logsumexp(0)


@dataclass(frozen=True, eq=False)
class Density:
    """A density of targets: the mean of a candidate or of the pool, a scale, and the shape of the noise.

    **Math**: p(y | x) = h((y - m(x)) / s(x)) / s(x), with components of h widened to `rounding` if they are narrower.

    **Limit**: h is the same everywhere; only its scale depends on the inputs.
    """

    name: str
    source: str
    scale: Scale
    rounding: Tensor  # (T,), standard deviations of the rounding of targets, which no component can be narrower than
    shape: Shape | None = None

    def scored(
        self, moments: Moments, inputs: Tensor, targets: Tensor, weights: Tensor, fold: Tensor, effort: tuple[int, int]
    ) -> tuple["Density", Tensor]:
        """Fit scale and shape; return the density and held-out log densities (n, T) of the targets.

        The scale of a fold is fitted to the other folds, with `effort` (rows, evaluations).
        """
        scale = torch.empty_like(targets)
        for number in sorted(set(fold.tolist())):
            rows = fold == number
            part = Moments(*(tensor[rows] for tensor in moments))
            scale[rows] = self.scale.settled(~rows, *effort).at(part, inputs[rows])
        values = (targets - moments.mean) / scale
        shape = Shape.of(values.flatten(), weights.repeat_interleave(targets.shape[1]))
        final = self.scale.settled(torch.ones_like(fold, dtype=torch.bool), *effort)
        density = replace(self, scale=final, shape=shape)
        means, scales, shares = density._around(moments.mean, scale)
        each = shares.log().view(-1, 1, 1) - 0.5 * ((targets - means) / scales).square() - scales.log()
        return density, each.logsumexp(0) - HALF_LOG_TWO_PI

    def normals(self, moments: Moments, inputs: Tensor) -> tuple[Normals, Moments]:
        """Return the mixture of normals at inputs, and its moments with an unchanged share of epistemic variance."""
        assert self.shape is not None
        scale = self.scale.at(moments, inputs)
        before = moments.variance if self.scale.constant is None else scale.square()
        shape = self.shape.weights @ (self.shape.scales.square() + self.shape.means.square())
        after = shape.to(scale) * scale.square()
        return self._around(moments.mean, scale), Moments(moments.mean, after, moments.epistemic * after / before)

    def _around(self, mean: Tensor, scale: Tensor) -> Normals:
        """Return the mixture of normals with this mean and scale, (N, T)."""
        assert self.shape is not None
        own = scale * self.shape.scales.view(-1, 1, 1)
        scales = torch.maximum(own, self.rounding.to(own))  # the shape is fitted to residuals that contain it
        return Normals(mean + scale * self.shape.means.view(-1, 1, 1), scales, self.shape.weights)


def rounding(targets: Tensor) -> Tensor:
    """Standard deviations (T,) of the rounding of targets (N, T): the least difference of usual values over root 12.

    Usual values are the most frequent ones that make up 95 % of the rows: a few odd decimals do not count. It is 0
    where no value repeats. Where values do, a narrow density would gain from them without bound.

    >>> rounding(torch.tensor([[3.0], [5.0], [5.0], [6.0]]))
    tensor([0.2887])
    """
    return torch.stack([_least_gap(column) for column in targets.T]) / math.sqrt(12.0)


def _least_gap(column: Tensor) -> Tensor:
    values, counts = torch.unique(column, return_counts=True)  # ascending
    if len(values) == len(column):
        return column.new_zeros(())
    frequent = counts.sort(descending=True).values
    fewest = frequent[(frequent.cumsum(0) < USUAL * len(column)).sum()]
    gaps = values[counts >= fewest].diff()
    return gaps.min() if len(gaps) else column.new_zeros(())


@dataclass(frozen=True, eq=False)
class Calibration:
    """Class probabilities of drawn logits, with a slope, a spread and offsets chosen by held-out rows.

    **Math**: the average over draws f of softmax(a (m + r (f - m)) + b), m the mean of the draws; a, r and b maximise
    the held-out log probability under normal priors near a = r = 1, b = 0.

    **Limit**: a is within e^-3 and e^3, r within 0 and 2: draws that are too wide, as where classes can be
    separated, come nearer to their mean.
    """

    slope: float
    spread: float
    offsets: Tensor  # (C,)

    @classmethod
    def of(cls, logits: Tensor, labels: Tensor, weights: Tensor) -> "Calibration":
        """Maximise the held-out log probability of labels, from draws (S, n, C), under normal priors near no change."""

        def loss(values: Tensor) -> Tensor:
            log_draws = _log_draws(logits, *_limited(values), values[2:])
            chosen = log_draws.gather(2, labels.expand(len(logits), -1).unsqueeze(2)).squeeze(2)
            held_out = weights @ (chosen.logsumexp(0) - math.log(len(logits)))
            return -held_out + 0.5 * (values[:2].square().sum() + (values[2:] / OFFSET).square().sum())

        found = minimise(loss, logits.new_zeros(logits.shape[-1] + 2), EVALUATIONS)
        slope, spread = _limited(found)
        return cls(float(slope), float(spread), found[2:])

    @classmethod
    def none(cls, classes: int, device: torch.device) -> "Calibration":
        """Return the calibration that changes nothing."""
        return cls(1.0, 1.0, torch.zeros(classes, dtype=torch.float64, device=device))

    def predictive(self, logits: Tensor) -> ClassPredictive:
        """Return the predictive for draws of logits (S, N, C)."""
        draws = _log_draws(logits, self.slope, self.spread, self.offsets)
        return ClassPredictive.of_log_probs(draws, draws.dtype)


def _limited(values: Tensor) -> tuple[Tensor, Tensor]:
    """Map two numbers to a slope in (e^-3, e^3) and a spread in (0, 2); zeros give 1 and 1."""
    return (3.0 * torch.tanh(values[0] / 3.0)).exp(), 1.0 + torch.tanh(values[1])


def _log_draws(logits: Tensor, slope: float | Tensor, spread: float | Tensor, offsets: Tensor) -> Tensor:
    """Return the calibrated log probabilities of each draw, (S, N, C)."""
    mean = logits.mean(0)
    return (slope * (mean + spread * (logits - mean)) + offsets).log_softmax(-1)
