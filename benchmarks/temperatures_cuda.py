"""A step of mean-field VI at eight temperatures together, against eight runs one after the other, on a CUDA device.

ResNet-20 with batch norm on images of CIFAR-10's shape, batch 128, float32. Both ways train by `posterity.infer`, which
records steps as CUDA graphs, from the same start, on the same rows, with channels last in memory; "in turn" is eight
calls, one for each temperature. A temperature alone is shown beside. Without a CUDA device the benchmark says so and
ends.
"""

import statistics
import sys
from collections.abc import Callable

import torch
from torch import Tensor

import posterity as po
from benchmarks.harness import Comparison, Contender, compare, context, parser, write

BATCH, ROWS, STEPS = 128, 6400, 200
ETAS = torch.logspace(-6, 1, 8, dtype=torch.float64)
ONE, TURN, TOGETHER = "one temperature", "eight in turn", "eight together"


def problem(seed: int) -> tuple[po.Joint, tuple[Tensor, Tensor]]:
    """Random images: what they show makes no difference to the time."""
    torch.manual_seed(seed)
    key = po.Key(seed).fold("temperatures")
    images = key.fold("images").normal((ROWS, 3, 32, 32), device="cuda")
    labels = (key.fold("labels").uniform((ROWS,), device="cuda") * 10).long()
    net = po.networks.ResNet(20).cuda()
    joint = po.Joint(net, po.likelihoods.Categorical(), po.priors.Normal(0.2**0.5), ROWS, po.Tempering.tempered(ETAS))
    return joint, (images, labels)


def measured(rounds: int, seed: int) -> tuple[Comparison, dict[str, float]]:
    """The comparison, and the times of a step inside the loop over steps."""
    joint, rows = problem(seed)
    method = po.methods.MeanField(STEPS, BATCH, po.optim.Adam())
    loops: dict[str, list[float]] = {ONE: [], TURN: [], TOGETHER: []}

    def call(contender: str) -> Callable[[], float]:
        def run() -> float:
            if contender == TOGETHER:
                start = joint.initial().expand(len(ETAS), -1).clone()
                traces = [po.infer(method, joint, rows, start=start, progress=False)[1]]
            else:
                places = range(1 if contender == ONE else len(ETAS))
                traces = [po.infer(method, joint.member(place), rows, progress=False)[1] for place in places]
            loops[contender].append(sum(trace.seconds for trace in traces) / STEPS)
            return statistics.mean(float(trace["data_fit"][-5:].mean()) for trace in traces)

        return run

    contenders = [
        Contender(contender, lambda contender=contender: call(contender), STEPS, lambda value: value)  # type: ignore[misc]
        for contender in loops
    ]
    unit = f"step at all temperatures; a call trains {STEPS} steps from the start, set-up included"
    found = compare("Eight temperatures, ResNet-20, batch 128, cuda", contenders, limit=ONE, unit=unit, rounds=rounds)
    timed = {contender: seconds[2::2] for contender, seconds in loops.items()}  # without first calls and warm-ups
    gain = statistics.median(a / b for a, b in zip(timed[TURN], timed[TOGETHER], strict=True))
    return found, {"ms together": 1e3 * statistics.median(timed[TOGETHER]), "gain": gain}


def main() -> None:
    """Run it and write `temperatures_cuda.json` and `temperatures_cuda.md`."""
    given = parser(__doc__ or "").parse_args()
    if not torch.cuda.is_available():
        sys.exit("temperatures_cuda needs a CUDA device, and there is none.")
    torch.set_num_threads(given.threads)
    found, facts = measured(given.rounds, given.seed)
    note = (
        f"Inside infer's loop a step of all eight takes {facts['ms together']:.4g} ms: {facts['gain']:.3f} x the "
        "throughput of eight captured runs one after the other (medians by round)."
    )
    write("temperatures_cuda", [found], context(given), facts, [note], given.results)


if __name__ == "__main__":
    main()
