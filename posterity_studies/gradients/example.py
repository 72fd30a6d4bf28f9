"""One weight, two functions of it: variances of gradient estimators against their exact values by quadrature."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from posterity.methods.parts.gradients import Estimator, Factorised, StickTheLanding, WeightSampling
from posterity.methods.parts.gradients.drawn_weights import score_gradients
from posterity.model import Batch, Density
from posterity.numerics.random import Key
from posterity.report.numbers import with_error

ROUNDING = 1e-9  # variances below this are zero up to rounding


@dataclass(frozen=True)
class Variance:
    """The variance of an estimator for one pass through the data, its standard error, and its exact value if known.

    An estimate from K passes has its variance multiplied by K, so that what costs the same is compared.
    """

    value: float
    error: float
    exact: float | None = None

    def __str__(self) -> str:
        """Return value and error, or 0 if the value is rounding."""
        return with_error(self.value, self.error) if self.value > ROUNDING else "0"


def total_variance(estimates: Tensor, passes: float, exact: float | None = None) -> Variance:
    """Return the variance of independent estimates (S, R), summed over R, per pass of `passes`.

    The squared distances from the mean are averaged, and the standard error is the average's.

    >>> import torch
    >>> total_variance(torch.tensor([[0.0], [2.0], [4.0]]), passes=1).value
    4.0
    """
    count = len(estimates)
    distance = (estimates.double() - estimates.double().mean(0)).square().sum(1) * (count / (count - 1))
    error = float(distance.std()) / math.sqrt(count)
    return Variance(passes * float(distance.mean()), passes * error, exact)


MEAN, SCALE = 0.7, 0.4
SAMPLES = 200_000
REACH, POINTS = 9.0, 4001  # standard deviations and points of the trapezoid rule
FUNCTIONS: Mapping[str, Callable[[Tensor], Tensor]] = MappingProxyType(
    {"w^2": torch.square, "log sigmoid(w)": logsigmoid}
)


@dataclass(frozen=True)
class Row:
    """An estimator of the gradients of E f(w) + H(q) in the mean and the scale of q, for one function f."""

    function: str
    estimator: str
    passes: int
    mean: Variance
    scale: Variance


def example(seed: int) -> list[Row]:
    """Compute all functions and estimators, with q = N(0.7, 0.4^2)."""
    return [row for name in FUNCTIONS for row in _rows(name, Key(seed).fold(name))]


def _rows(name: str, key: Key) -> list[Row]:
    exact = exact_variances(name)
    sampled = {
        "score function": _by_score(name, key.fold("score"), baseline=False),
        "score with baseline": _by_score(name, key.fold("baseline"), baseline=True),
        "pathwise": _by_path(name, WeightSampling(), key.fold("path")),
        "pathwise, antithetic": _by_path(name, WeightSampling(draws=2, antithetic=True), key.fold("pair")),
        "stick the landing": _by_path(name, StickTheLanding(), key.fold("landing")),
    }
    results = []
    for estimator, pair in sampled.items():
        passes = 2 if "antithetic" in estimator else 1
        mean, scale = (
            total_variance(estimates.unsqueeze(1), passes, value)
            for estimates, value in zip(pair, exact[estimator], strict=True)
        )
        results.append(Row(name, estimator, passes, mean, scale))
    return results


def _by_path(name: str, estimator: Estimator, key: Key) -> tuple[Tensor, Tensor]:
    """Return estimates of both gradients, (SAMPLES,) each, from as many independent weights in one call."""
    function = FUNCTIONS[name]
    density = Density(lambda w: function(w).sum(), {"w": (SAMPLES,)})
    q = Factorised(torch.full((SAMPLES,), MEAN), torch.full((SAMPLES,), SCALE), None)
    nothing = Batch(torch.empty(0), torch.empty(0))  # a density takes no data
    term = estimator.data_term(density, q, nothing, {}, {}, key)
    if term.divergence_grads is None:
        return term.grad_mean, term.grad_scale
    return term.grad_mean - term.divergence_grads.mean, term.grad_scale - term.divergence_grads.scale


def _by_score(name: str, key: Key, *, baseline: bool) -> tuple[Tensor, Tensor]:
    """Return score-function estimates of both gradients; the baseline of each draw comes from all others."""
    noise = key.normal((SAMPLES,), torch.float64)
    values = FUNCTIONS[name](MEAN + SCALE * noise)
    mean, scale = (
        score_gradients(values, score.unsqueeze(1), baseline).squeeze(1) / SCALE
        for score in (noise, noise.square() - 1)
    )
    return mean, scale


def exact_variances(name: str) -> dict[str, tuple[float, float]]:
    """Return the variances of both gradients for one pass, by the trapezoid rule over the noise.

    The entropy's gradient is a constant except in "stick the landing", whose estimates have -log q in them.
    """
    noise = torch.linspace(-REACH, REACH, POINTS, dtype=torch.float64)
    mass = torch.exp(-0.5 * noise.square())
    mass = mass / mass.sum()
    w = (MEAN + SCALE * noise).requires_grad_()
    value = FUNCTIONS[name](w)
    (slope,) = torch.autograd.grad(value.sum(), w)
    value = value.detach()
    mirrored = slope.flip(0)  # at -noise

    def variance(estimate: Tensor) -> float:
        return float(mass @ (estimate - mass @ estimate).square())

    def best(score: Tensor) -> Tensor:
        weights = mass * score.square()
        return (value - (weights @ value) / weights.sum()) * score / SCALE

    scores = noise, noise.square() - 1
    landed = slope + noise / SCALE
    results = {
        "score function": tuple(value * score / SCALE for score in scores),
        "score with baseline": tuple(best(score) for score in scores),
        "pathwise": (slope, slope * noise),
        "pathwise, antithetic": (
            math.sqrt(2) * 0.5 * (slope + mirrored),
            math.sqrt(2) * 0.5 * (slope - mirrored) * noise,
        ),
        "stick the landing": (landed, landed * noise),
    }
    return {name: (variance(pair[0]), variance(pair[1])) for name, pair in results.items()}
