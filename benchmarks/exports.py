"""Exported programs of every kind of posterior, run without posterity: how far are they from `q.predict`?

    python -m benchmarks.exports

Each case is exported to .pt2 and to .onnx. Two fresh processes, in which importing posterity fails, run the files: one
with torch, one with onnxruntime and no torch. Batches have 1, 3 and 11 rows. What they must give comes from `predict`,
with the same number of draws and seed. For classes of a linearised posterior the mutual information is that of draws of
its outputs, and so is all of a likelihood without a closed form.
"""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import posterity as po
from benchmarks.harness import context, parser, write
from posterity.curvature import Diagonal, Full, Kronecker
from posterity.likelihoods import (
    Bernoulli,
    Categorical,
    Gaussian,
    Heteroscedastic,
    Likelihood,
    Poisson,
    Probit,
    StudentT,
)
from posterity.methods import (
    MAP,
    SGLD,
    SWAG,
    AllWeights,
    Ensemble,
    Laplace,
    LastLayer,
    MCDropout,
    MeanField,
    ProbabilisticBackpropagation,
)
from posterity.posteriors import Calibrated, Dropout, Linearized, Mixture, Posterior
from posterity.predictive import VectorScaling, from_outputs
from posterity.priors import Normal

ROWS, DRAWS, SEED = (1, 3, 11), 8, 3
FORBID = """
import sys
class Forbidden:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in FORBIDDEN:
            raise ImportError(name)
sys.meta_path.insert(0, Forbidden())
import json, pathlib
import numpy as np
folder = pathlib.Path(sys.argv[1])
away = {}
for file in sorted(folder.glob("*" + SUFFIX)):
    stored = dict(np.load(file.with_suffix(".npz")))
    worst = 0.0
    program = None
    for rows in ROWS:
        given = {k.split("/")[2]: v for k, v in stored.items() if k.startswith(f"{rows}/in/")}
        wanted = {k.split("/")[2]: v for k, v in stored.items() if k.startswith(f"{rows}/out/")}
        program = program or opened(file)
        result = called(program, given)
        assert set(wanted) <= set(result), (file.name, sorted(result))
        for name, value in wanted.items():
            assert value.shape == result[name].shape, (file.name, name, value.shape, result[name].shape)
            worst = max(worst, float(np.abs(value - result[name]).max()))
    away[file.stem] = worst
assert not [name for name in sys.modules if name.partition(".")[0] in FORBIDDEN]
print(json.dumps(away))
"""
WITH_TORCH = f"""
FORBIDDEN, SUFFIX, ROWS = {{"posterity"}}, ".pt2", {ROWS}
import torch
def opened(file):
    return torch.export.load(file).module()
def called(program, given):
    rows = {{name: torch.from_numpy(value) for name, value in given.items()}}
    return {{k: v.numpy() for k, v in program(rows["inputs"] if set(rows) == {{"inputs"}} else rows).items()}}
"""
WITH_ONNX = f"""
FORBIDDEN, SUFFIX, ROWS = {{"posterity", "torch", "onnxscript"}}, ".onnx", {ROWS}
import onnxruntime
def opened(file):
    return onnxruntime.InferenceSession(str(file), providers=["CPUExecutionProvider"])
def called(program, given):
    return dict(zip([o.name for o in program.get_outputs()], program.run(None, given)))
"""


@dataclass(frozen=True)
class Case:
    """A posterior, the inputs that it takes by their number of rows, and whether its mutual information is compared."""

    make: Callable[[], Posterior]
    inputs: Callable[[int], Any]
    information: bool = True


class Attention(nn.Module):
    """Two inputs by name."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, dropout=0.2, batch_first=True)
        self.out = nn.Linear(4, 3)

    def forward(self, tokens: Tensor, shift: Tensor) -> Tensor:
        tokens = tokens + shift.unsqueeze(1)
        value: Tensor = self.out(self.attention(tokens, tokens, tokens)[0].mean(1))
        return value


def rows_of(*shape: int, dtype: torch.dtype = torch.float32) -> Callable[[int], Tensor]:
    return lambda rows: po.Key(rows).normal((rows, *shape), dtype)


def named(rows: int) -> dict[str, Tensor]:
    return {"tokens": rows_of(5, 4)(rows), "shift": rows_of(4)(rows)}


def seeded(make: Callable[[], nn.Module]) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        return make()


def mlp(outputs: int, activation: type[nn.Module] = nn.ReLU) -> nn.Module:
    return seeded(
        lambda: nn.Sequential(nn.Linear(3, 8), activation(), nn.Linear(8, 6), activation(), nn.Linear(6, outputs))
    )


def normed(outputs: int, rate: float = 0.0) -> nn.Module:
    def make() -> nn.Module:
        module = nn.Sequential(
            nn.Linear(3, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Dropout(rate), nn.LayerNorm(6), nn.Linear(6, outputs)
        )
        module(torch.randn(50, 3))  # running statistics
        return module

    return seeded(make)


def convolutional() -> nn.Module:
    return seeded(
        lambda: nn.Sequential(
            nn.Conv2d(1, 4, 3), nn.ReLU(), nn.MaxPool2d(2), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(36, 3)
        )
    )


def targets(noise: Likelihood, outputs: int, rows: int = 30) -> Tensor:
    key, classes = po.Key(7), torch.arange(rows)
    if isinstance(noise, Categorical):
        return classes % outputs
    if isinstance(noise, (Bernoulli, Probit)):
        return (key.uniform((rows, outputs)) < 0.5).float()
    if isinstance(noise, Heteroscedastic):
        outputs = outputs // 2
    numbers = key.normal((rows, outputs))
    return numbers.abs().round() if isinstance(noise, Poisson) else numbers


def fitted(method: Any, noise: Likelihood, outputs: int, net: nn.Module | None = None, shape: Any = (3,)) -> Posterior:
    joint = po.Joint(mlp(outputs) if net is None else net, noise, Normal(1.0), num_data=30)
    if isinstance(method, Laplace):  # at weights that fit the rows
        start, _ = po.infer(MAP(steps=60), joint, (rows_of(*shape)(30), targets(noise, outputs)))
        return po.infer(method, joint, (rows_of(*shape)(30), targets(noise, outputs)), start=start)[0]
    return po.infer(method, joint, (rows_of(*shape)(30), targets(noise, outputs)))[0]


def laplace(structure: Any = None, subset: Any = None) -> Laplace:
    return Laplace(structure=structure or Full(), subset=subset or AllWeights(), tuning=None)


def chains(noise: Likelihood, outputs: int) -> Posterior:
    return fitted(SGLD(draws=4, warmup=3, thin=1, chains=2, batch_size=10, step_size=1e-3), noise, outputs)


def calibrated(q: Posterior, scaling: Any) -> Posterior:
    return Calibrated.fit(q, (rows_of(3)(30), torch.arange(30) % 3), scaling)


def weighted() -> Posterior:
    parts = [fitted(MeanField(steps=5), Categorical(), 3), fitted(MAP(steps=5), Categorical(), 3)]
    return Mixture(parts, torch.tensor([0.75, 0.25]))


def several_laplace(noise: Likelihood, outputs: int) -> Posterior:
    return Mixture([fitted(laplace(kind), noise, outputs) for kind in (Full(), Diagonal())])


def table_cases() -> dict[str, Case]:
    """Cases of rows with three numbers."""
    noises: dict[str, tuple[Likelihood, int]] = {
        "regression": (Gaussian(0.3), 1),
        "several_outputs": (Gaussian((0.3, 0.7)), 2),
        "heteroscedastic": (Heteroscedastic(), 2),
        "student": (StudentT(scale=0.5, degrees=5.0), 1),
        "counts": (Poisson(), 1),
        "classes": (Categorical(), 3),
        "two_classes": (Categorical(), 2),
        "labels": (Bernoulli(), 2),
        "probit": (Probit(), 1),
    }
    makers: dict[str, Callable[[Likelihood, int], Posterior]] = {
        "point": lambda *problem: fitted(MAP(steps=5), *problem),
        "mean_field": lambda *problem: fitted(MeanField(steps=5), *problem),
        "ensemble": lambda *problem: fitted(Ensemble(MAP(steps=5), 3), *problem),
        "chains": chains,
        "laplace": lambda *problem: fitted(laplace(), *problem),
        "last_layer": lambda *problem: fitted(laplace(subset=LastLayer()), *problem),
    }
    return {
        f"{kind}-{name}": Case(lambda make=make, problem=problem: make(*problem), rows_of(3))  # type: ignore[misc]
        for kind, make in makers.items()
        for name, problem in noises.items()
    }


def other_cases() -> dict[str, Case]:
    """Cases of single kinds and of other networks."""
    double = rows_of(3, dtype=torch.float64)
    image = rows_of(1, 8, 8)
    return {
        "swag-classes": Case(lambda: fitted(SWAG(MAP(steps=60), every=2, rank=5), Categorical(), 3), rows_of(3)),
        "kronecker-classes": Case(lambda: fitted(laplace(Kronecker()), Categorical(), 3), rows_of(3)),
        "silu-regression": Case(lambda: fitted(laplace(), Gaussian(0.3), 1, mlp(1, nn.SiLU)), rows_of(3)),
        "gelu-classes": Case(lambda: fitted(laplace(), Categorical(), 3, mlp(3, nn.GELU)), rows_of(3)),
        "learnt_noise-chains": Case(lambda: chains(Gaussian(0.3, learn=True), 1), rows_of(3)),
        "propagated": Case(lambda: fitted(ProbabilisticBackpropagation(passes=1), Gaussian(0.3), 1), rows_of(3)),
        "weighted_mixture": Case(weighted, rows_of(3)),
        "mixture_of_laplace-regression": Case(lambda: several_laplace(Gaussian(0.3), 1), rows_of(3)),
        "mixture_of_laplace-classes": Case(lambda: several_laplace(Categorical(), 3), rows_of(3), information=False),
        "calibrated_mean_field": Case(
            lambda: calibrated(fitted(MeanField(steps=5), Categorical(), 3), po.predictive.TemperatureScaling),
            rows_of(3),
            information=False,  # calibrated by its default draws, compared below with these
        ),
        "calibrated_ensemble": Case(
            lambda: calibrated(fitted(Ensemble(MAP(steps=5), 3), Categorical(), 3), VectorScaling), rows_of(3)
        ),
        "dropout": Case(lambda: fitted(MCDropout(steps=5), Categorical(), 3, normed(3, 0.4)), rows_of(3)),
        "norms-mean_field": Case(lambda: fitted(MeanField(steps=5), Gaussian(0.3), 1, normed(1)), rows_of(3)),
        "norms-last_layer": Case(lambda: fitted(laplace(subset=LastLayer()), Categorical(), 3, normed(3)), rows_of(3)),
        "images-ensemble": Case(
            lambda: fitted(Ensemble(MAP(steps=3), 2), Categorical(), 3, convolutional(), (1, 8, 8)), image
        ),
        "images-last_layer": Case(
            lambda: fitted(laplace(subset=LastLayer()), Categorical(), 3, convolutional(), (1, 8, 8)), image
        ),
        "attention-dropout": Case(lambda: Dropout.of(seeded(Attention), Categorical(), example=named(2)), named),
        "float64-mean_field": Case(
            lambda: po.infer(
                MeanField(steps=5),
                po.Joint(mlp(1).double(), Gaussian(0.3), Normal(1.0), num_data=30),
                (double(30), targets(Gaussian(0.3), 1).double()),
            )[0],
            double,
        ),
    }


def cases() -> dict[str, Case]:
    """Return all cases by name."""
    return {**table_cases(), **other_cases()}


def expected(q: Posterior, rows: Any, *, information: bool = True) -> dict[str, Tensor]:
    """Return what a program with `DRAWS` draws of `SEED` must give at the rows."""
    pred = q.predict(rows, draws=DRAWS, seed=SEED)
    drawn, likelihood = pred, q.joint.as_joint("exports").likelihood
    if isinstance(q, Linearized):  # by the draws that are stored: `predict` draws the outputs of each row by itself
        drawn = from_outputs(likelihood, q.outputs(rows, DRAWS, po.Key(SEED)))
    if not pred.classifies:
        pred = drawn if likelihood.link is None else pred
        return {"mean": pred.mean, "std": pred.std}
    values = {"probs": pred.probs, "entropy": pred.entropy}
    return {**values, "mutual_information": drawn.epistemic} if information else values


def stored(folder: Path, chosen: Mapping[str, Case], suffixes: tuple[str, ...]) -> dict[str, dict[str, float]]:
    """Write the files of the cases with what they must give; return seconds and bytes of each."""
    facts: dict[str, dict[str, float]] = {}
    for name, case in chosen.items():
        q, numbers, fact = case.make(), dict[str, Any](), dict[str, float]()
        for count in ROWS:
            rows = case.inputs(count)
            tensors = rows if isinstance(rows, dict) else {"inputs": rows}
            numbers.update({f"{count}/in/{key}": tensor.numpy() for key, tensor in tensors.items()})
            wanted = expected(q, rows, information=case.information)
            numbers.update({f"{count}/out/{key}": tensor.numpy() for key, tensor in wanted.items()})
        for suffix in suffixes:
            begin = time.perf_counter()
            q.export(folder / f"{name}{suffix}", case.inputs(3), draws=DRAWS, seed=SEED)
            fact[f"seconds{suffix}"] = time.perf_counter() - begin
            fact[f"bytes{suffix}"] = (folder / f"{name}{suffix}").stat().st_size
        np.savez(folder / f"{name}.npz", **numbers)
        facts[name] = fact
    return facts


def distances(folder: Path, suffix: str) -> dict[str, float]:
    """Return how far the programs of the folder are from what they must give, by a process without posterity."""
    import json

    script = (WITH_TORCH if suffix == ".pt2" else WITH_ONNX) + FORBID
    # what the script imports first is imported before the ban, which is of other names
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, "-W", "ignore", "-c", script, str(folder)]
    outcome = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=600)
    if outcome.returncode:
        raise RuntimeError(outcome.stderr[-3000:])
    away: dict[str, float] = json.loads(outcome.stdout.splitlines()[-1])
    return away


def main() -> None:
    """Export and run every case."""
    options = parser(__doc__ or "").parse_args()
    torch.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory() as name:
        facts = stored(Path(name), cases(), (".pt2", ".onnx"))
        away = {suffix: distances(Path(name), suffix) for suffix in (".pt2", ".onnx")}
    table = [["case", "torch alone", "onnxruntime alone", "seconds .pt2", "seconds .onnx", "KiB .onnx"]]
    for name, fact in facts.items():
        fact.update({f"away{suffix}": away[suffix][name] for suffix in away})
        sizes = [f"{fact['seconds.pt2']:.1f}", f"{fact['seconds.onnx']:.1f}", f"{fact['bytes.onnx'] / 1024:.0f}"]
        table.append([name, *(f"{away[suffix][name]:.1e}" for suffix in away), *sizes])
    worst = max(value for values in away.values() for value in values.values())
    notes = [f"The largest distance of any output from `predict` is {worst:.1e}; 1e-5 is promised."]
    write("exports", [], context(options, ["onnx", "onnxruntime"]), facts, notes, options.results, table)
    if worst > 1e-5:
        sys.exit("An export is further from predict than 1e-5.")


if __name__ == "__main__":
    main()
