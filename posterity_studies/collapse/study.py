"""The study as a whole, and its numbers as one document."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from posterity.numerics.random import Key
from posterity_studies.collapse import cases, optima
from posterity_studies.collapse.confidence import Confidence, Sureness, confidence
from posterity_studies.collapse.gaps import Gap, gaps
from posterity_studies.collapse.optima import Balanced, Optima, Untempered, balanced, untempered


@dataclass(frozen=True, eq=False)
class Study:
    """All that the study found: optima at eta = 1 of three cases, and at the balanced temperature of two of them."""

    seed: int
    rectified: Untempered
    odd: Untempered
    classes: Untempered
    balanced: Balanced
    balanced_classes: Balanced
    gaps: tuple[Gap, ...]
    confidence: Confidence

    @property
    def highest_above(self) -> float:
        """The largest ELBO - F~ anywhere, relative to F~: 0 or less but for rounding."""
        both = [one.optima for one in (self.rectified, self.odd, self.classes)]
        both += [one.optima for one in (self.balanced, self.balanced_classes)]
        return max(float(((one.elbo - one.functional) / one.functional.abs().clamp_min(1.0)).max()) for one in both)

    def document(self) -> dict[str, Any]:
        """Every number of the study, ready for JSON."""
        problem = self.rectified.case.problem
        return {
            "seed": self.seed,
            "prior_variance": problem.prior.outer_scale**2,
            "widths": [int(width) for width in self.rectified.widths.tolist()],
            "slopes_from_width": optima.FROM,
            "elbo_above_functional": self.highest_above,
            "untempered": [_untempered(one) for one in (self.rectified, self.odd, self.classes)],
            "gaps": [_gap(one) for one in self.gaps],
            "balanced": [_balanced(one) for one in (self.balanced, self.balanced_classes)],
            "confidence": {
                "classes": self.classes.case.outputs,
                "uniform": 1.0 / self.classes.case.outputs,
                "eta_1": _sureness(self.confidence.untempered),
                "balanced": _sureness(self.confidence.balanced),
                "limit": _sureness(self.confidence.limit),
            },
        }


def collapse(seed: int = 0, report: Callable[[str], None] = lambda line: None) -> Study:
    """Run the study; `seed` fixes everything random, and `report` is told what comes next."""
    key = Key(seed)
    made = cases.rectified(key), cases.odd(key), cases.classes(key)
    at_one = []
    for case in made:
        report(f"optima at eta = 1: {case.name}")
        at_one.append(untempered(case))
    rectified, odd, classes = at_one
    tempered = []
    for case in (rectified.case, classes.case):
        report(f"optima at eta = tau p/N: {case.name}")
        tempered.append(balanced(case))
    line, groups = tempered
    report("gaps")
    found = tuple(gaps(rectified.case, classes.case, at_one, tempered, key))
    return Study(seed, rectified, odd, classes, line, groups, found, confidence(classes, groups))


def _untempered(one: Untempered) -> dict[str, Any]:
    return {
        "case": one.case.name,
        "rows": one.case.problem.num_data,
        "theory_slope": one.law.exponent,
        "slope": one.slope,
        "slope_off": one.slope - one.law.exponent,
        "theory_constant": one.law.constant,
        "constant_ratio": float(one.ratio[-1]),
        "network_kl": one.network_kl.tolist(),
        "ratio_to_law": one.ratio.tolist(),
        **_at(one.optima),
    }


def _balanced(one: Balanced) -> dict[str, Any]:
    distance, moved = one.distance, one.moved
    return {
        "case": one.case.name,
        "rows": one.case.problem.num_data,
        "taus": [
            {
                "tau": tau,
                "kl_per_neuron": one.optima.kl[place].tolist(),
                "kl_per_neuron_limit": float(one.limit.kl[place]),
                "distance_to_limit": distance[place].tolist(),
                "slope": slope,
                "slope_off": slope + 1.0,
                "outputs_off_limit": moved[place].tolist(),
                "outputs_size": float(one.outputs[1][place].abs().max()),
            }
            for place, (tau, slope) in enumerate(zip(one.taus.tolist(), one.slopes, strict=True))
        ],
        "gradient": float(torch.cat([one.optima.gradient.flatten(), one.limit.gradient]).max()),
    }


def _gap(one: Gap) -> dict[str, Any]:
    return {
        "neurons": f"optimal, {one.case}" if one.case else "fixed",
        "name": one.name,
        "slope": one.slope,
        "slope_off": one.slope + 1.0,
        "largest_share_of_bound": one.of_bound,
        "gap": one.gap.tolist(),
        "bound": one.bound.tolist(),
    }


def _at(found: Optima) -> dict[str, Any]:
    return {"data_term": found.data_term.tolist(), "elbo": found.elbo.tolist(), "gradient": float(found.gradient.max())}


def _sureness(one: Sureness) -> dict[str, Any]:
    values: dict[str, Tensor] = {"confidence": one.confidence, "accuracy": one.accuracy, "nll": one.nll}
    return {name: value.tolist() for name, value in values.items()}
