"""The options of `study fidelity`."""

from dataclasses import dataclass
from typing import Any

from posterity.options import as_json, identity, option
from posterity_studies import options as o

SMALL = ("moons", "sine", "breast-cancer", "energy", "boston")
CIFAR = "cifar-10"
SMALL_METHODS = (
    "map",
    "ensemble",
    "dropout",
    "laplace-last-layer",
    "laplace-kronecker",
    "laplace-drawn",
    "laplace",
    "laplace-ensemble",
    "mean-field",
    "full-rank",
    "low-rank",
    "natural-gradient",
    "swag",
    "multi-swag",
    "sgld",
    "sghmc",
    "langevin",
    "hmc",
    "mams",
    "chees",
    "mclmc",
    "ensemble-mclmc",
)
CIFAR_METHODS = (
    "map",
    "ensemble",
    "large-ensemble",
    "dropout",
    "laplace-last-layer",
    "laplace-kronecker",
    "mean-field",
    "mean-field-ensemble",
    "natural-gradient",
    "swag",
    "multi-swag",
    "sgld",
    "sghmc",
    "sghmc-mixture",
    "sghmc-cycles",
)


@dataclass(frozen=True)
class Settings:
    """Problems and methods, and how much is computed.

    A small problem fixes rows, network, prior and noise, so that its posterior is one. Its truth is `truths` runs of
    NUTS, each of four chains with `draws` transitions after a warm-up of as many. With --paper there are more and
    longer runs.

    CIFAR-10 trains on the 40,960 images on which the reference chains ran, or on the first `rows` of them, and takes
    the settings of each method from its table, which was fixed on the training images that remain. `minutes` limits the
    time of a row in one call: a fit that takes longer is stored, and the same command continues it.
    """

    problems: tuple[str, ...] = o.names(
        SMALL,
        help="Problems:",
        choices=(*SMALL, CIFAR),
        usual="the small ones",
        panel=o.DATA,
        flags=("--problem",),
        identity=False,
    )
    methods: tuple[str, ...] = o.names(
        (),
        help="Methods:",
        choices=tuple(dict.fromkeys((*SMALL_METHODS, *CIFAR_METHODS))),
        usual="all of a problem",
        panel=o.METHOD,
        identity=False,
    )
    paper: bool = option(
        False, help="Four longer runs of NUTS for the truth of a small problem, not two.", panel=o.METHOD
    )
    rows: int | None = o.count(None, "Training images of CIFAR-10.", o.DATA, usual="40,960")
    epochs: float = o.amount(1.0, "Factor on the lengths of all fits on CIFAR-10.", o.METHOD)
    rates: tuple[float, ...] = o.grid(
        "--rates",
        (1.0,),
        help=f"Factors on the learning rates of chains on CIFAR-10, a row for each. {o.GRID}",
        panel=o.METHOD,
        identity=False,
    )
    bf16: bool = option(False, help="Steps on CIFAR-10 run the network in bf16.", panel=o.METHOD)
    width: int = o.count(16, "Channels of the first stage of the residual network.", o.NETWORK)
    depth: int = o.count(20, "Layers of the residual network, 6 n + 2.", o.NETWORK)
    minutes: float | None = o.amount(
        None, "Most minutes of a row on CIFAR-10 in this call.", o.METHOD, usual="no limit", identity=False
    )
    device: str = o.device_option("cpu")
    seed: int = o.seed_option()

    def __post_init__(self) -> None:
        o.check(self)
        for problem in self.problems:
            known = CIFAR_METHODS if problem == CIFAR else SMALL_METHODS
            other = [method for method in self.methods if method not in known]
            if other:
                raise ValueError(f"--methods: {problem} has no '{other[0]}'. Choose of: {', '.join(known)}.")
        if (self.depth - 2) % 6 or self.depth < 8:
            raise ValueError(f"--depth must be 6 n + 2 with n at least 1: 8, 14, 20, ... Got {self.depth}.")

    @property
    def truths(self) -> int:
        """Runs of NUTS that make the truth of a small problem."""
        return 4 if self.paper else 2

    @property
    def draws(self) -> int:
        """Transitions of each chain of a truth that are kept; its warm-up has as many."""
        return 2000 if self.paper else 500

    def methods_of(self, problem: str) -> tuple[str, ...]:
        """The methods that are compared on a problem."""
        return self.methods or (CIFAR_METHODS if problem == CIFAR else SMALL_METHODS)

    def config(self) -> dict[str, Any]:
        """The settings as JSON."""
        return as_json(self)

    def common(self) -> dict[str, Any]:
        """The settings on which the numbers of a single fit depend."""
        return identity(self)
