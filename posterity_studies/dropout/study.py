"""The study as a whole: what it computes, and its numbers as one document."""

from dataclasses import asdict, dataclass
from typing import Any

from posterity.evidence import DropoutObjective
from posterity_studies.dropout import classification as moons
from posterity_studies.dropout import enumeration as masks
from posterity_studies.dropout import regression as curves
from posterity_studies.dropout.classification import Classification, classification
from posterity_studies.dropout.divergence import Divergence, divergence
from posterity_studies.dropout.enumeration import Enumeration, enumeration
from posterity_studies.dropout.regression import Regression, regression

INSIDE, OUTSIDE, GAP = (1.0, 4.0), (5.0, curves.REACH), (0.0, 0.9)  # |x| where there are rows, and where there are none


@dataclass(frozen=True, eq=False)
class Study:
    """All that the study found."""

    seed: int
    regression: Regression
    classification: Classification
    enumeration: Enumeration
    divergence: Divergence

    def document(self) -> dict[str, Any]:
        """Every number of the study, ready for JSON."""
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
                "estimates": [asdict(one) for one in self.enumeration.estimates],
            },
            "divergence": [asdict(one) for one in self.divergence.failures],
        }

    def _regression(self) -> dict[str, Any]:
        axis, rows = self.regression.axis, len(self.regression.data.train)
        found = []
        for name, curve in self.regression.curves.items():
            found.append(
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
            "methods": found,
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
                {"method": name, **{key: getattr(one, key) for key in names}}
                for name, one in self.classification.maps.items()
            ],
        }


def dropout(seed: int = 0) -> Study:
    """Run the study; the seed fixes everything random."""
    return Study(seed, regression(seed), classification(seed), enumeration(seed), divergence())
