"""Ten kinds of networks times eleven methods: fit, predict, save, and load in a new process.

    python -m benchmarks.networks
    python -m benchmarks.networks --only "GRU,LSTM" --methods "SWAG,MAP"

A cell works where the fit ends, predictions are finite, and a new process that loads the folder predicts the same to
1e-5. Every other cell says why not, in the words of the error. Rows are few and random: this is no measure of quality.
"""

import logging
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import posterity as po
from benchmarks.architectures import ARCHITECTURES, BATCH, Architecture
from benchmarks.harness import context, parser, write
from posterity.curvature import Diagonal, Kronecker
from posterity.methods import LastLayer
from posterity.posteriors import Posterior

STEPS, DRAWS, WARMUP = 20, 4, 100
DIGITS = 1e-5


def joint_of(case: Architecture, module: nn.Module) -> po.Joint:
    """The problem of a network as it comes."""
    count = len(case.loader(0).dataset)  # type: ignore[arg-type]
    network = po.Network(module, outputs=case.outputs) if case.outputs is not None else module
    return po.Joint(network, case.likelihood, po.priors.Normal(scale=1.0), num_data=count)


def fitted(method: Callable[[], Any], *, mode: bool = False, factory: bool = False) -> Callable[..., Posterior]:
    """How `infer` fits a case, from its mode, or with modules of its own for members."""

    def fit(case: Architecture, seed: int) -> Posterior:
        joint, loader = joint_of(case, case.module(seed)), case.loader(seed)
        start: Any = None
        if mode:
            start, _ = po.infer(po.methods.MAP(STEPS), joint, loader, seed=seed, progress=False)
        if factory:
            base = case.module(seed)

            def start() -> nn.Module:
                made = case.make()
                frozen = {name: p for name, p in base.named_parameters() if not p.requires_grad}
                made.load_state_dict({**made.state_dict(), **frozen})
                return made

        return po.infer(method(), joint, loader, start=start, seed=seed, progress=False)[0]

    return fit


def by_ivon(case: Architecture, seed: int) -> Posterior:
    """A training loop of one's own with `optim.IVON`."""
    module, loader = case.module(seed), case.loader(seed)
    joint = joint_of(case, module)
    weights = [p for p in module.parameters() if p.requires_grad]
    optimizer = po.optim.IVON(weights, lr=0.05, ess=joint.num_data)
    module.train()
    for _ in range(STEPS // 4):
        for batch in loader:
            with optimizer.sampled_params(train=True):
                optimizer.zero_grad()
                loss(case, module, batch).backward()
            optimizer.step()
    return optimizer.posterior(joint, module)


def loss(case: Architecture, module: nn.Module, batch: Any) -> Tensor:
    """Cross entropy of a batch as it comes."""
    if isinstance(batch, dict):
        inputs = {name: value for name, value in batch.items() if name != "labels"}
        returned, labels = module(**inputs), batch["labels"]
    else:
        returned, labels = module(batch[0]), batch[1]
    if case.outputs is not None:
        returned = case.outputs(returned)
    return nn.functional.cross_entropy(getattr(returned, "logits", returned), labels)


METHODS: dict[str, Callable[..., Posterior]] = {
    "MAP": fitted(lambda: po.methods.MAP(STEPS)),
    "Laplace, last layer": fitted(lambda: po.methods.Laplace(subset=LastLayer()), mode=True),
    "Laplace, Kronecker": fitted(lambda: po.methods.Laplace(structure=Kronecker()), mode=True),
    "Laplace, diagonal": fitted(lambda: po.methods.Laplace(structure=Diagonal()), mode=True),
    "MeanField": fitted(lambda: po.methods.MeanField(STEPS)),
    "NaturalGradient": fitted(lambda: po.methods.NaturalGradient(STEPS)),
    "IVON": by_ivon,
    "MC dropout": fitted(lambda: po.methods.MCDropout(STEPS)),
    "SWAG": fitted(lambda: po.methods.SWAG(po.methods.MAP(STEPS), every=2, rank=5), mode=True),
    "Ensemble": fitted(lambda: po.methods.Ensemble(po.methods.MAP(STEPS), 2), factory=True),
    "SGHMC": fitted(lambda: po.methods.SGHMC(draws=DRAWS, warmup=WARMUP), mode=True),
}


def probabilities(q: Posterior, case: Architecture) -> Tensor:
    """Predicted probabilities of the first rows of the loader, with few draws."""
    pred = q.predict(case.loader(0), draws=DRAWS) if _has_draws(q) else q.predict(case.loader(0))
    probs: Tensor = pred.probs
    return probs


def _has_draws(q: Posterior) -> bool:
    return not isinstance(q, (po.posteriors.Linearized, po.posteriors.Point, po.posteriors.Mixture))


LOADED = """
import sys, torch, warnings
warnings.simplefilter("ignore")
import posterity as po
from benchmarks.architectures import ARCHITECTURES
from benchmarks.networks import probabilities
case, folder = ARCHITECTURES[int(sys.argv[1])], sys.argv[2]
torch.set_num_threads(1)
for name in sys.argv[3:]:
    module = case.module(1)  # other weights: all come from the folder
    network = po.Network(module, outputs=case.outputs) if case.outputs is not None else module
    try:
        probs = probabilities(po.load(f"{folder}/{name}", network), case)
        print(name, float((probs - torch.load(f"{folder}/{name}.pt")).abs().max()))
    except Exception as error:
        print(name, " ".join(f"{type(error).__name__}: {error}".split()))
"""


def cells(index: int, methods: dict[str, Callable[..., Posterior]], seed: int) -> dict[str, str]:
    """What came of each method on one architecture: "" where all works, else why not."""
    case, results, numbers = ARCHITECTURES[index], dict[str, str](), dict[str, str]()
    with tempfile.TemporaryDirectory() as folder:
        for number, (name, fit) in enumerate(methods.items()):
            begin = time.perf_counter()
            try:
                q = fit(case, seed)
                probs = probabilities(q, case)
                if not bool(torch.isfinite(probs).all()):
                    raise ValueError("predictions are not finite")
                q.save(Path(folder) / str(number))
                torch.save(probs, Path(folder) / f"{number}.pt")
                numbers[str(number)], results[name] = name, ""
            except Exception as error:  # a cell that says why
                results[name] = " ".join(f"{type(error).__name__}: {error}".split())
            took = time.perf_counter() - begin
            print(f"{case.name} | {name}: {results[name] or 'fits and predicts'} ({took:.1f} s)", file=sys.stderr)
        command = [sys.executable, "-c", LOADED, str(index), folder, *numbers]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        for line in done.stdout.splitlines():
            number, _, said = line.partition(" ")
            try:
                off = float(said)
            except ValueError:
                results[numbers[number]] = f"in a new process: {said}"
            else:
                results[numbers[number]] = "" if off <= DIGITS else f"a new process predicts otherwise, by {off:.1e}"
    return results


def main() -> None:
    """Run the matrix, and write it as a table."""
    words = parser(__doc__ or "")
    words.add_argument("--only", default="", help="names of architectures, with commas")
    words.add_argument("--methods", default="", help="names of methods, with semicolons")
    given = words.parse_args()
    torch.set_num_threads(given.threads)
    logging.getLogger("posterity").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    methods = {name: fit for name, fit in METHODS.items() if not given.methods or name in given.methods.split(";")}
    facts: dict[str, dict[str, str]] = {}
    for index, case in enumerate(ARCHITECTURES):
        if not given.only or case.name in given.only.split(","):
            facts[case.name] = cells(index, methods, given.seed)
    reasons = [f"{case}, {name}: {why}" for case, row in facts.items() for name, why in row.items() if why]
    working = sum(not why for row in facts.values() for why in row.values())
    total = sum(map(len, facts.values()))
    notes = [
        f"{working} of {total} cells fit, predict, are saved, and predict the same after loading in a new process.",
        *(f"{case}: {', '.join(name for name, why in row.items() if not why)}" for case, row in facts.items()),
        *reasons,
        f"{STEPS} steps, batches of {BATCH}, random rows: a test of doors, not of quality.",
    ]
    write("networks", [], context(given), {"cells": facts}, notes, given.results)
    print("\n".join(notes))


if __name__ == "__main__":
    main()
