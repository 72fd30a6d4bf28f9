"""The options of `study penalties`."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from posterity.errors import positive, positive_whole
from posterity.options import as_json, identity, option
from posterity_studies.grids import log_grid, merged
from posterity_studies.options import (
    DATA,
    GRID,
    METHOD,
    NETWORK,
    check,
    device_option,
    grid,
    jobs_option,
    names,
    seed_option,
)

if TYPE_CHECKING:
    from posterity.methods import MAP
    from posterity.model.augmentation import Augmentation
    from posterity_studies.penalties.protocol import Architecture

DATA_SETS = ("mnist", "fashion-mnist", "cifar-10")
NETWORKS = ("cvnn", "vgg19")
PENALTIES = ("l2", "l1", "rows", "columns", "channels")
DECK = ("l2", "l1", "rows", "columns")  # those of the published table
SETUPS = ("usual", "bayesian")
RATIOS = log_grid(10.0**-3, 10.0**0.5, 8)


@dataclass(frozen=True)
class Settings:
    """What is asked for; None, and an empty tuple, stand for what is usual with the network and the data set.

    A fit minimises the mean of -log p over n training rows plus lambda sum over l of lambda_l r(w_l), l the
    convolutions and linear layers; other tensors have the prior N(0, 10^2). Setup "bayesian": lambda_l with which a
    weight of P_l incoming ones has the variance 1 / P_l under the penalty's prior, lambda = ratio / n for each of
    `ratios`, to which 1 (lambda_Th) belongs. Setup "usual": lambda_l = 1, or the root of the size of a group, and the
    `lambdas`; without any, for each ratio the half power of ten nearest to the lambda at which the first weights (of
    the first seed) have the penalty that they have in the other setup.

    Fits take proximal steps with Nesterov's momentum, in step sizes that rise over a tenth of the run and fall on a
    cosine. A seed has its own first weights, order of the rows and changes of the images, which all its lambdas and
    both setups share. First weights are torch's, or without `batch_norm` normal of variance 2 / fan-in, by which
    signals do not fade from layer to layer. Images are scaled to mean 0 and variance 1 by channel. With `precision`
    "bf16" convolutions and products of training are computed in that type; weights and predictions are of float32.
    """

    data: str = option("mnist", help="Data set:", unit="NAME", choices=DATA_SETS, panel=DATA)
    net: str = option(
        "cvnn",
        help="Network, of which cvnn is a small convolutional one:",
        unit="NAME",
        choices=NETWORKS,
        panel=NETWORK,
    )
    penalties: tuple[str, ...] = names(
        DECK, help="Penalties (the last three: group lasso):", choices=PENALTIES, panel=METHOD, identity=False
    )
    setups: tuple[str, ...] = names(
        SETUPS,
        help="Layer factors, of which the usual are 1, or the root of a group's size:",
        choices=SETUPS,
        panel=METHOD,
        identity=False,
    )
    ratios: tuple[float, ...] = grid(
        "--ratios", help=f"lambda / lambda_Th, bayesian setup; 1 is added. {GRID}", panel=METHOD, identity=False
    )
    lambdas: tuple[float, ...] = grid(
        "--lambdas",
        help="lambda of the usual setup.",
        usual="matches the ratios, see results.json",
        panel=METHOD,
        identity=False,
    )
    seeds: int = option(
        2,
        help="Fits with other first weights, orders and crops.",
        unit="N",
        check=positive_whole,
        panel=METHOD,
        identity=False,
    )
    epochs: int | None = option(
        None, help="Passes over the rows.", unit="N", usual="by network", check=positive_whole, panel=METHOD
    )
    rows: int | None = option(None, help="Training rows used.", unit="N", usual="all", check=positive_whole, panel=DATA)
    width: int | None = option(
        None,
        help="Channels of the first layers.",
        unit="N",
        usual="by network and data",
        check=positive_whole,
        panel=NETWORK,
    )
    batch_size: int = option(128, help="Rows in a step.", unit="N", check=positive_whole, panel=METHOD)
    step_size: float | None = option(
        None, help="Largest of SGD.", unit="X", usual="0.1, without batch norm 0.02", check=positive, panel=METHOD
    )
    batch_norm: bool = option(True, help="Behind convolutions; else they have biases.", panel=NETWORK)
    augment: bool | None = option(
        None,
        help="Crop training images, and flip those of cifar-10.",
        usual="the latter only",
        panel=DATA,
    )
    held_out: int | None = option(
        None,
        help="Training rows to choose lambda by.",
        unit="N",
        usual="a tenth of all",
        check=positive_whole,
        panel=DATA,
    )
    precision: str = option(
        "float32", help="Of products in training:", unit="NAME", choices=("float32", "bf16"), panel=METHOD
    )
    jobs: int = jobs_option(1, help="Processes that fit groups side by side, on a CPU.")
    device: str = device_option()
    seed: int = seed_option()

    def __post_init__(self) -> None:
        check(self)
        if self.lambdas and "usual" not in self.setups:
            raise ValueError("--lambdas are those of the setup 'usual', which is not asked for. Use --ratios.")
        if self.jobs > 1 and self.device not in ("cpu", "auto"):
            raise ValueError(f"--jobs must be 1 on the device {self.device}. Got {self.jobs}.")

    @property
    def architecture(self) -> "Architecture":
        """The network, with what is usual for these images."""
        from posterity_studies.penalties.protocol import ARCHITECTURES, SMALL

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
    def actual_step_size(self) -> float:
        """The largest step size; without batch norm a long one leads astray."""
        return self.step_size or (0.1 if self.batch_norm else 0.02)

    @property
    def augmentation(self) -> "Augmentation | None":
        """What changes training images: crop and flip for CIFAR-10 unless told otherwise, crop alone for others."""
        from posterity.model.augmentation import Compose, Crop, Flip

        wanted = self.data == "cifar-10" if self.augment is None else self.augment
        if not wanted:
            return None
        return Compose((Crop(4), Flip())) if self.data == "cifar-10" else Crop(2)

    def config(self) -> dict[str, Any]:
        """The settings as JSON."""
        return as_json(self)

    def common(self) -> dict[str, Any]:
        """Those on which the numbers of a single fit depend."""
        return identity(self) | {
            "epochs": self.actual_epochs,
            "width": self.actual_width,
            "augment": repr(self.augmentation),
            "step_size": self.actual_step_size,
        }

    def inference(self, penalty: str, num_data: int) -> "MAP":
        """The method of every fit with a penalty on so many rows."""
        from posterity.methods import MAP
        from posterity.optim.optimizer import SGD
        from posterity.optim.schedules import Cosine
        from posterity_studies.penalties.protocol import PENALTIES

        batch = min(self.batch_size, num_data)
        steps = self.actual_epochs * (num_data // batch)
        sgd = SGD(self.actual_step_size, 0.9, nesterov=True)
        return MAP(steps, batch, sgd, Cosine(0.1), proximal=PENALTIES[penalty].prior().nonsmooth)
