"""The study as a whole: small problems against NUTS, CIFAR-10 against the HMC reference, tables and one document."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from posterity.cli.frame.output import table
from posterity.inference.sweep import Result
from posterity.report.files import processor
from posterity_studies.fidelity import images, small
from posterity_studies.fidelity.images import Images, Pictures
from posterity_studies.fidelity.problems import PROBLEMS, Problem, problem
from posterity_studies.fidelity.settings import CIFAR, Settings
from posterity_studies.fidelity.small import Cell, Truth
from posterity_studies.fidelity.truth import ESS, RHAT, Mixing
from posterity_studies.frame import notes, remark, title
from posterity_studies.options import Report, silent

NEAR, SHARE = 0.02, 0.1
"""The total variation that counts as near, and the share of NUTS's time in which a method should come there."""


@dataclass(frozen=True, eq=False)
class Compared:
    """A small problem: its truth, NUTS of rising lengths, and the methods."""

    name: str
    truth: Truth
    results: tuple[Result[Cell], ...]

    @property
    def nuts(self) -> list[Result[Cell]]:
        """NUTS, from the shortest to the first that has converged."""
        return [result for result in self.results if result.cell.method.startswith("nuts-")]

    @property
    def methods(self) -> list[Result[Cell]]:
        """All others, the nearest to the truth first."""
        others = [result for result in self.results if not result.cell.method.startswith("nuts-")]
        return sorted(others, key=lambda result: result.scores["total_variation"])

    @property
    def seconds(self) -> float:
        """What NUTS needs: the seconds of its shortest run whose chains have converged, or of the longest."""
        return self.nuts[-1].seconds

    @property
    def quick(self) -> list[Result[Cell]]:
        """The methods that are near in a tenth of that time, the quickest first."""
        near = [result for result in self.methods if result.scores["total_variation"] <= NEAR]
        return sorted(
            (result for result in near if result.seconds <= SHARE * self.seconds), key=lambda result: result.seconds
        )

    def note(self) -> str:
        """Which method is near the truth at a tenth of NUTS's time."""
        words = f"{PROBLEMS[self.name].label}: NUTS needs {self.seconds:.1f} s"
        if not self.quick:
            return f"{words}; no method is within {NEAR:g} of the truth in a tenth of that."
        best = min(self.quick, key=lambda result: result.scores["total_variation"])
        return (
            f"{words}; {best.cell.recipe.label} is within {best.scores['total_variation']:.3f} of the truth in "
            f"{best.seconds:.2f} s, {best.seconds / self.seconds:.2f} of that ({len(self.quick)} methods are within "
            f"{NEAR:g} in a tenth of it)."
        )

    def document(self) -> dict[str, Any]:
        """The problem as JSON."""
        known = self.truth
        return {
            "problem": self.name,
            "truth": {
                "rhat": known.mixing.rhat,
                "ess": known.mixing.ess,
                "divergent": known.divergent,
                "seconds": known.seconds,
                "floor": known.floor,
            },
            "nuts_seconds": self.seconds,
            "nuts_converged": Mixing(self.nuts[-1].scores["rhat"], self.nuts[-1].scores["ess"]).good,
            "near_in_a_tenth": [result.cell.method for result in self.quick],
            "methods": [
                {"method": result.cell.method, "label": result.cell.recipe.label, **_numbers(result)}
                for result in (*self.nuts, *self.methods)
            ],
        }


def _numbers(result: Result[Any]) -> dict[str, float]:
    return {**result.scores, "seconds": result.seconds}


@dataclass(frozen=True, eq=False)
class Study:
    """All that the study found: the small problems, and CIFAR-10 where it was asked for."""

    settings: Settings
    compared: tuple[Compared, ...]
    images: Images | None = None

    def document(self) -> dict[str, Any]:
        """Every number of the study, ready for JSON."""
        return {
            "settings": self.settings.config(),
            **processor(self.settings.device),
            "nuts_time": f"seconds of the shortest run of NUTS whose test predictions have R-hat <= {RHAT:g} and "
            f"bulk ESS >= {ESS:g}",
            "seconds": "of the processor, with plain steps; on CIFAR-10 of the clock",
            "problems": [part.document() for part in self.compared],
            **({} if self.images is None else {"cifar-10": self.images.document()}),
            "notes": list(self.lines()),
        }

    def lines(self) -> Sequence[str]:
        """What the numbers say, a sentence for each problem."""
        return [part.note() for part in self.compared] + ([] if self.images is None else self.images.notes())


Data = tuple[tuple[Problem, ...], Pictures | None]
"""The small problems that are asked for, and the images, if they are."""


def read(settings: Settings) -> Data:
    """Read the rows of all problems; ValueError or BadData where they cannot be had."""
    problems = tuple(problem(name, settings.seed) for name in settings.problems if name != CIFAR)
    return problems, images.read(settings) if CIFAR in settings.problems else None


def run(settings: Settings, folder: Path, report: Report = silent, data: Data | None = None) -> Study:
    """Run the study, or the part of it that `folder` does not hold yet; `report` is told a line about each fit."""
    problems, pictures = data or read(settings)
    compared = []
    for given in problems:
        known = small.truth(given, folder, settings, report)
        results = tuple(small.results(given, known, folder, settings, report))
        compared.append(Compared(given.name, known, results))
    part = None if pictures is None else images.run(settings, folder, report, pictures)
    return Study(settings, tuple(compared), part)


def show(out: Any, study: Study) -> None:
    """Print the tables."""
    for part in study.compared:
        title(out, f"{PROBLEMS[part.name].label}: distance of the predictive to the exact one")
        rows = table("method", "total variation", "Wasserstein", "k-hat", "seconds")
        for result in (*part.nuts, *part.methods):
            scores = result.scores
            rows.add_row(
                result.cell.recipe.label,
                f"{scores['total_variation']:.4f}",
                _short(scores.get("wasserstein"), ".4f"),
                _short(scores.get("pareto_k"), ".2f"),
                f"{result.seconds:.2f}",
            )
        out.print(rows)
        known = part.truth
        remark(
            out,
            f"Truth: {study.settings.truths} runs of NUTS with R-hat {known.mixing.rhat:.4f} and ESS "
            f"{known.mixing.ess:,.0f} of test predictions; a run is {known.floor['total_variation']:.4f} from the "
            "others.",
        )
    if study.images is not None:
        images.show(out, study.images)
    notes(out, study.lines())


def _short(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)
