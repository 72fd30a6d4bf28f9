"""A step of VGG-19 under a penalty in bfloat16, as `posterity study penalties` takes it, on a CUDA device.

For some batch sizes, fits that step together as members against fits one by one: milliseconds a step, and seconds that
a fit takes for an epoch of 45,000 rows. Images are random: what they show makes no difference to the time. Without a
CUDA device the benchmark says so and ends.
"""

import argparse
import sys
import time
from pathlib import Path

import torch

import posterity as po
from posterity.datasets import LabelledData
from posterity.inference import Callback, Run
from posterity_studies.options import silent
from posterity_studies.penalties.problem import Cell, Rows, problem
from posterity_studies.penalties.runs import Runs
from posterity_studies.penalties.settings import Settings

EPOCH = 45_000
BEFORE, STEPS = 20, 60  # kernels are tried out and the step is recorded in the first ones


class Clock(Callback):
    """Seconds from step BEFORE to the last."""

    def after_step(self, run: Run) -> None:
        if run.step in (BEFORE, run.steps):
            if run.joint.device.type == "cuda":
                torch.cuda.synchronize()
            self.began, self.seconds = time.perf_counter(), time.perf_counter() - getattr(self, "began", 0.0)


def milliseconds(settings: Settings, penalty: str, members: int) -> float:
    """The time of a step of all members."""
    count = STEPS * settings.batch_size
    key = po.Key(0).fold("images")
    images = key.normal((count, 3, 32, 32), torch.float32, settings.device)
    data = LabelledData(images, torch.arange(count, device=settings.device) % 10)
    own = problem(penalty, Rows(data, data, data, 10), settings)
    runs = Runs(own, 0.1, 1, Path(), settings, silent, "")
    task = runs.task([Cell(penalty, "bayesian", 0.01 * (1 + index), 0.1, 1, index) for index in range(members)])
    clock = Clock()
    with runs.setting():
        po.infer(task.method, task.joint, task.data, start=task.start, progress=False, callbacks=[clock])
    return 1e3 * clock.seconds / (STEPS - BEFORE)


def main() -> None:
    """Print a line for each penalty, batch size and number of members."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--penalties", default="l2,rows")
    parser.add_argument("--cases", default="128x6,256x8,256x1,512x8,512x1", help="batch size x members")
    given = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("penalised_vgg_cuda needs a CUDA device, and there is none.")
    print("penalty  batch  members  ms a step  seconds an epoch of a fit", flush=True)
    for penalty in given.penalties.split(","):
        for case in given.cases.split(","):
            batch, members = map(int, case.split("x"))
            settings = Settings(data="cifar-10", net="vgg19", batch_size=batch, precision="bf16", device="cuda")
            took = milliseconds(settings, penalty, members)
            an_epoch = 1e-3 * took / members * (EPOCH // batch)
            print(f"{penalty:7}  {batch:5}  {members:7}  {took:9.2f}  {an_epoch:25.3f}", flush=True)


if __name__ == "__main__":
    main()
