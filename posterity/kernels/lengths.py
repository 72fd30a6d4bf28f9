"""Lengths of trajectories: quasi-random shares of the longest, and its search by the ChEES criterion."""

from typing import NamedTuple

import torch
from torch import Tensor

RATE, MEMORY, MOST, FORGETTING = 0.025, 0.95, 0.35, 0.5  # of Adam, its squares and longest step, and of the average


def van_der_corput(index: int) -> float:
    """The number in (0, 1) whose binary digits are those of `index` > 0, mirrored at the point: Halton's, in base 2.

    >>> [van_der_corput(index) for index in (1, 2, 3, 4)]
    [0.5, 0.25, 0.75, 0.125]
    """
    return int(f"{index:b}"[::-1], 2) / (1 << index.bit_length())


class LengthSearch(NamedTuple):
    """Search for the log lengths (C,) of trajectories: the next to try, their average and mean squared slope.

    `centre` (G, P) is the mean position of groups of chains over `tried` transitions, in which later ones count more.
    """

    log_length: Tensor
    average: Tensor
    square: Tensor
    centre: Tensor
    tried: Tensor

    def shifted(self, log_factor: Tensor) -> "LengthSearch":
        """Return the search with all lengths multiplied, as by a change of units."""
        return self._replace(log_length=self.log_length + log_factor, average=self.average + log_factor)

    def below(self, most: float) -> "LengthSearch":
        """Return the search with log lengths of at most `most`."""
        return self._replace(log_length=self.log_length.clamp(max=most), average=self.average.clamp(max=most))


def searching_from(length: Tensor, position: Tensor, groups: int) -> LengthSearch:
    """Begin the search at lengths (C,), with chains at positions (C, P)."""
    log_length, none = length.log(), torch.zeros_like(length)
    centre = position.reshape(groups, -1, position.shape[-1]).mean(1)
    return LengthSearch(log_length, log_length, none, centre, torch.zeros_like(length[0]))


def lengthened(search: LengthSearch, slope: Tensor, position: Tensor, least: Tensor, most: Tensor) -> LengthSearch:
    """Take a step of Adam up the slope (C,) of the criterion in the log length, between the bounds (C,).

    `position` (C, P) is where the chains are.

    **References**: Hoffman, Radul and Sountsov (2021), An adaptive-MCMC scheme for setting trajectory lengths in
    Hamiltonian Monte Carlo, algorithm 1.
    """
    count = search.tried + 1.0
    square = MEMORY * search.square + (1.0 - MEMORY) * slope.square()
    size = (square / (1.0 - MEMORY**count)).sqrt().clamp_min(torch.finfo(slope.dtype).tiny)
    step = (RATE * slope / size).clamp(-MOST, MOST)
    log_length = torch.minimum(torch.maximum(search.log_length + step, least.log()), most.log())
    weight = count**-FORGETTING
    average = weight * log_length + (1.0 - weight) * search.average
    mean = position.reshape(len(search.centre), -1, position.shape[-1]).mean(1)
    centre = search.centre + 2.0 / (count + 2.0) * (mean - search.centre)
    return LengthSearch(log_length, average, square, centre, count)


def chees_slopes(away: Tensor, move: Tensor, velocity: Tensor) -> Tensor:
    """Derivatives (C,) of the ChEES criterion in the length of trajectories that end with velocities (C, P).

    **Math**: the change in the estimator of the expected square is (|x' - m|^2 - |x - m|^2)^2 / 4, for chains that go
    from x to x' = x + `move`; `away` is x - m, m the mean. Its derivative in time: (|x' - m|^2 - |x - m|^2) (x' - m).v.

    **References**: as `lengthened`, section 3.1.
    """
    after = away + move
    return (after.square().sum(-1) - away.square().sum(-1)) * (after * velocity).sum(-1)
