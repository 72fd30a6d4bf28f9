"""The preconditioner of samplers on mini-batches where nothing is set: Fisher scoring by the gradients."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from posterity.errors import positive
from posterity.methods.parts.preconditioners import Preconditioner
from posterity.optim.gradient_scale import GradientScale, ScaleState


@dataclass(frozen=True)
class Fisher(Preconditioner):
    """Inverse mean square of the gradients of each weight in each chain, with steps that their largest variance bounds.

    **Math**: G = num_data / (lambda V), with the V and lambda of `optim.GradientScale`, whose warm-up begins with a
    search for a mode by Adam with steps of `rate`. In a chain that has come to rest E[grad grad^T] is the curvature H
    plus the covariance of the gradients of batches, which is H (rows / batch - 1) for a model that is right. So at a
    learning rate e a step of SGLD widens no direction by more than e / 2 in variance, by its length and the noise of
    its gradients together.

    **References**: Ahn, Korattikara and Welling (2012), Bayesian posterior sampling via stochastic gradient Fisher
    scoring.
    """

    learning_rate: ClassVar[float] = 0.3
    learns: ClassVar[bool] = True

    rate: float = 0.01

    def __post_init__(self) -> None:
        positive("Fisher.rate", self.rate)

    @property
    def _scale(self) -> GradientScale:
        return GradientScale(self.rate)

    def usual_rate(self, momentum: float = 0.0) -> float:
        return self.learning_rate * (1.0 - momentum)  # momentum carries gradients further by 1 / (1 - momentum)

    def init(self, theta: Tensor) -> ScaleState:
        return self._scale.init(theta)

    def learn(self, known: ScaleState, theta: Tensor, grad: Tensor, step: Tensor, warmup: int) -> ScaleState:
        return self._scale.learn(known, theta, grad, step, warmup)

    def matrix(self, known: ScaleState, step: Tensor, warmup: int, num_data: float | Tensor) -> Tensor:
        return num_data / (self._scale.largest(known) * self._scale.squares(known))

    def moved(self, theta: Tensor, sampled: Tensor, known: ScaleState, step: Tensor, warmup: int) -> Tensor:
        return self._scale.searched(theta, sampled, known, step, warmup)

    def reference(self, known: ScaleState, step: Tensor, warmup: int) -> Tensor:
        return self._scale.reference(known, step, warmup)
