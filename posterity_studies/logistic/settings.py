"""The options of `study logistic`."""

from dataclasses import dataclass

from posterity_studies import options as o

FEWEST = 20  # chains, from whose differences the standard errors are taken
LEAST_DRAWS = 4


@dataclass(frozen=True)
class Settings:
    """Steps of variational fits, number and length of chains, resolution of the map of three classes, and the seed."""

    steps: int = o.count(2000, "Steps of each variational fit.", o.METHOD)
    chains: int = o.count(500, "Chains of each sampler.", o.METHOD)
    draws: int = o.count(100, "Trajectories of each chain after the warm-up.", o.METHOD)
    points: int = o.count(33, "Points on a side of the map of three classes.", o.METHOD)
    seed: int = o.seed_option()

    def __post_init__(self) -> None:
        o.check(self)
        if self.chains < FEWEST:
            raise ValueError(f"chains must be at least {FEWEST}, for standard errors. Got {self.chains}.")
        if self.draws < LEAST_DRAWS:
            raise ValueError(f"draws must be at least {LEAST_DRAWS}, for effective sample sizes. Got {self.draws}.")
        if self.points < 2:
            raise ValueError(f"points must be at least 2. Got {self.points}.")
