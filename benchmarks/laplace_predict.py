"""Time and memory of the linearised predictive of a Laplace posterior against one forward pass over the same rows.

A 784-400-400-10 network, 1,000 rows, curvature of 500 others, class probabilities by the probit formula: posteriors
over all weights (KFAC, diagonal) and over the last layer (KFAC). The peer is laplace-torch with both of its kinds of
Jacobian; where 1,000 rows would take it minutes it predicts fewer, and all times are for one row. And the last layer
of a network with 10,000 classes, at one input.
"""

import argparse
import dataclasses
import functools
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import posterity as po
from benchmarks.harness import Comparison, Contender, compare, context, parser, write
from benchmarks.laplace_parts import PEER_PACKAGES, Batches, our_fit, our_method, peer_fit, problem
from benchmarks.memory import MEBIBYTE, peak_bytes
from posterity.numerics.random import Key

LIMIT = "one forward pass"
OURS = "posterity"
ROWS, NUM_FIT = 1_000, 500
PROBE = 5  # rows of which the checksum is made, which every contender predicts
BACKENDS = ("BackPackGGN", "CurvlinopsGGN")  # with ASDL it predicts by the Jacobians that it has with Curvlinops
FEATURES, MANY_CLASSES = 128, 10_000
TOLERANCE = 0.02
STRUCTURES = {"kron": "KFAC", "diag": "diagonal"}


@dataclass(frozen=True)
class Case:
    """One posterior, and how many rows the peer predicts, how many of them at a time, and how many it is fitted to."""

    title: str
    structure: str
    last_layer: bool
    peer_rows: int
    peer_batch: int
    peer_fit_rows: dict[str, int]


CASES = {
    "kfac": Case("all weights, KFAC", "kron", False, 5, 5, {}),
    # its default backend forms the Jacobian of every row to fit a diagonal, so it gets few and its checksum differs
    "diagonal": Case("all weights, diagonal", "diag", False, 20, 20, {"CurvlinopsGGN": 10}),
    "last-layer": Case("last layer, KFAC", "kron", True, ROWS, 500, {}),
}


def forward(module: nn.Module, x: Tensor) -> Callable[[], Tensor]:
    """Class probabilities of the network alone."""

    @torch.no_grad()
    def call() -> Tensor:
        return module(x).softmax(dim=-1)

    return call


def our_predict(q: Any, x: Tensor) -> Callable[[], Tensor]:
    """Class probabilities of the linearised posterior."""
    probit = po.predictive.Probit()
    return lambda: q.predict(x, integrator=probit).probs


def peer_predict(
    backend: str, module: nn.Module, x: Tensor, y: Tensor, case: Case, rows: Tensor
) -> Callable[[], Tensor]:
    """The same of laplace-torch, in batches."""
    fitted_to = case.peer_fit_rows.get(backend, len(y))
    batches = Batches(x[:fitted_to], y[:fitted_to])
    fitted = peer_fit(backend, module, batches, case.structure, last_layer=case.last_layer)()

    def call() -> Tensor:
        parts = rows[: case.peer_rows].split(case.peer_batch)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return torch.cat([fitted(part, pred_type="glm", link_approx="probit").detach() for part in parts])

    return call


def spread(probs: Tensor) -> float:
    """Standard deviation over classes of the log probabilities, mean of the first rows.

    The probit formula scales a row's logits by 1 / sqrt(1 + pi variance / 8), and this with them, so that it tells
    variances apart even where all probabilities are close.
    """
    return float(probs[:PROBE].double().log().std(dim=-1).mean())


def measured(call: Callable[[], Any], peaks: dict[str, float], name: str) -> Callable[[], Any]:
    """The call, after its peak memory has been noted."""
    call()  # what a first call makes and keeps is not the predictive's
    peaks[name] = peak_bytes(call) / MEBIBYTE
    return call


def measure(case: Case, rounds: int, seed: int) -> Comparison:
    """One table: the limit, ours, and the peer's backends, with peak memory."""
    module, x, y = problem("mlp", NUM_FIT + ROWS, seed)
    x, y, rows = x[:NUM_FIT], y[:NUM_FIT], x[NUM_FIT:]
    peaks: dict[str, float] = {}
    predicted = {LIMIT: ROWS, OURS: ROWS} | {f"laplace-torch {backend}": case.peer_rows for backend in BACKENDS}

    def ours() -> Callable[[], Tensor]:
        return our_predict(our_fit(module, x, y, our_method("ggn", case.structure, last_layer=case.last_layer))(), rows)

    def contender(name: str, prepare: Callable[[], Callable[[], Tensor]], **more: Any) -> Contender:
        return Contender(name, lambda: measured(prepare(), peaks, name), predicted[name], **more)

    contenders = [
        contender(LIMIT, lambda: forward(module, rows)),
        contender(OURS, ours, checksum=spread),
        *(
            contender(
                f"laplace-torch {backend}",
                functools.partial(peer_predict, backend, module, x, y, case, rows),
                checksum=spread if backend not in case.peer_fit_rows else None,
                peer=True,
            )
            for backend in BACKENDS
        ),
    ]
    comparison = compare(
        f"Linearised predictive, {case.title}: 784-400-400-10",
        contenders,
        limit=LIMIT,
        unit="row",
        rounds=rounds,
        tolerance=TOLERANCE,
        checked_against=OURS,
    )
    names = [timing.name for timing in comparison.timings]
    columns = {
        "rows": {name: float(predicted[name]) for name in names},
        "peak MiB": {name: peaks[name] for name in names},
    }
    return dataclasses.replace(comparison, columns=columns)


def many_classes(structure: str, rounds: int, seed: int) -> Comparison:
    """One input of a network whose last layer maps 128 features to 10,000 classes."""
    torch.manual_seed(seed)
    module = nn.Sequential(nn.Linear(64, FEATURES), nn.ReLU(), nn.Linear(FEATURES, MANY_CLASSES))
    key = Key(seed).fold("many classes")
    x = key.fold("inputs").normal((NUM_FIT + 1, 64))
    y = (key.fold("labels").uniform((NUM_FIT,)) * MANY_CLASSES).long()
    peaks: dict[str, float] = {}

    def ours() -> Callable[[], Tensor]:
        return our_predict(our_fit(module, x[:-1], y, our_method("sampled", structure, last_layer=True))(), x[-1:])

    comparison = compare(
        f"Linearised predictive, last layer of {FEATURES} features and {MANY_CLASSES:,} classes, "
        f"{STRUCTURES[structure]}: one input",
        [
            Contender(LIMIT, lambda: measured(forward(module, x[-1:]), peaks, LIMIT)),
            Contender(OURS, lambda: measured(ours(), peaks, OURS), checksum=spread),
        ],
        limit=LIMIT,
        unit="call",
        rounds=rounds,
    )
    return dataclasses.replace(comparison, columns={"peak MiB": peaks})


def options() -> argparse.Namespace:
    """The usual options, fewer rounds as the peer takes seconds, which cases to run, and the head's structure."""
    found = parser(__doc__ or "")
    found.set_defaults(rounds=5)
    found.add_argument(
        "--case",
        action="append",
        choices=[*CASES, "many-classes"],
        help="run this case alone; may be given again (default: all). The results hold what was run.",
    )
    found.add_argument(
        "--many-classes",
        choices=list(STRUCTURES),
        default="diag",
        help="structure of the posterior over 10,000 classes (default diag; kron decomposes a matrix of that size "
        "first, which takes minutes)",
    )
    return found.parse_args()


def main() -> None:
    """Run the cases and write `laplace_predict.json` and `laplace_predict.md`."""
    chosen = options()
    torch.set_num_threads(chosen.threads)
    names = chosen.case or [*CASES, "many-classes"]
    comparisons = [
        many_classes(chosen.many_classes, chosen.rounds, chosen.seed)
        if name == "many-classes"
        else measure(CASES[name], chosen.rounds, chosen.seed)
        for name in names
    ]
    notes = [
        f"Times in the tables of 784-400-400-10 are for one row of the {ROWS:,} (of fewer for the peer, as the column "
        "rows says), fit not included.",
        "Peak MiB: growth of the process's resident set in one call over all its rows.",
        f"Checksum: standard deviation over classes of the log probabilities, mean of the first {PROBE} rows, which "
        "the predictive variance shrinks; a peer's row is marked where it does not agree with ours within "
        f"{TOLERANCE:.0%} (the peer's KFAC has a block of its own for each bias).",
        "CurvlinopsGGN has no checksum with the diagonal: fitting it takes it minutes, so that it is fitted to fewer "
        "rows.",
    ]
    write("laplace_predict", comparisons, context(chosen, PEER_PACKAGES), {}, notes, chosen.results)


if __name__ == "__main__":
    main()
