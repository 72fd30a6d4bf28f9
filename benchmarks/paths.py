"""How many files of the package a call passes: what a reader must open to follow it.

    python -m benchmarks.paths [--json] [--list]

A file counts when a function in it is called, in any thread. Each call runs once before, off the count, so that
imports and caches are not in it.
"""

import argparse
import json
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import torch

import posterity as po

ROOT = str(Path(po.__file__).parent) + "/"


def files_passed(call: Callable[[], object]) -> list[str]:
    """The files under the package in which a function runs during the second of two calls, sorted."""
    call()
    seen = set()

    def note(frame: FrameType, event: str, argument: object) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(ROOT) and code.co_name != "<module>":
            seen.add(code.co_filename.removeprefix(ROOT))

    threading.setprofile(note)
    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return sorted(seen)


def calls() -> dict[str, Callable[[], Any]]:
    """The calls by name: fits of a small classifier, and a prediction."""
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(64, 3, generator=generator), torch.randint(0, 3, (64,), generator=generator)
    net = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3))
    joint = po.Joint(net, po.likelihoods.Categorical(), po.priors.Normal(1.0), num_data=64)

    def fit(method: Any) -> Callable[[], Any]:
        return lambda: po.infer(method, joint, (x, y), progress=False)

    laplace = fit(po.methods.Laplace())
    posterior, _ = laplace()
    return {
        "infer(MAP)": fit(po.methods.MAP(steps=20)),
        "infer(Laplace)": laplace,
        "predict of Laplace": lambda: posterior.predict(x),
        "infer(MeanField)": fit(po.methods.MeanField(steps=20)),
        "infer(NUTS)": fit(po.methods.NUTS(draws=5, warmup=10, chains=2)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print the files by call, as JSON")
    parser.add_argument("--list", action="store_true", help="print the files below each row")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)  # the network's first weights
    passed = {name: files_passed(call) for name, call in calls().items()}
    if options.json:
        rows = {name: {"count": len(files), "files": files} for name, files in passed.items()}
        print(json.dumps({"posterity": po.__version__, "calls": rows}, indent=2))
        return
    print("| call | files passed |\n| --- | ---: |")
    for name, files in passed.items():
        print(f"| {name} | {len(files)} |")
        if options.list:
            print("\n".join(f"    {file}" for file in files))


if __name__ == "__main__":
    main()
