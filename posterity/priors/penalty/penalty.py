"""What every penalty on weights can do."""

from abc import ABC, abstractmethod

from torch import Tensor

from posterity.priors.prior import Prior


def summable(weight: Tensor) -> Tensor:
    """Weights in a number type that can hold sums over them: float32 where theirs has fewer digits, else their own."""
    return weight.float() if weight.is_floating_point() and weight.element_size() < 4 else weight


class Penalty(ABC):
    """A penalty r of one weight tensor (out, in, *kernel), in nats, without its factor.

    A penalty is an immutable value. Penalised maximum likelihood with `factor` r(w) is the mode under `prior(factor)`:
    the reading of a penalty by a posterior without width. Other readings are made by `to_prior`, for which r is a
    function of the posterior's mean mu and scale nu (`of`, and for single weights `each`).
    """

    @abstractmethod
    def __call__(self, weight: Tensor) -> Tensor:
        """r(w), summed over the tensor: (out, in, *kernel) -> (), in float32 for weights of fewer digits."""

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

    def of(self, mean: Tensor, scale: Tensor) -> Tensor:
        """r of a posterior with these means and scales, (out, in, *kernel) each -> (); that of the means by default."""
        return self(mean)

    @property
    def separates(self) -> bool:
        """Whether r is a sum over single weights, each of which `each` gives."""
        return True

    @abstractmethod
    def each(self, mean: Tensor, scale: Tensor) -> Tensor:
        """r of each weight alone, (...) and (...) -> (...); a TypeError where r is no such sum."""

    def __str__(self) -> str:
        return self.formula
