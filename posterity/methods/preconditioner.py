"""Step sizes for each weight: what samplers on mini-batches precondition their gradients with."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from posterity.errors import fraction, positive


class Preconditioner(ABC):
    """A positive diagonal matrix G that multiplies the gradient, and the variance of the noise; a value.

    It is learnt in the warm-up alone: while draws are kept it rests, and they have an exact law.
    """

    learning_rate: ClassVar[float]
    """That of SGD on the mean loss, times G, from which samplers take their usual step size."""

    learns: ClassVar[bool]
    """Whether it needs a warm-up."""

    @abstractmethod
    def init(self, theta: Tensor) -> Tensor | None:
        """What it knows before the first gradient of chains theta (C, P)."""

    @abstractmethod
    def learn(self, known: Tensor | None, grad: Tensor, step: Tensor, warmup: int) -> Tensor | None:
        """What it knows after the gradient of a step; its number, from 0, is a tensor () that is not to be read."""

    @abstractmethod
    def matrix(self, known: Tensor | None, step: Tensor, warmup: int, num_data: float | Tensor) -> float | Tensor:
        """The diagonal of G, 1 or (C, P), after `learn` of that step.

        `num_data`, a number or (C, 1), is by what the gradient exceeds that of the mean loss.
        """


@dataclass(frozen=True)
class Plain(Preconditioner):
    """No preconditioner: G = 1.

    >>> Plain().matrix(None, torch.tensor(0.0), 10, 100.0)
    1.0
    """

    learning_rate: ClassVar[float] = 0.03
    learns: ClassVar[bool] = False

    def init(self, theta: Tensor) -> None:
        """Nothing."""

    def learn(self, known: Tensor | None, grad: Tensor, step: Tensor, warmup: int) -> None:
        """Nothing."""

    def matrix(self, known: Tensor | None, step: Tensor, warmup: int, num_data: float | Tensor) -> float | Tensor:
        """1."""
        return 1.0


@dataclass(frozen=True)
class RMSprop(Preconditioner):
    """The running size of the gradients of each weight in each chain, as RMSprop has it.

    V <- decay V + (1 - decay) grad^2, divided by 1 - decay^t after t steps, and G = num_data / (sqrt(V) + damping): a
    step along G grad / num_data is one of RMSprop on the mean loss. V rests after the warm-up. (Li et al., 2016,
    Algorithm 1, let it follow the gradients for ever and leave out the derivative of G: a bias that no step size
    removes.) `damping`, in units of the gradient of the whole log density, bounds the steps of weights that have no
    gradient yet: under a prior N(0, 1) it is about 1 later.

    >>> rule, grad, step = RMSprop(damping=0.5), torch.tensor([[2.0, 0.0]]), torch.tensor(0.0)
    >>> known = rule.learn(rule.init(grad), grad, step, 10)
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
        """V = 0."""
        return torch.zeros_like(theta)

    def learn(self, known: Tensor | None, grad: Tensor, step: Tensor, warmup: int) -> Tensor:
        """The next V."""
        assert known is not None
        held = self.decay + (1.0 - self.decay) * (step >= warmup).to(step.dtype)
        return held * known + (1.0 - held) * grad.square()

    def matrix(self, known: Tensor | None, step: Tensor, warmup: int, num_data: float | Tensor) -> float | Tensor:
        """See the class."""
        assert known is not None
        count = (step + 1).clamp_max(warmup)
        return num_data / ((known / (1.0 - self.decay**count)).sqrt() + self.damping)
