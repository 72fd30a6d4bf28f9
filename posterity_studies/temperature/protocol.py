"""The protocol: settings, temperatures, the problem of each width, and the methods."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from posterity.errors import positive, positive_whole, unknown, whole
from posterity.inference import Method
from posterity.likelihoods import Categorical
from posterity.methods import SGHMC, MeanField, NaturalGradient
from posterity.methods.parts.gradients import WeightSampling
from posterity.methods.parts.minibatch_chains import RMSprop
from posterity.model import Joint, Tempering
from posterity.numerics.random import Key
from posterity.optim.optimizer import Adam
from posterity.optim.schedules import Cosine
from posterity.priors import Normal
from posterity_studies.grids import log_grid, merged
from posterity_studies.rows import first_weights
from posterity_studies.temperature.data import DATA_SETS, FOREIGN, IMAGES, USUAL_FOREIGN, Rows, read_rows
from posterity_studies.temperature.networks import ARCHITECTURES, Architecture

METHODS = ("bayes-by-backprop", "ivon", "sghmc")
PIXELS = ("raw", "standard")
DTYPES = {"float32": torch.float32, "float64": torch.float64}
LEAST_STEPS = 2000  # of a fit whose length is not given
SWEPT = ("widths", "etas", "taus", "seeds")  # what the numbers of a single fit do not depend on


@dataclass(frozen=True)
class Settings:
    """What is asked for; None, and an empty tuple, stand for what is usual with the network and the data set.

    A fit maximises E log p - eta KL(q || prior) under the prior N(0, `prior_variance`) of every weight; Bayes by
    Backprop with mirrored draws of the weights, shared by the rows of a batch, and Adam on a cosine. Every width has
    the temperatures `etas`, those of eta = tau p/N for the `taus`, and eta = 1; p is the number of training rows, N
    counts the neurons of `one-hidden` and the parameters of other networks. A seed has its own first weights and order
    of the rows; all its temperatures begin at the same weights. The noise of training is one for all fits.

    Predictions average over `draws` of the weights; with `neuron_draws`, at least over so many draws as make this many
    times neurons: outputs that are averages over neurons then have the same Monte Carlo noise whatever the width.

    `steps`, or else `epochs`, is the length of a fit; without either as many epochs as is usual, and 2,000 steps at
    least. `sghmc` samples one chain, half of its steps as warm-up.
    """

    data: str = "mnist"
    net: str = "one-hidden"
    widths: tuple[int, ...] = ()
    etas: tuple[float, ...] = ()
    taus: tuple[float, ...] = ()
    seeds: int = 3
    method: str = "bayes-by-backprop"
    epochs: int | None = None
    steps: int | None = None
    rows: int | None = None
    held_out: int | None = None
    ood: str | None = None
    pixels: str = "raw"
    batch_size: int | None = None
    step_size: float | None = None
    prior_variance: float = 0.2
    draws: int = 32
    neuron_draws: int | None = None
    seed: int = 0
    device: str = "cpu"
    dtype: str = "float32"

    def __post_init__(self) -> None:
        for kind, name, known in (
            ("data set", self.data, DATA_SETS),
            ("network", self.net, ARCHITECTURES),
            ("method", self.method, METHODS),
            ("pixels", self.pixels, PIXELS),
            ("number type", self.dtype, DTYPES),
            ("data set", FOREIGN[0] if self.ood is None else self.ood, FOREIGN),
        ):
            if name not in known:
                raise ValueError(unknown(kind, name, known))
        for name in ("epochs", "steps", "rows", "batch_size", "neuron_draws"):
            positive_whole(f"Settings.{name}", 1 if getattr(self, name) is None else getattr(self, name))
        for name in ("seeds", "draws"):
            positive_whole(f"Settings.{name}", getattr(self, name))
        whole("Settings.held_out", 0 if self.held_out is None else self.held_out)
        positive("Settings.step_size", 1.0 if self.step_size is None else self.step_size)
        positive("Settings.prior_variance", self.prior_variance)
        if self.steps is not None and self.epochs is not None:
            raise ValueError("Settings: give steps or epochs, not both.")
        for name in ("etas", "taus"):
            for value in getattr(self, name):
                positive(f"Settings.{name}", value)
        self._check_network()

    def _check_network(self) -> None:
        if self.neuron_draws is not None and self.architecture.units != "neurons":
            raise ValueError(f"The network '{self.net}' does not average over neurons. Leave neuron_draws out.")
        for width in self.widths:
            positive_whole("Settings.widths", width)
        usual = self.architecture.widths
        if not self.widths and not usual:
            raise ValueError(f"The network '{self.net}' needs widths, such as 50,200,800. Got none.")
        if self.widths and usual == (None,):
            raise ValueError(f"The network '{self.net}' has one size only. Leave widths out.")
        if not self.architecture.flat and self.data not in IMAGES:
            raise ValueError(
                f"The network '{self.net}' takes images, and '{self.data}' has none. Use net 'one-hidden'."
            )

    @property
    def architecture(self) -> Architecture:
        """The network."""
        return ARCHITECTURES[self.net]

    @property
    def all_widths(self) -> tuple[int | None, ...]:
        """Those given, or the usual ones."""
        return tuple(dict.fromkeys(self.widths)) or self.architecture.widths

    @property
    def all_taus(self) -> tuple[float, ...]:
        """Those given, or the usual ones where no temperature is given; ascending."""
        usual = self.architecture.taus if not self.etas else None
        return tuple(sorted(self.taus)) or (log_grid(*usual) if usual else ())

    def temperatures(self, num_data: int, units: int) -> tuple[float, ...]:
        """All etas of a network of so many units, ascending; those that differ by rounding once."""
        usual = self.architecture.etas if not self.taus else None
        given = self.etas or (log_grid(*usual) if usual else ())
        return merged((1.0, *given, *(tau * num_data / units for tau in self.all_taus)))

    def draws_of(self, units: int) -> int:
        """Draws for the predictions of a network of so many units."""
        return max(self.draws, math.ceil((self.neuron_draws or 0) / units))

    @property
    def foreign(self) -> str:
        """The rows from elsewhere."""
        return self.ood or USUAL_FOREIGN.get(self.data, "uniform")

    def config(self) -> dict[str, Any]:
        """The settings as JSON."""
        lists = {name: list(value) for name, value in asdict(self).items() if isinstance(value, tuple)}
        return {**asdict(self), **lists}

    def common(self) -> dict[str, Any]:
        """Those on which the numbers of a single fit depend."""
        return {name: value for name, value in self.config().items() if name not in SWEPT} | {"ood": self.foreign}

    def read(self) -> Rows:
        """The rows; BadData where a data set is absent, ValueError where it has fewer than are asked for."""
        return read_rows(
            self.data,
            foreign=self.foreign,
            rows=self.rows,
            held_out=self.held_out,
            seed=self.seed,
            flat=self.architecture.flat,
            standard=self.pixels == "standard",
            device=self.device,
            dtype=DTYPES[self.dtype],
        )

    def inference(self, num_data: int) -> Method:
        """The method of every fit on so many rows."""
        batch = min(self.batch_size or self.architecture.batch_size, num_data)
        usual = max(LEAST_STEPS, self.architecture.epochs * (num_data // batch))
        steps = self.steps or (usual if self.epochs is None else self.epochs * (num_data // batch))
        scales = self.architecture.initial_scales
        if self.method == "ivon":
            return NaturalGradient(
                steps, batch, self.step_size or 0.1, Cosine(), WeightSampling(antithetic=True), radius=0.1,
                initial_scales=scales,
            )  # fmt: skip
        if self.method == "sghmc":
            warmup = max(1, steps // 2)
            thin = max(1, (steps - warmup) // self.draws)
            return SGHMC(self.draws, warmup, 1, self.step_size, batch, thin, preconditioner=RMSprop())
        adam = Adam(self.step_size or self.architecture.step_size)
        return MeanField(steps, batch, adam, Cosine(), WeightSampling(antithetic=True), initial_scales=scales)


@dataclass(frozen=True, eq=False)
class Problem:
    """A width: its joint without a temperature, N, and the rows."""

    width: int | None
    joint: Joint
    units: int
    rows: Rows

    @property
    def num_data(self) -> int:
        """p."""
        return len(self.rows.train)

    def tau(self, eta: float) -> float:
        """The tau of eta = tau p/N."""
        return eta * self.units / self.num_data

    def tempered(self, etas: Sequence[float]) -> Joint:
        """The joint with one eta, or with a member for each."""
        joint = self.joint
        eta = etas[0] if len(etas) == 1 else torch.tensor(etas, dtype=torch.float64, device=joint.device)
        return Joint(joint.network, joint.likelihood, joint.prior, joint.num_data, Tempering.tempered(eta))

    def start(self, seeds: Sequence[int], key: Key) -> Tensor:
        """First weights, (P,) for one seed or a row for each."""
        return first_weights(self.joint.fresh, seeds, key)


def problem(width: int | None, rows: Rows, settings: Settings) -> Problem:
    """The problem of a width."""
    architecture = settings.architecture
    with torch.random.fork_rng(devices=[]):  # weights that nobody sees: every fit has fresh ones
        torch.default_generator.manual_seed(0)
        module = architecture.make(rows.shape, rows.classes, width)
    module = module.to(settings.device, DTYPES[settings.dtype])
    prior = Normal(math.sqrt(settings.prior_variance))
    joint = Joint(module, Categorical(), prior, len(rows.train))
    return Problem(width, joint, architecture.count(joint.network), rows)
