"""A small network on a sine: the prior that variational EM chooses, against every fixed one on held-out rows."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

import torch
from torch import Tensor

from posterity.evidence import NoiseScale, PerLayer, PriorScale, Shared
from posterity.inference import infer
from posterity.likelihoods import Gaussian
from posterity.methods import MAP, Laplace, VariationalEM
from posterity.metrics import negative_log_likelihood
from posterity.model import Joint
from posterity.networks import MLP
from posterity.numerics.random import Key
from posterity.optim.optimizer import Adam
from posterity.optim.schedules import Cosine
from posterity.posteriors import Posterior
from posterity.priors import Normal

ROWS, TEST, NOISE, FREQUENCY, REACH = 60, 1000, 0.4, 1.5, 3.0
HIDDEN = 20
SCALES = (0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 100.0)
FIRST = 1.0  # the scale at which variational EM begins
DATA_SETS = 5
STEPS, ROUNDS = 1000, 25

Pair = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Mean:
    """A mean over data sets with its standard error."""

    mean: float
    error: float


@dataclass(frozen=True)
class Fit:
    """The result of variational EM on one data set: prior scales of both layers, noise, test NLL."""

    scales: tuple[float, float]
    noise: float
    test_nll: float


@dataclass(frozen=True)
class Chosen:
    """The choices of variational EM over data sets: geometric mean scales, mean noise and test NLL, and each fit.

    `above_best` is the test NLL minus the NLL of the fixed scale which is best on the test rows of the same data set.
    """

    name: str
    scales: tuple[float, ...]
    noise: float
    test_nll: Mean
    above_best: Mean
    fits: tuple[Fit, ...]


@dataclass(frozen=True)
class Priors:
    """Test NLL of each fixed prior scale, and of the choices of variational EM without held-out rows."""

    fixed: tuple[Mean, ...]
    chosen: tuple[Chosen, ...]


def priors(key: Key) -> Priors:
    """Fit all data sets; the posterior is the Laplace approximation throughout."""
    grids, fits = [], []
    maximisations: dict[str, tuple[PriorScale | NoiseScale, ...]] = {
        "one scale, noise known": (PriorScale(Shared()),),
        "a scale for each layer, noise found": (PriorScale(PerLayer()), NoiseScale()),
    }
    for number in range(DATA_SETS):
        own = key.fold(number)
        train, test = rows(ROWS, own.fold("train")), rows(TEST, own.fold("test"))
        grids.append(_fixed(train, test, own))
        fits.append({name: _fit(steps, train, test, own) for name, steps in maximisations.items()})
    return Priors(
        tuple(_mean(column) for column in zip(*grids, strict=True)),
        tuple(_chosen(name, [fit[name] for fit in fits], grids) for name in fits[0]),
    )


def rows(count: int, key: Key) -> Pair:
    """Inputs (count, 1), uniform, and a noisy sine of them."""
    x = REACH * (2.0 * key.fold("x").uniform((count, 1), torch.float64, "cpu") - 1.0)
    return x, (FREQUENCY * x).sin() + NOISE * key.fold("noise").normal((count, 1), torch.float64, "cpu")


def noise_alone() -> float:
    """Return the expected NLL of the true density: sine and noise known."""
    return 0.5 * math.log(2.0 * math.pi * math.e * NOISE**2)


def problem(scale: float | Tensor, key: Key) -> Joint:
    """A 1-20-1 network under N(0, scale^2), whose first weights follow from the key; the noise is the true one."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(key.fold("network").seed)
        net = MLP((1, HIDDEN, 1), activation="tanh").to("cpu", torch.float64)
    return Joint(net, Gaussian(NOISE), Normal(scale), ROWS)


def _fixed(train: Pair, test: Pair, key: Key) -> list[float]:
    """Return the test NLL of each scale; their modes are fitted together."""
    joint = problem(torch.tensor(SCALES, dtype=torch.float64, device="cpu"), key)
    start = problem(FIRST, key).network.initial.expand(len(SCALES), -1)
    modes, _ = infer(MAP(STEPS, None, Adam(0.02), Cosine()), joint, train, start=start, progress=False)
    results = []
    for index in range(len(SCALES)):
        mode = modes.member(index)
        assert isinstance(mode.joint, Joint)
        q, _ = infer(Laplace(tuning=None), mode.joint, train, start=mode, progress=False)
        results.append(_score(q, test))
    return results


def _fit(steps: tuple[PriorScale | NoiseScale, ...], train: Pair, test: Pair, key: Key) -> Fit:
    method = VariationalEM(Laplace(tuning=None), steps, ROUNDS, fit=MAP(STEPS, None, Adam(0.02), Cosine()))
    q, trace = infer(method, problem(FIRST, key), train, progress=False)
    hidden, _, output, _ = trace["prior_scale"][-1].tolist()  # weights and biases of two layers
    return Fit((hidden, output), float(trace["noise_scale"][-1]), _score(q, test))


def _score(q: Posterior, test: Pair) -> float:
    return negative_log_likelihood(q.predict(test[0]), test[1])


def _chosen(name: str, fits: Sequence[Fit], grids: Sequence[Sequence[float]]) -> Chosen:
    scores = [fit.test_nll for fit in fits]
    return Chosen(
        name,
        tuple(math.exp(fmean(map(math.log, column))) for column in zip(*(fit.scales for fit in fits), strict=True)),
        fmean(fit.noise for fit in fits),
        _mean(scores),
        _mean([score - min(grid) for score, grid in zip(scores, grids, strict=True)]),
        tuple(fits),
    )


def _mean(values: Sequence[float]) -> Mean:
    return Mean(fmean(values), stdev(values) / math.sqrt(len(values)))
