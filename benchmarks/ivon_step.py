"""Time of a training step with IVON against one with plain torch.optim.Adam, and with ivon-opt.

All train the same network from the same weights on the same batches of 128 rows: forward pass, cross-entropy, backward
pass and step, in a plain loop, with the weights drawn once a step for IVON. The settings of both IVONs are the same;
their noise is not.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.harness import Comparison, Contender, compare, context, parser, write
from posterity.networks import MLP, LeNet, ResNet
from posterity.numerics.random import Key
from posterity.optim import IVON

BATCH, NUM_BATCHES, CLASSES = 128, 4, 10
SETTINGS = {"lr": 0.1, "ess": 50_000.0, "hess_init": 0.5, "beta2": 0.9999, "weight_decay": 2e-5}
TOLERANCE = 0.1
LIMIT = "torch.optim.Adam loop"
OURS = "posterity.optim.IVON loop"
PEER = "ivon-opt loop"

Loop = Callable[[], nn.Module]


@dataclass(frozen=True)
class Case:
    """A network, the shape of its rows, how many steps a call makes, and the most that IVON may take, x limit."""

    title: str
    make: Callable[[], nn.Module]
    shape: tuple[int, ...]
    steps: int
    bound: float


CASES = {
    "mlp": Case("784-400-400-10", lambda: MLP((784, 400, 400, CLASSES)), (784,), 40, 1.5),
    "lenet": Case("LeNet", LeNet, (1, 28, 28), 20, 1.05),
    "resnet": Case("ResNet-20", lambda: ResNet(20), (3, 32, 32), 2, 1.05),
}


def problem(case: Case, seed: int) -> tuple[nn.Module, list[tuple[Tensor, Tensor]]]:
    """A fresh network, and batches labelled by a random linear map, so that there is something to learn."""
    torch.manual_seed(seed)
    net = case.make()
    key = Key(seed).fold("ivon_step")
    x = key.fold("inputs").normal((NUM_BATCHES * BATCH, *case.shape))
    flat = x.flatten(1)
    y = (flat @ key.fold("teacher").normal((flat.shape[1], CLASSES))).argmax(dim=1)
    return net, list(zip(x.split(BATCH), y.split(BATCH), strict=True))  # type: ignore[no-untyped-call]


def adam(net: nn.Module, batches: list[tuple[Tensor, Tensor]], steps: int) -> Loop:
    """Train a copy of `net`, `steps` further steps in each call, as everybody does."""
    trained = copy.deepcopy(net)
    optimizer = torch.optim.Adam(trained.parameters())

    def call() -> nn.Module:
        for step in range(steps):
            x, y = batches[step % len(batches)]
            optimizer.zero_grad()
            nn.functional.cross_entropy(trained(x), y).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        return trained

    return call


def ivon(kind: Callable[..., Any], net: nn.Module, batches: list[tuple[Tensor, Tensor]], steps: int) -> Loop:
    """The same with an IVON, whose verbs are the same in both packages."""
    trained = copy.deepcopy(net)
    optimizer = kind(trained.parameters(), **SETTINGS)

    def call() -> nn.Module:
        for step in range(steps):
            x, y = batches[step % len(batches)]
            with optimizer.sampled_params(train=True):
                optimizer.zero_grad()
                nn.functional.cross_entropy(trained(x), y).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        return trained

    return call


def ivon_opt(net: nn.Module, batches: list[tuple[Tensor, Tensor]], steps: int) -> Loop:
    """The peer, from its own package."""
    import ivon as peer  # type: ignore[import-not-found, unused-ignore]

    return ivon(peer.IVON, net, batches, steps)


def measure(case: Case, rounds: int, seed: int) -> Comparison:
    """One table: the limit, ours, and the peer."""
    net, batches = problem(case, seed)

    def loss(trained: nn.Module) -> float:
        with torch.no_grad():
            return nn.functional.cross_entropy(trained(batches[0][0]), batches[0][1]).item()

    return compare(
        f"Training step, {case.title}, batch {BATCH}",
        [
            Contender(LIMIT, lambda: adam(net, batches, case.steps), case.steps),
            Contender(OURS, lambda: ivon(IVON, net, batches, case.steps), case.steps, loss),
            Contender(PEER, lambda: ivon_opt(net, batches, case.steps), case.steps, loss, peer=True),
        ],
        limit=LIMIT,
        unit=f"step; a call makes {case.steps}",
        rounds=rounds,
        tolerance=TOLERANCE,
        checked_against=OURS,
    )


def verdict(case: Case, comparison: Comparison) -> str:
    """Whether ours kept to the most that it may take, as a sentence."""
    ratio = comparison.median_of_ratios(OURS)
    word = "within" if ratio <= case.bound else "above"
    return f"{case.title}: {ratio:.3f} x Adam by round, {word} the {case.bound:g} that was asked for."


def main() -> None:
    """Run the comparisons and write `ivon_step.json` and `ivon_step.md`."""
    options = parser(__doc__ or "")
    options.add_argument("--nets", default=",".join(CASES), help="which networks (default: all)")
    chosen = options.parse_args()
    torch.set_num_threads(chosen.threads)
    comparisons, notes = [], []
    for name in chosen.nets.split(","):
        comparisons.append(measure(CASES[name], chosen.rounds, chosen.seed))
        notes.append(verdict(CASES[name], comparisons[-1]))
    notes.append(
        "Checksum: cross-entropy of the first batch after the first call, both IVONs with the same settings and noise "
        f"of their own; they must agree within {TOLERANCE:.0%}."
    )
    write("ivon_step", comparisons, context(chosen, ["ivon-opt"]), notes=notes, folder=chosen.results)


if __name__ == "__main__":
    main()
