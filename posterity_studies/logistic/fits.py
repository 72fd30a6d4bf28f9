"""The regression and its fits: the mode, Gaussians by several methods, and Markov chains."""

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from posterity.curvature import Hessian
from posterity.inference import Method, infer
from posterity.kernels import UnitMass
from posterity.likelihoods import Bernoulli, Categorical
from posterity.methods import (
    HMC,
    MALA,
    MAP,
    NUTS,
    ExpectationPropagation,
    FullRank,
    Langevin,
    Laplace,
    MeanField,
    Metropolis,
)
from posterity.methods.parts.gradients import LocalReparameterisation
from posterity.methods.parts.sampler import Sampler
from posterity.model import Joint
from posterity.optim.optimizer import Adam
from posterity.optim.schedules import Cosine
from posterity.posteriors import Gaussian, Linearized, Point, Samples
from posterity.precisions import Dense
from posterity.priors import Normal

# Ten rows that no line through the origin separates, so that the mode is finite without a prior, too.
INPUTS = (
    (1.2, 0.4),
    (0.6, 1.5),
    (-0.3, 0.9),
    (1.8, -0.7),
    (-1.1, -0.4),
    (-0.5, -1.6),
    (0.4, -0.8),
    (-1.9, 0.3),
    (0.2, 0.3),
    (-0.4, -0.2),
)
LABELS = (1, 1, 1, 1, 0, 0, 0, 0, 0, 1)
PRIOR_SCALE = 2.0


@dataclass(frozen=True, eq=False)
class Regression:
    """A fitted logistic regression: joint, rows, mode, and the Laplace posterior."""

    joint: Joint
    inputs: Tensor
    targets: Tensor
    mode: Point
    laplace: Linearized
    evaluations: int  # of the gradient, to find the mode

    @property
    def covariance(self) -> Tensor:
        """Covariance (P, P) of the Laplace posterior."""
        precision = self.laplace.gaussian.precision
        assert isinstance(precision, Dense)
        return precision.covariance()


def binary() -> Regression:
    """Fit the ten built-in rows with two labels: p(y = 1 | x) = sigmoid(w . x), w ~ N(0, 4 I)."""
    inputs = torch.tensor(INPUTS, dtype=torch.float64)
    return fit(inputs, torch.tensor(LABELS, dtype=torch.float64), PRIOR_SCALE)


def fit(inputs: Tensor, targets: Tensor, prior_scale: float, num_classes: int = 2) -> Regression:
    """Fit p(y | x) = sigmoid(w . x), or softmax(W x) for more than two classes, to rows (N, D) and labels (N,)."""
    outputs = 1 if num_classes == 2 else num_classes
    net = nn.Linear(inputs.shape[1], outputs, bias=False, dtype=torch.float64)
    nn.init.zeros_(net.weight)
    likelihood = Bernoulli() if num_classes == 2 else Categorical()
    joint = Joint(net, likelihood, Normal(scale=prior_scale), num_data=len(targets))
    mode, trace = infer(MAP(batch_size=None), joint, (inputs, targets), progress=False)
    laplace, _ = infer(Laplace(tuning=None, curvature=Hessian()), joint, (inputs, targets), start=mode, progress=False)
    assert isinstance(mode, Point)
    assert isinstance(laplace, Linearized)
    return Regression(joint, inputs, targets, mode, laplace, len(trace["loss"]))


@dataclass(frozen=True, eq=False)
class Fit:
    """A posterior of the weights and its cost: gradients of the log density, and CPU seconds.

    `gradients` is None for a method that needs none. Metropolis needs values alone; these count. Of the
    gradients `warmup` were spent before the first draw that is kept.
    """

    posterior: Linearized | Samples
    gradients: int | None
    seconds: float
    warmup: int = 0


LAYER_DRAWS, WEIGHT_DRAWS = 32, 4
GAUSSIANS: dict[str, tuple[Callable[[int], Method], int | None]] = {  # by steps, and the gradients of one step
    "Variational, factorised": (
        lambda steps: MeanField(steps, None, Adam(0.02), Cosine(), LocalReparameterisation(LAYER_DRAWS)),
        LAYER_DRAWS,
    ),
    "Variational, full": (lambda steps: FullRank(steps, None, WEIGHT_DRAWS, Adam(0.02), Cosine()), WEIGHT_DRAWS),
    "Expectation propagation": (lambda steps: ExpectationPropagation(), None),
}


def laplace_fit(regression: Regression) -> Fit:
    """Fit the Laplace posterior again from the first weights, to measure its seconds; its Hessian is not counted."""
    began = time.process_time()
    again = fit(regression.inputs, regression.targets, PRIOR_SCALE)
    return Fit(again.laplace, again.evaluations, time.process_time() - began)


def gaussian_fits(regression: Regression, steps: int, seed: int) -> dict[str, Fit]:
    """Fit the other Gaussians from the mode, by name; their logits are Gaussian, so predictions need no draws."""
    results = {}
    for name, (make, gradients) in GAUSSIANS.items():
        rows, began = (regression.inputs, regression.targets), time.process_time()
        q, _ = infer(make(steps), regression.joint, rows, start=regression.mode, seed=seed, progress=False)
        seconds = time.process_time() - began
        posterior = Linearized(q.joint, q) if isinstance(q, Gaussian) else q
        assert isinstance(posterior, Linearized)
        results[name] = Fit(posterior, None if gradients is None else gradients * steps, seconds)
    return results


SINGLE = 5  # transitions of one gradient for each trajectory of HMC, which has so many leapfrogs
SETTLING = 50  # transitions of the warm-up beyond the number of trajectories
SHORT_STEP, LANGEVIN_STEP = 0.6, 0.2
SAMPLERS: dict[str, Callable[[int, int, int], Sampler]] = {  # by trajectories, warm-up and chains
    "Metropolis, short steps": lambda draws, warmup, chains: Metropolis(
        SINGLE * draws, warmup, chains, thin=1, step_size=SHORT_STEP, mass=UnitMass()
    ),
    "Metropolis": lambda draws, warmup, chains: Metropolis(SINGLE * draws, warmup, chains, thin=1),
    "Langevin": lambda draws, warmup, chains: Langevin(SINGLE * draws, warmup, chains, 1, LANGEVIN_STEP),
    "MALA": lambda draws, warmup, chains: MALA(SINGLE * draws, warmup, chains, thin=1),
    "HMC": lambda draws, warmup, chains: HMC(draws, warmup, chains, steps=SINGLE),
    "NUTS": NUTS,
}


def sampled(regression: Regression, chains: int, draws: int, seed: int) -> dict[str, Fit]:
    """Run the samplers by name and keep all draws; the warm-up tunes all but Langevin and short steps.

    Each of the `chains` has `draws` trajectories, or `SINGLE` times as many transitions of one gradient.
    """
    results = {}
    warmup = draws + SETTLING
    for name, sampler in SAMPLERS.items():
        rows, began = (regression.inputs, regression.targets), time.process_time()
        q, trace = infer(sampler(draws, warmup, chains), regression.joint, rows, seed=seed, progress=False)
        seconds = time.process_time() - began
        assert isinstance(q, Samples)
        gradients = trace["leapfrogs"]  # (transitions, chains)
        results[name] = Fit(q, int(gradients.sum()), seconds, int(gradients[:warmup].sum()))
    return results
