"""Variational EM compared with the best cell of a grid, over splits: recipes, fits, comparison and tables."""

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import groupby
from pathlib import Path
from statistics import fmean
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from posterity.cli.frame.output import table
from posterity.datasets.uci import num_splits
from posterity.evidence import MacKayUpdate, NoiseScale, PerTensor, PriorScale, Shared, present_precision
from posterity.inference import Method, infer
from posterity.inference.executor import named
from posterity.inference.sweep import Result, stored_results, write_result
from posterity.likelihoods import Gaussian
from posterity.methods import MAP, Laplace, MeanField, VariationalEM
from posterity.methods.parts.scales import without_warnings
from posterity.model import Joint
from posterity.optim.optimizer import Adam
from posterity.optim.schedules import Cosine
from posterity.posteriors import Posterior
from posterity.predictive import Predictive
from posterity.priors import FanIn, Normal
from posterity.storage import Part
from posterity_studies import options
from posterity_studies.frame import add_heading, notes, remark, title
from posterity_studies.hyperparameters.settings import Settings
from posterity_studies.options import Report, silent
from posterity_studies.uci.protocol import Split, mlp, standard_split
from posterity_studies.uci.runs import depends_on_split
from posterity_studies.uci.study import Mean, mean_and_error

SIDE = 7
PRIOR_SCALES = tuple(10 ** (-1.5 + step / 3) for step in range(SIDE))
"""From 0.03 to 3, one scale for all weights."""
NOISE_SCALES = tuple(0.02 * 2**step for step in range(SIDE))
"""Standard deviations of the standardised target, from 0.02 to 1.28."""
FIRST_NOISE = 0.3
ROUNDS = 40
BURN_IN = 0.02
DRAWS = 500


@dataclass(frozen=True)
class Recipe:
    """An approximation: its label, its stages at fixed hyper-parameters, and variational EM with the same E-steps.

    Further what it predicts.
    """

    label: str
    stages: Callable[[Settings], tuple[Method, ...]]
    em: Callable[[Settings], VariationalEM]
    predict: Callable[[Posterior, Tensor], Predictive]


def grid_problem(split: Split, settings: Settings) -> Joint:
    """Return the joint of the protocol with a member for each cell of the grid, row by row of prior scales."""
    prior = torch.tensor(PRIOR_SCALES, dtype=torch.float64).repeat_interleave(SIDE)
    noise = torch.tensor(NOISE_SCALES, dtype=torch.float64).repeat(SIDE)
    return Joint(mlp(split, settings), Gaussian(noise.reshape(-1, 1, 1)), Normal(prior), len(split.train))


def em_problem(split: Split, settings: Settings) -> Joint:
    """Return the joint of the protocol at the initial prior and noise of EM."""
    return Joint(mlp(split, settings), Gaussian(FIRST_NOISE), Normal(settings.prior_scale), len(split.train))


def _map(settings: Settings) -> MAP:
    return MAP(settings.steps, settings.batch_size, Adam(settings.step_size), Cosine())


def _laplace_em(settings: Settings) -> VariationalEM:
    """Return variational EM whose mode is fitted further in each round, followed by a step of MacKay's update."""
    return VariationalEM(
        Laplace(tuning=None),
        (MacKayUpdate(PerTensor()),),
        rounds=ROUNDS,
        burn_in=BURN_IN,
        tolerance=None,
        fit=_map(settings),
    )


def _mean_field(settings: Settings) -> MeanField:
    """Return mean field with a third of MAP's step size, as draws add noise, and small initial scales."""
    step_size = Adam(settings.step_size / 3)
    return MeanField(settings.steps, settings.batch_size, step_size, Cosine(), initial_scales=FanIn(gain=0.02))


RECIPES: Mapping[str, Recipe] = MappingProxyType(
    {
        "laplace": Recipe(
            "Laplace",
            lambda settings: (_map(settings), Laplace(tuning=None)),
            _laplace_em,
            lambda posterior, inputs: posterior.predict(inputs),
        ),
        "mean-field": Recipe(
            "Mean field",
            lambda settings: (_mean_field(settings),),
            lambda settings: VariationalEM(
                _mean_field(settings), (PriorScale(PerTensor()), NoiseScale()), rounds=ROUNDS, burn_in=BURN_IN
            ),  # M-steps in closed form
            lambda posterior, inputs: posterior.predict(inputs, draws=DRAWS),
        ),
    }
)
"""Full Gauss-Newton and the linearised predictive are what `Laplace` does by default.

Batch and step size are those of `study uci`. The groups of weights, the M-steps, when they come and where prior and
noise begin were chosen by the log evidence of training rows: a first prior that is too wide leads to poorer modes.
Mean field has the same rounds, and on some data ends with too much noise: what its bound lacks counts as residuals.
"""


EM, GRID = "em", "grid"
Scores = dict[str, float]


@dataclass(frozen=True)
class Cell:
    """A fit: data set, approximation, split, and its part: EM, or the whole grid."""

    data_set: str
    method: str
    split: int
    part: str

    def path(self, folder: Path) -> Path:
        """Return its file in the folder of the study."""
        return folder / "runs" / self.data_set / self.method / f"{self.part}-{self.split:02d}.json"

    def __str__(self) -> str:
        return f"{self.data_set}, {RECIPES[self.method].label}, {self.part}, split {self.split}"


def depends(split: Split, cell: Cell, settings: Settings) -> Part:
    """Return the part that determines the results of a cell."""
    recipe = RECIPES[cell.method]
    if cell.part == EM:
        joint = em_problem(split, settings)
        how = {"stages": [recipe.em(settings)], "prior": joint.prior, "likelihood": joint.likelihood}
    else:
        how = {"stages": recipe.stages(settings), "prior": repr(PRIOR_SCALES), "likelihood": repr(NOISE_SCALES)}
    return depends_on_split(split, cell.method, settings, part=cell.part, **how)


def grid_key(row: int, column: int) -> str:
    """Return the key of the NLL at a prior scale and a noise scale of the grid."""
    return f"test_nll_{row}_{column}"


def fit_em(split: Split, method: str, settings: Settings) -> Scores:
    """Run variational EM; return its noise, its prior scale (geometric mean over the weights), and scores.

    "bound" is the bound of the last round, in nats per training row: Laplace's log evidence, or the ELBO.
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
    """Return the NLL at each prior and noise of the grid, all fitted together as members."""
    recipe, joint = RECIPES[method], grid_problem(split, settings)
    seed = settings.key(split.data_set, split.index).seed
    start: Posterior | None = None
    theta = joint.network.initial.expand(SIDE * SIDE, -1)
    for stage in recipe.stages(settings):
        start, _ = infer(stage, joint, split.train, start=theta if start is None else start, seed=seed, progress=False)
    assert start is not None
    results = {}
    for row in range(SIDE):
        for column in range(SIDE):
            predictive = recipe.predict(start.member(SIDE * row + column), split.test.inputs)
            results[grid_key(row, column)] = split.scores(predictive)["test_nll"]
    return results


def fit(cell: Cell, split: Split, settings: Settings) -> Result[Cell]:
    """Fit one cell and return its result."""
    begin = time.perf_counter()
    with named(cell), without_warnings():
        scores = (fit_em if cell.part == EM else fit_grid)(split, cell.method, settings)
    return Result(cell, scores, time.perf_counter() - begin)


def fit_all(missing: Sequence[Cell], folder: Path, settings: Settings) -> Iterator[Result[Cell]]:
    """Fit cells on the executor of the settings; store and yield each result when it is finished."""
    names = dict.fromkeys((cell.data_set, cell.split) for cell in missing)
    splits = {(name, index): standard_split(name, index) for name, index in names}
    work = {str(cell): partial(fit, cell, splits[cell.data_set, cell.split], settings) for cell in missing}
    for result in options.executor(settings, len(work)).results(work):
        cell = result.cell
        how = depends(splits[cell.data_set, cell.split], cell, settings)
        yield write_result(cell, folder, how, result.scores, result.seconds)


def stored(cells: Sequence[Cell], folder: Path, settings: Settings) -> Iterator[Result[Cell]]:
    """Yield the stored results of the cells; raise BadFolder for a damaged one or one of other settings."""
    return stored_results(
        cells, folder, lambda cell: depends(standard_split(cell.data_set, cell.split), cell, settings)
    )


GOAL = 0.05
"""Nats for each row by which variational EM may be worse than the best cell."""


@dataclass(frozen=True)
class Comparison:
    """One approximation on one data set.

    `grid` has the mean test NLL over splits at each prior scale (rows) and noise scale; `best` is the lowest of them,
    an oracle, at `best_prior_scale` and `best_noise_scale`, and `em` the NLL of variational EM. The standard error of
    their `difference` is that over splits of the difference on each. `split_oracle` lets the grid choose a cell of its
    own on each split, by the rows that it is scored on. `points` are the prior and noise of EM on each split.
    """

    data_set: str
    method: str
    splits: int
    grid: tuple[tuple[float, ...], ...]
    best: Mean
    best_prior_scale: float
    best_noise_scale: float
    em: Mean
    difference: Mean
    split_oracle: float
    points: tuple[tuple[float, float], ...]
    seconds: float

    @property
    def reached(self) -> bool:
        """Whether variational EM is within the goal."""
        return self.difference.mean <= GOAL

    @property
    def at_the_edge(self) -> bool:
        """Whether the best cell is at the edge of the grid."""
        ends = {PRIOR_SCALES[0], PRIOR_SCALES[-1]}, {NOISE_SCALES[0], NOISE_SCALES[-1]}
        return self.best_prior_scale in ends[0] or self.best_noise_scale in ends[1]

    @property
    def point(self) -> tuple[float, float]:
        """Prior and noise scales of EM, as geometric means over splits."""
        priors, noises = zip(*self.points, strict=True)
        return geometric_mean(priors), geometric_mean(noises)

    def note(self) -> str:
        """Return the comparison in a sentence."""
        prior, noise = self.point
        edge = ", at the edge of the grid" if self.at_the_edge else ""
        return (
            f"{self.data_set}, {self.method}: variational EM is {'' if self.reached else 'not '}within {GOAL:g} of the "
            f"best cell; its prior scale is {prior:.2g} and its noise {noise:.2g}, those of the best cell "
            f"{self.best_prior_scale:.2g} and {self.best_noise_scale:.2g}{edge}"
        )


def geometric_mean(values: Sequence[float]) -> float:
    """Return exp of the mean of logs.

    >>> round(geometric_mean([1.0, 4.0]), 6)
    2.0
    """
    return math.exp(fmean(math.log(value) for value in values))


def comparisons(results: Sequence[Result[Cell]]) -> list[Comparison]:
    """Return a comparison for each data set and approximation, in the order of the results."""
    groups: dict[tuple[str, str], list[Result[Cell]]] = {}
    for result in results:
        groups.setdefault((result.cell.data_set, result.cell.method), []).append(result)
    return [_compared(*index, group) for index, group in groups.items()]


def _compared(data_set: str, method: str, group: Sequence[Result[Cell]]) -> Comparison:
    order = sorted(group, key=lambda result: result.cell.split)
    em = [result.scores for result in order if result.cell.part == EM]
    cells = [result.scores for result in order if result.cell.part != EM]
    indices = [(row, column) for row in range(SIDE) for column in range(SIDE)]
    means = {index: fmean(scores[grid_key(*index)] for scores in cells) for index in indices}
    row, column = min(indices, key=means.__getitem__)
    best = [scores[grid_key(row, column)] for scores in cells]
    results = [scores["test_nll"] for scores in em]
    return Comparison(
        data_set,
        RECIPES[method].label,
        len(em),
        tuple(tuple(means[row, column] for column in range(SIDE)) for row in range(SIDE)),
        mean_and_error(best),
        PRIOR_SCALES[row],
        NOISE_SCALES[column],
        mean_and_error(results),
        mean_and_error([ours - theirs for ours, theirs in zip(results, best, strict=True)]),
        fmean(min(scores.values()) for scores in cells),
        tuple((scores["prior_scale"], scores["noise_scale"]) for scores in em),
        sum(result.seconds for result in group),
    )


@dataclass(frozen=True)
class Study:
    """The results of EM and of the grid, for each data set, approximation and split."""

    settings: Settings
    results: tuple[Result[Cell], ...]

    @property
    def comparisons(self) -> list[Comparison]:
        """A comparison for each data set and approximation."""
        return comparisons(self.results)

    def notes(self) -> list[str]:
        """Return a sentence on each comparison."""
        return [comparison.note() for comparison in self.comparisons]

    def document(self) -> dict[str, Any]:
        """Return all numbers of the study as JSON."""
        return {
            "settings": self.settings.config(),
            "prior_scales": list(PRIOR_SCALES),
            "noise_scales": list(NOISE_SCALES),
            "comparisons": [asdict(comparison) for comparison in self.comparisons],
            "fits": [{**asdict(result.cell), **result.scores, "seconds": result.seconds} for result in self.results],
            "notes": self.notes(),
        }


def run(settings: Settings, folder: Path, report: Report = silent) -> Study:
    """Run the study, or the part of it that `folder` does not hold yet.

    `report` gets a line about each fit. Results that were made with other settings are refused.
    """
    cells = [
        Cell(name, method, split, part)
        for name in dict.fromkeys(settings.datasets)
        for method in dict.fromkeys(settings.methods)
        for split in range(min(settings.splits or num_splits(name), num_splits(name)))
        for part in (EM, GRID)
    ]
    done = {result.cell: result for result in stored(cells, folder, settings)}
    missing = [cell for cell in cells if cell not in done]
    if done:
        report(f"{len(done)} of {len(cells)} results are there already")
    for count, result in enumerate(fit_all(missing, folder, settings), start=1):
        done[result.cell] = result
        scores = result.scores
        if result.cell.part == EM:
            text = f"NLL {scores['test_nll']:.4g}, prior {scores['prior_scale']:.3g}, noise {scores['noise_scale']:.3g}"
        else:
            text = f"best NLL {min(scores.values()):.4g}"
        report(f"{count}/{len(missing)} {result.cell}: {text}, {result.seconds:.1f} s")
    return Study(settings, tuple(done[cell] for cell in cells))


def show(out: Any, study: Study) -> None:
    """Print the tables."""
    title(out, "Prior and noise by variational EM, against the best of a grid")
    rows = table("", "best of grid", "variational EM", "difference", "splits", wrap=False)
    for data_set, part in groupby(study.comparisons, lambda comparison: comparison.data_set):
        add_heading(rows, data_set)
        for comparison in part:
            rows.add_row(
                f"  {comparison.method}",
                str(comparison.best),
                str(comparison.em),
                str(comparison.difference),
                str(comparison.splits),
            )
    out.print(rows)
    remark(out, "Test NLL in units of the target, mean ± standard error over splits.")
    notes(out, study.notes())
