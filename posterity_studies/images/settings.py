"""The options of `study images`."""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from posterity.errors import positive, positive_whole
from posterity.options import as_json, identity, option
from posterity_studies.options import DATA, GRID, METHOD, NETWORK, check, device_option, grid, names, seed_option

if TYPE_CHECKING:
    from posterity.inference import Method

DATA_SETS = ("mnist", "fashion-mnist")
STEPS = {"mlp": 10_000, "lenet": 5000}
"""Steps of mean-field inference that are usual for each network."""


@dataclass(frozen=True)
class Settings:
    """Images, networks and the etas to choose from, and how networks are trained.

    Mean-field inference takes `steps` steps from a MAP of a tenth as many, which all etas of a seed share; MAP takes as
    many as both together. `etas` is the grid from which eta is chosen, by the NLL of the first seed on `held_out`
    training images. The prior has the variance 1/5 that is usual for this experiment.

    Numbers of steps, step sizes (out of 0.001 to 0.01 for both), the estimator (out of mirrored weights and local
    reparameterisation) and the grid were chosen by scores of the first seed on the held-out images, after some hundred
    such fits. No test score was looked at for any choice.
    """

    data_set: str = option("mnist", help="Images:", unit="NAME", choices=DATA_SETS, flags=("--data",), panel=DATA)
    networks: tuple[str, ...] = names(
        tuple(STEPS), help="Networks:", choices=tuple(STEPS), panel=NETWORK, identity=False
    )
    etas: tuple[float, ...] = grid(
        "--etas",
        (1.0, 0.5, 0.3, 0.2, 0.1),
        help=f"Weights of the KL to choose from. {GRID}",
        panel=METHOD,
        identity=False,
    )
    held_out: int = option(5000, help="Training images to choose eta by.", unit="N", check=positive_whole, panel=DATA)
    seeds: int = option(
        3, help="Fits of MAP and of the chosen eta.", unit="N", check=positive_whole, panel=METHOD, identity=False
    )
    steps: int | None = option(
        None, help="Steps of mean-field inference.", unit="N", usual="by network", check=positive_whole, panel=METHOD
    )
    batch_size: int = option(128, help="Images in a step.", unit="N", check=positive_whole, panel=METHOD)
    step_size: float = option(0.003, help="First step size of Adam.", unit="X", check=positive, panel=METHOD)
    prior_scale: float = option(
        math.sqrt(0.2), help="Standard deviation of the prior of every weight.", unit="S", check=positive, panel=METHOD
    )
    draws: int = option(64, help="Draws of the weights for predictions.", unit="N", check=positive_whole, panel=METHOD)
    device: str = device_option("cpu")
    seed: int = seed_option()

    def __post_init__(self) -> None:
        check(self)

    def config(self) -> dict[str, Any]:
        """The settings as JSON."""
        return as_json(self)

    def common(self) -> dict[str, Any]:
        """Those of them on which the numbers of a single fit depend."""
        return identity(self)

    def stages(self, network: str, eta: float | None) -> "tuple[Method, ...]":
        """MAP for an eta of None; else a short MAP, and mean-field inference that goes on from there."""
        from posterity.methods import MAP, MeanField
        from posterity.methods.parts.gradients import WeightSampling
        from posterity.optim.optimizer import Adam
        from posterity.optim.schedules import Cosine

        steps, adam = self.steps or STEPS[network], Adam(self.step_size)
        first = max(1, steps // 10)
        if eta is None:
            return (MAP(first + steps, self.batch_size, adam, Cosine()),)
        mirrored = WeightSampling(antithetic=True)
        return (
            MAP(first, self.batch_size, adam, Cosine()),
            MeanField(steps, self.batch_size, adam, Cosine(), mirrored),
        )
