"""Time of a Laplace fit against one epoch of forward and backward passes over the same rows in the same batches.

The fit of a 784-400-400-10 network (10,000 rows) and of LeNet (2,000 rows), 10 classes, batches of 250, at the
weights given and with the prior fixed: what a curvature costs, up to a posterior that is ready to predict. Beside
each time stands the floor of its multiply-adds (`benchmarks/floor.py` says how they are counted). The peer is
laplace-torch with each of its backends. And the full Laplace approximation of a trained 2-50-50-2 network with 500
rows, prior tuned by evidence.
"""

import argparse
import dataclasses
import functools
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import posterity as po
from benchmarks import floor
from benchmarks.harness import Comparison, Contender, compare, context, parser, write
from benchmarks.laplace_parts import (
    BATCH,
    CLASSES,
    PEER_PACKAGES,
    Batches,
    epoch,
    our_evidence,
    our_fit,
    our_method,
    peer_evidence,
    peer_fit,
    prior_outside,
    problem,
    without_biases,
)
from posterity.networks import MLP

LIMIT = "forward and backward, one epoch"
OURS = "posterity"
NUM_DATA = {"mlp": 10_000, "lenet": 2_000}
NETS = {"mlp": "784-400-400-10", "lenet": "LeNet"}
GGN = ("BackPackGGN", "AsdlGGN", "CurvlinopsGGN")
EMPIRICAL = ("BackPackEF", "AsdlEF")  # Curvlinops forms the gradient of every row, which takes it minutes here
COLUMNS = CLASSES - 1  # the rank of the Hessian of a softmax
PRIOR_STEPS = 100  # laplace-torch's own number of steps in its search for the prior precision


@dataclass(frozen=True)
class Case:
    """One quantity: how we and the peer are told to make it, how far they may differ, and its multiply-adds a row."""

    title: str
    curvature: str
    structure: str
    backends: tuple[str, ...]
    tolerance: float
    floor: Callable[[Sequence[floor.Shape]], int]
    last_layer: bool = False
    num_data: int | None = None
    batch: int = BATCH
    nets: tuple[str, ...] = ("mlp", "lenet")


CASES = {
    "exact-kfac": Case(
        "KFAC of the exact Gauss-Newton matrix",
        *("ggn", "kron", GGN, 0.02, functools.partial(floor.kronecker, columns=COLUMNS)),
    ),
    "sampled-kfac": Case(
        "KFAC of the Fisher matrix, one sample",
        *("sampled", "kron", GGN, 0.1, functools.partial(floor.kronecker, columns=1)),
    ),
    "diagonal": Case(
        "Diagonal of the exact Gauss-Newton matrix",
        *("ggn", "diag", ("BackPackGGN", "AsdlGGN"), 1e-4, functools.partial(floor.diagonal, columns=COLUMNS)),
    ),
    "diagonal-small": Case(
        "Diagonal of the exact Gauss-Newton matrix, few rows (laplace-torch's default backend needs minutes for more)",
        *("ggn", "diag", GGN, 1e-4, functools.partial(floor.diagonal, columns=COLUMNS)),
        num_data=50,
        batch=25,
        nets=("mlp",),
    ),
    "empirical-diagonal": Case(
        "Diagonal of the empirical Fisher matrix",
        *("empirical", "diag", EMPIRICAL, 1e-4, functools.partial(floor.diagonal, columns=1)),
    ),
    "last-layer-kfac": Case(
        "KFAC of the exact Gauss-Newton matrix, last layer",
        *("ggn", "kron", GGN, 0.02, floor.last_layer_kronecker),
        last_layer=True,
    ),
}


def measure(case: Case, net: str, rounds: int, seed: int) -> Comparison:
    """One table: the limit, ours, and the peer's backends, each with the floor of the quantity."""
    num_data = case.num_data or NUM_DATA[net]
    module, x, y = problem(net, num_data, seed)
    batches = Batches(x, y, case.batch)
    method = our_method(case.curvature, case.structure, last_layer=case.last_layer, batch_size=case.batch)
    options = {"stochastic": True} if case.curvature == "sampled" else {}
    outside = prior_outside(module) if case.last_layer else 0.0
    contenders = [
        Contender(LIMIT, lambda: epoch(module, batches)),
        Contender(OURS, lambda: our_fit(module, x, y, method), checksum=lambda q: our_evidence(q) - outside),
        *(
            Contender(
                f"laplace-torch {backend}",
                functools.partial(
                    peer_fit, backend, module, batches, case.structure, last_layer=case.last_layer, **options
                ),
                checksum=peer_evidence,
                peer=True,
            )
            for backend in case.backends
        ),
    ]
    comparison = compare(
        f"{case.title}: {NETS[net]}, {num_data:,} rows, batch {case.batch}",
        contenders,
        limit=LIMIT,
        unit="fit",
        rounds=rounds,
        tolerance=case.tolerance,
        checked_against=OURS,
    )
    layers = floor.shapes(module, x[:1])
    share = case.floor(layers) / floor.epoch(layers)
    floors = {timing.name: share for timing in comparison.timings if timing.name != LIMIT}
    return dataclasses.replace(comparison, columns={"floor, x limit": {LIMIT: 1.0, **floors}})


def agreement(net: str, seed: int) -> dict[str, float]:
    """Relative difference of the peer's evidence from ours with KFAC, 500 rows, by backend, in layers without biases.

    With biases the two differ by design: the peer keeps a block of its own for the bias, ours is one more input.
    """
    module, x, y = problem(net, 500, seed)
    bare = without_biases(module)
    ours = our_evidence(our_fit(bare, x, y, our_method("ggn", "kron"))())
    differences = {}
    for backend in GGN:
        try:
            theirs = peer_evidence(peer_fit(backend, bare, Batches(x, y), "kron")())
        except ImportError:
            continue
        differences[backend] = abs(theirs - ours) / abs(ours)
    return differences


def trained(seed: int) -> tuple[nn.Module, Tensor, Tensor]:
    """Two moons and a 2-50-50-2 network at the mode of its posterior."""
    data = po.datasets.two_moons(num_data=500, seed=seed)
    torch.manual_seed(seed)
    joint = po.Joint(
        MLP((2, 50, 50, 2), activation="tanh"), po.likelihoods.Categorical(), po.priors.Normal(scale=1.0), num_data=500
    )
    x, y = data.train.pair
    method = po.methods.MAP(steps=2000, batch_size=None, optimizer=po.optim.Adam())
    q, _ = po.infer(method, joint, (x, y), seed=seed, progress=False)
    module = MLP((2, 50, 50, 2), activation="tanh")
    nn.utils.vector_to_parameters(q.point(), module.parameters())
    return module, x, y


def peer_tuned(module: nn.Module, x: Tensor, y: Tensor) -> Any:
    """laplace-torch's full posterior with its prior precision tuned by evidence, by its fastest backend."""
    fitted = peer_fit("BackPackGGN", module, Batches(x, y), "full")()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fitted.optimize_prior_precision(method="marglik", pred_type="glm", n_steps=PRIOR_STEPS)
    return fitted


def full(rounds: int, seed: int) -> tuple[Comparison, dict[str, float | str], list[str]]:
    """The tuned full posterior after MAP: ours interleaved with an epoch, the peer's once, as it takes minutes."""
    module, x, y = trained(seed)
    batches = Batches(x, y)
    comparison = compare(
        "Full Gauss-Newton matrix, prior tuned by evidence, after MAP: 2-50-50-2, 500 rows, batch 250",
        [
            Contender(LIMIT, lambda: epoch(module, batches)),
            Contender(
                OURS, lambda: our_fit(module, x, y, our_method("ggn", "full", tuned=True)), checksum=our_evidence
            ),
        ],
        limit=LIMIT,
        unit="fit",
        rounds=rounds,
    )
    ours = comparison[OURS]
    notes = [f"Full posterior, tuned: {ours.median:.3g} s after MAP, log evidence {ours.checksum:.2f}."]
    facts: dict[str, float | str] = {"ours_seconds": ours.median}
    start = time.perf_counter()
    try:
        fitted = peer_tuned(module, x, y)
    except Exception as error:
        facts["peer"] = f"{type(error).__name__}: {error}"[:200]
        return comparison, facts, [*notes, f"laplace-torch on the same: skipped, {facts['peer']}."]
    facts |= {"peer_seconds": time.perf_counter() - start, "peer_log_evidence": peer_evidence(fitted)}
    return (
        comparison,
        facts,
        [
            *notes,
            f"laplace-torch on the same (BackPackGGN, {PRIOR_STEPS} steps of its search, run once): "
            f"{facts['peer_seconds']:.3g} s, log evidence {facts['peer_log_evidence']:.2f}.",
        ],
    )


def options() -> argparse.Namespace:
    """The usual options, fewer rounds as a call takes seconds, and which cases to run."""
    found = parser(__doc__ or "")
    found.set_defaults(rounds=5)
    found.add_argument(
        "--case",
        action="append",
        choices=[*CASES, "full"],
        help="run this case alone; may be given again (default: all). The results hold what was run.",
    )
    return found.parse_args()


def main() -> None:
    """Run the cases and write `laplace_fit.json` and `laplace_fit.md`."""
    chosen = options()
    torch.set_num_threads(chosen.threads)
    names = chosen.case or [*CASES, "full"]
    comparisons: list[Comparison] = []
    facts: dict[str, Any] = {}
    notes = [
        "Checksum: log evidence at prior precision 1; a peer's row is marked where it does not agree with ours within "
        + ", ".join(f"{CASES[name].tolerance:g} ({name})" for name in names if name in CASES)
        + ". The wide ones: in KFAC the peer has a block of its own for each bias, and ours has the bias among the "
        "inputs; one sample of the Fisher matrix is another one for each contender.",
        "BackPACK does not divide the factors of a convolution by its positions, as ASDL and Curvlinops do.",
        "The floor counts the multiply-adds of the passes alone, over those of an epoch; a time below it is possible "
        "where large products run closer to the processor's peak than the small ones of an epoch.",
    ]
    for name in names:
        if name == "full":
            comparison, facts["full"], more = full(chosen.rounds, chosen.seed)
            comparisons.append(comparison)
            notes += more
            continue
        for net in CASES[name].nets:
            comparisons.append(measure(CASES[name], net, chosen.rounds, chosen.seed))
    if "exact-kfac" in names:
        for net in NUM_DATA:
            facts[f"agreement_{net}"] = found = agreement(net, chosen.seed)
            listed = ", ".join(f"{backend} {value:.1e}" for backend, value in found.items()) or "no peer installed"
            notes.append(
                f"KFAC in {NETS[net]} without biases, 500 rows, relative difference from our log evidence: {listed}."
            )
    write("laplace_fit", comparisons, context(chosen, PEER_PACKAGES), facts, notes, chosen.results)


if __name__ == "__main__":
    main()
