"""The options of `study hyperparameters`."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from posterity.options import identity
from posterity_studies import options as o
from posterity_studies.uci.settings import DATA_SETS

if TYPE_CHECKING:
    from posterity.numerics.random import Key

METHODS = ("laplace", "mean-field")


@dataclass(frozen=True)
class Settings:
    """Data sets, approximations and splits, and how networks are trained; EM begins at `prior_scale`."""

    datasets: tuple[str, ...] = o.names(
        ("bostonHousing", "energy", "wine-quality-red"),
        help="Data sets:",
        choices=DATA_SETS,
        panel=o.DATA,
        identity=False,
    )
    methods: tuple[str, ...] = o.names(
        ("laplace",), help="Approximations:", choices=METHODS, panel=o.METHOD, identity=False
    )
    steps: int = o.count(5000, "Training steps of each fit.", o.METHOD)
    splits: int | None = o.count(None, "The first N splits.", o.DATA, usual="all", identity=False)
    batch_size: int = o.count(256, "Rows in a step.", o.METHOD)
    step_size: float = o.amount(0.03, "First step size of Adam.", o.METHOD)
    prior_scale: float = o.amount(0.3, "Standard deviation of the first prior of EM.", o.METHOD, unit="S")
    jobs: int | None = o.jobs_option(None, "Processes.", usual="one for each core")
    seed: int = o.seed_option()

    def __post_init__(self) -> None:
        o.check(self)

    def config(self) -> dict[str, Any]:
        """What the numbers of the study depend on beside data set, split and approximation, as JSON."""
        return identity(self)

    def key(self, data_set: str, split: int) -> "Key":
        """What all randomness of a split grows from."""
        from posterity.numerics.random import Key

        return Key(self.seed).fold(data_set).fold(split)
