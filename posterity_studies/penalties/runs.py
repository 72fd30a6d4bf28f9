"""Fits of a penalty at once, for all lambdas, setups and seeds; and the scores of a fit."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor

from posterity import metrics
from posterity.errors import Diverged
from posterity.inference import Task, plan
from posterity.inference.sweep import Result, Sweep
from posterity.methods import MAP
from posterity.model.data import TensorData, as_data
from posterity.numerics.random import Key
from posterity.penalties.training import penalised
from posterity.posteriors import Point, Posterior
from posterity.predictive import Predictive
from posterity.pruning.pruning import pruned
from posterity.storage import Part
from posterity_studies.penalties.problem import Cell, Problem, Rows, problem, read
from posterity_studies.penalties.settings import Settings
from posterity_studies.rows import depends_on, own_orders

ROWS = 2048  # of a chunk of predictions
COMPARED = 256  # test images that the smaller module is tried on
VANISHED = "vanished "  # before the name of a layer


def scores(posterior: Point, rows: Rows) -> dict[str, float]:
    """Accuracy and NLL on test and held-out rows; zeros and filters that vanished; whether the smaller module agrees.

    `zeros` is the share of penalised weights that are exactly zero, `filters_left` and `weights_left` are shares of the
    hidden units and of all weights that `pruned` keeps, `vanished <layer>` counts the units that it removes, and
    `pruned_difference` is the largest of the differences between outputs of both modules on 256 test images, in
    float32 and (`exact_difference`) in float64. Diverged where an output is not finite.
    """
    results = {}
    for prefix, part in (("", rows.test), ("held_out_", rows.held_out)):
        predictive = _predicted(posterior, part.inputs)
        results[f"{prefix}accuracy"] = metrics.accuracy(predictive, part.targets)
        results[f"{prefix}nll"] = metrics.negative_log_likelihood(predictive, part.targets)
        results[f"{prefix}ece"] = metrics.expected_calibration_error(predictive, part.targets)
    module = posterior.module()
    weights = [weight.parameter for weight in penalised(module).values()]
    results["zeros"] = sum(int((w == 0).sum()) for w in weights) / sum(w.numel() for w in weights)
    smaller = pruned(module)
    images = rows.test.inputs[:COMPARED]
    # By default convolutions on a GPU round to ten binary digits, which the difference would show.
    with torch.no_grad(), torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        results["pruned_difference"] = float((smaller.module(images) - module(images)).abs().max())
        exact = images.double()
        precise = pruned(module.double()).module
        results["exact_difference"] = float((precise(exact) - module(exact)).abs().max())
    before, after = (sum(unit[index] for unit in smaller.units.values()) for index in (0, 1))
    results["filters_left"] = after / before
    results["weights_left"] = smaller.weights[1] / smaller.weights[0]
    return results | {VANISHED + name: float(had - has) for name, (had, has) in smaller.units.items()}


def _predicted(posterior: Point, images: Tensor) -> Predictive:
    try:
        return posterior.predict(images, batch_size=ROWS)
    except ValueError as error:
        module = posterior.module()
        with torch.no_grad():
            if all(bool(module(chunk).isfinite().all()) for chunk in torch.split(images, ROWS)):
                raise
        raise Diverged("Its outputs are not finite.", step=0, tensor="the outputs") from error


Fits = list[tuple[Cell, Result[Cell] | None]]


@dataclass(frozen=True, eq=False)
class Runs(Sweep[Cell]):
    """The fits of one penalty; `jobs` processes share the memory."""

    problem: Problem
    folder: Path
    settings: Settings
    report: Callable[[str], None]
    fingerprint: str
    jobs: int = 1

    @property
    def name(self) -> str:
        return self.problem.penalty

    def cells(self) -> list[Cell]:
        """All of the penalty, by seed, setup and lambda."""
        return [
            Cell(self.problem.penalty, setup, ratio, seed)
            for seed in range(self.settings.seeds)
            for setup in self.settings.setups
            for ratio in self.problem.ratios(setup, self.settings)
        ]

    def identity(self, cell: Cell) -> Part:
        return depends_on(cell, self.settings, inference=self._method, **{"training rows": self.fingerprint})

    def room(self, cells: Sequence[Cell]) -> bool:
        """Whether there is memory for these fits at once, in each of the processes."""
        memory = plan(self._method, self.problem.joint(cells), self._rows)
        return memory.has_room(self.jobs * memory.total)

    def task(self, cells: Sequence[Cell]) -> Task:
        key, seeds = Key(self.settings.seed).fold("penalties"), [cell.seed for cell in cells]
        start = self.problem.start(seeds, self.settings)
        return Task(
            self.name, self._method, self.problem.joint(cells), own_orders(self._rows, seeds), start, seed=key.seed
        )

    def scores(self, cell: Cell, posterior: Posterior) -> dict[str, float]:
        assert isinstance(posterior, Point)
        return scores(posterior, self.problem.rows)

    def summary(self, scores: dict[str, float]) -> str:
        return (
            f"accuracy {scores['accuracy']:.4f}, held out {scores['held_out_accuracy']:.4f}, "
            f"{100 * scores['zeros']:.0f} % zeros, {100 * scores['filters_left']:.0f} % of filters left"
        )

    @property
    def _method(self) -> MAP:
        return self.settings.inference(self.problem.penalty, self.problem.num_data)

    @property
    def _rows(self) -> TensorData:
        rows = as_data(self.problem.rows.train.pair, augmentation=self.settings.augmentation)
        assert isinstance(rows, TensorData)
        return rows

    @contextmanager
    def setting(self) -> Iterator[None]:
        """Convolutions of a GPU by the fastest kernel, tried out at the first step, and in bfloat16 if asked for.

        The kernel that cuDNN takes without a trial is a slow one for some layers of members of VGG-19. No cache of
        weights in bfloat16, which recorded steps would keep.
        """
        before, torch.backends.cudnn.benchmark = torch.backends.cudnn.benchmark, True
        half = self.settings.precision == "bf16"
        try:
            with torch.autocast(self.settings.device, torch.bfloat16, enabled=half, cache_enabled=False):
                yield
        finally:
            torch.backends.cudnn.benchmark = before


def fit_there(settings: Settings, penalty: str, group: Sequence[Cell], folder: Path) -> tuple[Fits, list[str]]:
    """Fit a group in a process of its own, and return its results and its progress lines."""
    rows, fingerprint = _read(settings)
    lines: list[str] = []
    runs = Runs(problem(penalty, rows, settings), folder, settings, lines.append, fingerprint)
    return list(runs.fitted(group)), lines


@lru_cache(maxsize=1)
def _read(settings: Settings) -> tuple[Rows, str]:
    """The rows, once in each process."""
    rows = read(settings)
    return rows, as_data(rows.train.pair).fingerprint()
