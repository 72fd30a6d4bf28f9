"""Time of one step of an ensemble of eight whose members step together, against one member and eight in turn.

All train by `posterity.infer` with MAP for the same number of steps a call, on shuffled batches of 128 rows in memory
(each member in its own order), from the same fresh weights: a 2-50-50-2 and a 784-400-400-10 network, and on a CUDA
device a ResNet-20 with a `forward` of its own, whose members are to take three times as long as one at most. "in turn"
is eight calls, one for each member. On a CUDA device steps are recorded where `infer` does so by itself.
"""

import statistics
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import posterity as po
from benchmarks.harness import Comparison, Contender, compare, context, parser, write
from benchmarks.laplace_resnet import OwnResNet

MEMBERS, BATCH, ROWS = 8, 128, 6400
RESNET = "ResNet-20 of one's own"
NETS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], int]] = {  # network, shape of a row, classes
    "2-50-50-2": (lambda: po.networks.MLP((2, 50, 50, 2)), (2,), 2),
    "784-400-400-10": (lambda: po.networks.MLP((784, 400, 400, 10)), (784,), 10),
    RESNET: (OwnResNet, (3, 32, 32), 10),
}
STEPS = {
    "cpu": {"2-50-50-2": 300, "784-400-400-10": 20},
    "cuda": {"2-50-50-2": 1000, "784-400-400-10": 1000, RESNET: 200},
}
ONE, TURN, TOGETHER = "one member", "eight members in turn", "Ensemble of eight"


def problem(name: str, seed: int, device: str) -> tuple[po.Joint, tuple[Tensor, Tensor]]:
    """A network and rows labelled by a random linear map, so that there is something to learn."""
    make, shape, classes = NETS[name]
    torch.manual_seed(seed)
    key = po.Key(seed).fold("ensemble_step")
    x = key.fold("inputs").normal((ROWS, *shape), device="cpu")
    flat = x.flatten(1)
    y = (flat @ key.fold("teacher").normal((flat.shape[1], classes), device="cpu")).argmax(dim=1)
    joint = po.Joint(make().to(device), po.likelihoods.Categorical(), po.priors.Normal(scale=1.0), num_data=ROWS)
    return joint, (x.to(device), y.to(device))


def measured(name: str, options: Any) -> tuple[Comparison, dict[str, float]]:
    """The comparison for one network, and its ratios inside the loop over steps."""
    steps = STEPS[options.device][name]
    joint, rows = problem(name, options.seed, options.device)
    method = po.methods.MAP(steps=steps, batch_size=BATCH, optimizer=po.optim.Adam())
    ensemble = po.methods.Ensemble(method, MEMBERS)
    start = ensemble.initial(joint, po.Key(options.seed))
    loops: dict[str, list[float]] = {ONE: [], TURN: [], TOGETHER: []}

    def call(contender: str) -> Callable[[], float]:
        def run() -> float:
            if contender == TOGETHER:
                _, trace = po.infer(ensemble, joint, rows, start=start, progress=False)
                seconds, loss = trace.seconds, float(trace["loss"][-5:].mean())
            else:
                members = start if contender == TURN else start[:1]
                traces = [po.infer(method, joint, rows, start=theta, progress=False)[1] for theta in members]
                seconds = sum(trace.seconds for trace in traces)
                loss = statistics.mean(float(trace["loss"][-5:].mean()) for trace in traces)
            loops[contender].append(seconds / steps)
            return loss

        return run

    contenders = [
        Contender(contender, lambda contender=contender: call(contender), steps, lambda loss: loss)  # type: ignore[misc]
        for contender in loops
    ]
    found = compare(
        f"Ensemble step, {name}, batch {BATCH}, {options.device}",
        contenders,
        limit=ONE,
        unit=f"step of all members; a call trains {steps} steps from the start, set-up included",
        rounds=options.rounds,
    )
    timed = {contender: seconds[2::2] for contender, seconds in loops.items()}  # without first calls and warm-ups
    against = {
        other: statistics.median(a / b for a, b in zip(timed[TOGETHER], timed[other], strict=True))
        for other in (ONE, TURN)
    }
    together = 1e3 * statistics.median(timed[TOGETHER])
    return found, {"ms": together, "by one": against[ONE], "by eight in turn": against[TURN]}


def main() -> None:
    """Run the networks and write `ensemble_step.json` and `ensemble_step.md` (`ensemble_step_cuda` on a GPU)."""
    options = parser(__doc__ or "")
    options.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="where to train")
    given = options.parse_args()
    torch.set_num_threads(given.threads)
    results = {name: measured(name, given) for name in STEPS[given.device]}
    notes = [
        f"{name}: inside infer's loop a step of the ensemble takes {facts['ms']:.4g} ms, {facts['by one']:.3f} x "
        f"that of one member and {facts['by eight in turn']:.3f} x that of eight in turn (medians by round)."
        for name, (_, facts) in results.items()
    ]
    notes.append("Checksum: mean loss of the last five steps, which starts and orders of rows move a little.")
    facts = {name: of for name, (_, of) in results.items()}
    topic = "ensemble_step" if given.device == "cpu" else "ensemble_step_cuda"
    write(topic, [found for found, _ in results.values()], context(given), facts, notes, given.results)


if __name__ == "__main__":
    main()
