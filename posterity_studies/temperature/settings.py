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
LEAST_STEPS = 2000  # of a fit whose length is not given


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

    data: str = o.choice("mnist", DATA_SETS, "Data set:", o.DATA)
    net: str = o.choice("one-hidden", NETWORKS, "Network:", o.NETWORK)
    widths: tuple[int, ...] = option(
        (),
        help="Numbers with commas between them, as 50,200,800, the usual ones of one hidden layer.",
        unit="NUMBERS",
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
    seeds: int = o.count(3, "Fits with other first weights and orders of rows.", o.METHOD, identity=False)
    method: str = o.choice("bayes-by-backprop", METHODS, "Method:", o.METHOD)
    epochs: int | None = o.count(None, "Passes over the rows.", o.METHOD, usual="by network")
    steps: int | None = o.count(None, "Steps of a fit, instead of passes.", o.METHOD)
    rows: int | None = o.count(None, "Training rows used.", o.DATA, usual="all")
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
    prior_variance: float = o.amount(0.2, "Variance of the prior of every weight.", o.METHOD, unit="V")
    draws: int = o.count(32, "Draws of the weights for predictions.", o.METHOD)
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
        self._check_network()

    def _check_network(self) -> None:
        if self.neuron_draws is not None and self.architecture.units != "neurons":
            raise ValueError(f"The network '{self.net}' does not average over neurons. Leave neuron_draws out.")
        if self.widths and self.architecture.widths == (None,):
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
    def all_widths(self) -> tuple[int | None, ...]:
        """The widths given, or the usual ones."""
        return tuple(dict.fromkeys(self.widths)) or self.architecture.widths

    @property
    def all_taus(self) -> tuple[float, ...]:
        """The taus given, or the usual ones where no temperature is given; ascending."""
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
        return as_json(self)

    def common(self) -> dict[str, Any]:
        """The settings on which the numbers of a single fit depend."""
        return identity(self) | {"ood": self.foreign}

    def inference(self, num_data: int) -> "Method":
        """The method of every fit on so many rows."""
        from posterity.methods import SGHMC, MeanField, NaturalGradient
        from posterity.methods.parts.gradients import WeightSampling
        from posterity.methods.parts.preconditioners import RMSprop
        from posterity.optim.optimizer import Adam
        from posterity.optim.schedules import Cosine

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
