"""Fits of the study: many at once, and one small file of scores for each."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from posterity.inference import Task, plan
from posterity.inference.sweep import Sweep
from posterity.model.data import TensorData, as_data
from posterity.numerics.random import Key
from posterity.posteriors import Posterior
from posterity.storage import Part
from posterity_studies.results import depends_on
from posterity_studies.rows import own_orders
from posterity_studies.temperature.problem import Problem, scores
from posterity_studies.temperature.settings import Settings


@dataclass(frozen=True)
class Cell:
    """One fit: a width, eta and a seed."""

    width: int | None
    eta: float
    seed: int

    def path(self, folder: Path) -> Path:
        """Its file in the folder of the study."""
        width = "network" if self.width is None else f"width-{self.width}"
        return folder / "runs" / width / f"eta-{self.eta:.12g}" / f"seed-{self.seed}.json"

    def __str__(self) -> str:
        width = "" if self.width is None else f"width {self.width}, "
        return f"{width}eta {self.eta:.4g}, seed {self.seed}"


@dataclass(frozen=True, eq=False)
class Runs(Sweep[Cell]):
    """The fits of one width: those stored, and those to be made."""

    problem: Problem
    folder: Path
    settings: Settings
    report: Callable[[str], None]
    fingerprint: str

    @property
    def name(self) -> str:
        return "" if self.problem.width is None else f"width {self.problem.width}"

    def cells(self) -> list[Cell]:
        """All of the width, by seed and temperature."""
        etas = self.settings.temperatures(self.problem.num_data, self.problem.units)
        return [Cell(self.problem.width, eta, seed) for seed in range(self.settings.seeds) for eta in etas]

    def identity(self, cell: Cell) -> Part:
        method = self.settings.inference(self.problem.num_data)
        return depends_on(cell, self.settings, inference=method, **{"training rows": self.fingerprint})

    def room(self, cells: Sequence[Cell]) -> bool:
        joint = self.problem.tempered([cell.eta for cell in cells])
        return plan(self.settings.inference(self.problem.num_data), joint, self.problem.rows.train.pair).fits

    def task(self, cells: Sequence[Cell]) -> Task:
        rows, key = as_data(self.problem.rows.train.pair), Key(self.settings.seed).fold("temperature")
        assert isinstance(rows, TensorData)
        seeds = [cell.seed for cell in cells]
        return Task(
            str(cells[0]),
            self.settings.inference(self.problem.num_data),
            self.problem.tempered([cell.eta for cell in cells]),
            own_orders(rows, seeds),
            self.problem.start(seeds, key.fold("start")),
            seed=key.seed,
        )

    def scores(self, cell: Cell, posterior: Posterior) -> dict[str, float]:
        return scores(posterior, cell.seed, self.problem, self.settings)

    def summary(self, scores: dict[str, float]) -> str:
        return f"accuracy {scores['accuracy']:.4f}, NLL {scores['nll']:.4g}, confidence {scores['confidence']:.3f}"
