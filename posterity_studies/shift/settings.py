"""The options of `study shift`."""

from dataclasses import dataclass
from typing import Any

from posterity.options import as_json, identity, option
from posterity_studies import options as o

NETWORKS = {"mnist": ("lenet", "mlp"), "fashion-mnist": ("lenet", "mlp"), "cifar-10": ("resnet-20",)}
"""The networks that are usual for each data set; all of them take each."""
METHODS = (
    "map",
    "ensemble",
    "laplace",
    "laplace-ensemble",
    "swag",
    "multi-swag",
    "dropout",
    "mean-field",
    "natural-gradient",
)


@dataclass(frozen=True)
class Settings:
    """Images, networks and methods.

    A network's settings are in `recipes.py`; they were chosen by NLL on `held_out` training images, which no fit sees.
    The temperature that calibrates a method is fitted to these images, too. Test images are for the scores alone.
    With --augment training images are moved, and digits and garments turned, zoomed and sheared, or the images of
    CIFAR-10 mirrored, at random; fits are then longer. Fits are stored while they run, and the same command continues
    them.
    """

    data: str = o.choice("mnist", tuple(NETWORKS), "Images:", o.DATA)
    augment: bool = option(False, help="Change the images at random before each step.", panel=o.DATA)
    held_out: int = o.count(5000, "Training images that no fit sees, to calibrate by.", o.DATA)
    shifted: int = o.count(1000, "Test images that are changed, and foreign ones: the first.", o.DATA)
    networks: tuple[str, ...] = o.names(
        (),
        help="Networks:",
        choices=tuple(dict.fromkeys(name for names in NETWORKS.values() for name in names)),
        usual="by data",
        panel=o.NETWORK,
        identity=False,
    )
    methods: tuple[str, ...] = o.names(METHODS, help="Methods:", choices=METHODS, panel=o.METHOD, identity=False)
    epochs: float = o.amount(1.0, "Factor on the lengths of all fits.", o.METHOD)
    minutes: float | None = o.amount(
        None, "Most minutes of a method in this call.", o.METHOD, usual="no limit", identity=False
    )
    device: str = o.device_option("cpu")
    seed: int = o.seed_option()

    def __post_init__(self) -> None:
        o.check(self)

    @property
    def chosen_networks(self) -> tuple[str, ...]:
        """The networks that are fitted."""
        return self.networks or NETWORKS[self.data]

    def config(self) -> dict[str, Any]:
        """The settings as JSON."""
        return as_json(self)

    def common(self) -> dict[str, Any]:
        """The settings on which the numbers of a single fit depend."""
        return identity(self)
