"""Which part of a curvature matrix is kept, and the precision made of it."""

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from posterity.curvature.rows import Rows
from posterity.curvature.survey import Place, Survey
from posterity.precisions.precision import Precision

Sums = dict[str, Tensor]

RECENT = "recent "  # begins the names of sums over the last few batches, in the number type of the weights
TOGETHER = 8  # batches in them: to add each batch to sums in float64 would take as long as its products


class Structure(ABC):
    """How the curvature over R weights is held while it is summed over rows, in one or more passes over the data.

    `add` takes the sums so far (empty at first) and gives new ones; it may overwrite those it is given.
    """

    @property
    def passes(self) -> int:
        """Passes over the data."""
        return 1

    @property
    def needs_columns(self) -> bool:
        """Whether it can be had of curvatures with columns only."""
        return False

    @abstractmethod
    def add(self, sums: Sums, rows: Rows, number: int) -> Sums:
        """The sums with these rows added, in pass `number`."""

    def end(self, sums: Sums, rows: Rows, number: int, prior: Tensor) -> Sums:
        """The sums after pass `number`, whose last rows were `rows`; `prior` (R,) is the prior's precision."""
        return sums

    def check_prior(self, places: Sequence[Place], prior: Tensor) -> None:
        """A ValueError where `precision` could not take this prior (R,), before any pass is made."""
        return

    @abstractmethod
    def precision(self, sums: Sums, places: Sequence[Place], scale: float | Tensor, prior: Tensor) -> Precision:
        """scale C + diag(prior) for the sums C over all rows; `places` as in the survey, none for a `Density`."""

    @abstractmethod
    def bytes(self, survey: Survey, num_data: int, columns: int) -> int:
        """What the sums and the precision take at most, for `columns` columns a row."""


def added(sums: Sums, **values: Tensor) -> Sums:
    """The sums with each value added to the one of its name, in place and in the number type of the sum."""
    for name, value in values.items():
        sums[name] = sums[name].add_(value) if name in sums else value
    return sums


def counted(sums: Sums) -> Sums:
    """The sums one batch later: now and then the recent ones are added to those in float64."""
    batches = sums["batches"] + 1 if "batches" in sums else torch.ones((), dtype=torch.int64)
    return {**(settled(sums) if int(batches) % TOGETHER == 0 else sums), "batches": batches}


def settled(sums: Sums) -> Sums:
    """The sums with the recent ones in them, in float64."""
    recent = {name.removeprefix(RECENT): value for name, value in sums.items() if name.startswith(RECENT)}
    rest = {name: value for name, value in sums.items() if not name.startswith(RECENT)}
    return added(rest, **{name: value if name in rest else value.to(torch.float64) for name, value in recent.items()})
