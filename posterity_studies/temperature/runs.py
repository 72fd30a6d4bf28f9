"""Fits of the study: many at once, and one small file of scores for each."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from posterity import __version__
from posterity.inference import Checkpoint, Trace, infer, plan
from posterity.model.data import TensorData, as_data
from posterity.numerics.random import Key
from posterity.posteriors import Posterior
from posterity_studies.groups import SECONDS, GroupedRuns, own_orders
from posterity_studies.results import Identity
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
        return folder / "runs" / _name(self.width) / f"eta-{self.eta:.12g}" / f"seed-{self.seed}.json"

    def __str__(self) -> str:
        width = "" if self.width is None else f"width {self.width}, "
        return f"{width}eta {self.eta:.4g}, seed {self.seed}"


@dataclass(frozen=True, eq=False)
class Runs(GroupedRuns[Cell]):
    """The fits of one width: those stored, and those to be made.

    `identity` has all that the numbers of a cell depend on; the method as it prints, so that a default that has
    changed tells.
    """

    problem: Problem
    folder: Path
    settings: Settings
    report: Callable[[str], None]
    fingerprint: str

    @property
    def name(self) -> str:
        return _name(self.problem.width)

    @property
    def prefix(self) -> str:
        return "" if self.problem.width is None else f"width {self.problem.width}: "

    def cells(self) -> list[Cell]:
        """All of the width, by seed and temperature."""
        etas = self.settings.temperatures(self.problem.num_data, self.problem.units)
        return [Cell(self.problem.width, eta, seed) for seed in range(self.settings.seeds) for eta in etas]

    def identity(self, cell: Cell) -> Identity:
        return {
            "width": cell.width,
            "eta": cell.eta,
            "fit": cell.seed,
            **self.settings.common(),
            "inference": repr(self.settings.inference(self.problem.num_data)),
            "training rows": self.fingerprint,
            "posterity": __version__,
        }

    def room(self, cells: Sequence[Cell]) -> bool:
        joint = self.problem.tempered([cell.eta for cell in cells])
        return plan(self.settings.inference(self.problem.num_data), joint, self.problem.rows.train.pair).fits

    def infer(self, group: Sequence[Cell], place: Path) -> tuple[Posterior, Trace]:
        """The posteriors of the cells, as members where there are several, and the trace; resumed if `place` has it."""
        settings, rows = self.settings, as_data(self.problem.rows.train.pair)
        assert isinstance(rows, TensorData)
        seeds, etas = [cell.seed for cell in group], [cell.eta for cell in group]
        method, key = settings.inference(self.problem.num_data), Key(settings.seed).fold("temperature")
        count = "a fit" if len(group) == 1 else f"{len(group)} fits together"
        self.report(f"{self.prefix}{count}, {len(method.batches(rows, key)):,} steps")
        return infer(
            method,
            self.problem.tempered(etas),
            own_orders(rows, seeds),
            start=self.problem.start(seeds, key.fold("start")),
            seed=key.seed,
            checkpoint=Checkpoint(place, seconds=SECONDS),
            progress=False,
        )

    def scores(self, cell: Cell, posterior: Posterior) -> dict[str, float]:
        return scores(posterior, cell.seed, self.problem, self.settings)

    def told(self, scores: dict[str, float]) -> str:
        return f"accuracy {scores['accuracy']:.4f}, NLL {scores['nll']:.4g}, confidence {scores['confidence']:.3f}"


def _name(width: int | None) -> str:
    return "network" if width is None else f"width-{width}"
