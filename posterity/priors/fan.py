"""Rules that set a tensor's prior variance by its fans, as initialisations do."""

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from math import prod

from posterity.errors import positive
from posterity.numerics.layout import Layout, Slice


@dataclass(frozen=True)
class ScaleRule(ABC):
    """A prior variance as a function of a tensor's fans; `gain` multiplies the standard deviation."""

    gain: float = 1.0

    def __post_init__(self) -> None:
        positive(f"{type(self).__name__}.gain", self.gain)

    @abstractmethod
    def variance(self, fan_in: int, fan_out: int) -> float:
        """Variance of each weight of a tensor with these fans."""

    def rescaled(self, factor: float) -> "ScaleRule":
        """The same rule with every standard deviation multiplied."""
        return replace(self, gain=self.gain * factor)


@dataclass(frozen=True)
class FanIn(ScaleRule):
    """Variance gain^2 / fan_in, which keeps the variance of a linear layer's outputs.

    **Math**: Var w = gain^2 / fan_in. With fan_in inputs of unit variance an output has variance gain^2.

    **Limit**: forward signals only; on the edge of chaos `gain` is the activation's sigma_w.

    **Cost**: none; one number a tensor.

    **References**: LeCun et al. (1998), Efficient BackProp, eq. 16.

    **Example**:

    >>> FanIn().variance(fan_in=100, fan_out=10)
    0.01
    """

    def variance(self, fan_in: int, fan_out: int) -> float:
        return self.gain**2 / fan_in


@dataclass(frozen=True)
class Glorot(ScaleRule):
    """Variance 2 gain^2 / (fan_in + fan_out), between what keeps the outputs' and what keeps the gradients' variance.

    **Math**: Var w = 2 gain^2 / (fan_in + fan_out).

    **Limit**: derived for activations that are linear near zero.

    **Cost**: none; one number a tensor.

    **References**: Glorot and Bengio (2010), Understanding the difficulty of training deep feedforward neural networks,
    eq. 12.

    **Example**:

    >>> Glorot().variance(fan_in=30, fan_out=10)
    0.05
    """

    def variance(self, fan_in: int, fan_out: int) -> float:
        return 2.0 * self.gain**2 / (fan_in + fan_out)


@dataclass(frozen=True)
class He(ScaleRule):
    """Variance 2 gain^2 / fan_in, which keeps the second moment of signals through ReLU layers.

    **Math**: Var w = 2 gain^2 / fan_in.

    **Limit**: for ReLU; it is `FanIn(gain=sqrt(2))`.

    **Cost**: none; one number a tensor.

    **References**: He et al. (2015), Delving deep into rectifiers, eq. 10.

    **Example**:

    >>> He().variance(fan_in=50, fan_out=10)
    0.04
    """

    def variance(self, fan_in: int, fan_out: int) -> float:
        return 2.0 * self.gain**2 / fan_in


def fans(part: Slice, layout: Layout) -> tuple[int, int] | None:
    """(fan_in, fan_out) of a weight (out, in, *kernel), or of the weight that a bias belongs to; None without fans.

    A transposed convolution stores (in, out, *kernel), so its two fans come exchanged, as in torch's own
    initialisations.
    """
    shape = part.shape
    if len(shape) == 1 and part.name.split(".")[-1] == "bias":
        sibling = part.name.removesuffix("bias") + "weight"
        shape = next((other.shape for other in layout if other.name == sibling), shape)
    if len(shape) < 2:
        return None
    return prod(shape[1:]), shape[0] * prod(shape[2:])
