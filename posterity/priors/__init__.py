"""Densities over network weights."""

from posterity.priors.fan import FanIn, Glorot, He, ScaleRule
from posterity.priors.layerwise import Layerwise
from posterity.priors.normal import Normal
from posterity.priors.prior import Prior

__all__ = ["FanIn", "Glorot", "He", "Layerwise", "Normal", "Prior", "ScaleRule"]
