"""The study: expected NLL against both temperatures, its tables and its numbers as JSON."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from posterity.cli.frame.output import table
from posterity.model import Tempering
from posterity.numerics.random import Key
from posterity_studies.frame import print_claims, remark, title
from posterity_studies.grids import log_grid
from posterity_studies.misspecification.models import CLEANER, NOISIER, WELL, Model, linear_models, logistic_models
from posterity_studies.options import Report, Settings, silent

TEMPERATURES = (0.05, 20.0, 41)  # least, largest and number, with 1 among them
SAME = 1e-9  # nats


@dataclass(frozen=True, eq=False)
class Curves:
    """Expected NLL of a model (G,) at the temperatures, taken as eta and as T; `plain` is at 1."""

    model: str
    targets: str
    description: str
    plain: float
    by_eta: Tensor
    by_temperature: Tensor

    def best(self, values: Tensor) -> float:
        """Return the temperature with the lowest NLL on the grid."""
        return float(temperatures()[int(values.argmin())])


@dataclass(frozen=True, eq=False)
class Study:
    """The curves of each model with each kind of targets."""

    seed: int
    curves: tuple[Curves, ...]

    def claims(self) -> dict[str, bool]:
        """Claims of theory about temperatures, and whether they hold here."""
        by_kind = {kind: [own for own in self.curves if own.targets == kind] for kind in (WELL, CLEANER, NOISIER)}
        pairs = {
            kind: [(own, values) for own in some for values in (own.by_eta, own.by_temperature)]
            for kind, some in by_kind.items()
        }
        return {
            "well specified, no temperature is better than 1": all(
                float(values.min()) >= own.plain - SAME for own, values in pairs[WELL]
            ),
            "targets cleaner than the model says want a cold posterior": all(
                own.best(values) < 1.0 and float(values.min()) < own.plain - SAME for own, values in pairs[CLEANER]
            ),
            "targets noisier than the model says want a warm posterior": all(
                own.best(values) > 1.0 and float(values.min()) < own.plain - SAME for own, values in pairs[NOISIER]
            ),
        }

    def document(self) -> dict[str, Any]:
        """Return all numbers of the study as JSON."""
        return {
            "seed": self.seed,
            "temperatures": temperatures().tolist(),
            "curves": [
                {
                    "model": own.model,
                    "targets": own.targets,
                    "description": own.description,
                    "nll_at_1": own.plain,
                    "nll_by_eta": own.by_eta.tolist(),
                    "nll_by_temperature": own.by_temperature.tolist(),
                    "best_eta": own.best(own.by_eta),
                    "best_temperature": own.best(own.by_temperature),
                }
                for own in self.curves
            ],
            "claims": self.claims(),
        }


def temperatures() -> Tensor:
    """Return the values of eta and T, (G,)."""
    return torch.tensor(log_grid(*TEMPERATURES), dtype=torch.float64, device="cpu")


def run(settings: Settings, folder: Path | None = None, report: Report = silent) -> Study:
    """Run the study; the seed fixes the rows of the linear model."""
    results = []
    for name, models in (
        ("linear regression", linear_models(Key(settings.seed))),
        ("logistic regression", logistic_models()),
    ):
        report(name)
        results += [_curves(name, targets, model) for targets, model in models.items()]
    return Study(settings.seed, tuple(results))


def _curves(name: str, targets: str, model: Model) -> Curves:
    by_eta, by_temperature = (
        torch.tensor([model.nll(kind(at)) for at in temperatures().tolist()], dtype=torch.float64, device="cpu")
        for kind in (Tempering.tempered, Tempering.cold)
    )
    return Curves(name, targets, model.name, model.nll(Tempering.bayes()), by_eta, by_temperature)


def show(out: Any, study: Study) -> None:
    """Print the tables."""
    document = study.document()
    title(out, "Expected NLL of a new target, in nats")
    rows = table("model", "targets", "at 1", "best eta", "NLL there", "best T", "NLL there")
    for row in document["curves"]:
        bests = ((row["best_eta"], row["nll_by_eta"]), (row["best_temperature"], row["nll_by_temperature"]))
        numbers = [text for best, values in bests for text in (f"{best:.3g}", f"{min(values):.4f}")]
        rows.add_row(row["model"].split()[0], row["description"], f"{row['nll_at_1']:.4f}", *numbers)
    out.print(rows)
    remark(out, "eta: likelihood to the power 1/eta. T: likelihood and prior to the power 1/T. Nothing is sampled.")
    print_claims(out, document["claims"])
