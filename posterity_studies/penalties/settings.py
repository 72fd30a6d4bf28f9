"""The options of `study penalties`."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from posterity.errors import whole
from posterity.options import as_json, identity, option
from posterity_studies import options as o
from posterity_studies.grids import log_grid, merged

if TYPE_CHECKING:
    from posterity.methods import MAP
    from posterity.model.augmentation import Augmentation
    from posterity_studies.penalties.problem import Architecture

DATA_SETS = ("mnist", "fashion-mnist", "cifar-10")
NETWORKS = ("cvnn", "vgg19")
PENALTIES = ("l2", "l1", "rows", "columns", "channels")
DECK = ("l2", "l1", "rows", "columns")  # as in the published table
SETUPS = ("usual", "bayesian")
RATIOS = log_grid(10.0**-3, 10.0**0.5, 8)


@dataclass(frozen=True)
class Settings:
    """Settings of the study; None and () are replaced by defaults for the network and the data set.

    A fit minimises the mean of -log p over n training rows plus lambda sum over l of lambda_l r(w_l), l the
    convolutions and linear layers; other tensors have the prior N(0, 10^2). Setup "bayesian": lambda_l with which a
    weight of P_l incoming ones has the variance 1 / P_l under the penalty's prior, lambda = ratio / n for each of
    `ratios`, to which 1 (lambda_Th) belongs. Setup "usual": lambda_l = 1, or the root of the size of a group, and the
    `lambdas`; without any, for each ratio the half power of ten nearest to the lambda at which the first weights (of
    the first seed) have the penalty that they have in the other setup.

    A lambda takes the step size of `step_size` that does best on held-out rows, in every setup and at lambda_Th alike.
    With `search_epochs` that is found out in short runs of the first seed, of all step sizes and lambdas; runs of
    `epochs` follow for the best lambda, those half a power of ten to either side of it, and lambda_Th. Where the best
    of these has no neighbour on a side, a lambda is added there, `extend` times at most.

    Fits take proximal steps with Nesterov's momentum, in step sizes that rise over a tenth of the run and fall on a
    cosine. A seed has its own first weights, order of the rows and changes of the images, which all its lambdas and
    both setups share. First weights are torch's, or without `batch_norm` normal of variance 2 / fan-in, by which
    signals do not fade from layer to layer. Images are scaled to mean 0 and variance 1 by channel. With `precision`
    "bf16" convolutions and products of training are computed in that type; weights and predictions are of float32.
    """

    data: str = o.choice("mnist", DATA_SETS, "Data set:", o.DATA)
    net: str = o.choice("cvnn", NETWORKS, "Network, of which cvnn is a small convolutional one:", o.NETWORK)
    penalties: tuple[str, ...] = o.names(
        DECK, help="Penalties (the last three: group lasso):", choices=PENALTIES, panel=o.METHOD, identity=False
    )
    setups: tuple[str, ...] = o.names(
        SETUPS,
        help="Layer factors, of which the usual are 1, or the root of a group's size:",
        choices=SETUPS,
        panel=o.METHOD,
        identity=False,
    )
    ratios: tuple[float, ...] = o.grid(
        "--ratios", help=f"lambda / lambda_Th, bayesian setup; 1 is added. {o.GRID}", panel=o.METHOD, identity=False
    )
    lambdas: tuple[float, ...] = o.grid(
        "--lambdas",
        help="lambda of the usual setup.",
        usual="matches the ratios, see results.json",
        panel=o.METHOD,
        identity=False,
    )
    extend: int = option(
        0,
        help="Lambdas added at most, one by one, where lambda* is at the end.",
        unit="N",
        check=whole,
        panel=o.METHOD,
        identity=False,
    )
    seeds: int = o.count(2, "Fits with other first weights, orders and crops.", o.METHOD, identity=False)
    epochs: int | None = o.count(None, "Passes over the rows.", o.METHOD, usual="by network", identity=False)
    search_epochs: int | None = o.count(
        None, "Passes of short runs that choose lambdas and step sizes.", o.METHOD, usual="no such runs", identity=False
    )
    rows: int | None = o.count(None, "Training rows used.", o.DATA, usual="all")
    width: int | None = o.count(None, "Channels of the first layers.", o.NETWORK, usual="by network and data")
    batch_size: int = o.count(128, "Rows in a step.", o.METHOD)
    step_size: tuple[float, ...] = o.grid(
        "--step-size",
        help="Largest of SGD; of several the best on held-out rows.",
        usual="0.1, without batch norm 0.02",
        panel=o.METHOD,
        identity=False,
    )
    batch_norm: bool = option(True, help="Behind convolutions; else they have biases.", panel=o.NETWORK)
    augment: bool | None = option(
        None, help="Crop training images, and flip those of cifar-10.", usual="the latter only", panel=o.DATA
    )
    held_out: int | None = o.count(None, "Training rows to choose lambda by.", o.DATA, usual="a tenth of all")
    precision: str = o.choice("float32", ("float32", "bf16"), "Of products in training:", o.METHOD)
    together: int | None = o.count(
        None, "Fits that step together at most.", o.METHOD, usual="as many as memory has room for", identity=False
    )
    jobs: int = o.jobs_option(1, "Groups of fits that run side by side, on a CPU or a cluster.")
    executor: str | None = o.fits_option()
    device: str = o.device_option()
    seed: int = o.seed_option()

    def __post_init__(self) -> None:
        o.check(self)
        if self.lambdas and "usual" not in self.setups:
            raise ValueError("--lambdas is for the setup 'usual', which is not asked for. Use --ratios.")
        if self.search_epochs is not None and self.search_epochs >= self.actual_epochs:
            raise ValueError(
                f"--search-epochs must be fewer than the {self.actual_epochs} of --epochs. Got {self.search_epochs}."
            )
        cluster = (self.executor or "").startswith("ray")
        if self.jobs > 1 and self.device not in ("cpu", "auto") and not cluster:
            raise ValueError(
                f"--jobs must be 1 on the device {self.device}, except with --executor ray. Got {self.jobs}."
            )

    @property
    def architecture(self) -> "Architecture":
        """The network, with the defaults for these images."""
        from posterity_studies.penalties.problem import ARCHITECTURES, SMALL

        return SMALL if self.net == "cvnn" and self.data != "cifar-10" else ARCHITECTURES[self.net]

    @property
    def all_ratios(self) -> tuple[float, ...]:
        """lambda / lambda_Th of the Bayesian setup, ascending, 1 among them."""
        return merged((1.0, *(self.ratios or RATIOS)))

    @property
    def actual_width(self) -> int:
        """The width of the network."""
        return self.width or self.architecture.width

    @property
    def actual_epochs(self) -> int:
        """Passes over the rows."""
        return self.epochs or self.architecture.epochs

    @property
    def actual_step_sizes(self) -> tuple[float, ...]:
        """The largest step sizes to choose from, ascending; large ones fail without batch norm."""
        return merged(self.step_size or ((0.1 if self.batch_norm else 0.02),))

    @property
    def augmentation(self) -> "Augmentation | None":
        """The augmentation: by default crop and flip for CIFAR-10, and crop for other data sets."""
        from posterity.model.augmentation import Compose, Crop, Flip

        wanted = self.data == "cifar-10" if self.augment is None else self.augment
        if not wanted:
            return None
        return Compose((Crop(4), Flip())) if self.data == "cifar-10" else Crop(2)

    def config(self) -> dict[str, Any]:
        """Return the settings as JSON."""
        return as_json(self)

    def common(self) -> dict[str, Any]:
        """Return the settings that determine a single fit."""
        return identity(self) | {"width": self.actual_width, "augment": repr(self.augmentation)}

    def inference(self, penalty: str, num_data: int, step_size: float, epochs: int) -> "MAP":
        """Return the method for a penalty on so many rows, with this largest step size and so many passes."""
        from posterity.methods import MAP
        from posterity.optim.optimizer import SGD
        from posterity.optim.schedules import Cosine
        from posterity_studies.penalties.problem import PENALTIES

        batch = min(self.batch_size, num_data)
        steps = epochs * (num_data // batch)
        sgd = SGD(step_size, 0.9, nesterov=True)
        return MAP(steps, batch, sgd, Cosine(0.1), proximal=PENALTIES[penalty].prior().nonsmooth)
