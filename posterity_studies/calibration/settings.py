"""The options of `study calibration`."""

from dataclasses import dataclass

from posterity_studies import options as o

MODELS = ("linear", "logistic", "network")
EXACT = ("nuts", "hmc", "mala", "metropolis")
METHODS = (*EXACT, "langevin", "sgld", "mean-field", "laplace")
FEWEST = 5  # least expected replicates in a bin for a chi-square test
MOST = 20  # bins


@dataclass(frozen=True)
class Settings:
    """Models and methods, the number of data sets, and the draws of each posterior."""

    models: tuple[str, ...] = o.names(MODELS, help="Models:", choices=MODELS, panel=o.DATA)
    methods: tuple[str, ...] = o.names(EXACT, help="Methods:", choices=METHODS, panel=o.METHOD)
    replicates: int = o.count(1000, "Data sets for each model.", o.DATA)
    draws: int = o.count(31, "Draws among which a true value is ranked.", o.METHOD)
    seed: int = o.seed_option()

    def __post_init__(self) -> None:
        o.check(self)
        number_of_bins(self.replicates, self.draws)


def number_of_bins(replicates: int, draws: int) -> int:
    """Return the largest number of equal bins, up to `MOST`, with `FEWEST` expected replicates in each.

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
