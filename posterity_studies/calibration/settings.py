"""The options of `study calibration`."""

from dataclasses import dataclass

from posterity.errors import positive_whole
from posterity.options import option
from posterity_studies.options import DATA, METHOD, check, names, seed_option

MODELS = ("linear", "logistic", "network")
EXACT = ("nuts", "hmc", "mala", "metropolis")
METHODS = (*EXACT, "langevin", "sgld", "mean-field", "laplace")
FEWEST = 5  # replicates expected in a bin, below which chi-square says little
MOST = 20  # bins


@dataclass(frozen=True)
class Settings:
    """Models and methods, the number of data sets, and the draws of each posterior."""

    models: tuple[str, ...] = names(MODELS, help="Models:", choices=MODELS, panel=DATA)
    methods: tuple[str, ...] = names(EXACT, help="Methods:", choices=METHODS, panel=METHOD)
    replicates: int = option(1000, help="Data sets for each model.", unit="N", check=positive_whole, panel=DATA)
    draws: int = option(
        31, help="Draws among which a true value is ranked.", unit="N", check=positive_whole, panel=METHOD
    )
    seed: int = seed_option()

    def __post_init__(self) -> None:
        check(self)
        number_of_bins(self.replicates, self.draws)


def number_of_bins(replicates: int, draws: int) -> int:
    """The most bins of equal numbers of ranks, up to `MOST`, in each of which `FEWEST` replicates are expected.

    >>> number_of_bins(1000, 63), number_of_bins(100, 63), number_of_bins(1000, 99)
    (16, 16, 20)
    """
    limit = min(MOST, replicates // FEWEST)
    fitting = [bins for bins in range(2, limit + 1) if (draws + 1) % bins == 0]
    if not fitting:
        raise ValueError(
            f"calibrate: {draws + 1} ranks of {replicates} replicates cannot be put into 2 to {MOST} equal bins of at "
            f"least {FEWEST} each. Use draws such that draws + 1 has divisors, such as 63, or more replicates."
        )
    return fitting[-1]
