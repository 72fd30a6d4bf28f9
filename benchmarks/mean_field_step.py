"""Time of one step of mean-field variational inference against one of plain `torch.optim.Adam`, batch 128.

One draw of the weights for each step on 784-400-400-10, LeNet, ResNet-20 and 2-50-50-10, and eight draws on the first
against eight deterministic passes. A step is `method.step` with a fresh key on a batch that is at hand; a further row
has whole runs of `infer`, with drawing batches and set-up. Before that the ELBO and its gradient are checked.
"""

import argparse
import dataclasses
import functools
import statistics
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import posterity as po
from benchmarks.harness import Comparison, Contender, compare, context, parser, write
from benchmarks.mean_field_checks import against_autograd, against_closed_form
from benchmarks.mean_field_layers import Peer, Problem
from benchmarks.mean_field_parts import (
    BATCH,
    NUM_DATA,
    STEP_SIZE,
    deterministic_step,
    our_joint,
    our_objective,
    our_run,
    our_step,
    problem,
)
from benchmarks.mean_field_peers import PACKAGES, PEERS, kl_weight, peer_kl_weight

LIMIT = "torch.optim.Adam"
FUSED = "torch.optim.Adam(fused=True)"
ONE, PAIRED, RUN = "posterity, one draw", "posterity, antithetic", "posterity infer, one draw"
LOCAL, SAMPLED = "posterity, local reparameterisation", "posterity, weight sampling"
KL_WEIGHT = "KL weight (ELBO: 1)"
CHECKED = (784, 400, 400, 10)


@dataclass(frozen=True)
class Case:
    """A network, draws for each step, steps timed in a row, steps of a run of `infer`, and the most rounds."""

    title: str
    net: str
    draws: int
    block: int
    run_steps: int
    rounds: int


CASES = {
    "mlp": Case("784-400-400-10, one draw", "mlp", 1, 6, 12, 100),
    "lenet": Case("LeNet, one draw", "lenet", 1, 4, 8, 100),
    "resnet20": Case("ResNet-20, one draw", "resnet20", 1, 1, 2, 5),
    "tiny": Case("2-50-50-10, one draw", "tiny", 1, 30, 60, 100),
    "mlp-8": Case("784-400-400-10, eight draws", "mlp", 8, 2, 0, 100),
}


def estimators(draws: int) -> dict[str, Any]:
    """Ours by name of contender."""
    if draws == 1:
        return {ONE: po.methods.WeightSampling(), PAIRED: po.methods.WeightSampling(antithetic=True)}
    return {
        LOCAL: po.methods.LocalReparameterisation(draws=draws),
        SAMPLED: po.methods.WeightSampling(draws=draws, antithetic=True),
    }


def our_method(estimator: Any, steps: int = 5000) -> Any:
    """`MeanField` with the limit's step size and batch."""
    return po.methods.MeanField(
        steps=steps, batch_size=BATCH, estimator=estimator, optimizer=po.optim.Adam(step_size=STEP_SIZE)
    )


def peer_step(
    build: Callable[[Problem], Peer], name: str, start: Problem, weights: dict[str, float]
) -> Callable[[], Any]:
    """The step of a peer, once its objective has been looked at."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        weights[name] = peer_kl_weight(build, start.module, start.x, start.y)
        return build(start).step


def our_contenders(case: Case, module: nn.Module, x: Tensor, y: Tensor, loops: list[float]) -> list[Contender]:
    """Steps of ours, and runs; the loops of the latter add their seconds to `loops`."""
    found = [
        Contender(name, functools.partial(our_step, our_method(estimator), our_joint(module), x, y))
        for name, estimator in estimators(case.draws).items()
    ]
    if not case.run_steps:
        return found
    rows = BATCH * case.run_steps
    _, inputs, labels = problem(case.net, rows, seed=0)

    def prepare() -> Callable[[], Any]:
        method = our_method(po.methods.WeightSampling(), case.run_steps)
        run = our_run(method, our_joint(module, rows), inputs, labels)

        def call() -> None:
            loops.append(run().seconds / case.run_steps)

        return call

    return [*found, Contender(RUN, prepare, case.run_steps)]


def measure(case: Case, rounds: int, seed: int) -> tuple[Comparison, float | None]:
    """One table, and the median ratio to the limit of a step within the loop of `infer`."""
    module, x, y = problem(case.net, BATCH, seed)
    weights: dict[str, float] = {}
    loops: list[float] = []
    for name, estimator in estimators(case.draws).items():
        weights[name] = kl_weight(functools.partial(our_objective, estimator, module, x, y))
        if abs(weights[name] - 1.0) > 0.01:
            raise ValueError(f"{name} counts the KL {weights[name]:.4g} times.")
    start = Problem(module, x, y, case.draws)
    comparison = compare(
        f"Mean-field step, {case.title}",
        [
            Contender(LIMIT, lambda: deterministic_step(module, x, y, case.draws)),
            Contender(FUSED, lambda: deterministic_step(module, x, y, case.draws, fused=True)),
            *our_contenders(case, module, x, y, loops),
            *(
                Contender(name, functools.partial(peer_step, build, name, start, weights), peer=True)
                for name, build in PEERS.items()
            ),
        ],
        limit=LIMIT,
        unit=f"step of {case.draws} draw{'s' * (case.draws > 1)}",
        rounds=min(rounds, case.rounds),
        block=case.block,
    )
    comparison = dataclasses.replace(comparison, columns={KL_WEIGHT: weights})
    if not loops:
        return comparison, None
    each = case.block + 1  # a warm-up and the block, after the first call of all
    timed = [statistics.mean(loops[at + 1 : at + each]) for at in range(1, len(loops), each)]
    ratios = (own / limit for own, limit in zip(timed, comparison[LIMIT].seconds, strict=True))
    return comparison, statistics.median(ratios)


def options() -> argparse.Namespace:
    """The usual options, and which cases to run."""
    found = parser(__doc__ or "")
    found.add_argument(
        "--case",
        action="append",
        choices=list(CASES),
        help="run this case alone; may be given again (default: all). The results hold what was run.",
    )
    return found.parse_args()


def main() -> None:
    """Check, run the cases and write `mean_field_step.json` and `mean_field_step.md`."""
    chosen = options()
    torch.set_num_threads(chosen.threads)
    errors = against_autograd(CHECKED)
    ours = {**estimators(1), **estimators(8)}
    distances = {name: against_closed_form(estimator) for name, estimator in ours.items()}
    comparisons, loops = [], {}
    for name in chosen.case or CASES:
        comparison, loop = measure(CASES[name], chosen.rounds, chosen.seed)
        comparisons.append(comparison)
        if loop is not None:
            loops[name] = loop
    facts = {"loop_ratio": loops, "autograd_errors": errors, "closed_form_distances": distances}
    write("mean_field_step", comparisons, context(chosen, PACKAGES), facts, notes(**facts), chosen.results)


def notes(
    loop_ratio: dict[str, float], autograd_errors: dict[str, float], closed_form_distances: dict[str, float]
) -> list[str]:
    """What the tables do not say."""
    loops = ", ".join(f"{CASES[name].title.split(',')[0]} {ratio:.3f}" for name, ratio in loop_ratio.items())
    errors = ", ".join(f"{error:.1e} ({name})" for name, error in autograd_errors.items())
    distances = ", ".join(f"{distance:.2f} ({name})" for name, distance in closed_form_distances.items())
    return [
        f"{RUN}: whole calls of `infer` over the steps that they make, with checks of the data, copies and batches "
        f"drawn from rows in memory. Within its loop alone a step is, x limit (median by round): {loops or 'not run'}.",
        "Autograd: loss and gradient of a step with one draw, for 784-400-400-10 with tanh in float64, against those "
        f"of an ELBO written down plainly. Relative errors: {errors}.",
        "Closed form: loss and gradients of a linear model with known noise lie within 5 standard errors for each of "
        f"ours. The farthest are at {distances}.",
        f"{KL_WEIGHT}: how often the objective counts the KL of {NUM_DATA:,} data, measured by the change of its value "
        "and of the closed-form KL between scales of 1e-5 and 1e-4 of all weights. Peers are called as documented: "
        "bayesian-torch adds up means over tensors and divides by the batch size; torchbnn's examples have 0.01 times "
        "the mean over weights; blitz does not divide by the number of data; torch-uncertainty averages over layers.",
        "With eight draws bayesian-torch averages outputs, not losses.",
        "torch-uncertainty: its layers are loaded without its `__init__`, which needs torchvision, and its ELBOLoss is "
        "written out. TyXe: a function that it calls and Pyro has no more is put back.",
    ]


if __name__ == "__main__":
    main()
