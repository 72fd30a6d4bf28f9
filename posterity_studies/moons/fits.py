"""The methods on two moons of one seed: fits from the same first weights, scores and entropies."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor

from posterity.datasets import DataSet
from posterity.datasets.toys import two_moons
from posterity.inference import Method, infer
from posterity.inference.callbacks import tracked
from posterity.likelihoods import Categorical
from posterity.methods import MAP, SWAG, Ensemble, Laplace, MCDropout, MeanField, NaturalGradient
from posterity.metrics import accuracy, expected_calibration_error, negative_log_likelihood
from posterity.model import Joint
from posterity.networks import MLP
from posterity.numerics.random import Key
from posterity.optim.optimizer import SGD, Adam
from posterity.optim.schedules import Cosine
from posterity.posteriors import Posterior
from posterity.predictive import ClassPredictive
from posterity.priors import Normal
from posterity_studies.options import Report, silent

ROWS, NOISE = 500, 0.1
HIDDEN = 50
RATE = 0.2  # of dropout, which only MC dropout uses
STEPS = 2000
MEMBERS = 5
DRAWS = 200
CENTRE, REACH, SIDE = (0.5, 0.25), 4.0, 81
RING, POINTS = 20.0, 180


def methods() -> Mapping[str, tuple[Method, ...]]:
    """The stages of each method by its name; a stage starts from the posterior of the one before."""
    adam, wandering = Adam(0.01), SGD(0.05)
    mode = MAP(STEPS, None, adam, Cosine())
    return MappingProxyType(
        {
            "MAP": (mode,),
            "MeanField": (MeanField(2 * STEPS, None, adam, Cosine()),),
            "NaturalGradient": (NaturalGradient(2 * STEPS, None, step_size=0.1, radius=0.1, schedule=Cosine()),),
            "MCDropout": (MCDropout(STEPS, None, adam, Cosine()),),
            "Ensemble": (Ensemble(mode, MEMBERS),),
            "SWAG": (mode, SWAG(MAP(STEPS, 20, wandering), every=max(1, STEPS // 100))),
            "Laplace": (mode, Laplace()),
        }
    )


@dataclass(frozen=True, eq=False)
class Fit:
    """The result of a method: scores on the test rows, entropies (N,) on training rows and (POINTS,) on the ring."""

    test_nll: float
    test_accuracy: float
    calibration_error: float
    data_entropy: Tensor
    ring_entropy: Tensor
    map_entropy: Tensor | None  # (SIDE * SIDE,) over the grid, where it was asked for
    map_probability: Tensor | None  # p(y = 1 | x), the same


@dataclass(frozen=True, eq=False)
class Seed:
    """The rows of a seed, and the fit of each method."""

    data: DataSet
    fits: dict[str, Fit]


def axes() -> tuple[Tensor, Tensor]:
    """First and second coordinates of the grid, (SIDE,) each."""
    first, second = (torch.linspace(c - REACH, c + REACH, SIDE) for c in CENTRE)
    return first, second


def ring() -> Tensor:
    """Points on a circle far from the rows, (POINTS, 2)."""
    angle = torch.linspace(0.0, 2 * math.pi, POINTS + 1)[:-1]
    return torch.tensor(CENTRE) + RING * torch.stack([angle.cos(), angle.sin()], dim=1)


def problem(data: DataSet, seed: int) -> Joint:
    """A 2-50-50-2 network with dropout layers, whose first weights follow from the seed, under a N(0, 1) prior."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(Key(seed).fold("network").seed)
        net = MLP((2, HIDDEN, HIDDEN, 2), dropout=RATE)
    return Joint(net, Categorical(), Normal(1.0), len(data.train))


def fits(seed: int, *, with_maps: bool = False, report: Report = silent) -> Seed:
    """Fit every method; the seed determines rows, first weights and all other random numbers."""
    data = two_moons(ROWS, NOISE, seed)
    done: dict[tuple[Method, ...], Posterior] = {}
    for number, (name, stages) in enumerate(tracked([*methods().items()], "methods"), start=1):
        report(f"seed {seed}: {name}, {number} of {len(methods())} methods")
        for count in range(1, len(stages) + 1):
            if stages[:count] not in done:
                start, joint = done.get(stages[: count - 1]), problem(data, seed)
                done[stages[:count]], _ = infer(
                    stages[count - 1], joint, data.train, start=start, seed=seed, progress=False
                )
    grid = torch.cartesian_prod(*axes()) if with_maps else None
    return Seed(data, {name: scored(done[stages], data, grid) for name, stages in methods().items()})


def scored(q: Posterior, data: DataSet, grid: Tensor | None = None) -> Fit:
    """The scores of a posterior; entropies and probabilities over a grid (G, 2) too, where it is given."""
    test = q.predict(data.test.inputs, draws=DRAWS)
    there = None if grid is None else _predicted(q, grid)
    return Fit(
        test_nll=negative_log_likelihood(test, data.test.targets),
        test_accuracy=accuracy(test, data.test.targets),
        calibration_error=expected_calibration_error(test, data.test.targets),
        data_entropy=_predicted(q, data.train.inputs).entropy,
        ring_entropy=_predicted(q, ring()).entropy,
        map_entropy=None if there is None else there.entropy,
        map_probability=None if there is None else there.probs[:, 1],
    )


def _predicted(q: Posterior, inputs: Tensor) -> ClassPredictive:
    result = q.predict(inputs, draws=DRAWS)
    assert isinstance(result, ClassPredictive)
    return result
