"""Adaptation in the warm-up: step sizes by dual averaging, mass matrices over windows."""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor


class DualAveraging(NamedTuple):
    """Dual averaging of log step sizes: the next to try, their average, and the state of the search."""

    log_step: Tensor
    average: Tensor
    error: Tensor
    centre: Tensor
    tried: Tensor


# The constants of Hoffman and Gelman (2014), section 3.2.1: shrinkage, delay, forgetting, and the first pull upwards.
SHRINKAGE, DELAY, FORGETTING, UPWARDS = 0.05, 10.0, 0.75, 10.0


def averaging_from(step_size: Tensor, upwards: float = UPWARDS) -> DualAveraging:
    """Begin the search at step sizes (G,), pulled towards `upwards` times these."""
    log_step, none = step_size.log(), torch.zeros_like(step_size)
    return DualAveraging(log_step, log_step, none, log_step + math.log(upwards), torch.zeros_like(step_size[0]))


def averaged(search: DualAveraging, accept: Tensor, wanted: float, shrinkage: float = SHRINKAGE) -> DualAveraging:
    """Update the search after a transition with acceptance probability `accept` (G,), of which `wanted` is the target.

    **Math**: with t transitions so far, e_t = (1 - 1/(t + 10)) e_{t-1} + (wanted - accept) / (t + 10), log step =
    centre - e_t sqrt(t) / shrinkage, and its average with weight t^-0.75.

    **References**: Hoffman and Gelman (2014), The no-U-turn sampler, eq. 6.

    >>> search = averaging_from(torch.ones(1))
    >>> for _ in range(1000):  # a sampler that accepts with probability exp(-step)
    ...     search = averaged(search, (-search.log_step.exp()).exp(), 0.8)
    >>> round(float((-search.average.exp()).exp()), 1)
    0.8
    """
    count = search.tried + 1.0
    share = 1.0 / (count + DELAY)
    error = (1.0 - share) * search.error + share * (wanted - accept)
    log_step = search.centre - count.sqrt() / shrinkage * error
    weight = count**-FORGETTING
    average = weight * log_step + (1.0 - weight) * search.average
    return DualAveraging(log_step, average, error, search.centre, count)


FIRST, LAST, BASE = 75, 50, 25  # transitions before, after and in the first window of a long warm-up
SETTLING = 5  # transitions in which a step size recovers from the first, upward pull of its search
SHORTEST = 20  # a shorter warm-up learns the step size alone
FEW = 4  # up to so many chains learn no sooner than a single chain
SOONEST, LEAST = 20, 5  # FIRST and BASE for many chains


# Single proposals are accepted with probabilities near 0 or 1, and a noisy search ends with steps that are too large.
# After the last mass matrix their search is calm: it is long, moves little, and starts without an upward pull.
CALM_SHRINKAGE, CALM_SHARE = 0.5, 0.3


@lru_cache
def windows(warmup: int, chains: int = 1, least: float = 0.0) -> tuple[int, tuple[int, ...]]:
    """First transition whose draws count, and the transitions after which the mass matrix is re-estimated.

    Windows double in length and each forgets the draws before it; before and after them only the step size is learnt.
    Many `chains` that learn together have enough draws sooner: their windows begin earlier and are shorter. A shorter
    warm-up is divided as 15 %, 75 %, 10 %, the last of at least 5 transitions. At least the share `least` of a warm-up
    follows the last mass matrix.

    >>> windows(1000)
    (75, (100, 150, 250, 450, 950))
    >>> windows(200, chains=16)
    (20, (26, 38, 62, 150))
    >>> windows(100)
    (15, (90,))
    >>> windows(10)
    (10, ())
    """
    if warmup < SHORTEST:
        return warmup, ()
    share = FEW / max(FEW, chains)
    first, length = max(SOONEST, int(share * FIRST)), max(LEAST, int(share * BASE))
    last = max(LAST, int(least * warmup))
    if warmup < first + last + length:
        first, last = int(0.15 * warmup), max(SETTLING, int(max(0.1, least) * warmup))
        length = warmup - first - last
    ends, end, stop = [], first, warmup - last
    while end < stop:
        end += length
        length *= 2
        if end + length > stop:  # too short a window would be left
            end = stop
        ends.append(end)
    return first, tuple(ends)


class Moments(NamedTuple):
    """Number, mean (G, P) and scatter about it, (G, P) or (G, P, P), of the positions of groups of chains."""

    number: Tensor
    mean: Tensor
    scatter: Tensor


def with_positions(moments: Moments, positions: Tensor) -> Moments:
    """Add positions (C, P) to the moments, C / G to each group."""
    rows = positions.reshape(len(moments.mean), -1, positions.shape[-1])  # (G, C / G, P)
    more, mean = rows.shape[1], rows.mean(1)
    number = moments.number + more
    away, shift = rows - mean.unsqueeze(1), mean - moments.mean
    weight = moments.number * more / number
    if moments.scatter.dim() == 2:
        scatter = moments.scatter + away.square().sum(1) + weight * shift.square()
    else:
        scatter = moments.scatter + away.mT @ away + weight * shift.unsqueeze(2) * shift.unsqueeze(1)
    return Moments(number, moments.mean + shift * (more / number), scatter)


def no_moments(like: Tensor) -> Moments:
    """Moments before any draw, for a scale `like` (G, P) or (G, P, P)."""
    mean = torch.zeros_like(like[..., 0] if like.dim() == 3 else like)
    return Moments(torch.zeros((), dtype=like.dtype, device=like.device), mean, torch.zeros_like(like))


# The estimate from n positions is shrunk towards _SMALL times the identity as by _EXTRA more positions (as in Stan).
_EXTRA, _SMALL = 5.0, 1e-3


class Mass(ABC):
    """Mass matrix of the momenta: the inverse of a covariance L L^T with scale L."""

    learns: bool = True

    @abstractmethod
    def initial(self, groups: int, like: Tensor) -> Tensor:
        """Initial scale of groups of chains: (G, P) or (G, P, P)."""

    @abstractmethod
    def scale(self, moments: Moments) -> Tensor:
        """Estimate the scale from moments of positions."""


@dataclass(frozen=True)
class UnitMass(Mass):
    """Unit mass: nothing is learnt."""

    learns = False

    def initial(self, groups: int, like: Tensor) -> Tensor:
        return torch.ones(groups, like.shape[-1], dtype=like.dtype, device=like.device)

    def scale(self, moments: Moments) -> Tensor:
        return torch.ones_like(moments.mean)


@dataclass(frozen=True)
class DiagonalMass(Mass):
    """One standard deviation for each parameter, learnt in the warm-up.

    >>> rows = torch.tensor([[[0.0], [2.0]]])
    >>> moments = with_positions(no_moments(DiagonalMass().initial(1, rows)), rows[0])
    >>> round(float(DiagonalMass().scale(moments) ** 2), 4)  # 2/7 of the variance 2, 5/7 of 0.001
    0.5721
    """

    def initial(self, groups: int, like: Tensor) -> Tensor:
        return UnitMass().initial(groups, like)

    def scale(self, moments: Moments) -> Tensor:
        share = moments.number / (moments.number + _EXTRA)
        variance = moments.scatter / (moments.number - 1.0)
        return (share * variance + (1.0 - share) * _SMALL).sqrt()


@dataclass(frozen=True)
class DenseMass(Mass):
    """A dense covariance, learnt in the warm-up: for up to some hundred strongly correlated parameters."""

    def initial(self, groups: int, like: Tensor) -> Tensor:
        return torch.eye(like.shape[-1], dtype=like.dtype, device=like.device).repeat(groups, 1, 1)

    def scale(self, moments: Moments) -> Tensor:
        """Lower Cholesky factors (G, P, P) of the regularised covariances, computed in float64.

        Covariances are shrunk towards a small multiple of their diagonals: a fixed number would hide the correlations
        of parameters with smaller variances.
        """
        count = moments.number.double()
        share = count / (count + _EXTRA)
        covariance = moments.scatter.double() / (count - 1.0)
        variance = covariance.diagonal(dim1=-2, dim2=-1)
        small = _SMALL * torch.where(variance > 0.0, variance, 1.0).diag_embed()
        factor: Tensor = torch.linalg.cholesky(share * covariance + (1.0 - share) * small)
        return factor.to(moments.scatter.dtype).contiguous()  # the layout in which it is loaded from a file, to the bit


MOST_DENSE, ENOUGH = 100, 10  # parameters, and positions for each, with which a dense covariance pays


@dataclass(frozen=True)
class AutoMass(Mass):
    """A dense covariance of up to 100 parameters that 10 positions each have told, else standard deviations.

    >>> rows = torch.tensor([[0.0, 0.0], [2.0, 2.0]])
    >>> moments = no_moments(AutoMass().initial(1, rows))
    >>> bool(AutoMass().scale(with_positions(moments, rows))[0, 1, 0] == 0)  # two positions tell no correlation
    True
    >>> bool(AutoMass().scale(with_positions(moments, rows.repeat(10, 1)))[0, 1, 0] > 0.5)
    True
    """

    def initial(self, groups: int, like: Tensor) -> Tensor:
        return (DenseMass() if like.shape[-1] <= MOST_DENSE else DiagonalMass()).initial(groups, like)

    def scale(self, moments: Moments) -> Tensor:
        if moments.scatter.dim() == 2:
            return DiagonalMass().scale(moments)
        if float(moments.number) >= ENOUGH * moments.mean.shape[-1]:
            return DenseMass().scale(moments)
        variances = moments.scatter.diagonal(dim1=-2, dim2=-1)
        return DiagonalMass().scale(moments._replace(scatter=variances)).diag_embed()
