"""A step of VGG-19 under a penalty, as `posterity study penalties` takes it, by ways to run members.

For each batch size: a loop written by hand in torch (no penalty, no augmentation; autocast, channels last, fused SGD, a
CUDA graph), which is the limit; a fit alone; fits together as members, one by one on some CUDA streams or on one, and
by grouped convolutions. Milliseconds are for a step of one fit, seconds for its epoch of 45,000 rows. Images are
random: what they show makes no difference to the time. On a CPU, with other numbers, the benchmark only shows that all
ways run.
"""

import argparse
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

import torch
from torch.nn import functional as F

import posterity as po
from benchmarks.harness import recorded
from posterity.datasets import LabelledData
from posterity.inference import Callback, Run
from posterity.model import backward
from posterity.model.network import Network
from posterity_studies.options import silent
from posterity_studies.penalties.problem import Cell, Rows, problem
from posterity_studies.penalties.runs import Runs
from posterity_studies.penalties.settings import Settings

EPOCH = 45_000
HAND, ALONE, USUAL, GROUPED = "by hand", "alone", f"{backward.LANES} streams", "grouped"
WAYS = (HAND, ALONE, USUAL, "8 streams", "1 stream", GROUPED)


class Clock(Callback):
    """Seconds from step `before`, when kernels are tried out and the step is recorded, to the last."""

    def __init__(self, before: int) -> None:
        self.before, self.began, self.seconds = before, 0.0, 0.0

    def after_step(self, run: Run) -> None:
        if run.step in (self.before, run.steps):
            self.seconds = now() - self.began
            self.began = now()


def now() -> float:
    """Seconds, after all queued work."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


@contextmanager
def members_by(way: str) -> Iterator[None]:
    """Run members in this way."""
    lanes = int(way.split()[0]) if "stream" in way else 1
    with patch.object(Network, "one_by_one", way != GROUPED), patch.object(backward, "LANES", lanes):
        yield


def fitted(settings: Settings, penalty: str, members: int, steps: int) -> float:
    """Milliseconds of a step of one of these members by the library."""
    count, device = steps * settings.batch_size, settings.device
    images = po.Key(0).fold("images").normal((count, 3, 32, 32), torch.float32, device)
    data = LabelledData(images, torch.arange(count, device=device) % 10)
    own = problem(penalty, Rows(data, data, data, 10), settings)
    runs = Runs(own, 0.1, 1, Path(), settings, silent, "")
    task = runs.task([Cell(penalty, "bayesian", 0.01 * (1 + index), 0.1, 1, 0) for index in range(members)])
    clock = Clock(steps // 3)
    with runs.setting():
        po.infer(task.method, task.joint, task.data, start=task.start, progress=False, callbacks=[clock])
    return 1e3 * clock.seconds / (steps - clock.before) / members


def by_hand(settings: Settings, steps: int) -> float:
    """Milliseconds of a step in plain torch."""
    device = settings.device
    net = settings.architecture.make(10, 3, settings.actual_width, True).to(device)
    for kernel in (parameter for parameter in net.parameters() if parameter.dim() == 4):
        kernel.data = kernel.data.contiguous(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(net.parameters(), 0.01, 0.9, nesterov=True, fused=True)
    images = torch.randn(settings.batch_size, 3, 32, 32, device=device).to(memory_format=torch.channels_last)
    labels = torch.arange(settings.batch_size, device=device) % 10

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(device, torch.bfloat16, cache_enabled=False):
            outputs = net(images)
        F.cross_entropy(outputs.float(), labels).backward()  # type: ignore[no-untyped-call, unused-ignore]
        optimizer.step()

    with torch.backends.cudnn.flags(enabled=True, benchmark=True):
        call = recorded(step) if device == "cuda" else step
        call()
        began = now()
        for _ in range(steps):
            call()
        return 1e3 * (now() - began) / steps


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a line for each batch size and way, then for each further penalty, and on request the kernels of a step."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--batches", default="256,128", help="batch sizes")
    parser.add_argument("--ways", default=",".join(WAYS), help=", ".join(WAYS))
    parser.add_argument(
        "--penalties", default="rows,l2,l1,columns", help=f"all but the first by {USUAL} alone, at the first batch size"
    )
    parser.add_argument("--net", default="vgg19")
    parser.add_argument("--members", type=int, default=6)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--width", type=int)
    parser.add_argument("--precision", default="bf16")
    parser.add_argument("--profile", action="store_true", help="kernels of a step of a fit alone")
    given = parser.parse_args(arguments)
    first, *others = given.penalties.split(",")
    print("batch  penalty  way         members  ms a step of a fit  seconds an epoch of a fit  (took s)", flush=True)
    for batch in map(int, given.batches.split(",")):
        settings = Settings(
            data="cifar-10",
            net=given.net,
            batch_size=batch,
            precision=given.precision,
            device=given.device,
            width=given.width,
        )
        cases = [(way, first) for way in given.ways.split(",")] + [(USUAL, other) for other in others]
        others = []
        for way, penalty in cases:
            began, members = now(), 1 if way in (HAND, ALONE) else given.members
            if way == HAND:
                took = by_hand(settings, given.steps)
            else:
                with members_by(way):
                    took = fitted(settings, penalty, members, given.steps)
            an_epoch = 1e-3 * took * (EPOCH // batch)
            name = "none" if way == HAND else penalty
            line = f"{batch:5}  {name:7}  {way:10}  {members:7}  {took:18.3f}  {an_epoch:25.3f}"
            print(f"{line}  ({now() - began:.1f})", flush=True)
        if given.profile:
            with torch.profiler.profile() as profile:
                fitted(settings, first, 1, 30)
            kind = "cuda" if given.device == "cuda" else "cpu"
            print(profile.key_averages().table(sort_by=f"self_{kind}_time_total", row_limit=30), flush=True)


if __name__ == "__main__":
    main()
