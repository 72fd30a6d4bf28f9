"""Fits to a small problem: the truth by NUTS, NUTS of rising lengths, and every method; each has a file."""

import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from posterity import __version__
from posterity.evidence import importance
from posterity.inference import infer
from posterity.inference.callbacks import tracked
from posterity.inference.identity import identity, refuse_other
from posterity.inference.sweep import Result, stored_results, write_result
from posterity.methods import NUTS
from posterity.model.data import as_data
from posterity.numerics.random import Key
from posterity.posteriors import Posterior
from posterity.posteriors.samples import Samples
from posterity.storage import Part, RunFolder
from posterity_studies.fidelity.problems import Problem
from posterity_studies.fidelity.settings import Settings
from posterity_studies.fidelity.small_recipes import RECIPES, Recipe, ladder
from posterity_studies.fidelity.truth import Exact, Mixing, exact, predictions
from posterity_studies.options import Report

LENGTHS = (100, 200, 400, 800)
"""Transitions of the warm-up of NUTS, and as many draws: from the first that has converged follows its time."""
WORST = 10.0  # k-hat that stands for all above it
PROPOSALS = 1000  # draws of which k-hat is taken


@dataclass(frozen=True)
class Cell:
    """A method on a small problem; NUTS of a given length has the word nuts-LENGTH."""

    problem: str
    method: str

    def path(self, folder: Path) -> Path:
        """Its file in the folder of the study."""
        return folder / "runs" / self.problem / f"{self.method}.json"

    @property
    def recipe(self) -> Recipe:
        """How it is fitted."""
        return RECIPES[self.method] if self.method in RECIPES else ladder(int(self.method.removeprefix("nuts-")))

    def __str__(self) -> str:
        return f"{self.problem}, {self.recipe.label}"


@dataclass(frozen=True, eq=False)
class Truth:
    """The exact predictive of a problem, how its runs mixed, and how far one of them is from the others.

    `floor` is the mean distance of a run to the pooled others: what a method that is exact would show against a truth
    of one run less. `seconds` are of all runs, with compiling.
    """

    exact: Exact
    mixing: Mixing
    floor: dict[str, float]
    divergent: float
    seconds: float


def truth(problem: Problem, folder: Path, settings: Settings, report: Report) -> Truth:
    """The truth of a problem, from its folder or by NUTS."""
    runs, divergent, seconds = [], [], 0.0
    for index in tracked(range(settings.truths), f"{problem.name}, truths"):
        values, share, spent = _long_run(problem, index, folder, settings, report)
        runs.append(values)
        divergent.append(share)
        seconds += spent
    whole = exact(torch.stack(runs), problem.noise)
    apart = []
    for index, own in enumerate(runs):
        others = exact(torch.stack([*runs[:index], *runs[index + 1 :]]), problem.noise, whole.grid)
        apart.append(others.between(exact(own, problem.noise, whole.grid).density))
    floor = {name: sum(each[name] for each in apart) / len(apart) for name in apart[0]}
    mixing = Mixing.of(torch.cat(runs))  # the chains of all runs together
    return Truth(whole, mixing, floor, sum(divergent) / len(divergent), seconds)


def _long_run(
    problem: Problem, index: int, folder: Path, settings: Settings, report: Report
) -> tuple[Tensor, float, float]:
    """Predictions (C, D, N) of a run, the share of its transitions that diverged, and its seconds."""
    method, key = NUTS(draws=settings.draws, warmup=settings.draws), Key(settings.seed).fold("truth").fold(index)
    path = folder / "runs" / problem.name / f"truth-{index}"
    store, depends = RunFolder(path), _depends(problem, (method,), key.seed)
    if store.exists():
        refuse_other(path, depends, store.read("run"), "a truth of other settings")
        stored = store.read("draws")
        return stored.tensors["predictions"], float(stored.config["divergent"]), float(stored.config["seconds"])  # type: ignore[arg-type]
    begin = time.process_time()
    samples, _ = infer(method, problem.joint, problem.train.pair, seed=key.seed, progress=False)
    seconds = time.process_time() - begin
    assert isinstance(samples, Samples)
    values = predictions(samples, problem.test, problem.noise is None)
    divergent = float(samples.statistics["divergent"].double().mean())
    leapfrogs = float(samples.statistics["leapfrogs"].double().mean())
    config = {"divergent": divergent, "seconds": seconds, "leapfrogs": leapfrogs}
    store.commit({"run": depends, "draws": Part(config, {"predictions": values})})
    worst = Mixing.of(values)
    report(
        f"{problem.name}, truth {index + 1} of {settings.truths}: R-hat {worst.rhat:.3f}, ESS {worst.ess:,.0f}, "
        f"{leapfrogs:.0f} leapfrogs, {seconds:.0f} s"
    )
    return values, divergent, seconds


def _depends(problem: Problem, stages: object, seed: int, **more: object) -> Part:
    """All that the numbers of a run on a problem depend on."""
    test = as_data((problem.test, torch.zeros(len(problem.test), 1)))
    rows = {"training rows": as_data(problem.train), "test rows": test}
    return identity(model=problem.joint, stages=stages, seed=seed, **rows, **more, posterity=__version__)


def results(problem: Problem, known: Truth, folder: Path, settings: Settings, report: Report) -> Iterator[Result[Cell]]:
    """NUTS of rising lengths until it has converged, then every method; stored results are read."""
    for length in tracked(LENGTHS, f"{problem.name}, lengths"):
        result = _result(Cell(problem.name, f"nuts-{length}"), problem, known, folder, settings, report)
        yield result
        if Mixing(result.scores["rhat"], result.scores["ess"]).good:
            break
    for method in tracked(settings.methods_of(problem.name), f"{problem.name}, methods"):
        yield _result(Cell(problem.name, method), problem, known, folder, settings, report)


def _result(
    cell: Cell, problem: Problem, known: Truth, folder: Path, settings: Settings, report: Report
) -> Result[Cell]:
    seed = Key(settings.seed).fold(cell.method).seed

    def depends(cell: Cell) -> Part:
        truths = [settings.truths, settings.draws]
        return _depends(problem, cell.recipe.stages, seed, cell=asdict(cell), truths=truths)

    result = next(stored_results([cell], folder, depends), None)
    there = result is not None
    if result is None:
        scores, seconds = fitted(cell.recipe, problem, known.exact, seed)
        result = write_result(cell, folder, depends(cell), scores, seconds)
    variation = result.scores["total_variation"]
    report(f"{cell}: total variation {variation:.4f}, {'there already' if there else f'{result.seconds:.1f} s'}")
    return result


def fitted(recipe: Recipe, problem: Problem, known: Exact, seed: int) -> tuple[dict[str, float], float]:
    """The distances of a method's predictive to the exact one with what its posterior says, and its seconds.

    Seconds are those of the processor, of all stages, with plain steps: what compiling costs and saves depends on what
    a machine has compiled before.
    """
    joint, posterior = recipe.joint(problem), None
    begin = time.process_time()
    for stage in recipe.stages:
        posterior, _ = infer(
            stage, joint, problem.train.pair, start=posterior, seed=seed, progress=False, accelerate="off"
        )
    seconds = time.process_time() - begin
    assert posterior is not None
    scores = known.distances(recipe.predict(posterior, problem.test))
    return scores | _checks(recipe, posterior, problem), seconds


def _checks(recipe: Recipe, posterior: Posterior, problem: Problem) -> dict[str, float]:
    """k-hat of weights with a density, R-hat and effective draws of chains."""
    if recipe.dense:
        estimate = importance(posterior, problem.train.pair, draws=PROPOSALS)
        return {"pareto_k": max(-WORST, min(WORST, estimate.pareto_k))}
    if isinstance(posterior, Samples):
        mixing = Mixing.of(predictions(posterior, problem.test, problem.noise is None))
        return {"rhat": mixing.rhat, "ess": mixing.ess}
    return {}
