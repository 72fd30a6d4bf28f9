"""The study: its run, its tables and its numbers as JSON."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from posterity.cli.frame.output import table
from posterity.numerics.random import Key
from posterity_studies.collapse import optima
from posterity_studies.collapse.flow import TAU, Particles, particles
from posterity_studies.collapse.functions import LENGTH, WIDTH, Functions, functions
from posterity_studies.collapse.optima import (
    Balanced,
    Confidence,
    Gap,
    Sureness,
    Untempered,
    balanced,
    confidence,
    gaps,
    untempered,
)
from posterity_studies.frame import print_claims, remark, title
from posterity_studies.options import Report, Settings, silent


@dataclass(frozen=True, eq=False)
class Study:
    """The results: optima at eta = 1 of three cases, and at the balanced temperature of two of them."""

    seed: int
    rectified: Untempered
    odd: Untempered
    classes: Untempered
    balanced: Balanced
    balanced_classes: Balanced
    gaps: tuple[Gap, ...]
    confidence: Confidence
    particles: Particles
    functions: Functions

    @property
    def highest_above(self) -> float:
        """The largest ELBO - F~, relative to F~: at most 0 up to rounding."""
        both = [case.optima for case in (self.rectified, self.odd, self.classes)]
        both += [case.optima for case in (self.balanced, self.balanced_classes)]
        return max(float(((case.elbo - case.functional) / case.functional.abs().clamp_min(1.0)).max()) for case in both)

    def document(self) -> dict[str, Any]:
        """Return all numbers of the study as JSON."""
        problem = self.rectified.case.problem
        return {
            "seed": self.seed,
            "prior_variance": problem.prior.outer_scale**2,
            "widths": [int(width) for width in self.rectified.widths.tolist()],
            "slopes_from_width": optima.FROM,
            "elbo_above_functional": self.highest_above,
            "untempered": [_untempered(case) for case in (self.rectified, self.odd, self.classes)],
            "gaps": [_gap(gap) for gap in self.gaps],
            "balanced": [_balanced(case) for case in (self.balanced, self.balanced_classes)],
            "confidence": {
                "classes": self.classes.case.outputs,
                "uniform": 1.0 / self.classes.case.outputs,
                "eta_1": _sureness(self.confidence.untempered),
                "balanced": _sureness(self.confidence.balanced),
                "limit": _sureness(self.confidence.limit),
            },
            "flow": _flow(self.particles),
            "functions": {
                "width": WIDTH,
                "length_of_the_process": LENGTH,
                "matched_prior": asdict(self.functions.prior),
                "distances": self.functions.distances,
                "narrow_error_in_standard_errors": self.functions.narrow_error,
                "claims": self.functions.claims(),
            },
        }


PARTS = (0.2, 1.0, 1.9, 0.4, 3.0, 0.5, 1.0, 3.5)


def run(settings: Settings, folder: Path | None = None, report: Report = silent) -> Study:
    """Run the study; the seed determines all random numbers."""
    key = Key(settings.seed)
    made = optima.rectified(key), optima.odd(key), optima.classes(key)
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
    result = tuple(gaps(rectified.case, classes.case, at_one, tempered, key))
    sure = confidence(classes, groups)
    report("the gradient flow of particles")
    moving = particles(key.fold("flow"))
    drawn = functions(key.fold("functions"))
    return Study(settings.seed, rectified, odd, classes, line, groups, result, sure, moving, drawn)


def _untempered(untempered: Untempered) -> dict[str, Any]:
    return {
        "case": untempered.case.name,
        "rows": untempered.case.problem.num_data,
        "theory_slope": untempered.law.exponent,
        "slope": untempered.slope,
        "slope_off": untempered.slope - untempered.law.exponent,
        "theory_constant": untempered.law.constant,
        "constant_ratio": float(untempered.ratio[-1]),
        "network_kl": untempered.network_kl.tolist(),
        "ratio_to_law": untempered.ratio.tolist(),
        "data_term": untempered.optima.data_term.tolist(),
        "elbo": untempered.optima.elbo.tolist(),
        "gradient": float(untempered.optima.gradient.max()),
    }


def _balanced(balanced: Balanced) -> dict[str, Any]:
    distance, moved = balanced.distance, balanced.moved
    return {
        "case": balanced.case.name,
        "rows": balanced.case.problem.num_data,
        "taus": [
            {
                "tau": tau,
                "kl_per_neuron": balanced.optima.kl[index].tolist(),
                "kl_per_neuron_limit": float(balanced.limit.kl[index]),
                "distance_to_limit": distance[index].tolist(),
                "slope": slope,
                "slope_off": slope + 1.0,
                "outputs_off_limit": moved[index].tolist(),
                "outputs_size": float(balanced.outputs[1][index].abs().max()),
            }
            for index, (tau, slope) in enumerate(zip(balanced.taus.tolist(), balanced.slopes, strict=True))
        ],
        "gradient": float(torch.cat([balanced.optima.gradient.flatten(), balanced.limit.gradient]).max()),
    }


def _gap(gap: Gap) -> dict[str, Any]:
    return {
        "neurons": f"optimal, {gap.case}" if gap.case else "fixed",
        "name": gap.name,
        "slope": gap.slope,
        "slope_off": gap.slope + 1.0,
        "largest_share_of_bound": gap.of_bound,
        "gap": gap.gap.tolist(),
        "bound": gap.bound.tolist(),
    }


def _sureness(sureness: Sureness) -> dict[str, Any]:
    return {name: getattr(sureness, name).tolist() for name in ("confidence", "accuracy", "nll")}


def _flow(particles: Particles) -> dict[str, Any]:
    return {
        "tau": TAU,
        "optimum": particles.best.theta[0].tolist(),
        "functional_at_the_optimum": particles.highest,
        "largest_first_variation_elsewhere_minus_there": particles.certificate,
        "flows": [
            {
                "particles": count,
                "steps": flow.steps,
                "times": flow.times.tolist(),
                "functional": flow.values.tolist(),
                "largest_distance_from_the_optimum": particles.distance(count),
            }
            for count, flow in particles.flows.items()
        ],
        "claims": particles.claims(),
    }


def show(out: Any, study: Study) -> None:
    """Print the tables."""
    document = study.document()
    title(out, "eta = 1: KL(q* || P0) of the network")
    cases = document["untempered"]
    rows = table("width", *(heading for case in cases for heading in (case["case"], "/ theory")))
    for index, width in enumerate(document["widths"]):
        pairs = ((f"{case['network_kl'][index]:.3e}", f"{case['ratio_to_law'][index]:.4f}") for case in cases)
        rows.add_row(f"{width:,}", *(text for pair in pairs for text in pair))
    out.print(rows)
    rows = table(f"from width {document['slopes_from_width']}", "slope", "theory", "off", "constant", "ratio")
    for case in cases:
        rows.add_row(
            case["case"],
            f"{case['slope']:.5f}",
            str(case["theory_slope"]),
            f"{case['slope_off']:+.1e}",
            f"{case['theory_constant']:.5g}",
            f"{case['constant_ratio']:.6f}",
        )
    out.print(rows)
    title(out, "Slopes of F~ - ELBO, by theory -1")
    rows = table("neurons", "slope", "off", "of its bound")
    for row in document["gaps"]:
        name = f"{row['neurons']}: {row['name']}"
        rows.add_row(name, f"{row['slope']:.5f}", f"{row['slope_off']:+.1e}", f"{row['largest_share_of_bound']:.4f}")
    out.print(rows)
    remark(out, f"ELBO above F~ anywhere, at most: {document['elbo_above_functional']:.1e} of F~")
    out.print()
    title(out, "eta = tau p/N: KL of a neuron, and how neurons go to their limit")
    widths, shown = document["widths"], (0, -1)
    rows = table("case", "tau", *(f"N = {widths[index]:,}" for index in shown), "limit", "slope", "f moves")
    for case in document["balanced"]:
        for row in case["taus"]:
            numbers = (*(row["kl_per_neuron"][index] for index in shown), row["kl_per_neuron_limit"])
            moved = row["outputs_off_limit"][-1]
            texts = (f"{number:.5g}" for number in numbers)
            rows.add_row(case["case"], f"{row['tau']:g}", *texts, f"{row['slope']:.4f}", f"{moved:.0e}")
    out.print(rows)
    remark(
        out,
        "Slope: of the distance of the neurons' parameters from their limit, by theory -1. f moves: the largest "
        "difference of E f from its limit, at the widest.",
    )
    out.print()
    title(out, f"Confidence of the averaged prediction, {document['confidence']['classes']} classes")
    sureness, taus = document["confidence"], [row["tau"] for row in document["balanced"][-1]["taus"]]
    rows = table("width", "eta = 1", *(f"tau = {tau:g}" for tau in taus))
    for index, width in enumerate(document["widths"]):
        numbers = (sureness["eta_1"]["confidence"][index], *(row[index] for row in sureness["balanced"]["confidence"]))
        rows.add_row(f"{width:,}", *(f"{number:.4f}" for number in numbers))
    rows.add_row(
        "limit", f"{sureness['uniform']:.4f}", *(f"{number:.4f}" for number in sureness["limit"]["confidence"])
    )
    out.print(rows)
    title(out, "The gradient flow of particles for F")
    rows = table("particles", "F at the start", "at the end", "optimum", "off by", "particles off by")
    for row in document["flow"]["flows"]:
        highest, values = document["flow"]["functional_at_the_optimum"], row["functional"]
        rows.add_row(
            str(row["particles"]),
            *(f"{number:.6f}" for number in (values[0], values[-1], highest)),
            f"{highest - values[-1]:.0e}",
            f"{row['largest_distance_from_the_optimum']:.0e}",
        )
    out.print(rows)
    print_claims(out, document["flow"]["claims"])
    scales = document["functions"]["matched_prior"]
    title(out, "Priors over functions: distance from a Gaussian process")
    rows = table("prior", "outer scale", "inner scale", "bias scale", "distance")
    for name, distance in document["functions"]["distances"].items():
        own = [f"{scales[f'{part}_scale']:.3g}" for part in ("outer", "inner", "bias")]
        rows.add_row(name, *(own if "matched" in name else ["1"] * 3 if "1" in name else [""] * 3), f"{distance:.3f}")
    out.print(rows)
    print_claims(out, document["functions"]["claims"])
