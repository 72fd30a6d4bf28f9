"""Losses l(f, y) of one row, convex in f."""

from abc import ABC, abstractmethod

from torch import Tensor

from posterity.evidence.wide.output_law import OutputLaw


class Loss(ABC):
    """l(f, y) = -log p(y | f) - log Z for rows of outputs f (..., P, C), convex and smooth in f."""

    @property
    @abstractmethod
    def smoothness(self) -> float:
        """beta: no eigenvalue of the curvature is larger, at any f."""

    @abstractmethod
    def checked(self, targets: Tensor, outputs: int) -> Tensor:
        """The targets as the other functions take them, or a ValueError that says what is wrong with them."""

    @abstractmethod
    def value(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """l, (..., P, C) -> (..., P)."""

    @abstractmethod
    def slope(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Gradient of l in f, (..., P, C)."""

    @abstractmethod
    def curvature(self, outputs: Tensor) -> Tensor:
        """Hessian of l in f, (..., P, C, C); that of these losses does not depend on the target."""

    @abstractmethod
    def excess(self, law: OutputLaw) -> Tensor:
        """E l(f, y) - l(E f, y) under the law of f, (..., P): at least 0; not the difference of the two."""

    @abstractmethod
    def log_normaliser(self, outputs: int) -> float:
        """log Z of one row: log p(y | f) = -l(f, y) - log Z."""

    def second_order(self, law: OutputLaw) -> Tensor:
        """1/2 tr(curvature at E f times Cov f), (..., P): the excess up to O(1/N^2)."""
        return 0.5 * (self.curvature(law.mean) * law.covariance).sum((-1, -2))
