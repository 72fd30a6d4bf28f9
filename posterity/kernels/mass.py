"""What a warm-up learns of the scales of a target."""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from posterity.kernels.windows import Moments

# The estimate from n positions is drawn to a small multiple of one as by so many more (Stan's choice).
_EXTRA, _SMALL = 5.0, 1e-3


class Mass(ABC):
    """How momenta are scaled: by the inverse of a covariance, of which the scale L has L L^T."""

    learns: bool = True

    @abstractmethod
    def initial(self, groups: int, like: Tensor) -> Tensor:
        """The scale before anything is known, for groups of chains: (G, P), or (G, P, P)."""

    @abstractmethod
    def scale(self, moments: Moments) -> Tensor:
        """The scale from moments of positions."""


@dataclass(frozen=True)
class UnitMass(Mass):
    """All directions alike, and nothing learnt: coordinates as they are."""

    learns = False

    def initial(self, groups: int, like: Tensor) -> Tensor:
        """Ones (G, P)."""
        return torch.ones(groups, like.shape[-1], dtype=like.dtype, device=like.device)

    def scale(self, moments: Moments) -> Tensor:
        """Ones."""
        return torch.ones_like(moments.mean)


@dataclass(frozen=True)
class DiagonalMass(Mass):
    """One standard deviation for each parameter, learnt in the warm-up.

    >>> rows = torch.tensor([[[0.0], [2.0]]])
    >>> from posterity.kernels.windows import no_moments, with_positions
    >>> moments = with_positions(no_moments(DiagonalMass().initial(1, rows)), rows[0])
    >>> round(float(DiagonalMass().scale(moments) ** 2), 4)  # 2/7 of the variance 2, 5/7 of 0.001
    0.5721
    """

    def initial(self, groups: int, like: Tensor) -> Tensor:
        """Ones (G, P)."""
        return UnitMass().initial(groups, like)

    def scale(self, moments: Moments) -> Tensor:
        """Standard deviations (G, P), regularised."""
        share = moments.number / (moments.number + _EXTRA)
        variance = moments.scatter / (moments.number - 1.0)
        return (share * variance + (1.0 - share) * _SMALL).sqrt()


@dataclass(frozen=True)
class DenseMass(Mass):
    """A whole covariance, learnt in the warm-up: for strongly correlated parameters, up to some hundred of them."""

    def initial(self, groups: int, like: Tensor) -> Tensor:
        """Unit matrices (G, P, P)."""
        size = like.shape[-1]
        return torch.eye(size, dtype=like.dtype, device=like.device).repeat(groups, 1, 1)

    def scale(self, moments: Moments) -> Tensor:
        """Lower factors (G, P, P) of the covariances, regularised; in float64 inside.

        They are drawn to a small multiple of their diagonals: a fixed number would hide the correlations of
        parameters whose variances are below it.
        """
        count = moments.number.double()
        share = count / (count + _EXTRA)
        covariance = moments.scatter.double() / (count - 1.0)
        variance = covariance.diagonal(dim1=-2, dim2=-1)
        small = _SMALL * torch.where(variance > 0.0, variance, 1.0).diag_embed()
        factor: Tensor = torch.linalg.cholesky(share * covariance + (1.0 - share) * small)
        return factor.to(moments.scatter.dtype).contiguous()  # as it comes back from a file, to the bit
