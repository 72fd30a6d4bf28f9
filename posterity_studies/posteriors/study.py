"""NUTS on posteriors with published reference draws or moments: errors of moments, and diagnostics of chains."""

import math
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from posterity.cli.frame.output import table
from posterity.datasets.posteriordb import POSTERIORS, german_credit_reference, posteriordb_draws
from posterity.diagnostics import bulk_ess, mcse_mean, mcse_sd, rhat, tail_ess
from posterity.inference.acceleration import Acceleration
from posterity.inference.callbacks import tracked
from posterity.inference.infer import infer
from posterity.numerics.random import Key
from posterity.posteriors.samples import Samples
from posterity_studies.frame import remark, title
from posterity_studies.options import Report, Settings, silent
from posterity_studies.posteriors.densities import GERMAN_CREDIT, JOINTS, Model, density, flat, joint

CHAINS, WARMUP, DRAWS = 16, 300, 500
FORMS = (*((name, "Density") for name in POSTERIORS), *((name, "Joint") for name in JOINTS))
"""The posteriors, each with its form."""

# Limits that a correct sampler with long enough chains keeps.
MEAN_ERRORS, SD_ERRORS, RHAT, ESS, DIVERGENT = 4.0, 5.0, 1.01, 1000.0, 0.001


@dataclass(frozen=True)
class Reference:
    """Moments (K,) of the parameters of a posterior in the order of `names`, with their standard errors."""

    names: tuple[str, ...]
    mean: Tensor
    mean_error: Tensor
    sd: Tensor
    sd_error: Tensor


@dataclass(frozen=True)
class Comparison:
    """The result for a posterior: each number is for its worst parameter.

    `mean_errors` and `sd_errors` are distances from the reference in combined standard errors; `ess` is the smaller
    one of bulk and tail; `divergent` is the fraction of transitions.
    """

    posterior: str
    form: str
    parameters: int
    mean_errors: float
    sd_errors: float
    rhat: float
    ess: float
    divergent: float
    leapfrogs: float
    seconds: float

    @property
    def good(self) -> bool:
        """Whether all numbers keep their limits."""
        near = self.mean_errors <= MEAN_ERRORS and self.sd_errors <= SD_ERRORS
        return near and self.rhat <= RHAT and self.ess >= ESS and self.divergent <= DIVERGENT


@dataclass(frozen=True)
class Study:
    """All comparisons, and the numbers of chains and draws."""

    seed: int
    chains: int
    warmup: int
    draws: int
    comparisons: tuple[Comparison, ...]

    def document(self) -> dict[str, Any]:
        """Return all numbers of the study as JSON."""
        rows = [{**asdict(comparison), "good": comparison.good} for comparison in self.comparisons]
        limits = {"mean_errors": MEAN_ERRORS, "sd_errors": SD_ERRORS, "rhat": RHAT, "ess": ESS, "divergent": DIVERGENT}
        settings = {"seed": self.seed, "chains": self.chains, "warmup": self.warmup, "draws": self.draws}
        return {**settings, "limits": limits, "posteriors": rows}


def reference(name: str) -> Reference:
    """Return the reference of a posterior, from reference draws or published moments."""
    if name == GERMAN_CREDIT:
        mean, error, sd = german_credit_reference()
        # For near-normal draws the sd has the error of the mean over sqrt 2.
        return Reference(tuple(f"weights[{i + 1}]" for i in range(len(mean))), mean, error, sd, error / math.sqrt(2))
    draws = flat(posteriordb_draws(name))
    table = torch.stack(list(draws.values()), -1)  # (10, 1000, K)
    return Reference(tuple(draws), *_moments(table))


def _moments(table: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return means, their errors, standard deviations and their errors, (K,) each, of draws (C, D, K)."""
    rows = table.flatten(0, 1)
    return rows.mean(0), mcse_mean(table), rows.std(0), mcse_sd(table)


def stated(name: str, form: str) -> Model:
    """Return the posterior in the form "Density" or "Joint"."""
    return density(name) if form == "Density" else joint(name)


def compared(
    name: str, form: str, seed: int, chains: int, warmup: int, draws: int, accelerate: Acceleration = "auto"
) -> Comparison:
    """Sample the posterior by NUTS, and compare it with its reference."""
    model, known = stated(name, form), reference(name)
    start = model.starts(chains, Key(seed).fold("start"))
    began = time.perf_counter()
    q, _ = infer(
        model.sampler(draws, warmup, chains),
        model.problem,
        model.rows,
        start=start,
        seed=seed,
        accelerate=accelerate,
        progress=False,
    )
    seconds = time.perf_counter() - began
    assert isinstance(q, Samples)
    result = flat(model.reported(q.values()))
    table = torch.stack([result[parameter] for parameter in known.names], -1)  # (C, D, K)
    mean, mean_error, sd, sd_error = _moments(table)
    return Comparison(
        posterior=name,
        form=form,
        parameters=len(known.names),
        mean_errors=_worst(mean - known.mean, mean_error, known.mean_error),
        sd_errors=_worst(sd - known.sd, sd_error, known.sd_error),
        rhat=float(rhat(table).max()),
        ess=float(torch.minimum(bulk_ess(table), tail_ess(table)).min()),
        divergent=float(q.statistics["divergent"].double().mean()),
        leapfrogs=float(q.statistics["leapfrogs"].double().mean()),
        seconds=seconds,
    )


def _worst(distance: Tensor, first: Tensor, other: Tensor) -> float:
    return float((distance.abs() / (first.square() + other.square()).sqrt()).max())


def run(settings: Settings, folder: Path | None = None, report: Report = silent) -> Study:
    """Run the study; the seed determines all random numbers."""
    rows = []
    for name, form in tracked(FORMS, "posteriors"):
        rows.append(compared(name, form, settings.seed, CHAINS, WARMUP, DRAWS))
        report(f"{name} as {form}: {rows[-1].seconds:.0f} s")
    return Study(settings.seed, CHAINS, WARMUP, DRAWS, tuple(rows))


LONGEST = 25  # letters of a name in the table


def show(out: Any, study: Study) -> None:
    """Print the tables."""
    document = study.document()
    limits = document["limits"]
    settings = f"{document['chains']} chains of {document['warmup']} + {document['draws']} transitions"
    title(out, f"NUTS, {settings}")
    rows = table("posterior", "form", "mean", "sd", "R-hat", "ESS", "div.%", "s")
    for row in document["posteriors"]:
        rows.add_row(
            name if len(name := row["posterior"]) <= LONGEST else name.split("-")[-1],
            row["form"],
            f"{row['mean_errors']:.1f}",
            f"{row['sd_errors']:.1f}",
            f"{row['rhat']:.4f}",
            f"{row['ess']:,.0f}",
            f"{100 * row['divergent']:.2f}",
            f"{row['seconds']:.0f}",
        )
    out.print(rows)
    good = sum(row["good"] for row in document["posteriors"])
    remark(
        out,
        f"{good} of {len(document['posteriors'])} within: mean {limits['mean_errors']:g} and sd "
        f"{limits['sd_errors']:g} combined standard errors from the reference, R-hat {limits['rhat']:g}, "
        f"ESS {limits['ess']:,.0f}, divergent {100 * limits['divergent']:g} %. The worst parameter of each counts.",
    )
