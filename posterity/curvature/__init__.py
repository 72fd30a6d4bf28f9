"""Curvatures of the negative log-likelihood."""

from posterity.curvature.curvature import Curvature
from posterity.curvature.gauss_newton import GaussNewton
from posterity.curvature.hessian import Hessian

__all__ = ["Curvature", "GaussNewton", "Hessian"]
