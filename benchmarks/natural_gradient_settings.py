"""How the defaults of `NaturalGradient` were chosen: by training and validation rows of three problems, no test rows.

    python -m benchmarks.natural_gradient_settings

A fifth of the training rows is held out; for each step size and beta2 the loss (minus the ELBO per datum, over the last
tenth of the steps) and the NLL of the held-out rows are printed, with those of `MeanField` under Adam.
"""

import sys
import time
from collections.abc import Callable
from dataclasses import replace

import torch

from posterity.datasets import DataSet, mnist, two_moons, uci_regression
from posterity.errors import Diverged
from posterity.inference import Method, infer
from posterity.likelihoods import Categorical, Gaussian
from posterity.methods import MeanField, NaturalGradient
from posterity.metrics import negative_log_likelihood
from posterity.model import Joint
from posterity.networks import MLP
from posterity.optim.optimizer import Adam
from posterity.optim.schedules import Constant, Cosine
from posterity.priors import Normal
from posterity_studies.uci.protocol import standardised

STEPS = 2000
BATCH_SIZE = 64
SEEDS = 2
CANDIDATES: dict[str, Method] = {
    **{f"mean-field Adam {size}": MeanField(STEPS, BATCH_SIZE, Adam(size)) for size in (0.001, 0.01)},
    **{
        f"step size {size}, radius {radius}, beta2 {beta2}, {type(schedule).__name__}": NaturalGradient(
            STEPS, BATCH_SIZE, step_size=size, schedule=schedule, beta2=beta2, radius=radius
        )
        for schedule, pairs in (
            (Constant(), ((0.003, None), (0.01, None), (0.01, 1.0), (0.03, 0.3), (0.1, 0.1))),
            (Cosine(), ((0.01, 1.0), (0.03, 0.3), (0.1, 0.1))),
        )
        for size, radius in pairs
        for beta2 in (0.98, 0.99, 0.995)
    },
}


def moons() -> tuple[DataSet, tuple[int, ...]]:
    return two_moons(), (2, 50, 50, 2)


def energy() -> tuple[DataSet, tuple[int, ...]]:
    data = uci_regression("energy", 0)
    split = standardised(data, 0)
    return replace(data, train=split.train, test=split.test), (8, 50, 1)


def digits() -> tuple[DataSet, tuple[int, ...]]:
    data = mnist()
    rows = data.train.rows(torch.arange(1000))
    return replace(data, train=replace(rows, inputs=rows.inputs.flatten(1).float())), (784, 100, 10)


PROBLEMS: dict[str, Callable[[], tuple[DataSet, tuple[int, ...]]]] = {
    "two-moons": moons,
    "energy": energy,
    "mnist-1000": digits,
}


def scores(method: Method, data: DataSet, sizes: tuple[int, ...], seed: int) -> tuple[float, float]:
    """Loss at the end and NLL of the held-out rows."""
    rest, rows = data.validation_split(0.2, seed)
    torch.manual_seed(seed)
    likelihood = Categorical() if data.classes else Gaussian(1.0, learn=True)
    joint = Joint(MLP(sizes), likelihood, Normal(1.0), len(rest.train))
    try:
        q, trace = infer(method, joint, rest.train, seed=seed, progress=False)
    except Diverged:
        return float("nan"), float("nan")
    predicted = q.predict(rows.inputs, draws=50)
    return float(trace["loss"][-STEPS // 10 :].mean()), float(negative_log_likelihood(predicted, rows.targets))


def main() -> None:
    torch.set_num_threads(1)
    for name in sys.argv[1:] or PROBLEMS:
        data, sizes = PROBLEMS[name]()
        for label, method in CANDIDATES.items():
            begin = time.perf_counter()
            found = torch.tensor([scores(method, data, sizes, seed) for seed in range(SEEDS)]).mean(0)
            seconds = time.perf_counter() - begin
            print(f"{name}: {label}: loss {found[0]:.4f}, held-out NLL {found[1]:.4f}, {seconds:.0f} s", flush=True)


if __name__ == "__main__":
    main()
