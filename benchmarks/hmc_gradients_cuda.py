"""HMC on a 784-50-10 tanh net over 10,000 MNIST images on a CUDA device: gradients a second of 64 chains against one.

Categorical likelihood, N(0, 1) prior, all images in every gradient, float32. The limit is one chain whose leapfrogs are
written by hand and recorded as a CUDA graph, without accept steps or draws kept. `posterity` is timed inside `infer`,
over the second half of the transitions, with all that a transition does. Contenders take turns; a rate counts the
gradients of all chains. Nothing is needed but torch, numpy, safetensors and this repository; without a CUDA device the
benchmark says so and ends.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

import posterity as po
from benchmarks.harness import context, parser, report
from posterity.datasets import mnist_test
from posterity.errors import BadData
from posterity.inference import Callback, Run

SIZES, NUM_DATA, WANTED = (784, 50, 10), 10_000, 5.0
STEP_SIZE, LEAPFROGS, DRAWS, REPLAYS = 5e-4, 20, 20, 20  # a step so small that no trajectory diverges
LIMIT, OURS = "hand-written, recorded, 1 chain", "posterity HMC, {} chain{}"

Rate = Callable[[], float]


@dataclass(frozen=True)
class Speed:
    """A contender's gradients a second, one entry a round."""

    name: str
    chains: int
    rates: list[float]

    @property
    def median(self) -> float:
        """Over rounds."""
        return statistics.median(self.rates)

    def ratio(self, other: "Speed") -> float:
        """Median over rounds of the ratio to the other's rate in the same round."""
        return statistics.median(own / its for own, its in zip(self.rates, other.rates, strict=True))


def images(seed: int, device: torch.device, rows: int = NUM_DATA) -> tuple[Tensor, Tensor, str]:
    """Images (N, 784) with mean 0 and variance 1 over all pixels, labels (N,), and what they are."""
    try:
        data = mnist_test()
        x, y, what = data.inputs[:rows].flatten(1), data.targets[:rows], "MNIST test images"
        x = (x - x.mean()) / x.std()
    except BadData:
        key = po.Key(seed).fold("images")
        x, what = key.fold("inputs").normal((rows, SIZES[0])), "random images (MNIST was not found)"
        y = (key.fold("labels").uniform((rows,)) * SIZES[-1]).long()
    return x.to(device), y.to(device), what


def problem(x: Tensor, seed: int) -> po.Joint:
    """The network with likelihood and prior."""
    torch.manual_seed(seed)
    net = po.networks.MLP(SIZES, activation="tanh").to(x.device)
    return po.Joint(net, po.likelihoods.Categorical(), po.priors.Normal(scale=1.0), num_data=len(x))


def log_density(theta: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """(C, P) -> (C,), theta in the order of the network's parameters; without the prior's constant."""
    inputs, hidden, classes = SIZES
    w1, b1, w2, b2 = theta.split((hidden * inputs, hidden, classes * hidden, classes), dim=1)  # type: ignore[no-untyped-call]
    units = torch.tanh(x @ w1.unflatten(1, (hidden, inputs)).mT + b1.unsqueeze(1))  # (C, N, H)
    logits = units @ w2.unflatten(1, (classes, hidden)).mT + b2.unsqueeze(1)  # (C, N, K)
    picked = logits.log_softmax(-1).gather(-1, y.expand(len(theta), -1).unsqueeze(-1))
    return picked.sum((1, 2)) - 0.5 * theta.square().sum(1)


def trajectory(theta: Tensor, momentum: Tensor, x: Tensor, y: Tensor) -> None:
    """A few leapfrogs of all chains, in place, one gradient each: the half steps in between are taken as whole ones."""
    for _ in range(LEAPFROGS):
        theta.add_(momentum, alpha=STEP_SIZE)
        leaf = theta.detach().requires_grad_()
        (grad,) = torch.autograd.grad(log_density(leaf, x, y).sum(), leaf)
        momentum.add_(grad, alpha=STEP_SIZE)


def by_hand(chains: int, joint: po.Joint, x: Tensor, y: Tensor) -> Rate:
    """The rate of recorded trajectories."""
    key = po.Key(0)
    theta = torch.stack([joint.fresh(key.fold(index)) for index in range(chains)])
    momentum = torch.zeros_like(theta)
    aside = torch.cuda.Stream()
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):
        for _ in range(2):
            trajectory(theta, momentum, x, y)
    torch.cuda.current_stream().wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        trajectory(theta, momentum, x, y)

    def rate() -> float:
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(REPLAYS):
            graph.replay()
        torch.cuda.synchronize()
        return len(theta) * LEAPFROGS * REPLAYS / (time.perf_counter() - begin)  # which keeps the graph's theta alive

    return rate


class _SecondHalf(Callback):
    """Seconds of the second half of a run."""

    def __init__(self) -> None:
        self.begin = self.seconds = 0.0

    def after_step(self, run: Run) -> None:
        if run.step in (run.steps // 2, run.steps):
            if run.joint.device.type == "cuda":
                torch.cuda.synchronize()
            now = time.perf_counter()
            self.begin, self.seconds = now, now - self.begin


def ours(chains: int, joint: po.Joint, x: Tensor, y: Tensor) -> Rate:
    """The rate inside `infer`, in which the first transitions are recorded where the method allows."""
    method = po.methods.HMC(draws=DRAWS, warmup=0, chains=chains, step_size=STEP_SIZE, steps=LEAPFROGS)

    def rate() -> float:
        timer = _SecondHalf()
        samples: Any = po.infer(method, joint, (x, y), callbacks=[timer], progress=False)[0]
        return float(samples.statistics["leapfrogs"][:, DRAWS // 2 :].sum()) / timer.seconds  # (C, D)

    return rate


def lines(speeds: Sequence[Speed], title: str) -> list[str]:
    """A table as Markdown."""
    singles = [speed for speed in speeds if speed.chains == 1]
    head = ("contender", "gradients/s", "ms a leapfrog of all chains", *(f"x {single.name}" for single in singles))
    said = [f"## {title}", "", "| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for speed in speeds:
        ratios = (f"{speed.ratio(single):.3f}" for single in singles)
        cells = (speed.name, f"{speed.median:.5g}", f"{1e3 * speed.chains / speed.median:.4g}", *ratios)
        said.append("| " + " | ".join(cells) + " |")
    return [*said, ""]


def measure(given: argparse.Namespace, x: Tensor, y: Tensor) -> list[Speed]:
    """All contenders in turn, the order rotating, after a first run of each off the clock."""
    joint = problem(x, given.seed)
    rates: dict[str, tuple[int, Rate]] = {}
    for chains in (1, given.chains):
        plural = "" if chains == 1 else "s"
        rates[f"hand-written, recorded, {chains} chain{plural}"] = chains, by_hand(chains, joint, x, y)
        rates[OURS.format(chains, plural)] = chains, ours(chains, joint, x, y)
    speeds = [Speed(name, chains, []) for name, (chains, _) in rates.items()]
    for turn in range(-1, given.rounds):
        first = turn % len(speeds)
        for speed in speeds[first:] + speeds[:first]:
            found = rates[speed.name][1]()
            if turn >= 0:
                speed.rates.append(found)
    return speeds


def verdict(speeds: Sequence[Speed], chains: int) -> list[str]:
    """Whether many chains of ours make the most of the device, as sentences."""
    known: Mapping[str, Speed] = {speed.name: speed for speed in speeds}
    many, said = known.get(OURS.format(chains, "s")), []
    for single in (LIMIT, OURS.format(1, "")):
        if many is not None and single in known:
            ratio = many.ratio(known[single])
            word = "within" if ratio >= WANTED else "below"
            said.append(f"{many.name}: {ratio:.2f} x {single}, {word} the {WANTED:g} that was asked for.")
    return said


def main() -> None:
    """Run the comparison and write `hmc_gradients_cuda.json` and `hmc_gradients_cuda.md`."""
    options = parser(__doc__ or "")
    options.set_defaults(rounds=7)
    options.add_argument("--chains", type=int, default=64, help="how many chains in one batch (default 64)")
    options.add_argument(
        "--precision", choices=("highest", "high"), default="highest", help="of float32 products; high is TF32"
    )
    given = options.parse_args()
    if not torch.cuda.is_available():
        sys.exit("hmc_gradients_cuda needs a CUDA device, and torch sees none.")
    torch.set_num_threads(given.threads)
    torch.set_float32_matmul_precision(given.precision)
    about = context(given)
    about["machine"]["gpu"] = torch.cuda.get_device_name(0)
    x, y, what = images(given.seed, torch.device("cuda"))
    speeds = measure(given, x, y)
    notes = [
        *verdict(speeds, given.chains),
        f"On one {about['machine']['gpu']}, CUDA {torch.version.cuda}; {len(x):,} {what}; float32, products "
        f"{'in TF32' if given.precision == 'high' else 'not rounded further'}; {LEAPFROGS} leapfrogs a trajectory.",
        f"Medians over {given.rounds} interleaved rounds; ratios are medians of those by round. A round is {REPLAYS} "
        f"recorded trajectories, or the second {DRAWS // 2} of {DRAWS} transitions inside infer.",
    ]
    title = f"HMC, 784-50-10 tanh, {len(x):,} images"
    text = "\n".join(lines(speeds, title)) + "\n" + report([], about, notes)
    document = {"topic": "hmc_gradients_cuda", **about, "notes": notes, "speeds": [asdict(speed) for speed in speeds]}
    given.results.mkdir(parents=True, exist_ok=True)
    (given.results / "hmc_gradients_cuda.json").write_text(json.dumps(document, indent=1) + "\n")
    (given.results / "hmc_gradients_cuda.md").write_text(f"# hmc gradients cuda\n\n{text}")
    print(text)


if __name__ == "__main__":
    main()
