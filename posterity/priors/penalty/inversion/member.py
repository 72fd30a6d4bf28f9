"""One member of a family: the density of X by which w = mu + X is smeared."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from posterity.priors.penalty.families import Family


@dataclass(frozen=True)
class Member:
    """X ~ beta_{0, nu} of `family` at nu = `scale`, in float64.

    r(mu) = -entropy - E log alpha(mu + X). The convolution is with the reflection of the density of X, which is what
    an expectation over mu + X is (theory 002-05; without it a skewed family gives another prior).
    """

    family: Family
    scale: float

    @property
    def entropy(self) -> float:
        """-E log beta_0(X), in nats."""
        return self.family.entropy(self.scale)

    @property
    def spread(self) -> float:
        """The standard deviation of X."""
        _, first, second = self.moments(2).tolist()
        return math.sqrt(second - first**2)

    def moments(self, order: int) -> Tensor:
        """E X^n for n = 0 ... order, (order + 1,) on the CPU."""
        return torch.tensor(self.family.moments(self.scale, order), dtype=torch.float64, device="cpu")

    def characteristic(self, frequency: Tensor) -> Tensor:
        """E exp(i k X) for frequencies k (...), complex (...)."""
        return self.family.characteristic(frequency, self.scale)

    def gain(self, frequency: Tensor) -> Tensor:
        """1 / |E exp(i k X)|: by how much inverting multiplies what r has at frequency k, (...) -> (...)."""
        return self.characteristic(frequency).abs().reciprocal()

    def nodes(self) -> tuple[Tensor, Tensor]:
        """Points x and weights of sum 1, (Q,) each, with E f(X) = the sum of weights times f(x)."""
        return self.family.nodes(self.scale)

    def smooth(self, function: Callable[[Tensor], Tensor], mu: Tensor) -> Tensor:
        """E f(mu + X), (N,) -> (N,), by the nodes."""
        points, weights = (part.to(mu.device) for part in self.nodes())
        return function(mu.unsqueeze(-1) + points) @ weights

    def finer_nodes(self) -> tuple[Tensor, Tensor] | None:
        """Other nodes, to check by; None where there is no need."""
        return self.family.finer_nodes(self.scale)
