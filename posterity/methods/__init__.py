"""Inference methods: one file each."""

from posterity.methods.conjugate import Conjugate
from posterity.methods.laplace import Laplace
from posterity.methods.maximum_a_posteriori import MAP
from posterity.methods.structure import Diagonal, Full, Structure

__all__ = ["MAP", "Conjugate", "Diagonal", "Full", "Laplace", "Structure"]
