"""How the settings of `posterity study uci` were chosen: by rows held out of the training rows, never by test rows.

    python -m benchmarks.uci_settings energy kin8nm

A tenth of the training rows of the first splits is held out; every candidate is fitted to the rest, and its mean NLL on
those rows, in units of the target, is printed for MAP and Laplace. The test rows are not looked at.
"""

import sys
import time
from dataclasses import replace
from statistics import fmean

import torch

from posterity.datasets import uci_regression
from posterity.inference import infer
from posterity.studies.uci import Settings
from posterity.studies.uci.protocol import Split, problem, standardised
from posterity.studies.uci.recipes import RECIPES

SPLITS = 2
CANDIDATES = [
    Settings(steps=20_000, batch_size=batch_size, step_size=step_size, prior_scale=prior_scale)
    for batch_size, step_size, prior_scale in (
        (128, 0.01, 1.0),
        (128, 0.01, 3.0),
        (128, 0.03, 1.0),
        (128, 0.03, 3.0),
        (256, 0.01, 1.0),
        (256, 0.03, 1.0),
        (256, 0.03, 3.0),
        (512, 0.01, 1.0),
        (512, 0.03, 1.0),
    )
]


def held_out(name: str, index: int) -> Split:
    """The training rows of a split, a tenth of them in the place of the test rows."""
    rest, rows = uci_regression(name, index).validation_split(0.1)
    return standardised(replace(rest, test=rows), index)


def scores(split: Split, settings: Settings) -> list[float]:
    """The held-out NLL of MAP and of Laplace, whose first stage MAP is."""
    found, posterior = [], None
    for stage in RECIPES["laplace"].stages(settings):
        key = settings.key(split.data_set, split.index)
        posterior, _ = infer(
            stage, problem(split, settings), split.train, start=posterior, seed=key.seed, progress=False
        )
        found.append(split.scores(posterior.predict(split.test.inputs))["test_nll"])
    return found


def main() -> None:
    torch.set_num_threads(1)
    for name in sys.argv[1:] or ("energy", "kin8nm", "naval-propulsion-plant", "power-plant"):
        splits = [held_out(name, index) for index in range(SPLITS)]
        for settings in CANDIDATES:
            begin = time.perf_counter()
            mode, laplace = map(fmean, zip(*(scores(split, settings) for split in splits), strict=True))
            seconds = time.perf_counter() - begin
            print(
                f"{name}: {settings}: held-out NLL MAP {mode:.4f}, Laplace {laplace:.4f}, {seconds:.0f} s", flush=True
            )


if __name__ == "__main__":
    main()
