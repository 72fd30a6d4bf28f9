"""Fits of the study: for each data set, approximation and split one file of variational EM and one of the grid."""

import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from posterity.evidence import Shared, present_precision
from posterity.inference import infer
from posterity.inference.executor import in_processes, named
from posterity.inference.sweep import Result, stored_results, write_result
from posterity.likelihoods import Gaussian
from posterity.model import Joint
from posterity.posteriors import Posterior
from posterity.storage import Part
from posterity_studies.hyperparameters.recipes import (
    NOISE_SCALES,
    PRIOR_SCALES,
    RECIPES,
    SIDE,
    em_problem,
    grid_problem,
)
from posterity_studies.hyperparameters.settings import Settings
from posterity_studies.uci.protocol import Split, standard_split
from posterity_studies.uci.runs import depends_on_split

EM, GRID = "em", "grid"
Scores = dict[str, float]


@dataclass(frozen=True)
class Cell:
    """One data set, approximation and split, and whether its prior and noise are those of EM or all of the grid."""

    data_set: str
    method: str
    split: int
    part: str

    def path(self, folder: Path) -> Path:
        """Its file in the folder of the study."""
        return folder / "runs" / self.data_set / self.method / f"{self.part}-{self.split:02d}.json"

    def __str__(self) -> str:
        return f"{self.data_set}, {RECIPES[self.method].label}, {self.part}, split {self.split}"


def depends(split: Split, cell: Cell, settings: Settings) -> Part:
    """All that the numbers of a cell depend on."""
    recipe = RECIPES[cell.method]
    if cell.part == EM:
        joint = em_problem(split, settings)
        how = {"stages": [recipe.em(settings)], "prior": joint.prior, "likelihood": joint.likelihood}
    else:
        how = {"stages": recipe.stages(settings), "prior": repr(PRIOR_SCALES), "likelihood": repr(NOISE_SCALES)}
    return depends_on_split(split, cell.method, settings, part=cell.part, **how)


def grid_key(row: int, column: int) -> str:
    """The name of the NLL at a prior scale and a noise scale of the grid."""
    return f"test_nll_{row}_{column}"


def fit_em(split: Split, method: str, settings: Settings) -> Scores:
    """Prior and noise that variational EM found, the prior scale as a geometric mean over the weights, and scores.

    "bound" is that of the last round in nats for each training row: the log evidence of Laplace, or the ELBO.
    """
    recipe = RECIPES[method]
    seed = settings.key(split.data_set, split.index).seed
    posterior, trace = infer(recipe.em(settings), em_problem(split, settings), split.train, seed=seed, progress=False)
    joint = posterior.joint
    assert isinstance(joint, Joint)
    assert isinstance(joint.likelihood, Gaussian)
    return {
        **split.scores(recipe.predict(posterior, split.test.inputs)),
        "prior_scale": float(present_precision(joint, Shared())) ** -0.5,
        "noise_scale": float(joint.likelihood.scale),  # type: ignore[arg-type]  # one number
        "bound": float(trace["bound"][-1]) / len(split.train),
    }


def fit_grid(split: Split, method: str, settings: Settings) -> Scores:
    """The NLL at each prior and noise of the grid; all of them are fitted at once, as members."""
    recipe, joint = RECIPES[method], grid_problem(split, settings)
    seed = settings.key(split.data_set, split.index).seed
    start: Posterior | None = None
    theta = joint.network.initial.expand(SIDE * SIDE, -1)
    for stage in recipe.stages(settings):
        start, _ = infer(stage, joint, split.train, start=theta if start is None else start, seed=seed, progress=False)
    assert start is not None
    found = {}
    for row in range(SIDE):
        for column in range(SIDE):
            predictive = recipe.predict(start.member(SIDE * row + column), split.test.inputs)
            found[grid_key(row, column)] = split.scores(predictive)["test_nll"]
    return found


def fit(cell: Cell, folder: Path, settings: Settings) -> Result[Cell]:
    """Fit one cell and store what it gave."""
    split = standard_split(cell.data_set, cell.split)
    begin = time.perf_counter()
    with named(cell), _without_warnings():
        scores = (fit_em if cell.part == EM else fit_grid)(split, cell.method, settings)
    seconds = time.perf_counter() - begin
    return write_result(cell, folder, depends(split, cell, settings), scores, seconds)


@contextmanager
def _without_warnings() -> Iterator[None]:
    """No word on weights away from a mode: those of the first rounds and of the worst cells are, and scores tell."""
    logger = logging.getLogger("posterity")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def fit_all(missing: Sequence[Cell], folder: Path, settings: Settings, jobs: int) -> Iterator[Result[Cell]]:
    """Fit these cells, in `jobs` processes; give each result as soon as it is there."""
    return in_processes({str(cell): partial(fit, cell, folder, settings) for cell in missing}, jobs)


def stored(cells: Sequence[Cell], folder: Path, settings: Settings) -> Iterator[Result[Cell]]:
    """The results of those cells that have one; BadFolder at one that is damaged or of other settings."""
    return stored_results(
        cells, folder, lambda cell: depends(standard_split(cell.data_set, cell.split), cell, settings)
    )
