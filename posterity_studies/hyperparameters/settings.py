"""The options of `study hyperparameters`."""

from dataclasses import dataclass

from posterity_studies import options as o
from posterity_studies.uci import settings as uci

METHODS = ("laplace", "mean-field")


@dataclass(frozen=True)
class Settings(uci.Settings):
    """Data sets, approximations and splits, and how networks are trained; EM begins at `prior_scale`."""

    datasets: tuple[str, ...] = o.names(
        ("bostonHousing", "energy", "wine-quality-red"),
        help="Data sets:",
        choices=uci.DATA_SETS,
        panel=o.DATA,
        identity=False,
    )
    methods: tuple[str, ...] = o.names(
        ("laplace",), help="Approximations:", choices=METHODS, panel=o.METHOD, identity=False
    )
    steps: int = o.count(5000, "Training steps of each fit.", o.METHOD)
    prior_scale: float = o.amount(0.3, "Standard deviation of the first prior of EM.", o.METHOD, unit="S")
