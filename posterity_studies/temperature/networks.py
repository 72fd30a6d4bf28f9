"""The networks of the study by name, with what is usual for each."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from torch import nn

from posterity.model.network import Network
from posterity.model.units import neurons, parameters
from posterity.networks import MLP, LeNet, MeanFieldNetwork, ResNet
from posterity.priors.fan import FanIn, ScaleRule


@dataclass(frozen=True)
class SameScale(ScaleRule):
    """Variance gain^2 for every tensor: neurons that begin alike, whatever the width.

    >>> SameScale(0.5).variance(fan_in=100, fan_out=10)
    0.25
    """

    def variance(self, fan_in: int, fan_out: int) -> float:
        return self.gain**2


@dataclass(frozen=True)
class Architecture:
    """A network of the study.

    `make` takes the shape of a row, the number of classes and the width. `units` says what N of tau p/N counts.
    `widths` are the usual ones; empty where they must be given, and (None,) where the network has no width. `etas` and
    `taus` are the temperatures where the user names none.
    """

    label: str
    make: Callable[[tuple[int, ...], int, int | None], nn.Module]
    units: str
    flat: bool
    epochs: int
    batch_size: int
    step_size: float
    widths: tuple[int | None, ...] = ()
    etas: tuple[float, float, int] | None = None
    taus: tuple[float, float, int] | None = None
    initial_scales: ScaleRule = field(default_factory=lambda: FanIn(gain=0.1))

    def count(self, network: Network) -> int:
        """N: the neurons of the network, or its parameters."""
        return neurons(network) if self.units == "neurons" else parameters(network)


ARCHITECTURES: Mapping[str, Architecture] = MappingProxyType(
    {
        "one-hidden": Architecture(
            "one hidden layer, averaged over its neurons",
            lambda shape, classes, width: MeanFieldNetwork(shape[0], _wide(width), classes),
            "neurons",
            flat=True,
            epochs=30,
            batch_size=500,
            step_size=0.03,  # by the bound on 2,000 and 10,000 training digits; it does not depend on the width
            taus=(1e-6, 1.0, 13),
            initial_scales=SameScale(gain=0.05),
        ),
        "mlp": Architecture(
            "one hidden layer with biases",
            lambda shape, classes, width: MLP((shape[0], _wide(width), classes)),
            "parameters",
            flat=True,
            epochs=30,
            batch_size=500,
            step_size=0.003,
            etas=(1e-5, 10.0, 13),
        ),
        "lenet": Architecture(
            "LeNet",
            lambda shape, classes, _: LeNet(classes, shape[0], shape[-1]),
            "parameters",
            flat=False,
            epochs=30,
            batch_size=250,
            step_size=0.003,
            widths=(None,),
            etas=(1e-5, 10.0, 13),
        ),
        "resnet-20": Architecture(
            "ResNet-20",
            lambda shape, classes, width: ResNet(20, classes, shape[0], _wide(width)),
            "parameters",
            flat=False,
            epochs=50,
            batch_size=250,
            step_size=0.003,
            widths=(16,),
            etas=(1e-5, 10.0, 13),
        ),
    }
)


def _wide(width: int | None) -> int:
    assert width is not None  # the settings have refused it
    return width
