"""What every curvature of the negative log-likelihood can do."""

from abc import ABC, abstractmethod
from typing import ClassVar

from torch import Tensor

from posterity.curvature.rows import Rows
from posterity.likelihoods.likelihood import Likelihood
from posterity.model.data import Batch
from posterity.model.network import Buffers
from posterity.model.problem import Problem
from posterity.numerics.random import Key


class Curvature(ABC):
    """A symmetric matrix that stands for the Hessian of -log p(D | theta) over the random weights.

    Sums over the rows of a batch: untempered, unscaled, without the prior. Most have the form sum_n J_n^T S_n S_n^T J_n
    with columns S_n in the space of the outputs; a `Structure` says how much of the matrix is kept.
    """

    factored: ClassVar[bool] = True
    """Whether it has columns."""

    scales_with_noise: ClassVar[bool] = True
    """Whether, under Gaussian noise, it goes as the inverse square of the noise scale."""

    @abstractmethod
    def columns(self, likelihood: Likelihood, outputs: Tensor, targets: Tensor, key: Key) -> Tensor:
        """S for each row, (K, n, *event), at outputs (n, *event)."""

    def num_columns(self, outputs: int) -> int:
        """How many columns K a row has at most, with this many outputs."""
        return outputs

    def matrix(
        self, joint: Problem, theta: Tensor, batch: Batch | None, buffers: Buffers | None, seed: int = 0
    ) -> Tensor:
        """The dense matrix (R, R) in float64, for one theta (P,)."""
        return Rows(self, joint, theta, batch, buffers, Key(seed)).matrix()

    def diagonal(
        self, joint: Problem, theta: Tensor, batch: Batch | None, buffers: Buffers | None, seed: int = 0
    ) -> Tensor:
        """Its diagonal (R,) in float64, for one theta (P,)."""
        return Rows(self, joint, theta, batch, buffers, Key(seed)).diagonal()
