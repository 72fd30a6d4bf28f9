"""Joint fits of a penalty for all lambdas, setups and seeds, and the scores of a fit."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor, nn

from posterity import metrics
from posterity.datasets import LabelledData
from posterity.errors import Diverged
from posterity.inference import Callback, Run, Task, plan
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
COMPARED = 256  # test images on which the pruned module is compared
VANISHED = "vanished "  # before the name of a layer
HELD_OUT, TRAINING = "held_out_accuracy", "training_accuracy"  # curves
LOOKS = 10  # points of a curve


def scores(posterior: Point, rows: Rows) -> dict[str, float]:
    """Return accuracy and NLL on test and held-out rows, zeros, vanished filters, and the error of the pruned module.

    `zeros` is the share of penalised weights that are exactly zero, `filters_left` and `weights_left` are shares of the
    hidden units and of all weights that `pruned` keeps, `vanished <layer>` counts the units that it removes, and
    `pruned_difference` is the largest of the differences between outputs of both modules on 256 test images, in
    float32 and (`exact_difference`) in float64. Diverged where an output is not finite.
    """
    results = prediction_scores(posterior, rows.test) | prediction_scores(posterior, rows.held_out, "held_out_")
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


def prediction_scores(posterior: Point, rows: LabelledData, prefix: str = "") -> dict[str, float]:
    """Return accuracy, NLL and expected calibration error on some rows."""
    predictive = _predicted(posterior, rows.inputs)
    return {
        f"{prefix}accuracy": metrics.accuracy(predictive, rows.targets),
        f"{prefix}nll": metrics.negative_log_likelihood(predictive, rows.targets),
        f"{prefix}ece": metrics.expected_calibration_error(predictive, rows.targets),
    }


def _predicted(posterior: Point, images: Tensor) -> Predictive:
    try:
        return posterior.predict(images, batch_size=ROWS)
    except ValueError as error:
        module = posterior.module()
        with torch.no_grad():
            if all(bool(module(chunk).isfinite().all()) for chunk in torch.split(images, ROWS)):
                raise
        raise Diverged("Its outputs are not finite.", step=0, tensor="the outputs") from error


class Accuracies(Callback):
    """Records the accuracy of each member on held-out rows, and on as many training rows, at ten steps of a run."""

    def __init__(self, rows: Rows) -> None:
        inputs, targets = (part[: len(rows.held_out)] for part in rows.train.pair)
        self._parts = {HELD_OUT: rows.held_out, TRAINING: LabelledData(inputs, targets)}

    def after_step(self, run: Run) -> None:
        if run.step == run.steps or run.step % max(1, run.steps // LOOKS) == 0:
            run.trace.record(run.step, self._scored(run.latest()))

    @torch.no_grad()
    def _scored(self, posterior: Posterior) -> dict[str, Tensor]:
        assert isinstance(posterior, Point)
        count = posterior.num_members
        members = [posterior] if count is None else [posterior.member(index) for index in range(count)]
        modules = [member.module() for member in members]
        accuracies = {
            name: torch.tensor([_accuracy(module, part) for module in modules], dtype=torch.float64, device="cpu")
            for name, part in self._parts.items()
        }
        return accuracies if count is not None else {name: values[0] for name, values in accuracies.items()}


def _accuracy(module: nn.Module, rows: LabelledData) -> float:
    """Return accuracies, also for outputs that are not finite, at which the run itself stops."""
    batches = zip(torch.split(rows.inputs, ROWS), torch.split(rows.targets, ROWS), strict=True)
    right = sum((module(inputs).argmax(-1) == targets).sum() for inputs, targets in batches)
    return float(right) / len(rows)


Fits = list[tuple[Cell, Result[Cell] | None]]


@dataclass(frozen=True, eq=False)
class Runs(Sweep[Cell]):
    """The fits of one penalty with one step size and length; `jobs` processes share the memory.

    Those of a search see held-out rows alone, and no test rows, at their end.
    """

    columns = (HELD_OUT, TRAINING)
    problem: Problem
    step_size: float
    epochs: int
    folder: Path
    settings: Settings
    report: Callable[[str], None]
    fingerprint: str
    jobs: int = 1

    @property
    def name(self) -> str:
        return f"{self.problem.penalty}, {Cell('', '', 1.0, self.step_size, self.epochs, 0).steps}"

    @property
    def searches(self) -> bool:
        """Whether these are the short runs by which lambdas and step sizes are chosen."""
        return self.epochs != self.settings.actual_epochs

    def callbacks(self) -> Sequence[Callback]:
        return [] if self.searches else [Accuracies(self.problem.rows)]

    def identity(self, cell: Cell) -> Part:
        return depends_on(cell, self.settings, inference=self._method, **{"training rows": self.fingerprint})

    def room(self, cells: Sequence[Cell]) -> bool:
        """Return whether there is memory for these fits together, in each of the processes."""
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
        if self.searches:
            return prediction_scores(posterior, self.problem.rows.held_out, "held_out_")
        return scores(posterior, self.problem.rows)

    def summary(self, scores: dict[str, float]) -> str:
        if self.searches:
            return f"held-out accuracy {scores['held_out_accuracy']:.4f}"
        return (
            f"accuracy {scores['accuracy']:.4f}, held out {scores['held_out_accuracy']:.4f}, "
            f"{100 * scores['zeros']:.0f} % zeros, {100 * scores['filters_left']:.0f} % of filters left"
        )

    @property
    def _method(self) -> MAP:
        return self.settings.inference(self.problem.penalty, self.problem.num_data, self.step_size, self.epochs)

    @property
    def _rows(self) -> TensorData:
        rows = as_data(self.problem.rows.train.pair, augmentation=self.settings.augmentation)
        assert isinstance(rows, TensorData)
        return rows

    @contextmanager
    def setting(self) -> Iterator[None]:
        """Let a GPU choose the fastest convolution kernels at the first step, in bfloat16 with --precision bf16.

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
    """Fit a group in a worker process; return its results and its progress lines."""
    rows, fingerprint = _read(settings)
    lines: list[str] = []
    own = problem(penalty, rows, settings)
    runs = Runs(own, group[0].step_size, group[0].epochs, folder, settings, lines.append, fingerprint)
    return list(runs.fitted(group)), lines


@lru_cache(maxsize=1)
def _read(settings: Settings) -> tuple[Rows, str]:
    """Read the rows, once in each process."""
    rows = read(settings)
    return rows, as_data(rows.train.pair).fingerprint()
