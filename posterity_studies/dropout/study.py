"""The study: its run, its tables and its numbers as JSON."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from posterity.cli.frame.output import table
from posterity.evidence import DropoutObjective
from posterity_studies.dropout import classification as moons
from posterity_studies.dropout import enumeration as masks
from posterity_studies.dropout import regression as curves
from posterity_studies.dropout import training as losses
from posterity_studies.dropout.classification import Classification, classification
from posterity_studies.dropout.enumeration import Divergence, Enumeration, divergence, enumeration
from posterity_studies.dropout.regression import Regression, regression
from posterity_studies.dropout.training import Losses, training
from posterity_studies.frame import notes, print_claims, remark, title
from posterity_studies.options import Report, Settings, silent

INSIDE, OUTSIDE, GAP = (1.0, 4.0), (5.0, curves.REACH), (0.0, 0.9)  # |x| where there are rows, and where there are none


@dataclass(frozen=True, eq=False)
class Study:
    """The results of the study."""

    seed: int
    regression: Regression
    classification: Classification
    enumeration: Enumeration
    divergence: Divergence
    training: dict[str, Losses]

    def document(self) -> dict[str, Any]:
        """Return all numbers of the study as JSON."""
        return {
            "seed": self.seed,
            "regression": self._regression(),
            "classification": self._classification(),
            "enumeration": {
                "units": masks.UNITS,
                "rate": masks.RATE,
                "masks": self.enumeration.masks,
                "input": masks.AT,
                "mean": self.enumeration.mean,
                "variance": self.enumeration.variance,
                "kl_from_the_moment_matched_gaussian": self.enumeration.divergence,
                "repeats": masks.REPEATS,
                "estimates": [asdict(estimate) for estimate in self.enumeration.estimates],
            },
            "divergence": [asdict(failure) for failure in self.divergence.failures],
            "training": self._training(),
        }

    def _training(self) -> dict[str, Any]:
        return {
            "data_sets": losses.DATA_SETS,
            "rows": losses.ROWS,
            "rate": losses.RATE,
            "level": losses.LEVEL,
            "runs": [
                {
                    "method": name,
                    "steps": own.steps.tolist(),
                    "training_loss": own.train.tolist(),
                    "held_out_loss": own.held_out.tolist(),
                    "training_loss_standard_error": own.train_error.tolist(),
                    "held_out_loss_standard_error": own.held_out_error.tolist(),
                    "steps_to_level": own.steps_to_level,
                    "least_held_out_loss": own.least,
                    "rise_of_held_out_loss": own.rise,
                }
                for name, own in self.training.items()
            ],
            "claims": losses.claims(self.training),
        }

    def _regression(self) -> dict[str, Any]:
        axis, rows = self.regression.axis, len(self.regression.data.train)
        results = []
        for name, curve in self.regression.curves.items():
            results.append(
                {
                    "method": name,
                    "test_nll": curve.test_nll,
                    "test_rmse": curve.test_rmse,
                    "noise": curve.noise,
                    "precision": curve.noise**-2,
                    "rates": list(curve.rates),
                    "scale_on_the_data": curve.mean_scale(axis, *INSIDE),
                    "scale_in_the_gap": curve.mean_scale(axis, *GAP),
                    "scale_outside": curve.mean_scale(axis, *OUTSIDE),
                }
            )
        tau = self.regression.curves["MC dropout"].noise ** -2
        length_scale = (1 - curves.RATE) ** 0.5  # of a prior N(0, 1) on torch's weights: l^2 = (1 - p) / s^2
        setting = {"rate": curves.RATE, "length_scale": length_scale, "num_data": rows}
        decay = DropoutObjective(halved=False, weight_decay=True).penalty(tau, **setting)
        return {
            "rows": rows,
            "draws": curves.DRAWS,
            "methods": results,
            "convention": {
                "precision": tau,
                "length_scale": length_scale,
                "weight_decay_of_the_same_model_with_squared_error": decay,
            },
        }

    def _classification(self) -> dict[str, Any]:
        names = ("entropy_on_the_data", "entropy_on_the_ring", "test_nll", "test_accuracy")
        return {
            "rows": len(self.classification.data.train),
            "rate": moons.RATE,
            "draws": moons.DRAWS,
            "ring": moons.RING,
            "methods": [
                {"method": name, **{key: getattr(entropies, key) for key in names}}
                for name, entropies in self.classification.maps.items()
            ],
        }


PARTS = (9.0, 2.3, 0.7, 1.3, 1.4)


def run(settings: Settings, folder: Path | None = None, report: Report = silent) -> Study:
    """Run the study; the seed determines all random numbers."""
    seed = settings.seed
    report("a curve")
    curve = regression(seed)
    report("two moons")
    moons = classification(seed)
    report("all masks of a tiny network, and divergences")
    masks, distances = enumeration(seed), divergence()
    report("losses while training")
    return Study(seed, curve, moons, masks, distances, training(seed))


def show(out: Any, study: Study) -> None:
    """Print the tables."""
    document = study.document()
    curve, moons, tiny = document["regression"], document["classification"], document["enumeration"]
    title(out, f"y = sin(x) + x, {curve['rows']} rows on 1 < |x| < 4: standard deviation of f")
    rows = table("method", "test NLL", "on data", "in gap", "outside", "rates")
    for row in curve["methods"]:
        numbers = ("test_nll", "scale_on_the_data", "scale_in_the_gap", "scale_outside")
        rates = ", ".join(f"{rate:.2f}" for rate in row["rates"])
        rows.add_row(row["method"], *(f"{row[key]:.3f}" for key in numbers), rates)
    out.print(rows)
    title(out, f"Two moons, {moons['rows']} rows: entropy of the label, in nats")
    rows = table("method", "test NLL", "accuracy", "on the data", "far away")
    for row in moons["methods"]:
        numbers = ("test_nll", "test_accuracy", "entropy_on_the_data", "entropy_on_the_ring")
        rows.add_row(row["method"], *(f"{row[key]:.4f}" for key in numbers))
    out.print(rows)
    remark(out, f"Far away: on a circle of radius {moons['ring']:g}.")
    out.print()
    title(out, f"Mean and variance by S draws against all {tiny['masks']} masks of a tiny network")
    rows = table("draws", "mean off by", "theory", "scatter / S", "/ (S - 1)", "exact")
    for row in tiny["estimates"]:
        numbers = ("mean_error", "mean_error_by_theory", "plug_in_variance", "unbiased_variance")
        rows.add_row(str(row["draws"]), *(f"{row[key]:.4f}" for key in numbers), f"{tiny['variance']:.4f}")
    out.print(rows)
    title(out, "Where training takes a wrong KL for granted: |m| below so many s")
    rows = table("rate", "s l", "wrong in sign", "off by a per cent")
    for row in document["divergence"]:
        rows.add_row(
            f"{row['rate']:g}", f"{row['width']:g}", f"{row['distance']:.2f}", f"{row['within_a_percent']:.2f}"
        )
    out.print(rows)
    curves = document["training"]
    title(out, f"Losses of {curves['data_sets']} fits to {curves['rows']} noisy rows, in nats per row, dropout off")
    rows = table("training", f"steps to {curves['level']:g}", "training loss", "held-out loss", "its least", "rise")
    for row in curves["runs"]:
        ends = (row["training_loss"][-1], row["held_out_loss"][-1])
        numbers = (*ends, row["least_held_out_loss"], row["rise_of_held_out_loss"])
        rows.add_row(row["method"], str(row["steps_to_level"] or "never"), *(f"{number:.3f}" for number in numbers))
    out.print(rows)
    print_claims(out, curves["claims"])
    out.print()
    convention = curve["convention"]
    lines = (
        f"precision tau of MC dropout on the curve: {convention['precision']:.3f} (length-scale "
        f"{convention['length_scale']:.4f}); as weight decay beside a mean squared error: "
        f"{convention['weight_decay_of_the_same_model_with_squared_error']:.3e}",
        "KL of the exact predictive from the Gaussian with its moments: "
        f"{tiny['kl_from_the_moment_matched_gaussian']:.4f} nats",
    )
    notes(out, lines)
