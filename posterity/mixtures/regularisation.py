"""What keeps covariances away from zero: a floor under variances, or an inverse-Wishart prior."""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from posterity.errors import positive
from posterity.mixtures.checks import not_negative
from posterity.mixtures.covariance import Covariance
from posterity.mixtures.full import non_negative


class Regularisation(ABC):
    """Covariances from second moments, and what the objective loses by them."""

    @property
    @abstractmethod
    def exact(self) -> bool:
        """Whether the M-step maximises the objective, so that the objective never falls."""

    @property
    @abstractmethod
    def positive(self) -> bool:
        """Whether covariances are positive definite whatever the second moments are."""

    @abstractmethod
    def covariances(self, kind: Covariance, moments: Tensor, counts: Tensor, dimensions: int) -> Tensor:
        """Covariances (R, *shape) from second moments (R, *shape) about the means and counts (R, K)."""

    def estimated(self, kind: Covariance, moments: Tensor, counts: Tensor, dimensions: int) -> Tensor:
        """The same where rounding has left second moments below zero: those are mended if the result shall be positive.

        Sums about means far away lose digits in the difference to those about the new ones.
        """
        if not kind.matrices:
            return self.covariances(kind, moments.clamp_min(0.0), counts, dimensions)
        found = self.covariances(kind, moments, counts, dimensions)
        if self.positive:
            failed = torch.linalg.cholesky_ex(found).info > 0
            if bool(failed.any()):
                mended = self.covariances(kind, non_negative(moments), counts, dimensions)
                found = torch.where(failed[..., None, None], mended, found)
        return found

    @abstractmethod
    def penalty(self, kind: Covariance, factors: Tensor, components: int, dimensions: int) -> Tensor:
        """What is taken from the log-likelihood, in nats (R,), from whitening factors (R, *shape)."""


@dataclass(frozen=True)
class Floor(Regularisation):
    """A number added to all variances after the M-step, as scikit-learn does.

    **Math**: S_k = S_k^ML + eps I, eps = `variance`; no penalty.

    **Limit**: not the maximum of any objective: the log-likelihood may fall by O(eps) in a round. 0 is plain EM, whose
    likelihood has no upper limit: a component on one point ends in an error, after rounds in which digits are lost.

    **Cost**: none.

    **References**: theory of the decks, item 000-07.

    **Example**:

    >>> from posterity.mixtures.spherical import Spherical
    >>> Floor(0.5).covariances(Spherical(), torch.tensor([[6.0]]), torch.tensor([[3.0]]), 2)
    tensor([[1.5000]])
    """

    variance: float = 1e-6

    def __post_init__(self) -> None:
        not_negative("reg_covar", self.variance, ", or an InverseWishart")

    @property
    def exact(self) -> bool:
        """Never: even 0 has no limit to the digits lost on the way to a collapse."""
        return False

    @property
    def positive(self) -> bool:
        return self.variance > 0

    def covariances(self, kind: Covariance, moments: Tensor, counts: Tensor, dimensions: int) -> Tensor:
        return moments / kind.divisors(counts, dimensions) + self.variance * kind.identity(dimensions, moments)

    def penalty(self, kind: Covariance, factors: Tensor, components: int, dimensions: int) -> Tensor:
        return torch.zeros_like(factors.flatten(1)[:, 0])


@dataclass(frozen=True)
class InverseWishart(Regularisation):
    """An inverse-Wishart prior on covariances, at whose mode they are put: the objective never falls.

    **Math**: S_k = (N_k S_k^ML + eps I) / (N_k + nu) with eps = `scale` and nu = `degrees` maximises the log-likelihood
    less 1/2 sum_k [nu log det S_k + eps tr S_k^-1], which is the logarithm of an inverse-Wishart density with scale
    matrix eps I and nu - D - 1 degrees of freedom. A tied covariance has one such term, a diagonal or spherical one the
    term of the matrix that it stands for.

    **Limit**: eps is in squared units of the data, weighed against the scatter of all rows of a component, where a
    floor is weighed against a variance. An empty component has the covariance eps / nu I.

    **Cost**: none.

    **References**: Fraley and Raftery (2007), Bayesian regularization for normal mixture estimation, section 3.

    **Example**:

    >>> from posterity.mixtures.diagonal import Diagonal
    >>> moments, counts = torch.tensor([[[3.0]]]), torch.tensor([[3.0]])
    >>> InverseWishart(scale=2.0, degrees=2.0).covariances(Diagonal(), moments, counts, 1)
    tensor([[[1.]]])
    """

    scale: float
    degrees: float

    def __post_init__(self) -> None:
        positive("InverseWishart.scale", self.scale)
        positive("InverseWishart.degrees", self.degrees)

    @property
    def exact(self) -> bool:
        return True

    @property
    def positive(self) -> bool:
        return True

    def covariances(self, kind: Covariance, moments: Tensor, counts: Tensor, dimensions: int) -> Tensor:
        moments = moments + self.scale * kind.identity_moment(dimensions, moments)
        return moments / kind.divisors(counts, dimensions, self.degrees)

    def penalty(self, kind: Covariance, factors: Tensor, components: int, dimensions: int) -> Tensor:
        """1/2 sum [nu log det S + eps tr S^-1] over the matrices."""
        traces = kind.quadratic(factors, kind.identity_moment(dimensions, factors))
        return (self.degrees * kind.log_determinants(factors, components, dimensions) + self.scale * traces) / 2
