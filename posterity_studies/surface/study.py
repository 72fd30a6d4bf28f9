"""The study: its run, its tables and its numbers as JSON."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from posterity.cli.frame.output import table
from posterity.numerics.random import Key
from posterity.report.numbers import number
from posterity_studies.frame import print_claims, remark, title
from posterity_studies.options import Report, Settings, silent
from posterity_studies.surface import problem
from posterity_studies.surface.fits import Approximation, approximations
from posterity_studies.surface.problem import Surface, grid, surfaces

POINTS, BEYOND = 121, 3.0  # number and range of the inputs at which functions are computed

ROUNDING = 1e-9


@dataclass(frozen=True, eq=False)
class Study:
    """The surfaces by model, the methods on the network's surface, and functions of the network at inputs `x` (N,).

    `functions` (2, N) belong to the modes, and `mean` and `scale` (N,) the moments of f under the exact posterior.
    """

    seed: int
    surfaces: dict[str, Surface]
    methods: dict[str, Approximation]
    x: Tensor
    functions: Tensor
    mean: Tensor
    scale: Tensor

    @property
    def barrier(self) -> float:
        """The potential of the network at the origin above its minimum, in nats."""
        middle = problem.SIDE // 2
        return float(self.surfaces["network"].potential[middle, middle])

    def claims(self) -> dict[str, bool]:
        """Claims about convex and non-convex potentials, and whether they hold here."""
        line, network = self.surfaces["line"], self.surfaces["network"]
        middle, same = problem.SIDE // 2, float((self.functions[0] - self.functions[1]).abs().max())
        one = [self.methods[name] for name in ("Laplace", "MeanField", "FullRank")]
        return {
            "the potential of the line is convex": line.convex_share == 1.0,
            "every descent on it ends at one place": len(line.modes) == 1,
            "the potential of the network is not convex": network.convex_share < 1.0,
            "it has a saddle at the origin": float(network.curvature[middle, middle]) < 0.0 < self.barrier,
            "descents on it end at two modes": len(network.modes) == 2,
            "both modes are one function": same < 1e-3,
            "no chain goes from one mode to the other": self.methods["NUTS"].crossed == 0,
            "one Gaussian has most of its mass on one mode": all(own.positive > 0.9 for own in one),
            "and a KL(q || p) of at least log 2, but for what leaks over": all(
                _at_least(own) <= (own.divergence or 0.0) + ROUNDING for own in one
            ),
        }

    def document(self) -> dict[str, Any]:
        """Return all numbers of the study as JSON."""
        return {
            "seed": self.seed,
            "rows": problem.ROWS,
            "noise": problem.NOISE,
            "prior_scale": problem.PRIOR_SCALE,
            "barrier": self.barrier,
            "surfaces": [
                {
                    "model": name,
                    "modes": own.modes.tolist(),
                    "convex_share_of_the_grid": own.convex_share,
                    "least_curvature": float(own.curvature.min()),
                }
                for name, own in self.surfaces.items()
            ],
            "methods": [
                {
                    "method": name,
                    "probability_of_positive_b": own.positive,
                    "divergence": own.divergence,
                    "chains_in_both_modes": own.crossed,
                }
                for name, own in self.methods.items()
            ],
            "claims": self.claims(),
        }


def _at_least(own: Approximation) -> float:
    """Return the least KL(q || p) for a share of q on one of two equally likely halves: log 2 minus binary entropy."""
    share = own.positive
    return math.log(2.0) + sum(part * math.log(part) for part in (share, 1.0 - share) if part > 0.0)


PARTS = (0.3, 2.6, 0.6)


def run(settings: Settings, folder: Path | None = None, report: Report = silent) -> Study:
    """Run the study; the seed determines all random numbers."""
    report("potentials of a line and of a network")
    made = surfaces(Key(settings.seed).fold("rows"))
    report("methods on two modes")
    methods = approximations(made["network"], settings.seed)
    x = torch.linspace(-BEYOND, BEYOND, POINTS, dtype=torch.float64, device="cpu")
    joint, masses = made["network"].joint, made["network"].masses.flatten()
    with torch.no_grad():
        functions = joint.outputs(made["network"].modes, x.unsqueeze(1)).squeeze(-1)
        values = joint.outputs(grid(), x.unsqueeze(1)).squeeze(-1)  # (G, N)
    mean = masses @ values
    return Study(settings.seed, made, methods, x, functions, mean, (masses @ (values - mean).square()).sqrt())


def show(out: Any, study: Study) -> None:
    """Print the tables."""
    document = study.document()
    title(out, f"Potentials V(w) of two weights, {document['rows']} rows")
    rows = table("model", "modes (b, a)", "convex on", "least curvature")
    for row in document["surfaces"]:
        modes = ", ".join(f"({first:.2f}, {second:.2f})" for first, second in row["modes"])
        share = f"{100 * row['convex_share_of_the_grid']:.0f} % of the grid"
        rows.add_row(row["model"], modes, share, number(row["least_curvature"], 3))
    out.print(rows)
    title(out, f"The network's posterior: modes {document['barrier']:.1f} nats below the saddle")
    rows = table("method", "p(b > 0)", "KL(q || p)")
    for row in document["methods"]:
        divergence = "" if row["divergence"] is None else f"{round(row['divergence'], 4) + 0.0:.4f}"
        rows.add_row(row["method"], f"{row['probability_of_positive_b']:.4f}", divergence)
    out.print(rows)
    remark(out, "KL in nats, on a grid of the weights. The chains start on both sides.")
    print_claims(out, document["claims"])
