"""Transitions of Markov chains, as pure functions on a batch of chains with the noise given."""

from posterity.kernels.dual_averaging import DualAveraging, averaged, averaging_from
from posterity.kernels.hamiltonian import hamiltonian
from posterity.kernels.langevin import adjusted, unadjusted
from posterity.kernels.leapfrog import leapfrog
from posterity.kernels.mass import DenseMass, DiagonalMass, Mass, UnitMass
from posterity.kernels.metropolis import accepted, random_walk
from posterity.kernels.no_u_turn import no_u_turn
from posterity.kernels.place import Move, Place, Target, place_at
from posterity.kernels.whitening import whitened
from posterity.kernels.windows import Moments, windows

__all__ = [
    "DenseMass",
    "DiagonalMass",
    "DualAveraging",
    "Mass",
    "Moments",
    "Move",
    "Place",
    "Target",
    "UnitMass",
    "accepted",
    "adjusted",
    "averaged",
    "averaging_from",
    "hamiltonian",
    "leapfrog",
    "no_u_turn",
    "place_at",
    "random_walk",
    "unadjusted",
    "whitened",
    "windows",
]
