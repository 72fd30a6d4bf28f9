"""The options of `study temperature`."""

import math
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from posterity.errors import positive_whole, whole
from posterity.options import as_json, identity, option
from posterity_studies import options as o
from posterity_studies.grids import log_grid, merged

if TYPE_CHECKING:
    from posterity.inference import Method
    from posterity_studies.temperature.problem import Architecture

IMAGES = ("mnist", "fashion-mnist", "cifar-10")
DATA_SETS = (*IMAGES, "two-moons", "blobs")
FOREIGN = (*IMAGES, "kmnist", "uniform")
USUAL_FOREIGN = {"mnist": "fashion-mnist", "fashion-mnist": "mnist", "cifar-10": "fashion-mnist"}
NETWORKS = ("one-hidden", "mlp", "lenet", "resnet-20")
METHODS = ("bayes-by-backprop", "ivon", "sghmc")
PIXELS = ("raw", "standard")
DTYPES = ("float32", "float64")
LEAST_STEPS = 2000  # least steps of a fit without a given length


@dataclass(frozen=True)
class Size:
    """The default size of the study: for about two minutes, or with --paper in full.

    `widths` are (None,) where the network has no width. `etas` and `taus` are low, high and count of a grid. `rows` is
    the largest number of training rows, None for all. `steps` is the length of a fit; without it `epochs` is, and
    2,000 steps at least.
    """

    widths: tuple[int | None, ...]
    batch_size: int
    seeds: int
    etas: tuple[float, float, int] | None = None
    taus: tuple[float, float, int] | None = None
    rows: int | None = None
    steps: int | None = None
    epochs: int = 30
    draws: int = 32
    neuron_draws: int | None = None


@dataclass(frozen=True)
class Settings:
    """Settings of the study; None and () are replaced by defaults for the network and the data set.

    A fit maximises E log p - eta KL(q || prior) under the prior N(0, `prior_variance`) of every weight; Bayes by
    Backprop with mirrored draws of the weights, shared by the rows of a batch, and Adam on a cosine. Every width has
    the temperatures `etas`, those of eta = tau p/N for the `taus`, and eta = 1; p is the number of training rows, N
    counts the neurons of `one-hidden` and the parameters of other networks. A seed has its own first weights and order
    of the rows; all its temperatures begin at the same weights. The noise of training is one for all fits.

    With `cold` temperatures T instead, SGHMC samples (likelihood x prior)^(1/T), a chain for each T and seed; those of
    a seed begin at the mode that MAP finds, since at w = 0 the density of a deep network has a mode of its own.

    Predictions average over `draws` of the weights; with `neuron_draws`, at least over so many draws as make this many
    times neurons: outputs that are averages over neurons then have the same Monte Carlo noise whatever the width.

    `steps`, or else `epochs`, is the length of a fit; without either it is that of the `size`. `sghmc` samples one
    chain, half of its steps as warm-up.
    """

    data: str = o.choice("mnist", DATA_SETS, "Data set:", o.DATA)
    net: str = o.choice("one-hidden", NETWORKS, "Network:", o.NETWORK)
    widths: tuple[int, ...] = option(
        (),
        help="Numbers with commas between them, as 50,200,800: neurons, or channels of the first stage.",
        unit="NUMBERS",
        usual="by network",
        parse=partial(o.whole_numbers, "--widths"),
        check=positive_whole,
        panel=o.NETWORK,
        identity=False,
    )
    etas: tuple[float, ...] = o.grid("--etas", help=f"Weights of the KL. {o.GRID}", panel=o.METHOD, identity=False)
    taus: tuple[float, ...] = o.grid(
        "--taus",
        help="More of them, eta = tau p/N for p rows, N neurons or parameters.",
        panel=o.METHOD,
        identity=False,
    )
    cold: tuple[float, ...] = o.grid(
        "--cold",
        help="Temperatures T instead, of (likelihood x prior)^(1/T), sampled by SGHMC.",
        panel=o.METHOD,
        identity=False,
    )
    paper: bool = option(
        False,
        help="All widths, temperatures, seeds and rows, for a GPU; without it two minutes on two cores.",
        panel=o.METHOD,
        identity=False,
    )
    seeds: int | None = o.count(
        None, "Fits with other first weights and orders of rows.", o.METHOD, usual="1, with --paper 3", identity=False
    )
    method: str | None = o.choice(
        None, METHODS, "Method:", o.METHOD, usual="bayes-by-backprop, with --cold sghmc", identity=False
    )
    epochs: int | None = o.count(None, "Passes over the rows.", o.METHOD, usual="by size")
    steps: int | None = o.count(None, "Steps of a fit, instead of passes.", o.METHOD)
    rows: int | None = o.count(None, "Training rows used.", o.DATA, usual="4000, with --paper all")
    held_out: int | None = option(
        None,
        help="Training rows to choose the best eta by.",
        unit="N",
        usual="a twelfth of them",
        check=whole,
        panel=o.DATA,
    )
    ood: str | None = o.choice(None, FOREIGN, "Foreign rows, of which uniform are noise:", o.DATA, usual="by data set")
    pixels: str = o.choice("raw", PIXELS, "As they are, or with mean 0 and variance 1 by channel:", o.DATA)
    batch_size: int | None = o.count(None, "Rows in a step.", o.METHOD, usual="by network")
    step_size: float | None = o.amount(None, "First step size.", o.METHOD, usual="by network and method")
    scale_step: float | None = o.amount(
        None, "Steps of log-scales, relative to those of means.", o.METHOD, usual="by network"
    )
    prior_variance: float = o.amount(0.2, "Variance of the prior of every weight.", o.METHOD, unit="V")
    draws: int | None = o.count(None, "Draws of the weights for predictions.", o.METHOD, usual="by size")
    neuron_draws: int | None = o.count(
        None, "As many more draws as make so many times neurons, for equal noise at all widths.", o.METHOD
    )
    device: str = o.device_option()
    dtype: str = o.choice("float32", DTYPES, "Of all numbers:", o.METHOD)
    seed: int = o.seed_option()

    def __post_init__(self) -> None:
        o.check(self)
        if self.steps is not None and self.epochs is not None:
            raise ValueError("Settings: give steps or epochs, not both.")
        if self.cold and (self.etas or self.taus):
            raise ValueError("Settings: give cold, or etas and taus, not both: they are temperatures of two densities.")
        if self.cold and self.method not in (None, "sghmc"):
            raise ValueError(f"Cold posteriors are sampled by 'sghmc'. Got method '{self.method}'. Leave it out.")
        if self.cold and len(self.all_widths) > 1:
            raise ValueError(f"Settings: cold takes one width. Got {', '.join(map(str, self.all_widths))}.")
        self._check_network()

    def _check_network(self) -> None:
        if self.neuron_draws is not None and self.architecture.units != "neurons":
            raise ValueError(f"The network '{self.net}' does not average over neurons. Leave neuron_draws out.")
        if self.widths and self.size.widths == (None,):
            raise ValueError(f"The network '{self.net}' has one size only. Leave widths out.")
        if not self.architecture.flat and self.data not in IMAGES:
            raise ValueError(
                f"The network '{self.net}' takes images, and '{self.data}' has none. Use net 'one-hidden'."
            )

    @property
    def architecture(self) -> "Architecture":
        """The network."""
        from posterity_studies.temperature.problem import ARCHITECTURES

        return ARCHITECTURES[self.net]

    @property
    def size(self) -> Size:
        """The default size."""
        return self.architecture.paper if self.paper else self.architecture.quick

    @property
    def method_name(self) -> str:
        """The given method, or the default."""
        return self.method or ("sghmc" if self.cold else "bayes-by-backprop")

    @property
    def all_seeds(self) -> int:
        """The given number of seeds, or the default."""
        return self.seeds or self.size.seeds

    @property
    def all_widths(self) -> tuple[int | None, ...]:
        """The given widths, or the defaults; only the first for a cold posterior."""
        usual = self.size.widths[:1] if self.cold else self.size.widths
        return tuple(dict.fromkeys(self.widths)) or usual

    @property
    def all_taus(self) -> tuple[float, ...]:
        """The given taus, or the defaults if no temperature is given; ascending."""
        usual = self.size.taus if not (self.etas or self.cold) else None
        return tuple(sorted(self.taus)) or (log_grid(*usual) if usual else ())

    def temperatures(self, num_data: int, units: int) -> tuple[float, ...]:
        """Return all etas of a network of so many units, or all T, ascending and distinct up to rounding."""
        usual = self.size.etas if not self.taus else None
        given = self.cold or self.etas or (log_grid(*usual) if usual else ())
        return merged((1.0, *given, *(tau * num_data / units for tau in self.all_taus)))

    def rows_of(self, available: int) -> int | None:
        """Return the number of training rows to use; None for all."""
        return self.size.rows and min(self.size.rows, available) if self.rows is None else self.rows

    def draws_of(self, units: int) -> int:
        """Return the draws for predictions of a network of so many units."""
        return max(self.all_draws, math.ceil((self.neuron_draws or self.size.neuron_draws or 0) / units))

    @property
    def all_draws(self) -> int:
        """The given number of draws, or the default."""
        return self.draws or self.size.draws

    @property
    def foreign(self) -> str:
        """The name of the foreign rows."""
        return self.ood or USUAL_FOREIGN.get(self.data, "uniform")

    def config(self) -> dict[str, Any]:
        """Return the settings as JSON."""
        return as_json(self)

    def common(self) -> dict[str, Any]:
        """Return the settings that determine a single fit."""
        more = self.neuron_draws or self.size.neuron_draws
        chosen = {"ood": self.foreign, "method": self.method_name, "draws": self.all_draws, "neuron_draws": more}
        return identity(self) | chosen | {"cold": bool(self.cold)}

    def search(self, num_data: int) -> "Method":
        """Return MAP for the mode at which chains of a cold posterior begin, which is the same at every T."""
        from posterity.methods import MAP
        from posterity.optim.optimizer import Adam
        from posterity.optim.schedules import Cosine

        batch, steps = self._length(num_data)
        return MAP(max(1, min(steps // 2, LEAST_STEPS)), batch, Adam(self.architecture.step_size), Cosine())

    def _length(self, num_data: int) -> tuple[int, int]:
        """Return the rows in a step and the number of steps."""
        size = self.size
        batch = min(self.batch_size or size.batch_size, num_data)
        passes = (self.epochs or size.epochs) * (num_data // batch)
        usual = size.steps or max(LEAST_STEPS, passes)
        return batch, self.steps or (usual if self.epochs is None else passes)

    def inference(self, num_data: int, chains: int = 1) -> "Method":
        """Return the method of a fit on so many rows; a sampler runs so many chains together."""
        from posterity.methods import SGHMC, MeanField, NaturalGradient
        from posterity.methods.parts.gradients import WeightSampling
        from posterity.methods.parts.preconditioners import Plain, RMSprop
        from posterity.optim.optimizer import Adam
        from posterity.optim.schedules import Cosine

        architecture, (batch, steps) = self.architecture, self._length(num_data)
        scales = architecture.initial_scales
        if self.method_name == "ivon":
            return NaturalGradient(
                steps, batch, self.step_size or 0.1, Cosine(), WeightSampling(antithetic=True), radius=0.1,
                initial_scales=scales,
            )  # fmt: skip
        if self.method_name == "sghmc":
            warmup = max(1, steps // 2)
            thin = max(1, (steps - warmup) // self.all_draws)
            rule = Plain() if self.cold else RMSprop()
            return SGHMC(self.all_draws, warmup, chains, self.step_size, batch, thin, preconditioner=rule)
        adam, step = Adam(self.step_size or architecture.step_size), self.scale_step or architecture.scale_step
        return MeanField(
            steps, batch, adam, Cosine(), WeightSampling(antithetic=True), initial_scales=scales, scale_step=step
        )
