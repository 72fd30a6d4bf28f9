"""The study as a whole, and its numbers as one document."""

from dataclasses import asdict, dataclass
from typing import Any

from torch import Tensor

from posterity.numerics.random import Key
from posterity.studies.mixtures import example, partly
from posterity.studies.mixtures.bounds import Checks, Curve, checks, curves, one_mean
from posterity.studies.mixtures.example import Rounds, Sample, Values
from posterity.studies.mixtures.partly import Share, partly_labelled


@dataclass(frozen=True, eq=False)
class Study:
    """All that the study found."""

    seed: int
    data: Sample
    complete: dict[str, Tensor]
    run: Rounds
    curves: tuple[Curve, ...]
    one_mean: tuple[Curve, ...]
    checks: Checks
    miniature: Checks
    shares: tuple[Share, ...]

    def document(self) -> dict[str, Any]:
        """Every number of the study, ready for JSON."""
        return {
            "seed": self.seed,
            "example": {
                "points": len(self.data.points),
                "truth": _numbers(example.TRUTH),
                "with_labels": _numbers(self.complete),
                "start": _numbers(self.run.history[0]),
                "by_em": _numbers(self.run.end),
                "bound_after_e": self.run.after_e.tolist(),
                "bound_after_m": self.run.after_m.tolist(),
                "checks": asdict(self.checks),
            },
            "miniature": {"points": list(example.MINIATURE), "checks": asdict(self.miniature)},
            "labels": {
                "points": partly.COUNT,
                "truth": _numbers(partly.TRUTH),
                "data_sets": partly.REPLICATES,
                "shares": [asdict(one) for one in self.shares],
            },
        }


def mixtures(seed: int = 0) -> Study:
    """Run the study; `seed` fixes everything random."""
    key = Key(seed)
    data = example.sample(example.COUNT, example.TRUTH, key.fold("points"))
    hidden, small = example.unlabelled(data), example.miniature()
    run = example.expectation_maximization(hidden, example.START)
    small_run = example.expectation_maximization(small, example.MINIATURE_START)
    return Study(
        seed,
        data,
        example.complete(data),
        run,
        tuple(curves(hidden, run.history)),
        tuple(one_mean(hidden, example.START)),
        checks(hidden, run, key.fold("q")),
        checks(small, small_run, key.fold("q")),
        tuple(partly_labelled(key.fold("labels"))),
    )


def _numbers(values: Values) -> dict[str, list[float]]:
    return {name: value.tolist() for name, value in values.items()}
