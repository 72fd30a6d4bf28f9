"""Transitions of Markov chains as pure functions of a batch of chains and noise, and the adaptation of warm-up.

The samplers that call them are in `methods`.
"""

from posterity.kernels.adaptation import (
    AutoMass,
    DenseMass,
    DiagonalMass,
    DualAveraging,
    Mass,
    Moments,
    UnitMass,
    averaged,
    averaging_from,
    windows,
)
from posterity.kernels.hamiltonian import hamiltonian, leapfrog
from posterity.kernels.langevin import adjusted, unadjusted
from posterity.kernels.metropolis import accepted, random_walk
from posterity.kernels.no_u_turn import no_u_turn
from posterity.kernels.state import Move, Place, Target, place_at, whitened

__all__ = [
    "AutoMass",
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
