"""What every penalty on weights can do."""

from abc import ABC, abstractmethod

from torch import Tensor

from posterity.priors.prior import Prior


class Penalty(ABC):
    """A penalty r of one weight tensor (out, in, *kernel), in nats, without its factor.

    A penalty is an immutable value. Penalised maximum likelihood with `factor` r(w) is the mode under `prior(factor)`:
    the reading of a penalty by a posterior without width. Other readings are made by `to_prior`.
    """

    @abstractmethod
    def __call__(self, weight: Tensor) -> Tensor:
        """r(w), summed over the tensor: (out, in, *kernel) -> ()."""

    @abstractmethod
    def prior(self, factor: float | Tensor = 1.0) -> Prior:
        """The prior exp(-factor r(w)) / Z, not bound; `factor` is a number or (M,) with one for each member."""

    @abstractmethod
    def factor(self, variance: float, shape: tuple[int, ...]) -> float:
        """The factor with which each weight of a tensor of `shape` has this variance under `prior(factor)`."""

    @property
    @abstractmethod
    def formula(self) -> str:
        """r in one line of plain text."""

    def __str__(self) -> str:
        return self.formula
