"""Time of one MAP step against a hand-written Adam loop, and the share of it that drawing batches takes.

Both sides train the same 784-400-400-10 network from the same weights for the same number of steps a call:
shuffled batches of 128 indexed from 50,000 rows in memory, cross-entropy and a N(0, 1) prior (weight decay
1 / num_data on the mean loss), fused Adam with step size 1e-3, and the loss read as a number at every step.
The loop by hand takes its batches by `index_select`, which is about twice as fast as `x[index]`, so that the
limit is the best that plain torch does.
"""

import copy
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import posterity
from benchmarks.harness import Contender, compare, context, parser, write
from posterity.model.data import as_data
from posterity.networks import MLP
from posterity.numerics.random import Key
from posterity.optim.optimizer import Adam

NUM_DATA, BATCH = 50_000, 128
STEPS = NUM_DATA // BATCH  # one epoch
STEP_SIZE = 1e-3
TOLERANCE = 0.01
ORDER = Key(0).fold("batches").fold(0)  # the order of rows in the first pass of a run with seed 0
LIMIT = "torch.optim.Adam(fused=True) loop"
OURS = "posterity.infer(MAP)"
LIMIT_BATCHES = "index_select by hand"
OUR_BATCHES = "posterity minibatches"


def problem(seed: int) -> tuple[nn.Module, Tensor, Tensor]:
    """A fresh network, and rows labelled by a random linear map, so that there is something to learn."""
    torch.manual_seed(seed)
    net = MLP((784, 400, 400, 10))
    key = Key(seed).fold("map_step")
    x = key.fold("inputs").normal((NUM_DATA, 784))
    return net, x, (x @ key.fold("teacher").normal((784, 10))).argmax(dim=1)


def by_hand(net: nn.Module, x: Tensor, y: Tensor) -> Callable[[], nn.Module]:
    """Train a copy of `net` for STEPS steps with torch alone."""

    def call() -> nn.Module:
        trained = copy.deepcopy(net)
        optimizer = torch.optim.Adam(trained.parameters(), lr=STEP_SIZE, weight_decay=1 / NUM_DATA, fused=True)
        losses = []
        order = ORDER.permutation(NUM_DATA)  # that of `infer`, so that both must end alike
        for step in range(STEPS):
            index = order[step * BATCH : (step + 1) * BATCH]
            loss = nn.functional.cross_entropy(trained(x.index_select(0, index)), y.index_select(0, index))
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            losses.append(loss.item())
        return trained

    return call


def by_posterity(net: nn.Module, x: Tensor, y: Tensor, loops: list[float]) -> Callable[[], Any]:
    """Train `net`'s private copy for STEPS steps with `posterity.infer`; add the seconds of a step to `loops`."""
    joint = posterity.Joint(
        net, posterity.likelihoods.Categorical(), posterity.priors.Normal(scale=1.0), num_data=NUM_DATA
    )
    method = posterity.methods.MAP(steps=STEPS, batch_size=BATCH, optimizer=Adam(step_size=STEP_SIZE))

    def call() -> Any:
        ends: list[float] = []
        note: Callable[[Any], None] = lambda run: ends.append(time.perf_counter())  # noqa: E731
        q, _ = posterity.infer(method, joint, (x, y), seed=0, progress=False, callbacks=[note])
        loops.append((ends[-2] - ends[0]) / (STEPS - 2))  # the last step also passes over all rows
        return q

    return call


def batches_by_hand(x: Tensor, y: Tensor) -> Callable[[], None]:
    """Draw every batch of one epoch by indexing a permutation."""

    def call() -> None:
        order = torch.randperm(NUM_DATA)
        for step in range(NUM_DATA // BATCH):
            index = order[step * BATCH : (step + 1) * BATCH]
            _ = x.index_select(0, index), y.index_select(0, index)

    return call


def batches_by_posterity(x: Tensor, y: Tensor) -> Callable[[], None]:
    """Draw every batch of one epoch as `infer` does."""
    data = as_data((x, y))

    def call() -> None:
        for _ in data.minibatches(BATCH, NUM_DATA // BATCH, Key(0)).from_step(0):
            pass

    return call


def main() -> None:
    """Run both comparisons and write `map_step.json` and `map_step.md`."""
    options = parser(__doc__ or "").parse_args()
    torch.set_num_threads(options.threads)
    net, x, y = problem(options.seed)
    probe, labels = x[:2000], y[:2000]
    loops: list[float] = []

    def cross_entropy(trained: nn.Module) -> float:
        with torch.no_grad():
            return nn.functional.cross_entropy(trained(probe), labels).item()

    steps = compare(
        "MAP step, 784-400-400-10, batch 128",
        [
            Contender(LIMIT, lambda: by_hand(net, x, y), STEPS, cross_entropy),
            Contender(
                OURS,
                lambda: by_posterity(net, x, y, loops),
                STEPS,
                lambda q: -q.predict(probe).log_prob(labels).mean().item(),
            ),
        ],
        limit=LIMIT,
        unit=f"step; a call trains {STEPS} steps from the start, set-up included",
        rounds=options.rounds,
        tolerance=TOLERANCE,
    )
    epoch = NUM_DATA // BATCH
    draws = compare(
        f"Drawing the {epoch} batches of one epoch",
        [
            Contender(LIMIT_BATCHES, lambda: batches_by_hand(x, y), epoch),
            Contender(OUR_BATCHES, lambda: batches_by_posterity(x, y), epoch),
        ],
        limit=LIMIT_BATCHES,
        unit="batch; a call draws one epoch",
        rounds=options.rounds,
    )
    in_loop = loops[2::2]  # the timed calls: after the first, every other is a warm-up
    step = statistics.median(in_loop)
    ratio = statistics.median(own / hand for own, hand in zip(in_loop, steps[LIMIT].seconds, strict=True))
    outside = STEPS * statistics.median(all_ - own for all_, own in zip(steps[OURS].seconds, in_loop, strict=True))
    share = draws[OUR_BATCHES].median / step
    facts = {"loop_step_seconds": step, "loop_ratio": ratio, "outside_seconds": outside, "data_path_share": share}
    drawing, training = (1e3 * epoch * seconds for seconds in (draws[OUR_BATCHES].median, step))
    notes = [
        f"Inside infer's loop a step takes {1e3 * step:.4g} ms, {ratio:.3f} x the limit (median by round). "
        f"Each call also spends {1e3 * outside:.3g} ms outside the loop, once, however many steps it makes: "
        "it checks all rows, copies weights, and at the end measures by a pass over all rows how far the mode is.",
        f"Data path: drawing one epoch's {epoch} batches takes {share:.1%} of its training, "
        f"{drawing:.3g} ms of {training:.4g} ms.",
        "Checksum: mean cross-entropy on 2,000 rows after the call, from the same batches on both sides; they must "
        f"agree within {TOLERANCE:.0%} (roundings grow in training).",
    ]
    write("map_step", [steps, draws], context(options), facts, notes, options.results)


if __name__ == "__main__":
    main()
