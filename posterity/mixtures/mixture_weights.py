"""How the unknown weights of a mixture are distributed."""

from abc import ABC, abstractmethod

from torch import Tensor


class MixtureWeights(ABC):
    """A conjugate family for the weights of K components, by concentrations (R, *shape)."""

    @property
    @abstractmethod
    def ordered(self) -> bool:
        """Whether the order of the components matters, large ones first."""

    @abstractmethod
    def prior(self, concentration: Tensor, components: int) -> Tensor:
        """The concentrations (1, *shape) of the prior, from its one number as a tensor ()."""

    @abstractmethod
    def updated(self, prior: Tensor, counts: Tensor) -> Tensor:
        """The posterior (R, *shape) when components have counts (R, K) of rows."""

    @abstractmethod
    def expected_logs(self, concentration: Tensor) -> Tensor:
        """E log weight_k, (R, K)."""

    @abstractmethod
    def means(self, concentration: Tensor) -> Tensor:
        """E weight_k, (R, K), with sum 1."""

    @abstractmethod
    def divergence(self, concentration: Tensor, prior: Tensor) -> Tensor:
        """KL(posterior || prior) in nats, (R,)."""
