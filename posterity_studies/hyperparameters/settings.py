"""The options of `study hyperparameters`."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from posterity.errors import positive, positive_whole
from posterity.options import identity, option
from posterity_studies.options import DATA, METHOD, check, jobs_option, names, seed_option
from posterity_studies.uci.settings import DATA_SETS

if TYPE_CHECKING:
    from posterity.numerics.random import Key

METHODS = ("laplace", "mean-field")


@dataclass(frozen=True)
class Settings:
    """Data sets, approximations and splits, and how networks are trained; EM begins at `prior_scale`."""

    datasets: tuple[str, ...] = names(
        ("bostonHousing", "energy", "wine-quality-red"),
        help="Data sets:",
        choices=DATA_SETS,
        panel=DATA,
        identity=False,
    )
    methods: tuple[str, ...] = names(
        ("laplace",), help="Approximations:", choices=METHODS, panel=METHOD, identity=False
    )
    steps: int = option(5000, help="Training steps of each fit.", unit="N", check=positive_whole, panel=METHOD)
    splits: int | None = option(
        None, help="The first N splits.", unit="N", usual="all", check=positive_whole, panel=DATA, identity=False
    )
    batch_size: int = option(256, help="Rows in a step.", unit="N", check=positive_whole, panel=METHOD)
    step_size: float = option(0.03, help="First step size of Adam.", unit="X", check=positive, panel=METHOD)
    prior_scale: float = option(
        0.3, help="Standard deviation of the first prior of EM.", unit="S", check=positive, panel=METHOD
    )
    jobs: int | None = jobs_option(help="Processes.", usual="one for each core")
    seed: int = seed_option()

    def __post_init__(self) -> None:
        check(self)

    def config(self) -> dict[str, Any]:
        """What the numbers of the study depend on beside data set, split and approximation, as JSON."""
        return identity(self)

    def key(self, data_set: str, split: int) -> "Key":
        """What all randomness of a split grows from."""
        from posterity.numerics.random import Key

        return Key(self.seed).fold(data_set).fold(split)
