"""Folders whose hashes are right and whose content is not: what is made of 2,000 of them.

A folder is changed in one place (a JSON value, its type, a key that is gone, a tensor of another shape or dtype, one
that is gone, NaN) and sealed again with right hashes. It then counts as

- refused: a `BadFolder` in one line; at the command line exit code 4 and one line that begins with "error: ".
- harmless: it is read, and all that comes out is, bit for bit, what comes out of the folder as it was.
- sound: it is read as what it says: what was read, stored again, is the changed content bit for bit (no value was
  left out, converted or made up), and it can be used to the end. At the command line, where the changed part is the
  task, all keys that were stored are there.
- diverged: a run goes on from a state that is sound and absurd, and says that it diverges.
- silent: it is read, and none of these holds.
- traceback: anything else is raised, or the exit code is neither 0 nor 4.

The last two must not occur.
"""

import contextlib
import copy
import io
import math
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import posterity as po
from benchmarks.harness import context, parser, write
from posterity.cli.frame.folders import find_run
from posterity.cli.main import main as command_line
from posterity.errors import BadFolder, Diverged
from posterity.likelihoods import Categorical
from posterity.numerics.random import Key
from posterity.priors import Layerwise, Normal
from posterity.storage import Part, RunFolder, encode, flatten

OUTCOMES = ("refused", "harmless", "sound", "diverged", "silent", "traceback")
m = po.methods
POSTERIORS: dict[str, Any] = {
    "point": m.MAP(steps=2),
    "dense": m.Laplace(tuning=None),
    "kronecker": m.Laplace(structure=po.curvature.Kronecker(), tuning=None),
    "diagonal": m.Laplace(structure=po.curvature.Diagonal(), tuning=None),
    "low rank": m.Laplace(structure=po.curvature.LowRank(3), tuning=None),
    "last layer": m.Laplace(subset=m.LastLayer(), tuning=None),
    "factorised": m.MeanField(steps=2),
    "full rank": m.FullRank(steps=2),
    "swag": m.SWAG(fit=m.MAP(steps=9), every=1, warmup=2, rank=4),
    "chains": m.NUTS(chains=2, warmup=2, draws=3, max_depth=2),
    "dropout": m.MCDropout(steps=2),
    "ensemble": m.Ensemble(m.MAP(steps=2), size=3),
    "ensemble of Gaussians": m.Ensemble(m.MeanField(steps=2), size=2),
}
WITH_BUFFERS = ("point", "dropout", "ensemble")
CHECKPOINTS: dict[str, Any] = {
    "sghmc": m.SGHMC(chains=2, warmup=2, draws=3, thin=1),
    "nuts": m.NUTS(chains=2, warmup=2, draws=3, max_depth=2),
    "ensemble": m.Ensemble(m.MAP(steps=5), size=2),
    "mean field": m.MeanField(steps=6),
    "map": m.MAP(steps=6, batch_size=4),
}
RUNS: dict[str, tuple[str, ...]] = {
    "laplace, numbers": ("--target", "y", "--method", "laplace", "--steps", "3", "--hidden", "2"),
    "mean-field, classes": ("--target", "b", "--method", "mean-field", "--steps", "3", "--hidden", "2"),
    "map, conformal": ("--target", "y", "--method", "map", "--steps", "3", "--hidden", "2", "--conformal", "split"),
    "ensemble, folds": ("--target", "b", "--method", "ensemble", "--steps", "3", "--hidden", "2", "--cv", "2"),
    "nuts, a toy": ("--method", "nuts", "--warmup", "3", "--draws", "3", "--chains", "2", "--hidden", "2"),
}


def network(buffers: bool) -> nn.Module:
    """A network of two layers, with batch norm and dropout between them if there shall be `buffers`."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        inner = [nn.BatchNorm1d(3), nn.Dropout(0.5)] if buffers else []
        return nn.Sequential(nn.Linear(2, 3), *inner, nn.Tanh(), nn.Linear(3, 2)).double()


def rows() -> tuple[Tensor, Tensor]:
    """Twelve rows of two classes."""
    x = torch.randn(12, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return x, (x[:, 0] > 0).long()


def slots(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the paths of all nodes of a JSON value but the outermost."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield (*path, key)
        yield from slots(item, (*path, key))


def mutated_config(config: Mapping[str, Any], chance: random.Random) -> dict[str, Any]:
    """A copy of the JSON object in which one node is gone or has another value."""
    changed = copy.deepcopy(dict(config))
    *path, last = chance.choice(list(slots(changed)))
    parent: Any = changed
    for key in path:
        parent = parent[key]
    if chance.random() < 0.25:
        del parent[last]
        return changed
    choices = [None, "x", [], {}, True, -1, 0, 3.5, 10**30, [1, 2], {"tensor": "x"}, {"float": "nan"}, "12", -1e300]
    parent[last] = chance.choice([value for value in choices if value != parent[last]])
    return changed


def mutated_tensors(tensors: Mapping[str, Tensor], chance: random.Random) -> dict[str, Tensor]:
    """The tensors with one of them gone, or of another dtype, another shape, or with an entry that is not finite."""
    changed = dict(tensors)
    name = chance.choice(sorted(changed))
    tensor, kind = changed[name], chance.choice(["drop", "cast", "shorten", "nan", "longer", "whole"])
    if kind == "drop":
        del changed[name]
    elif kind == "cast":
        changed[name] = tensor.half() if tensor.is_floating_point() else tensor.float()
    elif kind == "shorten":
        changed[name] = tensor[..., :-1].clone() if tensor.dim() else tensor[None]
    elif kind == "longer":
        changed[name] = torch.cat([tensor, tensor], -1) if tensor.dim() else tensor.expand(2).clone()
    elif kind == "whole":
        changed[name] = tensor.long() if tensor.is_floating_point() else tensor.double()
    else:
        tensor = tensor.clone() if tensor.is_floating_point() else tensor.double()
        if tensor.numel():
            tensor.view(-1)[chance.randrange(tensor.numel())] = chance.choice([math.nan, math.inf, -math.inf])
        changed[name] = tensor
    return changed


def damage(folder: Path, part: str, chance: random.Random, into: Path | None = None) -> Part:
    """Change one thing in a part of the folder, and seal it again, there or elsewhere; returns what is stored now."""
    stored = RunFolder(folder).read(part)
    if stored.tensors and (not stored.config or chance.random() < 0.5):
        changed = Part(stored.config, mutated_tensors(stored.tensors, chance))
    else:
        changed = Part(mutated_config(stored.config, chance), stored.tensors)
    RunFolder(into or folder).commit({part: changed})
    return changed


def filled(folder: Path) -> list[str]:
    """The parts of a folder that hold anything."""
    parts = {name: RunFolder(folder).read(name) for name in RunFolder(folder).parts()}
    return [name for name, part in parts.items() if part.config or part.tensors]


def copied(part: Part) -> Part:
    """The part with tensors of its own."""
    return Part(part.config, {name: tensor.clone() for name, tensor in part.tensors.items()})


def same(part: Part, other: Part) -> bool:
    """Whether two parts are equal bit for bit; NaN equals itself."""
    if part.config != other.config or part.tensors.keys() != other.tensors.keys():
        return False
    return all(
        tensor.dtype == other.tensors[name].dtype
        and tensor.shape == other.tensors[name].shape
        and torch.equal(
            tensor.reshape(-1).view(torch.uint8), other.tensors[name].contiguous().view(-1).view(torch.uint8)
        )
        for name, tensor in part.tensors.items()
    )


def used(posterior: Any) -> Tensor:
    """Use all that a posterior holds; returns its predictions."""
    probs: Tensor = posterior.predict(rows()[0], draws=3).probs
    if not bool(probs.isfinite().all()):
        raise ValueError("predictions are not finite")
    posterior.point()
    if not isinstance(posterior, po.posteriors.Dropout | po.posteriors.Mixture):
        posterior.sample(2, Key(0))
    return probs


def joint(kind: str) -> po.Joint:
    """The problem of a saved posterior."""
    prior = Layerwise({"0.weight": Normal(torch.full((1, 6), 0.7, dtype=torch.float64)), "*": Normal(1.5)})
    plain = kind in ("kronecker", "last layer")
    return po.Joint(
        network(kind in WITH_BUFFERS), Categorical(), Normal(1.5) if plain else prior, num_data=len(rows()[0])
    )


def of_posterior(kind: str, folder: Path) -> Callable[[random.Random], str]:
    """Save a posterior in the folder; returns what changes it and says the outcome."""
    po.infer(POSTERIORS[kind], joint(kind), rows(), seed=1, progress=False)[0].save(folder / "run")
    before = used(po.load(folder / "run", network(kind in WITH_BUFFERS)))

    def outcome(chance: random.Random) -> str:
        changed = damage(folder / "run", "posterior", chance, folder / "changed")
        posterior = po.load(folder / "changed", network(kind in WITH_BUFFERS))
        probs = used(posterior)
        if same(posterior.parts()["posterior"], changed):
            return "sound"
        return "harmless" if torch.equal(probs, before) else "silent"

    return outcome


def of_checkpoint(kind: str, folder: Path) -> Callable[[random.Random], str]:
    """Interrupt a run after four steps; returns what changes its checkpoint and says the outcome."""

    class Stop(po.inference.Callback):
        def after_step(self, run: po.inference.Run) -> None:
            if run.step == 4:
                raise KeyboardInterrupt

    class Note(po.inference.Callback):
        """Stores what was read of a checkpoint again."""

        def start(self, run: po.inference.Run) -> None:
            state = {"step": run.step, "stopped": run.stopped, "seconds": run.trace.seconds, "state": run.state}
            self.state_read = copied(flatten({**state, "callbacks": {}}))  # steps write over their state
            self.trace_read = copied(Part({}, run.trace.tensors())).tensors
            self.kept_read = copied(flatten(run.kept[0:])) if len(run.kept) else None

    def fit(path: Path, *callbacks: po.inference.Callback) -> Tensor:
        problem = po.Joint(network(False), Categorical(), Normal(1.0), num_data=len(rows()[0]))
        kept = po.inference.Checkpoint(path, steps=1)
        q, _ = po.infer(CHECKPOINTS[kind], problem, rows(), checkpoint=kept, callbacks=callbacks, progress=False)
        return used(q)

    with contextlib.suppress(KeyboardInterrupt):
        fit(folder / "run", Stop())
    whole = fit(folder / "whole")

    def outcome(chance: random.Random) -> str:
        path = folder / "changed"
        shutil.rmtree(path, ignore_errors=True)
        shutil.copytree(folder / "run", path)
        part = chance.choice(filled(path))
        changed, note = damage(path, part, chance), Note()
        probs = fit(path, note)
        if torch.equal(probs, whole):
            return "harmless"
        read = {"state": note.state_read, "trace": Part(changed.config, note.trace_read)}.get(part, note.kept_read)
        return "sound" if part != "run" and read is not None and same(read, changed) else "silent"

    return outcome


def of_run(kind: str, folder: Path) -> Callable[[random.Random], str]:
    """Fit at the command line; returns what changes the run and says what `posterity predict` makes of it."""
    table = folder / "table.csv"
    table.write_text("a,b,y\n" + "".join(f"{row},{('u', 'v')[row % 2]},{row % 5 * 1.5}\n" for row in range(40)))
    toy = "toy" in kind
    run = str(folder / "run")
    code, _, errors = _called("fit", "two-moons" if toy else str(table), *RUNS[kind], "--out", run, "--quiet")
    if code:
        raise RuntimeError(f"{kind}: {errors}")
    more = (*(() if toy else ("--data", str(table))), *(("--conformal",) if "conformal" in kind else ()))
    _, before, _ = _called("predict", run, *more)

    def outcome(chance: random.Random) -> str:
        path = folder / "changed"
        shutil.rmtree(path, ignore_errors=True)
        shutil.copytree(folder / "run", path)
        part = chance.choice(filled(path))
        stored = RunFolder(path).read(part)
        changed = damage(path, part, chance)
        code, output, errors = _called("predict", str(path), *more)
        said = [line for line in errors.splitlines() if line.startswith("error: ")]
        if code == 4 and len(said) == 1 and "Traceback" not in errors and str(path) in said[0]:
            return "refused"
        if code != 0 or said:
            raise RuntimeError(f"exit code {code}: {errors[-300:]}")
        if output == before:
            return "harmless"
        return "sound" if _said(path, part, stored, changed) else "silent"

    return outcome


def _said(path: Path, part: str, stored: Part, changed: Part) -> bool:
    """Whether a run that was read says what its changed part says."""
    opened = find_run(path)
    if part == "task":
        return set(slots(stored.config)) <= set(slots(changed.config))
    if part == "posterior":
        return same(opened.posterior.parts()["posterior"], changed)
    if part == "preprocessing":
        tensors: dict[str, Tensor] = {}
        value = encode(opened.preprocessing, tensors)
        return same(Part({"file": str(opened.file), "value": value}, tensors), changed)
    # Numbers of the same shapes and dtypes, all finite, in a part whose keys are all there.
    forms = {name: (tensor.shape, tensor.dtype) for name, tensor in stored.tensors.items()}
    whole = forms == {name: (tensor.shape, tensor.dtype) for name, tensor in changed.tensors.items()}
    return whole and set(slots(stored.config)) == set(slots(changed.config))


def _called(*arguments: str) -> tuple[int, str, str]:
    """Exit code, standard output and standard error of the command line, in this process."""
    out, errors = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(errors):
        code = command_line(list(arguments))
    return code, out.getvalue(), errors.getvalue()


def counted(
    outcome: Callable[[random.Random], str], kind: str, number: int, seed: int
) -> tuple[Counter[str], list[str]]:
    """Outcomes of this many changes, and what went wrong in which."""
    counts: Counter[str] = Counter()
    wrong = []
    for index in range(number):
        name = f"{kind} {seed} {index}"
        try:
            result = outcome(random.Random(name))
        except BadFolder as error:
            result = "traceback" if "\n" in str(error) else "refused"
        except Diverged:
            result = "diverged"
        except Exception as error:
            result = "traceback"
            wrong.append(f"{name}: {type(error).__name__}: {' '.join(str(error).split())[:200]}")
        if result == "silent":
            wrong.append(f"{name}: silent")
        counts[result] += 1
    return counts, wrong


FAMILIES: dict[str, tuple[Mapping[str, Any], Callable[[str, Path], Callable[[random.Random], str]], float]] = {
    "posterior": (POSTERIORS, of_posterior, 0.5),
    "checkpoint": (CHECKPOINTS, of_checkpoint, 0.2),
    "run folder": (RUNS, of_run, 0.3),
}


def main() -> int:
    """Run the mutations; 1 where one is silent or ends in a traceback."""
    options = parser(__doc__ or "")
    options.add_argument("--number", type=int, default=2000, help="changed folders in all (default 2000)")
    given = options.parse_args()
    torch.set_num_threads(given.threads)
    begin, wrong, facts = time.perf_counter(), list[str](), dict[str, Any]()
    table = [["folder", "kind", "changed", *OUTCOMES]]
    totals: Counter[str] = Counter()
    for family, (kinds, make, share) in FAMILIES.items():
        for kind in kinds:
            number = -(-round(share * given.number) // len(kinds))
            with tempfile.TemporaryDirectory(prefix="posterity-resealed-") as folder:
                counts, bad = counted(make(kind, Path(folder)), f"{family} {kind}", number, given.seed)
            wrong += bad
            totals += counts
            table.append([family, kind, str(number), *(str(counts[name]) for name in OUTCOMES)])
            facts[f"{family}: {kind}"] = dict(counts)
    table.append(["all", "", str(totals.total()), *(str(totals[name]) for name in OUTCOMES)])
    notes = [line.strip() for line in " ".join((__doc__ or "").split("\n- ")[0].split("\n\n")[1:]).splitlines() if line]
    notes = [" ".join(notes), *(" ".join(line.split()) for line in (__doc__ or "").split("\n- ")[1:])]
    notes += [f"{time.perf_counter() - begin:.0f} s.", *wrong]
    write("resealed", [], context(given), {"counts": facts, "wrong": wrong}, notes, given.results, table)
    return 1 if totals["silent"] or totals["traceback"] else 0


if __name__ == "__main__":
    sys.exit(main())
