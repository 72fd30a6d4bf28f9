"""Time and memory of predictive probabilities from 32 draws of the weights against 32 deterministic forward passes.

A 784-400-400-10 network with the last layer's weights enlarged, so that it is sure of its classes and draws matter;
1,000 rows; every weight with a standard deviation of 0.02 around the same means for all contenders;
`posterior.predict` on our side, what their documentation does on the peers'.
"""

import dataclasses
import functools
import warnings
from collections.abc import Callable

import torch
from torch import Tensor, nn

from benchmarks.harness import Contender, compare, context, parser, write
from benchmarks.mean_field_layers import Peer, Problem
from benchmarks.mean_field_parts import BATCH, our_posterior, problem
from benchmarks.mean_field_peers import PACKAGES, PEERS
from benchmarks.memory import MEBIBYTE, peak_bytes

LIMIT = "32 forward passes"
BY_HAND = "32 draws by hand"
OURS = "posterity"
ROWS, DRAWS, SCALE = 1_000, 32, 0.02
ENLARGED = 20.0  # times, the weights of the last layer
TOLERANCE = 0.05


def forward_passes(module: nn.Module, x: Tensor) -> Callable[[], Tensor]:
    """Class probabilities of the network alone, as often as there are draws."""

    @torch.no_grad()
    def call() -> Tensor:
        total = torch.zeros(())
        for _ in range(DRAWS):
            total = total + module(x).softmax(dim=-1)
        return total / DRAWS

    return call


def by_hand(module: nn.Module, x: Tensor, scale: float = SCALE) -> Callable[[], Tensor]:
    """The plainest way to draw each weight anew for each pass."""
    means = {name: weight.detach() for name, weight in module.named_parameters()}

    @torch.no_grad()
    def call() -> Tensor:
        total = torch.zeros(())
        for _ in range(DRAWS):
            drawn = {name: mean + scale * torch.randn_like(mean) for name, mean in means.items()}
            total = total + torch.func.functional_call(module, drawn, (x,)).softmax(dim=-1)
        return total / DRAWS

    return call


def our_predict(module: nn.Module, x: Tensor) -> Callable[[], Tensor]:
    """The predictive of a mean-field posterior."""
    q = our_posterior(module, SCALE)
    return lambda: q.predict(x, draws=DRAWS).probs


def peer_predict(build: Callable[[Problem], Peer], module: nn.Module, x: Tensor, y: Tensor) -> Callable[[], Tensor]:
    """That of a peer that stands at the same means and scales."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        peer = build(Problem(module, x[:BATCH], y[:BATCH], scale=SCALE))
    return lambda: peer.predict(x, DRAWS)


def entropy(probs: Tensor) -> float:
    """Mean over rows of the entropy of the averaged probabilities, which the spread of the draws raises."""
    return float(torch.special.entr(probs.double()).sum(-1).mean())


def measured(call: Callable[[], Tensor], peaks: dict[str, float], name: str) -> Callable[[], Tensor]:
    """The call, after its peak memory has been noted."""
    call()  # what a first call makes and keeps is not the predictive's
    peaks[name] = peak_bytes(call) / MEBIBYTE
    return call


def main() -> None:
    """Run the comparison and write `mean_field_predict.json` and `mean_field_predict.md`."""
    chosen = parser(__doc__ or "").parse_args()
    torch.set_num_threads(chosen.threads)
    module, x, y = problem("mlp", ROWS, chosen.seed)
    with torch.no_grad():
        list(module.parameters())[-2].mul_(ENLARGED)
    peaks: dict[str, float] = {}

    def contender(
        name: str, prepare: Callable[[], Callable[[], Tensor]], *, drawn: bool = True, peer: bool = False
    ) -> Contender:
        return Contender(name, lambda: measured(prepare(), peaks, name), DRAWS, entropy if drawn else None, peer)

    comparison = compare(
        f"Mean-field predictive, 784-400-400-10: {DRAWS} draws for {ROWS:,} rows",
        [
            contender(LIMIT, lambda: forward_passes(module, x), drawn=False),
            contender(BY_HAND, lambda: by_hand(module, x)),
            contender(OURS, lambda: our_predict(module, x)),
            *(
                contender(name, functools.partial(peer_predict, build, module, x, y), peer=True)
                for name, build in PEERS.items()
            ),
        ],
        limit=LIMIT,
        unit="draw",
        rounds=chosen.rounds,
        tolerance=TOLERANCE,
        checked_against=BY_HAND,
    )
    names = [timing.name for timing in comparison.timings]
    columns = {"peak MiB": {name: peaks[name] for name in names}}
    notes = [
        "Checksum: mean entropy of the averaged probabilities in nats, which must agree with that of the draws by hand "
        f"within {TOLERANCE:.0%} (draws differ); a peer's row is marked where it does not. Of the network without "
        f"draws it is {entropy(forward_passes(module, x)()):.4g}.",
        "Peak MiB: growth of the process's resident set in one call. Ours keeps the log probabilities of all draws, "
        "from which the entropy is split.",
    ]
    write(
        "mean_field_predict",
        [dataclasses.replace(comparison, columns=columns)],
        context(chosen, PACKAGES),
        {},
        notes,
        chosen.results,
    )


if __name__ == "__main__":
    main()
