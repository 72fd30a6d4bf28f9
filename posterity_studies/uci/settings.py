"""The options of `study uci`."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from posterity.options import comma_separated, identity
from posterity_studies import options as o

if TYPE_CHECKING:
    from posterity.numerics.random import Key

DATA_SETS = (
    "bostonHousing",
    "energy",
    "kin8nm",
    "naval-propulsion-plant",
    "power-plant",
    "protein-tertiary-structure",
    "wine-quality-red",
)
METHODS = ("map", "laplace", "dropout", "ensemble", "pbp", "default-map", "default-laplace", "laplace-ensemble",
           "mean-field", "natural-gradient", "online-laplace", "swag", "auto")  # fmt: skip
CONSTANTS = ("zero", "rounded")


def _data_sets(text: str) -> tuple[str, ...]:
    return DATA_SETS if text.strip() == "all" else comma_separated(text)


@dataclass(frozen=True)
class Settings:
    """Data sets, methods and splits, and how networks are trained.

    The defaults were chosen without the test rows, by the NLL of Laplace on training rows held out of kin8nm, the set
    on which they matter most: `python -m benchmarks.uci_settings kin8nm`. A step size of 0.03 is better than 0.01;
    the batch sizes and prior scales tried with it differ no more than with the start of the network.
    """

    datasets: tuple[str, ...] = o.names(
        DATA_SETS, help="Data sets:", choices=DATA_SETS, parse=_data_sets, usual="all", panel=o.DATA, identity=False
    )
    methods: tuple[str, ...] = o.names(
        ("map", "laplace"), help="Methods:", choices=METHODS, panel=o.METHOD, identity=False
    )
    steps: int = o.count(20_000, "Training steps of each fit.", o.METHOD)
    splits: int | None = o.count(None, "The first N splits.", o.DATA, usual="all", identity=False)
    constants: str = o.choice(
        "zero",
        CONSTANTS,
        "Constant inputs: 0, or what the rounding of their mean leaves, which in published runs was 1 in naval.",
        o.DATA,
        identity=False,  # the rows are part of it
    )
    batch_size: int = o.count(256, "Rows in a step.", o.METHOD)
    step_size: float = o.amount(0.03, "First step size of Adam.", o.METHOD)
    prior_scale: float = o.amount(1.0, "Standard deviation of the prior of every weight.", o.METHOD, unit="S")
    jobs: int | None = o.jobs_option(
        None, "Fits at a time.", usual="one for each core; with ray, all there is room for"
    )
    executor: str | None = o.fits_option()
    seed: int = o.seed_option()

    def __post_init__(self) -> None:
        o.check(self)

    def config(self) -> dict[str, Any]:
        """What the numbers of the study depend on beside data set, split and method, as JSON."""
        return identity(self)

    def key(self, data_set: str, split: int) -> "Key":
        """What all randomness of a split grows from; methods share it, and so a start."""
        from posterity.numerics.random import Key

        return Key(self.seed).fold(data_set).fold(split)
