"""A normal prior in disguise."""

from dataclasses import dataclass

from torch import Tensor

from posterity.numerics.random import Key
from posterity.priors import Normal, Prior


@dataclass(frozen=True)
class Opaque(Prior):
    """A normal prior that does not say so, with the gradient of the base class: keeps `Layerwise` from fusing."""

    inner: Normal

    def log_prob(self, theta: Tensor) -> Tensor:
        return self.inner.log_prob(theta)

    def sample(self, shape: tuple[int, ...], key: Key, like: Tensor) -> Tensor:
        return self.inner.sample(shape, key, like)

    def variance(self, like: Tensor) -> Tensor:
        return self.inner.variance(like)

    def cross_entropy(self, mean: Tensor, scale: Tensor) -> Tensor:
        return self.inner.cross_entropy(mean, scale)

    def precision(self, theta: Tensor) -> Tensor:
        return self.inner.precision(theta)
