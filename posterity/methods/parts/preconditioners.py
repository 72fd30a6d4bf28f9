"""Preconditioners of samplers on mini-batches: none, and that of RMSprop."""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from posterity.errors import fraction, positive


class Preconditioner(ABC):
    """A positive diagonal matrix G that multiplies the gradient and the variance of the noise.

    It is learnt in the warm-up alone and constant while draws are kept, so that these have an exact law.
    """

    learning_rate: ClassVar[float]
    """Learning rate of SGD on the mean loss, times G, that sets the default step size of samplers."""

    learns: ClassVar[bool]
    """Whether it needs a warm-up."""

    @abstractmethod
    def init(self, theta: Tensor) -> Any:
        """Return the running statistics before the first gradient of chains theta (C, P)."""

    @abstractmethod
    def learn(self, known: Any, theta: Tensor, grad: Tensor, step: Tensor, warmup: int) -> Any:
        """Return the running statistics after the gradient at theta of a step; its number, from 0, is a tensor ()."""

    @abstractmethod
    def matrix(self, known: Any, step: Tensor, warmup: int, num_data: float | Tensor) -> float | Tensor:
        """Return the diagonal of G, 1 or (C, P), after `learn` of that step.

        `num_data`, a number or (C, 1), is the ratio of the gradient to that of the mean loss.
        """

    def usual_rate(self, momentum: float = 0.0) -> float:
        """Return the learning rate of the default step size, less with momentum, which carries gradients further."""
        return self.learning_rate * math.sqrt(1.0 - momentum)

    def moved(self, theta: Tensor, sampled: Tensor, known: Any, step: Tensor, warmup: int) -> Tensor:
        """Return theta (C, P) after a step: as sampled, or where the warm-up begins with a search, where that goes."""
        return sampled

    def reference(self, known: Any, step: Tensor, warmup: int) -> Tensor | None:
        """Return the point (C, P) about which the configurational temperature is taken; None for the origin."""
        return None


@dataclass(frozen=True)
class Plain(Preconditioner):
    """No preconditioner: G = 1.

    >>> Plain().matrix(None, torch.tensor(0.0), 10, 100.0)
    1.0
    """

    learning_rate: ClassVar[float] = 0.03
    learns: ClassVar[bool] = False

    def init(self, theta: Tensor) -> None:
        return None

    def learn(self, known: None, theta: Tensor, grad: Tensor, step: Tensor, warmup: int) -> None:
        return None

    def matrix(self, known: None, step: Tensor, warmup: int, num_data: float | Tensor) -> float:
        return 1.0


@dataclass(frozen=True)
class RMSprop(Preconditioner):
    """Inverse root mean square of the running gradients of each weight in each chain, as in RMSprop.

    V <- decay V + (1 - decay) grad^2, divided by 1 - decay^t after t steps, and G = num_data / (sqrt(V) + damping): a
    step along G grad / num_data is one of RMSprop on the mean loss. V is constant after the warm-up. (Li et al., 2016,
    Algorithm 1, update it for ever and leave out the derivative of G: a bias that no step size removes.) `damping`, in
    units of the gradient of the whole log density, bounds the steps of weights that have no gradient yet: under a
    prior N(0, 1) it is about 1 later.

    >>> rule, grad, step = RMSprop(damping=0.5), torch.tensor([[2.0, 0.0]]), torch.tensor(0.0)
    >>> known = rule.learn(rule.init(grad), grad, grad, step, 10)
    >>> rule.matrix(known, step, 10, 1.0)
    tensor([[0.4000, 2.0000]])
    """

    learning_rate: ClassVar[float] = 1e-3
    learns: ClassVar[bool] = True

    decay: float = 0.99
    damping: float = 1.0

    def __post_init__(self) -> None:
        fraction("RMSprop.decay", self.decay)
        positive("RMSprop.damping", self.damping)

    def init(self, theta: Tensor) -> Tensor:
        return torch.zeros_like(theta)

    def learn(self, known: Tensor, theta: Tensor, grad: Tensor, step: Tensor, warmup: int) -> Tensor:
        held = self.decay + (1.0 - self.decay) * (step >= warmup).to(step.dtype)
        return held * known + (1.0 - held) * grad.square()

    def matrix(self, known: Tensor, step: Tensor, warmup: int, num_data: float | Tensor) -> Tensor:
        count = (step + 1).clamp_max(warmup)
        return num_data / ((known / (1.0 - self.decay**count)).sqrt() + self.damping)
