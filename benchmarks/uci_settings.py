"""How the settings of `posterity study uci` were chosen: by rows held out of the training rows, never by test rows.

    python -m benchmarks.uci_settings energy kin8nm
    python -m benchmarks.uci_settings bostonHousing energy --methods dropout,ensemble

A tenth of the training rows of the first splits is held out; every candidate is fitted to the rest, and its mean NLL on
those rows, in units of the target, is printed for each method. The test rows are not looked at. MC dropout and
ensembles (which hold out further rows for choices of their own) take a fifth and a twentieth of the steps.
"""

import argparse
import time
from dataclasses import replace
from statistics import fmean

import torch

from posterity.datasets import uci_regression
from posterity_studies.uci.protocol import Split, standardised
from posterity_studies.uci.recipes import RECIPES
from posterity_studies.uci.runs import Done, fitted
from posterity_studies.uci.settings import Settings

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
SHORTER = [
    Settings(steps=steps, step_size=step_size, prior_scale=prior_scale)
    for steps, step_size, prior_scale in (
        (10_000, 0.03, 1.0),
        (20_000, 0.01, 1.0),
        (20_000, 0.03, 0.3),
        (20_000, 0.03, 1.0),
        (40_000, 0.03, 1.0),
    )
]


def held_out(name: str, index: int) -> Split:
    """The training rows of a split, a tenth of them in the place of the test rows."""
    rest, rows = uci_regression(name, index).validation_split(0.1)
    return standardised(replace(rest, test=rows), index)


def main() -> None:
    torch.set_num_threads(1)
    words = argparse.ArgumentParser()
    words.add_argument("data_sets", nargs="*", default=["energy", "kin8nm", "naval-propulsion-plant", "power-plant"])
    words.add_argument("--methods", default="map,laplace")
    given = words.parse_args()
    methods = given.methods.split(",")
    candidates = CANDIDATES if "map" in methods else SHORTER
    for name in given.data_sets:
        splits = [held_out(name, index) for index in range(SPLITS)]
        for settings in candidates:
            begin, found = time.perf_counter(), []
            for split in splits:
                done: Done = {}
                found.append([fitted(split, RECIPES[method], settings, done)[0]["test_nll"] for method in methods])
            means = map(fmean, zip(*found, strict=True))
            shown = ", ".join(
                f"{RECIPES[method].label} {mean:.4f}" for method, mean in zip(methods, means, strict=True)
            )
            print(f"{name}: {settings}: held-out NLL {shown}, {time.perf_counter() - begin:.0f} s", flush=True)


if __name__ == "__main__":
    main()
