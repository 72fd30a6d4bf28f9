"""The rows on CIFAR-10: fits that build on one another, and what each row takes of them, with its cost in epochs.

The budget. One H200 trains about 50,000 images a second, all members together (measured: six members, 70 epochs, 426 s
in float32), so that an epoch of one member over 40,960 images takes 0.8 s. Fits are shared: rows of one member take the
first of an ensemble, and later fits start from earlier ones. Seconds are expected ones; those of a row count all fits
that it builds on, with the share of members that it uses.

| fit | starts from | members or chains x epochs | seconds |
|---|---|---|---|
| map | | 6 x 40 | 200 |
| large-ensemble | | 12 x 40 | 400 |
| dropout | | 1 x 40 | 50 |
| laplace-last-layer, laplace-kronecker | map, first member | one pass; 12 passes | 5; 30 |
| swag | map | 6 x 20 | 100 |
| mean-field | map | 6 x 60 | 300 |
| natural-gradient | map, first member | 1 x 40 | 100 |
| sgld | mean-field, a draw of each member | 6 x 40 | 200 |
| sghmc | mean-field, a draw of each member | 6 x 40 | 200 |
| sghmc-cycles | map | 6 x 40 | 200 |

That is 1,800 s, and predictions of 5,000 + 9,040 images by 60 networks take some 10 s a row: five calls of at most ten
minutes, in two sessions. The longest row, sghmc-mixture, takes 200 + 300 + 200 s: 11.7 minutes.

Why chains start at draws of mean field: by gradient noise alone a step of size e heats a direction of curvature h by
e h / 2 times the rows over the batch, so that a chain at a temperature within 10 % of 1 forgets the directions which
the prior alone decides (precision 5) in no less than some 100 epochs, and one that starts at a mode is too cold all
the while. In draws of a fitted mean field these directions have the width of the posterior from the beginning, and
stiff ones, which mean field gets wrong, settle in an epoch. Its own configurational temperature is 1 at the optimum
(Stein's identity), so that a temperature of 1 soon after such a start is necessary, not sufficient.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor

from posterity.curvature import Kronecker
from posterity.inference import Method
from posterity.methods import MAP, SGHMC, SGLD, SWAG, Ensemble, Laplace, MCDropout, MeanField, NaturalGradient
from posterity.methods.parts.subset import LastLayer
from posterity.numerics.random import Key
from posterity.optim.optimizer import SGD, Adam
from posterity.optim.schedules import Cosine, Cycles
from posterity.posteriors import Mixture, Posterior
from posterity.posteriors.samples import Samples
from posterity.priors.fan import FanIn
from posterity_studies.shared_fits import Fit, first, whole

MEMBERS, MANY = 6, 12
BATCH = 256
EPOCHS = {
    "map": 40,
    "large-ensemble": 40,
    "dropout": 40,
    "swag": 20,
    "mean-field": 60,
    "natural-gradient": 40,
    "sgld": 40,
    "sghmc": 40,
    "sghmc-cycles": 40,
}
"""Passes over the rows of each member of a fit."""
SGHMC_RATE, SGLD_RATE = 0.0123, 0.041
"""Learning rates on the mean loss that the step sizes of chains amount to: 3e-7 and 1e-6 on its sum over 40,960 images.

These are those of the published runs of the reference's authors, which had batches of 80.
"""
DRAWS = 20  # of each chain, from its second half


@dataclass(frozen=True)
class Length:
    """The length of fits on so many rows, with a factor on all numbers of epochs."""

    rows: int
    factor: float

    @property
    def batch(self) -> int:
        """Rows in a step."""
        return min(BATCH, self.rows)

    def of(self, fit: str) -> int:
        """Steps of a fit."""
        return max(2, round(EPOCHS[fit] * self.factor * self.rows / self.batch))


def _draws(posterior: Posterior) -> Tensor:
    """A draw of the weights of each member, (M, P)."""
    assert isinstance(posterior, Mixture)
    return torch.cat([part.sample(1, Key(0).fold(index)) for index, part in enumerate(posterior.posteriors)])


def _first_chain(posterior: Posterior) -> Posterior:
    assert isinstance(posterior, Samples)
    return posterior.chain(0)


def _mode(length: Length, rate: float) -> Method:
    return Ensemble(MAP(length.of("map"), length.batch, Adam(0.003), Cosine(0.05)), MEMBERS)


def _many(length: Length, rate: float) -> Method:
    return Ensemble(MAP(length.of("large-ensemble"), length.batch, Adam(0.003), Cosine(0.05)), MANY)


def _dropout(length: Length, rate: float) -> Method:
    return MCDropout(length.of("dropout"), length.batch, Adam(0.003), Cosine(0.05))


def _swag(length: Length, rate: float) -> Method:
    steps = length.of("swag")
    every = max(1, steps // 40)
    fit = MAP(steps, length.batch, SGD(0.02))
    return Ensemble(SWAG(fit, every=every, rank=min(20, steps // every)), MEMBERS)


def _mean_field(length: Length, rate: float) -> Method:
    steps, narrow = length.of("mean-field"), FanIn(gain=0.1)
    return Ensemble(
        MeanField(steps, length.batch, Adam(0.002), Cosine(0.05), initial_scales=narrow, scale_step=10.0), MEMBERS
    )


def _natural_gradient(length: Length, rate: float) -> Method:
    return NaturalGradient(length.of("natural-gradient"), length.batch)


def _sgld(length: Length, rate: float) -> Method:
    warmup, thin, draws = _counts(length.of("sgld"))
    return SGLD(draws, warmup, MEMBERS, rate * SGLD_RATE / length.rows, length.batch, thin)


def _sghmc(length: Length, rate: float) -> Method:
    warmup, thin, draws = _counts(length.of("sghmc"))
    return SGHMC(draws, warmup, MEMBERS, (rate * SGHMC_RATE / length.rows) ** 0.5, length.batch, thin)


def _cycles(length: Length, rate: float) -> Method:
    """Four cycles; the last fifth of each samples."""
    cycle = max(2, length.of("sghmc-cycles") // 4)
    schedule = Cycles(cycle, explore=0.8)
    kept = cycle - schedule.first
    draws = min(DRAWS // 4, kept)
    size = (5.0 * rate * SGHMC_RATE / length.rows) ** 0.5
    return SGHMC(4 * draws, 0, MEMBERS, size, length.batch, kept // draws, schedule)


def _counts(steps: int) -> tuple[int, int, int]:
    """Warm-up, steps between draws, and draws of a chain of so many steps."""
    later = max(1, steps // 2)
    draws = min(DRAWS, later)
    return steps - (later // draws) * draws, later // draws, draws


FITS: Mapping[str, Fit] = MappingProxyType(
    {
        "map": Fit(_mode, members=MEMBERS),
        "large-ensemble": Fit(_many, members=MANY),
        "dropout": Fit(_dropout, dropping=True),
        "laplace-last-layer": Fit(lambda *_: Laplace(subset=LastLayer()), "map", first),
        "laplace-kronecker": Fit(lambda *_: Laplace(structure=Kronecker()), "map", first),
        "swag": Fit(_swag, "map", members=MEMBERS),
        "mean-field": Fit(_mean_field, "map", members=MEMBERS),
        "natural-gradient": Fit(_natural_gradient, "map", first),
        "sgld": Fit(_sgld, "mean-field", _draws, MEMBERS, samples=True),
        "sghmc": Fit(_sghmc, "mean-field", _draws, MEMBERS, samples=True),
        "sghmc-cycles": Fit(_cycles, "map", members=MEMBERS, samples=True),
    }
)
"""The fits by name."""


@dataclass(frozen=True)
class Row:
    """A row of the table: its label, its fit, and the part of the fit's posterior that it takes."""

    label: str
    fit: str
    family: str
    part: Callable[[Posterior], Posterior] = whole
    members: int = MEMBERS
    draws: int = 60


ROWS: Mapping[str, Row] = MappingProxyType(
    {
        "map": Row("MAP", "map", "points", first, 1),
        "ensemble": Row(f"ensemble of {MEMBERS}", "map", "points"),
        "large-ensemble": Row(f"ensemble of {MANY}", "large-ensemble", "points", members=MANY),
        "dropout": Row("MC dropout", "dropout", "points", members=1),
        "laplace-last-layer": Row("Laplace, last layer", "laplace-last-layer", "Laplace", members=1),
        "laplace-kronecker": Row("Laplace, Kronecker", "laplace-kronecker", "Laplace", members=1),
        "mean-field": Row("MeanField", "mean-field", "variational", first, 1),
        "mean-field-ensemble": Row(f"MeanField, {MEMBERS} members", "mean-field", "variational"),
        "natural-gradient": Row("NaturalGradient", "natural-gradient", "variational", members=1),
        "swag": Row("SWAG", "swag", "SWAG", first, 1),
        "multi-swag": Row(f"multi-SWAG of {MEMBERS}", "swag", "SWAG"),
        "sgld": Row(f"SGLD, {MEMBERS} chains", "sgld", "samplers"),
        "sghmc": Row("SGHMC, one chain", "sghmc", "samplers", _first_chain, 1),
        "sghmc-mixture": Row(f"SGHMC, {MEMBERS} chains", "sghmc", "samplers"),
        "sghmc-cycles": Row(f"cyclical SGHMC, {MEMBERS} chains", "sghmc-cycles", "samplers"),
    }
)
"""The rows by word."""
