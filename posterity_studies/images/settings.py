"""The options of `study images`."""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from posterity.options import as_json, identity
from posterity_studies import options as o

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

    data_set: str = o.choice("mnist", DATA_SETS, "Images:", o.DATA, flags=("--data",))
    networks: tuple[str, ...] = o.names(
        tuple(STEPS), help="Networks:", choices=tuple(STEPS), panel=o.NETWORK, identity=False
    )
    etas: tuple[float, ...] = o.grid(
        "--etas",
        (1.0, 0.5, 0.3, 0.2, 0.1),
        help=f"Weights of the KL to choose from. {o.GRID}",
        panel=o.METHOD,
        identity=False,
    )
    held_out: int = o.count(5000, "Training images to choose eta by.", o.DATA)
    seeds: int = o.count(3, "Fits of MAP and of the chosen eta.", o.METHOD, identity=False)
    steps: int | None = o.count(None, "Steps of mean-field inference.", o.METHOD, usual="by network")
    batch_size: int = o.count(128, "Images in a step.", o.METHOD)
    step_size: float = o.amount(0.003, "First step size of Adam.", o.METHOD)
    prior_scale: float = o.amount(
        math.sqrt(0.2), "Standard deviation of the prior of every weight.", o.METHOD, unit="S"
    )
    draws: int = o.count(64, "Draws of the weights for predictions.", o.METHOD)
    device: str = o.device_option("cpu")
    seed: int = o.seed_option()

    def __post_init__(self) -> None:
        o.check(self)

    def config(self) -> dict[str, Any]:
        """The settings as JSON."""
        return as_json(self)

    def common(self) -> dict[str, Any]:
        """The settings on which the numbers of a single fit depend."""
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
