"""MC dropout on two moons, beside MAP."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from posterity.datasets import DataSet
from posterity.datasets.toys import two_moons
from posterity.inference import Method, infer
from posterity.likelihoods import Categorical
from posterity.methods import MAP, MCDropout
from posterity.metrics import accuracy, negative_log_likelihood
from posterity.model import Joint
from posterity.networks import MLP
from posterity.numerics.random import Key
from posterity.optim.optimizer import Adam
from posterity.optim.schedules import Cosine
from posterity.predictive import ClassPredictive
from posterity.priors import Normal

HIDDEN = 50
RATE = 0.2
STEPS = 2000
DRAWS = 300
CENTRE, REACH, SIDE = (0.5, 0.25), 4.0, 81
RING = 20.0


@dataclass(frozen=True, eq=False)
class Map:
    """A method on two moons: p(y = 1 | x) and its entropy over the grid, (SIDE * SIDE,), and scores."""

    probability: Tensor
    entropy: Tensor
    entropy_on_the_data: float
    entropy_on_the_ring: float
    test_nll: float
    test_accuracy: float


@dataclass(frozen=True, eq=False)
class Classification:
    """The data, the coordinates of the grid (first inputs, second inputs), and the maps by method."""

    data: DataSet
    axes: tuple[Tensor, Tensor]
    maps: dict[str, Map]


def classification(seed: int) -> Classification:
    """Fit both methods from the same first weights; the seed fixes everything random."""
    data = two_moons(num_data=200, noise=0.15, seed=seed)
    first, second = (torch.linspace(c - REACH, c + REACH, SIDE) for c in CENTRE)
    methods: dict[str, Method] = {
        "MAP": MAP(STEPS, None, Adam(0.01), Cosine()),
        "MC dropout": MCDropout(STEPS, None, Adam(0.01), Cosine()),
    }
    maps = {name: _map(method, data, torch.cartesian_prod(first, second), seed) for name, method in methods.items()}
    return Classification(data, (first, second), maps)


def _map(method: Method, data: DataSet, grid: Tensor, seed: int) -> Map:
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(Key(seed).fold("network").seed)
        net = MLP((2, HIDDEN, HIDDEN, 2), dropout=RATE)
    joint = Joint(net, Categorical(), Normal(1.0), len(data.train))
    q, _ = infer(method, joint, data.train.pair, seed=seed)
    angle = torch.linspace(0.0, 2 * math.pi, 181)[:-1]
    ring = torch.tensor(CENTRE) + RING * torch.stack([angle.cos(), angle.sin()], dim=1)
    there, rows, far = (q.predict(x, draws=DRAWS, batch_size=8192) for x in (grid, data.train.inputs, ring))
    test = q.predict(data.test.inputs, draws=DRAWS)
    assert isinstance(there, ClassPredictive)
    assert isinstance(rows, ClassPredictive) and isinstance(far, ClassPredictive)  # noqa: PT018
    return Map(
        probability=there.probs[:, 1],
        entropy=there.entropy,
        entropy_on_the_data=float(rows.entropy.mean()),
        entropy_on_the_ring=float(far.entropy.mean()),
        test_nll=float(negative_log_likelihood(test, data.test.targets)),
        test_accuracy=float(accuracy(test, data.test.targets)),
    )
